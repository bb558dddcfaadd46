package metrics

import (
	"fmt"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tierd/tierd/host/session"
	"github.com/tierd/tierd/host/session/wire"
)

var (
	stateDesc   = prometheus.NewDesc("tierd_peer_state", "1 for the state that a peer is in.", []string{"peer", "state"}, nil)
	infoDesc    = prometheus.NewDesc("tierd_peer_info", "The peer's process by its boot id; 0 before the first session.", []string{"peer", "boot_id"}, nil)
	rttDesc     = prometheus.NewDesc("tierd_peer_rtt_seconds", "Round trip of the last ping; 0 before.", []string{"peer"}, nil)
	silenceDesc = prometheus.NewDesc("tierd_peer_silence_seconds", "Time since the last byte of the peer.", []string{"peer"}, nil)
	upDesc      = prometheus.NewDesc("tierd_peer_sessions_total", "Sessions that came up.", []string{"peer"}, nil)
)

// Peers is a collector that reads the peers' status at each scrape.
type Peers struct{ Status func() []wire.PeerStatus }

// Describe implements prometheus.Collector.
func (p Peers) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{stateDesc, infoDesc, rttDesc, silenceDesc, upDesc} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (p Peers) Collect(ch chan<- prometheus.Metric) {
	for _, s := range p.Status() {
		for state := session.Connecting; state <= session.Dead; state++ {
			v := 0.0
			if s.State == state {
				v = 1
			}
			ch <- prometheus.MustNewConstMetric(stateDesc, prometheus.GaugeValue, v, s.ID, state.String())
		}
		ch <- prometheus.MustNewConstMetric(infoDesc, prometheus.GaugeValue, 1, s.ID, fmt.Sprintf("%#x", s.BootID))
		ch <- prometheus.MustNewConstMetric(rttDesc, prometheus.GaugeValue, s.RTT.Seconds(), s.ID)
		ch <- prometheus.MustNewConstMetric(silenceDesc, prometheus.GaugeValue, s.Silence.Seconds(), s.ID)
		ch <- prometheus.MustNewConstMetric(upDesc, prometheus.CounterValue, float64(s.Sessions), s.ID)
	}
}
