package metrics

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/host/session"
	"github.com/tierd/tierd/host/session/wire"
	"github.com/tierd/tierd/host/tier"
)

func gather(t *testing.T, m *Metrics) map[string]*dto.MetricFamily {
	t.Helper()
	families, err := m.Registry().Gather()
	require.NoError(t, err)
	out := map[string]*dto.MetricFamily{}
	for _, f := range families {
		if strings.HasPrefix(f.GetName(), "tierd_") {
			out[f.GetName()] = f
		}
	}
	return out
}

// TestZerosFromTheStart: every series of every counter is there, with 0.
func TestZerosFromTheStart(t *testing.T) {
	m := New([]string{"sliding", "full"}, []string{"pd", "probe"})
	all := gather(t, m)
	for name, series := range map[string]int{
		"tierd_demanded_chunks_total":                             2 * 2,
		"tierd_supplied_chunks_total":                             2 * 2,
		"tierd_transferred_chunks_total":                          2 * 2,
		"tierd_unmatched_chunks_total":                            2 * 2 * len(Causes()),
		"tierd_peer_demanded_chunks_total":                        3 * 3, // of no group or leg, too
		"tierd_peer_ended_chunks_total":                           3 * 3 * (1 + len(Causes())),
		"tierd_kv_offload_store_bytes_total":                      2,
		"tierd_kv_offload_load_bytes_total":                       2,
		"tierd_kv_offload_load_time_seconds_total":                1,
		"tierd_kv_offload_tiering_read_bytes_total":               1,
		"tierd_kv_offload_tiering_write_bytes_total":              1,
		"tierd_kv_offload_tiering_checksum_failures_chunks_total": 2,
		"tierd_kv_offload_allocation_failure_total":               2,
		"tierd_parked_freed_chunks_total":                         3,
		"tierd_waits_total":                                       4 * 5,
		"tierd_requests_total":                                    2 * 2 * len(results),
		"tierd_prompt_tokens_by_source_total":                     4,
		"tierd_external_prefix_cache_queries_tokens_total":        1,
		"tierd_external_prefix_cache_hits_tokens_total":           1,
		"tierd_kv_offload_lookup_delay_seconds":                   1,
		"tierd_transfer_seconds":                                  5,
	} {
		f := all[name]
		require.NotNil(t, f, name)
		require.Len(t, f.Metric, series, name)
		for _, s := range f.Metric {
			require.Zero(t, s.GetCounter().GetValue()+float64(s.GetHistogram().GetSampleCount()), name)
		}
		delete(all, name)
	}
	require.Empty(t, all, "a metric that this test does not know")
}

func TestNamesAreOfOneStyle(t *testing.T) {
	m := New([]string{"full"}, []string{"pd"})
	for name, f := range gather(t, m) {
		require.NotEmpty(t, f.GetHelp(), name)
		require.Equal(t, f.GetType() == dto.MetricType_COUNTER, strings.HasSuffix(name, "_total"), name)
	}
}

func TestSnapshotsAreReadAtTheScrape(t *testing.T) {
	p, err := tier.New(tier.Options{Path: filepath.Join(t.TempDir(), "slab"), SlotBytes: 64, Slots: 4})
	require.NoError(t, err)
	defer p.Close()
	m := New(nil, nil)
	m.Register(Tier{Snapshot: p.Snapshot, Owners: []string{"request"}})
	m.Register(Peers{Status: func() []wire.PeerStatus {
		return []wire.PeerStatus{
			{ID: "b", Status: session.Status{State: session.Suspect, BootID: 7, Sessions: 1, Silence: time.Second, Lookups: 1, Demands: 2, Jobs: 3}},
			{ID: "never", Status: session.Status{State: session.Connecting, Silence: time.Hour}},
		}
	}, Legs: []string{"pd", "probe"}, Allowed: func(s *wire.PeerStatus, leg string) bool { return leg == "probe" }, PinnedBytes: func(peer string) uint64 { return uint64(len(peer)) }})
	m.Register(OpenWaits(func(wait string) (int, time.Duration) { return len(wait), time.Second }))
	m.Register(Info{Version: "v1", Go: "go1", Verdict: func() Verdict { return Verdict{"tiny", "sha256:d", "sha256:r", "kept"} }})
	m.Register(Gauges{"parked_bytes": func() float64 { return 5 }})
	value := func(name string, labels ...string) float64 {
		f := gather(t, m)[name]
		require.NotNil(t, f, name)
	next:
		for _, s := range f.Metric {
			have := map[string]bool{}
			for _, l := range s.Label {
				have[l.GetValue()] = true
			}
			for _, l := range labels {
				if !have[l] {
					continue next
				}
			}
			return s.GetGauge().GetValue() + s.GetCounter().GetValue()
		}
		require.Fail(t, "no such series", "%s %v", name, labels)
		return 0
	}
	require.Equal(t, 4.0, value("tierd_tier_slots", "free"))
	require.Equal(t, 0.0, value("tierd_tier_pins", "request", "write"))
	_, err = p.Stage(tier.Owner{Kind: "request", ID: "1"}, 3)
	require.NoError(t, err)
	require.Equal(t, 1.0, value("tierd_tier_slots", "free"))
	require.Equal(t, 3.0, value("tierd_tier_slots", "writing"))
	require.Equal(t, 3.0, value("tierd_tier_pins", "request", "write"))
	require.Equal(t, 1.0, value("tierd_peer_state", "b", "suspect"))
	require.Equal(t, 0.0, value("tierd_peer_state", "b", "ready"))
	require.Equal(t, 1.0, value("tierd_peer_info", "b", "0x7"))
	require.Equal(t, 1.0, value("tierd_peer_silence_seconds", "b"))
	require.Equal(t, 1.0, value("tierd_peer_info", "never", ""), "no process is known: the label is empty")
	require.Equal(t, 0.0, value("tierd_peer_silence_seconds", "never"), "it was never heard, so it does not fall silent")
	require.Equal(t, 5.0, value("tierd_parked_bytes"))
	require.Equal(t, 3*64.0, value("tierd_tier_pinned_bytes", "request", "write"))
	for kind, n := range map[string]float64{"lookup": 1, "demand": 2, "serve": 3} {
		require.Equal(t, n, value("tierd_peer_jobs", "b", kind))
	}
	require.Equal(t, 5.0, value("tierd_peer_pinned_bytes", "never"))
	require.Equal(t, 0.0, value("tierd_peer_leg_allowed", "b", "pd"))
	require.Equal(t, 1.0, value("tierd_peer_leg_allowed", "b", "probe"))
	require.Equal(t, 6.0, value("tierd_waits_in_work", "lookup"))
	require.Equal(t, 1.0, value("tierd_oldest_wait_seconds", "pending"))
	require.Equal(t, 1.0, value("tierd_build_info", "v1", "go1"))
	require.Equal(t, 1.0, value("tierd_verdict_info", "tiny", "sha256:d", "sha256:r", "kept"))
}

func TestPortsAndCertificates(t *testing.T) {
	m := New([]string{"full"}, []string{"pd"})
	m.Register(Ports{Control: func() (int, uint64) { return 3, 4 }, Data: func() (int, uint64) { return 0, 7 }})
	m.Register(Certificates{Days: func() (float64, float64) { return 12.5, -1 }})
	all := gather(t, m)
	value := func(name, label string) float64 {
		for _, s := range all[name].GetMetric() {
			if s.Label[0].GetValue() == label {
				return s.GetGauge().GetValue() + s.GetCounter().GetValue()
			}
		}
		t.Fatal(name, label)
		return 0
	}
	require.Equal(t, 3.0, value("tierd_half_open_connections", "control"))
	require.Equal(t, 0.0, value("tierd_half_open_connections", "data"))
	require.Equal(t, 4.0, value("tierd_half_open_closed_connections_total", "control"))
	require.Equal(t, 7.0, value("tierd_half_open_closed_connections_total", "data"))
	require.Equal(t, 12.5, value("tierd_tls_expiry_days", "cert"))
	require.Equal(t, -1.0, value("tierd_tls_expiry_days", "ca"))
}
