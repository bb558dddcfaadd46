package metrics

import "github.com/prometheus/client_golang/prometheus"

var (
	pairDesc   = prometheus.NewDesc("tierd_peer_pair", "1 for what is known of this node's version and the peer's together: none (no session yet), equal, checking, accepted, refused or undecided.", []string{"peer", "state"}, nil)
	pairsEnded = prometheus.NewDesc("tierd_peer_pair_checks_total", "Versions of peers that were judged against this node's, by what it came to; a verdict kept from before counts, too.", []string{"result"}, nil)
)

// Pairs is a collector of what is known of peers of other versions.
type Pairs struct {
	// Peers returns the state of each peer's pair, and States all that there are.
	Peers  func() map[string]string
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
			v := 0.0
			if state == is {
				v = 1
			}
			ch <- prometheus.MustNewConstMetric(pairDesc, prometheus.GaugeValue, v, peer, state)
		}
	}
	for _, end := range p.Ends {
		ch <- prometheus.MustNewConstMetric(pairsEnded, prometheus.CounterValue, float64(p.Ended(end)), end)
	}
}
