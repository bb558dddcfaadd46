// Package metrics holds the daemon's counters for Prometheus.
//
// # Zeros from the start
//
// A counter that appears only after its first event cannot be told from a misspelt
// label. Every label value that can occur is known when the daemon starts (groups and
// legs from the deployment, causes and outcomes from the lists below), so every
// series is there, with 0, at the first scrape.
//
// # Names
//
// Operators know vLLM's names. Where a quantity is the same, the name is vLLM's with
// tierd_ in place of vllm: and, where it helps, more labels. Every name says its unit;
// where vLLM's does not, ours has it before _total:
//
//	vllm:prompt_tokens_by_source_total{source}           tierd_prompt_tokens_by_source_total
//	vllm:external_prefix_cache_queries_total             tierd_external_prefix_cache_queries_tokens_total
//	vllm:external_prefix_cache_hits_total                tierd_external_prefix_cache_hits_tokens_total
//	vllm:kv_offload_store_bytes_total                    tierd_kv_offload_store_bytes_total{group}
//	vllm:kv_offload_load_bytes_total                     tierd_kv_offload_load_bytes_total{group}
//	vllm:kv_offload_load_time_total                      tierd_kv_offload_load_time_seconds_total
//	vllm:kv_offload_tiering_read_bytes_total{tier}       tierd_kv_offload_tiering_read_bytes_total{tier="1:peer"}
//	vllm:kv_offload_tiering_write_bytes_total{tier}      tierd_kv_offload_tiering_write_bytes_total{tier="1:peer"}
//	(proposed) kv_offload_tiering_checksum_failures      tierd_kv_offload_tiering_checksum_failures_chunks_total{place}
//	vllm:kv_offload_lookup_delay_seconds                 tierd_kv_offload_lookup_delay_seconds
//	vllm:kv_offload_allocation_failure_total             tierd_kv_offload_allocation_failure_total{role}
//
// What nobody else has is the join of supply and demand, in chunks:
//
//	tierd_demanded_chunks_total{group,leg}       what consumers of this node's engines planned to have
//	tierd_supplied_chunks_total{group,leg}       what producers of this node's engines offered
//	tierd_transferred_chunks_total{group,leg}    what arrived from peers, verified and readable
//	tierd_unmatched_chunks_total{group,leg,cause} demand that ended without its bytes, by cause
//
//	tierd_peer_demanded_chunks_total{group,leg}   what peers demanded here
//	tierd_peer_ended_chunks_total{group,leg,end}  how that ended: transferred, or the cause
//
// On a consumer, once its requests have ended, every demanded chunk was in its own tier,
// or transferred, or unmatched; one that was here and proved wrong when it was read
// again is unmatched as well, with cause checksum.
//
// # Gauges
//
// tierd_peer_pair{direction,peer,state} is what is known of a peer's version beside this node's,
// and tierd_peer_leg_allowed{peer,leg} what follows for requests that name it here and now. That
// is leg pd only when the consumer and the producer have each accepted the direction.
//
// "Used" was once read as "pinned", so there are two names: tierd_tier_slots{state}
// says what is in the slots, tierd_tier_pins{owner,kind} who keeps them from being
// reused, with the bytes in tierd_tier_pinned_bytes and the age of the oldest in
// tierd_tier_oldest_pin_seconds.
//
// tierd_device_copied_bytes_total{device,direction} and its neighbours count what goes into
// and out of engine memory by kind of device, with its seconds and what is in work; the
// tierd_gpu_ gauges say how the GPU is, and are all 0 where a node has none.
//
// tierd_tls_expiry_days{of} is there with TLS only: there is no number of days for a
// certificate that is not there. tierd_half_open_connections{port} is what waits on the
// ports without having said who it is.
//
// METRICS.md beside this file lists every metric that a node exports; a test of package
// host writes it from a node and holds it against one.
package metrics

import (
	"net/http"
	"slices"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	dto "github.com/prometheus/client_model/go"
)

// Causes of unmatched chunks and of failures in events.
const (
	// CauseUnmatched: the producer refused the key or its last word did not name it.
	CauseUnmatched = "unmatched"
	// CauseChecksum: the bytes are not those that were stored.
	CauseChecksum = "checksum"
	// CausePeer: the peer is silent, gone, not there, or could not send.
	CausePeer = "peer"
	// CauseDeadline: a wait was over.
	CauseDeadline = "deadline"
	// CauseAborted: this side gave up.
	CauseAborted = "aborted"
	// CauseNoRoom: no slot, here or there.
	CauseNoRoom = "no-room"
	// CauseEvicted: it was there, and was dropped before it was read.
	CauseEvicted = "evicted"
	// CauseRefused: the peer or this node does not serve the job: leg, layout, bounds.
	CauseRefused = "refused"
	// CauseStore: copying it out of or into engine memory failed.
	CauseStore = "store"
)

// Causes returns all of them.
func Causes() []string {
	return []string{CauseUnmatched, CauseChecksum, CausePeer, CauseDeadline, CauseAborted, CauseNoRoom, CauseEvicted, CauseRefused, CauseStore}
}

// Label values that are not causes.
var (
	// Sources of prompt tokens.
	sources = []string{"device", "host", "p2p", "compute"}
	// places of checksum failures.
	places = []string{"slab", "wire"}
	roles  = []string{"producer", "consumer"}
	// parkedEnds are the reasons of join.Why for which supply goes that was not sent.
	parkedEnds = []string{"aged", "no_room", "lapsed"}
	// waits that end with an outcome.
	waits    = []string{WaitLookup, WaitTransfer, WaitPending, WaitEvent}
	outcomes = []string{"ok", "deadline", "peer", "aborted", "refused"}
	// results of requests. hit: went on from the planned point; partial: from a lower
	// one above the local prefix; miss: nothing usable; ok: a producer's regular end.
	results    = []string{"ok", "hit", "partial", "miss", "aborted", "failed"}
	slotStates = []string{"free", "writing", "readable", "detached", "fenced"}
)

// Waits for others: for a peer's answer to lookups, for a peer's bytes, for chunks that
// other requests of this node are writing, and for an event in an engine's stream.
const (
	WaitLookup   = "lookup"
	WaitTransfer = "transfer"
	WaitPending  = "pending"
	WaitEvent    = "event"
)

// Waits returns all kinds of waits, and Outcomes how each may end.
func Waits() []string { return slices.Clone(waits) }

// Outcomes of waits.
func Outcomes() []string { return slices.Clone(outcomes) }

// EndTransferred is how a chunk that a peer demanded ends well; the other ends are causes.
const EndTransferred = "transferred"

// Unknown stands for a group and for a leg that there is not: only a peer that is at fault
// names one, and what it names must not make series.
const Unknown = "unknown"

// tierPeer is the tier label of bytes that cross the network, as order:type.
const tierPeer = "1:peer"

// Metrics are the counters of one node. The methods may be called from any goroutine.
type Metrics struct {
	registry *prometheus.Registry

	Demanded, Supplied, Transferred *prometheus.CounterVec // group, leg
	Unmatched                       *prometheus.CounterVec // group, leg, cause
	PeerDemanded                    *prometheus.CounterVec // group, leg
	PeerEnded                       *prometheus.CounterVec // group, leg, end
	StoreBytes, LoadBytes           *prometheus.CounterVec // group
	LoadSeconds                     prometheus.Counter
	PeerReadBytes, PeerWriteBytes   prometheus.Counter
	Checksum                        *prometheus.CounterVec // place
	NoRoom                          *prometheus.CounterVec // role
	ParkedFreed                     *prometheus.CounterVec // why
	Waits                           *prometheus.CounterVec // wait, outcome
	LookupSeconds                   prometheus.Histogram
	TransferSeconds                 *prometheus.HistogramVec // outcome
	Requests                        *prometheus.CounterVec   // role, leg, result
	TokensBySource                  *prometheus.CounterVec   // source
	Queries, Hits                   prometheus.Counter
}

// New returns metrics with every series at 0.
func New(groups, legs []string) *Metrics {
	m := &Metrics{registry: prometheus.NewRegistry()}
	m.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	m.Demanded = m.counters("demanded_chunks_total", "Chunks that consumers planned to have.", "group", "leg")
	m.Supplied = m.counters("supplied_chunks_total", "Chunks that producers offered.", "group", "leg")
	m.Transferred = m.counters("transferred_chunks_total", "Chunks that arrived from peers, verified.", "group", "leg")
	m.Unmatched = m.counters("unmatched_chunks_total", "Demanded chunks that ended without their bytes, by cause.", "group", "leg", "cause")
	m.PeerDemanded = m.counters("peer_demanded_chunks_total", "Chunks that peers demanded here.", "group", "leg")
	m.PeerEnded = m.counters("peer_ended_chunks_total", "Chunks that peers demanded here, by their end: transferred, or the cause.", "group", "leg", "end")
	m.StoreBytes = m.counters("kv_offload_store_bytes_total", "Bytes copied from engine memory into the tier.", "group")
	m.LoadBytes = m.counters("kv_offload_load_bytes_total", "Bytes copied from the tier into engine memory.", "group")
	m.LoadSeconds = m.counter("kv_offload_load_time_seconds_total", "Seconds that copies into engine memory took, with their checksums and several at a time.")
	tier := m.counters("kv_offload_tiering_read_bytes_total", "Bytes that came from a tier below, verified.", "tier")
	m.PeerReadBytes = tier.WithLabelValues(tierPeer)
	tier = m.counters("kv_offload_tiering_write_bytes_total", "Bytes handed to a tier below.", "tier")
	m.PeerWriteBytes = tier.WithLabelValues(tierPeer)
	m.Checksum = m.counters("kv_offload_tiering_checksum_failures_chunks_total", "Chunks whose bytes were not those that were stored, by place.", "place")
	m.NoRoom = m.counters("kv_offload_allocation_failure_total", "Requests or chunks that got no slot.", "role")
	m.ParkedFreed = m.counters("parked_freed_chunks_total", "Supply that was let go without being sent: by its age or oldest first for room when no consumer asked for it, or because its consumer did not renew its lease.", "why")
	m.Waits = m.counters("waits_total", "Waits by their end.", "wait", "outcome")
	m.LookupSeconds = m.histogram("kv_offload_lookup_delay_seconds", "Batched lookups at a peer.")
	m.TransferSeconds = m.histograms("transfer_seconds", "From a demand to the end of its last key, by how it ended.", "outcome")
	m.Requests = m.counters("requests_total", "Requests by their end.", "role", "leg", "result")
	m.TokensBySource = m.counters("prompt_tokens_by_source_total", "Prompt tokens of consumers by where their KV came from.", "source")
	m.Queries = m.counter("external_prefix_cache_queries_tokens_total", "Prompt tokens that consumers asked the tier for.")
	m.Hits = m.counter("external_prefix_cache_hits_tokens_total", "Prompt tokens that consumers got from the tier.")
	m.zeros(groups, legs)
	return m
}

func (m *Metrics) counters(name, help string, labels ...string) *prometheus.CounterVec {
	c := prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "tierd", Name: name, Help: help}, labels)
	m.registry.MustRegister(c)
	return c
}

func (m *Metrics) counter(name, help string) prometheus.Counter {
	c := prometheus.NewCounter(prometheus.CounterOpts{Namespace: "tierd", Name: name, Help: help})
	m.registry.MustRegister(c)
	return c
}

// buckets cover 1 ms to 30 s, the request deadline.
var buckets = []float64{.001, .002, .005, .01, .025, .05, .1, .25, .5, 1, 2, 5, 10, 30}

func (m *Metrics) histogram(name, help string) prometheus.Histogram {
	h := prometheus.NewHistogram(prometheus.HistogramOpts{Namespace: "tierd", Name: name, Help: help, Buckets: buckets})
	m.registry.MustRegister(h)
	return h
}

func (m *Metrics) histograms(name, help string, labels ...string) *prometheus.HistogramVec {
	h := prometheus.NewHistogramVec(prometheus.HistogramOpts{Namespace: "tierd", Name: name, Help: help, Buckets: buckets}, labels)
	m.registry.MustRegister(h)
	return h
}

func (m *Metrics) zeros(groups, legs []string) {
	for _, g := range groups {
		m.StoreBytes.WithLabelValues(g)
		m.LoadBytes.WithLabelValues(g)
		for _, l := range legs {
			m.Demanded.WithLabelValues(g, l)
			m.Supplied.WithLabelValues(g, l)
			m.Transferred.WithLabelValues(g, l)
			for _, c := range Causes() {
				m.Unmatched.WithLabelValues(g, l, c)
			}
		}
	}
	for _, g := range append([]string{Unknown}, groups...) {
		for _, l := range append([]string{Unknown}, legs...) {
			m.PeerDemanded.WithLabelValues(g, l)
			for _, e := range append([]string{EndTransferred}, Causes()...) {
				m.PeerEnded.WithLabelValues(g, l, e)
			}
		}
	}
	for _, p := range places {
		m.Checksum.WithLabelValues(p)
	}
	for _, w := range parkedEnds {
		m.ParkedFreed.WithLabelValues(w)
	}
	for _, s := range sources {
		m.TokensBySource.WithLabelValues(s)
	}
	for _, o := range outcomes {
		m.TransferSeconds.WithLabelValues(o)
	}
	for _, w := range waits {
		for _, o := range outcomes {
			m.Waits.WithLabelValues(w, o)
		}
	}
	for _, r := range roles {
		m.NoRoom.WithLabelValues(r)
		for _, l := range legs {
			for _, res := range results {
				m.Requests.WithLabelValues(r, l, res)
			}
		}
	}
}

// Register adds a collector, such as one that reads a snapshot at each scrape.
func (m *Metrics) Register(c prometheus.Collector) { m.registry.MustRegister(c) }

// Count reads a counter: the status of a node says the same numbers as its metrics.
func Count(v *prometheus.CounterVec, labels ...string) uint64 {
	var m dto.Metric
	if err := v.WithLabelValues(labels...).Write(&m); err != nil {
		return 0 // a counter in memory has no error
	}
	return uint64(m.Counter.GetValue())
}

// Registry is for tests, which read values from it.
func (m *Metrics) Registry() *prometheus.Registry { return m.registry }

// Handler serves the metrics.
func (m *Metrics) Handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{})
}
