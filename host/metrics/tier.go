package metrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tierd/tierd/host/tier"
)

var (
	slotsDesc = prometheus.NewDesc("tierd_tier_slots", "Slots of the primary tier by state.", []string{"state"}, nil)
	evictDesc = prometheus.NewDesc("tierd_tier_evictable_slots", "Readable slots that nobody pins.", nil, nil)
	bytesDesc = prometheus.NewDesc("tierd_tier_resident_bytes", "Content of the readable slots, in bytes.", nil, nil)
	pinsDesc  = prometheus.NewDesc("tierd_tier_pins", "What keeps slots from being reused, by kind of owner.", []string{"owner", "kind"}, nil)
	heldDesc  = prometheus.NewDesc("tierd_tier_pinned_bytes", "Bytes of the slots that are kept from being reused, by kind of owner.", []string{"owner", "kind"}, nil)
	ageDesc   = prometheus.NewDesc("tierd_tier_oldest_pin_seconds", "Age of the oldest pin, by kind of owner.", []string{"owner", "kind"}, nil)
	evictions = prometheus.NewDesc("tierd_tier_evicted_slots_total", "Readable slots that were reused.", nil, nil)
	refused   = prometheus.NewDesc("tierd_tier_refused_admissions_total", "Admissions that found no room.", nil, nil)
)

// Tier is a collector that reads a tier's snapshot at each scrape. Owners are the kinds
// of owner that this daemon has: a series of each is there from the start.
type Tier struct {
	Snapshot func() tier.Snapshot
	Owners   []string
}

// Describe implements prometheus.Collector.
func (t Tier) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{slotsDesc, evictDesc, bytesDesc, pinsDesc, heldDesc, ageDesc, evictions, refused} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (t Tier) Collect(ch chan<- prometheus.Metric) {
	s := t.Snapshot()
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	for i, n := range []int{s.Free, s.Writing, s.Readable, s.Detached, s.Fenced} {
		gauge(slotsDesc, float64(n), slotStates[i])
	}
	gauge(evictDesc, float64(s.Evictable))
	gauge(bytesDesc, float64(s.ResidentBytes))
	type label struct{ owner, kind string }
	count, bytes, age := map[label]float64{}, map[label]float64{}, map[label]float64{}
	for _, o := range t.Owners {
		for _, k := range []tier.PinKind{tier.PinRead, tier.PinWrite, tier.PinGrab} {
			count[label{o, string(k)}] = 0
		}
	}
	for _, p := range s.Pins {
		l := label{p.Owner.Kind, string(p.Kind)}
		count[l] += float64(p.Count)
		bytes[l] += float64(p.Bytes)
		age[l] = max(age[l], p.OldestAge.Seconds())
	}
	for l, n := range count {
		gauge(pinsDesc, n, l.owner, l.kind)
		gauge(heldDesc, bytes[l], l.owner, l.kind)
		gauge(ageDesc, age[l], l.owner, l.kind)
	}
	ch <- prometheus.MustNewConstMetric(evictions, prometheus.CounterValue, float64(s.Evictions))
	ch <- prometheus.MustNewConstMetric(refused, prometheus.CounterValue, float64(s.Refused))
}

// Gauges are values that are read at each scrape, by name.
type Gauges map[string]func() float64

// Describe implements prometheus.Collector.
func (g Gauges) Describe(ch chan<- *prometheus.Desc) {
	for name := range g {
		ch <- g.desc(name)
	}
}

func (g Gauges) desc(name string) *prometheus.Desc {
	return prometheus.NewDesc("tierd_"+name, gaugeHelp[name], nil, nil)
}

// Collect implements prometheus.Collector.
func (g Gauges) Collect(ch chan<- prometheus.Metric) {
	for name, read := range g {
		ch <- prometheus.MustNewConstMetric(g.desc(name), prometheus.GaugeValue, read())
	}
}

var gaugeHelp = map[string]string{
	"engines_attached":   "Engines that are attached.",
	"ready":              "1 while engines can work with this node.",
	"check_done_ratio":   "How far the check of the deployment is, from 0 to 1; 1 once its rules are accepted.",
	"requests_live":      "Requests that are begun and not finished.",
	"parked_bytes":       "Slots of supply that waits for a demand, in bytes.",
	"parked_chunks":      "Supply that waits for a demand, in chunks.",
	"transfers_live":     "Transfers that are begun or demanded and not finished.",
	"peer_jobs_in_work":  "Demands of peers in work.",
	"fetch_jobs_in_work": "Demands at peers in work.",
}
