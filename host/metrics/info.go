package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

var (
	buildDesc   = prometheus.NewDesc("tierd_build_info", "Always 1: the labels name the build.", []string{"version", "go"}, nil)
	verdictDesc = prometheus.NewDesc("tierd_verdict_info", "Always 1: the labels name the deployment, the verdict in use and where it is from: check, kept, certificate, or none yet.", []string{"model", "deployment_digest", "rules_digest", "from"}, nil)
	openDesc    = prometheus.NewDesc("tierd_waits_in_work", "Waits that have not ended.", []string{"wait"}, nil)
	oldestDesc  = prometheus.NewDesc("tierd_oldest_wait_seconds", "Age of the oldest wait that has not ended; 0 without one.", []string{"wait"}, nil)
)

// A Verdict is what the labels of tierd_verdict_info say.
type Verdict struct{ Model, DeploymentDigest, RulesDigest, From string }

// Info is a collector of what a node is.
type Info struct {
	Version, Go string
	Verdict     func() Verdict
}

// Describe implements prometheus.Collector.
func (i Info) Describe(ch chan<- *prometheus.Desc) { ch <- buildDesc; ch <- verdictDesc }

// Collect implements prometheus.Collector.
func (i Info) Collect(ch chan<- prometheus.Metric) {
	v := i.Verdict()
	ch <- prometheus.MustNewConstMetric(buildDesc, prometheus.GaugeValue, 1, i.Version, i.Go)
	ch <- prometheus.MustNewConstMetric(verdictDesc, prometheus.GaugeValue, 1, v.Model, v.DeploymentDigest, v.RulesDigest, v.From)
}

// OpenWaits is a collector of the waits in work. It returns, for a kind of [Waits], how
// many there are and how old the oldest is.
type OpenWaits func(wait string) (n int, oldest time.Duration)

// Describe implements prometheus.Collector.
func (OpenWaits) Describe(ch chan<- *prometheus.Desc) { ch <- openDesc; ch <- oldestDesc }

// Collect implements prometheus.Collector.
func (o OpenWaits) Collect(ch chan<- prometheus.Metric) {
	for _, w := range waits {
		n, oldest := o(w)
		ch <- prometheus.MustNewConstMetric(openDesc, prometheus.GaugeValue, float64(n), w)
		ch <- prometheus.MustNewConstMetric(oldestDesc, prometheus.GaugeValue, oldest.Seconds(), w)
	}
}
