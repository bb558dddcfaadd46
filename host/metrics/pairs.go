package metrics

import "github.com/prometheus/client_golang/prometheus"

var (
	pairDesc   = prometheus.NewDesc("tierd_peer_pair", "1 for what this node knows of its version and the peer's together, in each direction: consume (of what the peer produces) or produce. The state is equal, checking, accepted, refused, undecided or none (no session yet, or the roles leave no such way).", []string{"direction", "peer", "state"}, nil)
	pairsEnded = prometheus.NewDesc("tierd_peer_pair_checks_total", "Versions of peers that were judged against this node's, by what it came to; a verdict kept from before counts, too.", []string{"result"}, nil)
)

// PairStates are the states of a peer's pair with this node as the consumer and as the
// producer.
type PairStates struct{ Consume, Produce string }

// Pairs is a collector of what is known of peers of other versions.
type Pairs struct {
	// Peers returns the states of each peer's pair, and States all that there are.
	Peers  func() map[string]PairStates
	States []string
	// Ended returns how many checks have come to one of Ends.
	Ended func(end string) uint64
	Ends  []string
}

// Describe implements prometheus.Collector.
func (Pairs) Describe(ch chan<- *prometheus.Desc) { ch <- pairDesc; ch <- pairsEnded }

// Collect implements prometheus.Collector.
func (p Pairs) Collect(ch chan<- prometheus.Metric) {
	for peer, is := range p.Peers() {
		for _, state := range p.States {
			ch <- prometheus.MustNewConstMetric(pairDesc, prometheus.GaugeValue, truth(is.Consume == state), "consume", peer, state)
			ch <- prometheus.MustNewConstMetric(pairDesc, prometheus.GaugeValue, truth(is.Produce == state), "produce", peer, state)
		}
	}
	for _, end := range p.Ends {
		ch <- prometheus.MustNewConstMetric(pairsEnded, prometheus.CounterValue, float64(p.Ended(end)), end)
	}
}

func truth(is bool) float64 {
	if is {
		return 1
	}
	return 0
}
