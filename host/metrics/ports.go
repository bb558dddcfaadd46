package metrics

import "github.com/prometheus/client_golang/prometheus"

var (
	halfOpenDesc = prometheus.NewDesc("tierd_half_open_connections", "Connections that have come in and have not said who they are.", []string{"port"}, nil)
	pushedDesc   = prometheus.NewDesc("tierd_half_open_closed_connections_total", "Connections that were closed before they said who they are, to make room for newer ones; it grows when somebody floods the port.", []string{"port"}, nil)
)

// Ports is a collector of what waits on the ports for peers.
type Ports struct {
	Control, Data func() (waiting int, closed uint64)
}

// Describe implements prometheus.Collector.
func (Ports) Describe(ch chan<- *prometheus.Desc) {
	ch <- halfOpenDesc
	ch <- pushedDesc
}

// Collect implements prometheus.Collector.
func (p Ports) Collect(ch chan<- prometheus.Metric) {
	for _, port := range []struct {
		name   string
		counts func() (int, uint64)
	}{{"control", p.Control}, {"data", p.Data}} {
		waiting, closed := port.counts()
		ch <- prometheus.MustNewConstMetric(halfOpenDesc, prometheus.GaugeValue, float64(waiting), port.name)
		ch <- prometheus.MustNewConstMetric(pushedDesc, prometheus.CounterValue, float64(closed), port.name)
	}
}
