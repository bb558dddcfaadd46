package metrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tierd/tierd/host/devices"
)

var (
	copiedDesc   = prometheus.NewDesc("tierd_device_copied_bytes_total", "Bytes between engine memory and the slab, by kind of device: store is out of it, load into it.", []string{"device", "direction"}, nil)
	copySecDesc  = prometheus.NewDesc("tierd_device_copy_seconds_total", "Seconds that copies took, several at a time and with waiting for their turn.", []string{"device", "direction"}, nil)
	copyFailDesc = prometheus.NewDesc("tierd_device_failed_copies_total", "Copies that failed or were given up.", []string{"device", "direction"}, nil)
	copyWorkDesc = prometheus.NewDesc("tierd_device_copies_in_work", "Copies that are at work or wait for their turn.", []string{"device", "direction"}, nil)
	pinnedDesc   = prometheus.NewDesc("tierd_slab_pinned_bytes", "Bytes of the slab that are pinned for the GPU; it grows to the slab's size in the background.", nil, nil)

	gpuInfoDesc   = prometheus.NewDesc("tierd_gpu_info", "1 when this node has a GPU, which the labels name; 0 with empty labels when it has none.", []string{"device", "name", "uuid", "pci_bus_id"}, nil)
	gpuLostDesc   = prometheus.NewDesc("tierd_gpu_lost", "1 once the GPU cannot be used any more, until the daemon is restarted.", nil, nil)
	gpuMemoryDesc = prometheus.NewDesc("tierd_gpu_memory_bytes", "Memory of the GPU, of all processes.", []string{"state"}, nil)
	gpuOpenDesc   = prometheus.NewDesc("tierd_gpu_open_handles", "Regions of GPU memory and events that this daemon holds open, its own and those of engines. Without engines there are none: what is left then is never freed.", []string{"kind"}, nil)
	gpuGenDesc    = prometheus.NewDesc("tierd_gpu_pcie_generation", "PCIe generation now, and the most that GPU and slot can do together; an idle GPU lowers it. 0 when unknown.", []string{"of"}, nil)
	gpuLanesDesc  = prometheus.NewDesc("tierd_gpu_pcie_lanes", "PCIe lanes now, and the most that GPU and slot can do together. 0 when unknown.", []string{"of"}, nil)
	gpuECCDesc    = prometheus.NewDesc("tierd_gpu_uncorrected_memory_errors_total", "Memory errors since the driver was loaded that could not be corrected.", nil, nil)
	gpuXIDDesc    = prometheus.NewDesc("tierd_gpu_xid_errors_total", "Critical errors (XID) that the driver has reported since the start.", nil, nil)
	gpuWarnDesc   = prometheus.NewDesc("tierd_gpu_warnings", "What is wrong with the GPU or its link; tierd status has the sentences.", nil, nil)
)

// Devices is a collector that reads how the devices are at each scrape.
type Devices func() devices.Report

// Describe implements prometheus.Collector.
func (Devices) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		copiedDesc, copySecDesc, copyFailDesc, copyWorkDesc, pinnedDesc,
		gpuInfoDesc, gpuLostDesc, gpuMemoryDesc, gpuOpenDesc, gpuGenDesc, gpuLanesDesc, gpuECCDesc, gpuXIDDesc, gpuWarnDesc,
	} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (read Devices) Collect(ch chan<- prometheus.Metric) {
	r := read()
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	count := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, v, labels...)
	}
	for direction, all := range map[string]map[string]devices.Copies{"store": r.Stores, "load": r.Loads} {
		for _, kind := range []string{devices.KindMem, devices.KindCUDA} {
			c := all[kind]
			count(copiedDesc, float64(c.Bytes), kind, direction)
			count(copySecDesc, c.Seconds, kind, direction)
			count(copyFailDesc, float64(c.Failures), kind, direction)
			gauge(copyWorkDesc, float64(c.InWork), kind, direction)
		}
	}
	gauge(pinnedDesc, float64(r.Pinned))
	device := ""
	if r.Present {
		device = r.Device
	}
	gauge(gpuInfoDesc, oneIf(r.Present), device, r.Name, r.UUID, r.BusID)
	gauge(gpuLostDesc, oneIf(r.Lost != ""))
	gauge(gpuMemoryDesc, float64(r.TotalBytes-r.Free), "used")
	gauge(gpuMemoryDesc, float64(r.Free), "free")
	gauge(gpuOpenDesc, float64(r.Regions), "region")
	gauge(gpuOpenDesc, float64(r.Events), "event")
	link := r.Health.Link
	gauge(gpuGenDesc, float64(link.Generation), "now")
	gauge(gpuGenDesc, float64(link.GenerationMax), "max")
	gauge(gpuLanesDesc, float64(link.Lanes), "now")
	gauge(gpuLanesDesc, float64(link.LanesMax), "max")
	count(gpuECCDesc, float64(r.Health.UncorrectedErrors))
	count(gpuXIDDesc, float64(r.XIDErrors))
	gauge(gpuWarnDesc, float64(len(r.Warnings)))
}

func oneIf(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
