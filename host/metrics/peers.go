package metrics

import (
	"fmt"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tierd/tierd/host/session"
	"github.com/tierd/tierd/host/session/wire"
)

var (
	stateDesc      = prometheus.NewDesc("tierd_peer_state", "1 for the state that a peer is in.", []string{"peer", "state"}, nil)
	infoDesc       = prometheus.NewDesc("tierd_peer_info", "Always 1: the label boot_id names the process that the peer's last session was with; it changes when the peer restarts and is empty before the first session.", []string{"peer", "boot_id"}, nil)
	rttDesc        = prometheus.NewDesc("tierd_peer_rtt_seconds", "Round trip of the last ping; 0 before.", []string{"peer"}, nil)
	silenceDesc    = prometheus.NewDesc("tierd_peer_silence_seconds", "Time since the last byte of the peer, on control or data; 0 before the first session.", []string{"peer"}, nil)
	jobsDesc       = prometheus.NewDesc("tierd_peer_jobs", "Jobs in work with a peer: lookups and demands of this node at it, serves of what it demands here.", []string{"peer", "kind"}, nil)
	legDesc        = prometheus.NewDesc("tierd_peer_leg_allowed", "1 when a request that names the peer may use the leg now.", []string{"peer", "leg"}, nil)
	peerPinnedDesc = prometheus.NewDesc("tierd_peer_pinned_bytes", "Bytes that the demands of a peer keep here from being reused; bounds.peer_pinned_bytes is the most.", []string{"peer"}, nil)
	upDesc         = prometheus.NewDesc("tierd_peer_sessions_total", "Sessions that came up.", []string{"peer"}, nil)
)

// Peers is a collector that reads the peers' status at each scrape.
type Peers struct {
	Status func() []wire.PeerStatus
	// Legs are the legs there are, and Allowed says whether one may be used now.
	Legs    []string
	Allowed func(s *wire.PeerStatus, leg string) bool
	// PinnedBytes is what a peer's demands keep from being reused.
	PinnedBytes func(peer string) uint64
}

// Describe implements prometheus.Collector.
func (p Peers) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{stateDesc, infoDesc, rttDesc, silenceDesc, jobsDesc, legDesc, peerPinnedDesc, upDesc} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (p Peers) Collect(ch chan<- prometheus.Metric) {
	for _, s := range p.Status() {
		for state := session.Connecting; state <= session.Dead; state++ {
			ch <- prometheus.MustNewConstMetric(stateDesc, prometheus.GaugeValue, truth(s.State == state), s.ID, state.String())
		}
		boot, silence := "", 0.0
		if s.BootID != 0 {
			boot, silence = fmt.Sprintf("%#x", s.BootID), s.Silence.Seconds()
		}
		ch <- prometheus.MustNewConstMetric(infoDesc, prometheus.GaugeValue, 1, s.ID, boot)
		ch <- prometheus.MustNewConstMetric(rttDesc, prometheus.GaugeValue, s.RTT.Seconds(), s.ID)
		ch <- prometheus.MustNewConstMetric(silenceDesc, prometheus.GaugeValue, silence, s.ID)
		for _, j := range []struct {
			kind string
			n    int
		}{{"lookup", s.Lookups}, {"demand", s.Demands}, {"serve", s.Jobs}} {
			ch <- prometheus.MustNewConstMetric(jobsDesc, prometheus.GaugeValue, float64(j.n), s.ID, j.kind)
		}
		for _, l := range p.Legs {
			ch <- prometheus.MustNewConstMetric(legDesc, prometheus.GaugeValue, truth(p.Allowed(&s, l)), s.ID, l)
		}
		ch <- prometheus.MustNewConstMetric(peerPinnedDesc, prometheus.GaugeValue, float64(p.PinnedBytes(s.ID)), s.ID)
		ch <- prometheus.MustNewConstMetric(upDesc, prometheus.CounterValue, float64(s.Sessions), s.ID)
	}
}
