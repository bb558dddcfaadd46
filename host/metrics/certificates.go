package metrics

import "github.com/prometheus/client_golang/prometheus"

var certDesc = prometheus.NewDesc("tierd_tls_expiry_days", "Days until the certificate of this node (of=cert), or the first authority in its file (of=ca), expires; negative once it has. Not there without tls.", []string{"of"}, nil)

// Certificates is a collector that looks at the TLS files at each scrape.
type Certificates struct{ Days func() (cert, ca float64) }

// Describe implements prometheus.Collector.
func (Certificates) Describe(ch chan<- *prometheus.Desc) { ch <- certDesc }

// Collect implements prometheus.Collector.
func (c Certificates) Collect(ch chan<- prometheus.Metric) {
	cert, ca := c.Days()
	ch <- prometheus.MustNewConstMetric(certDesc, prometheus.GaugeValue, cert, "cert")
	ch <- prometheus.MustNewConstMetric(certDesc, prometheus.GaugeValue, ca, "ca")
}
