// Package status is the status of a daemon as people and tools see it: the JSON form that
// GET /statusz at http_listen answers, the text that tierd status prints of it, and the
// client that asks for it.
//
// # The form
//
// [Status] is the whole form, and [Form] its version. Within a version fields are only
// added; a field that goes or changes its meaning makes a new version. Times are in
// seconds, sizes in bytes, as the names say. Lists are never null. testdata/status.json is
// a status with every field.
//
// # What it does not hold
//
// Keys, prompts and addresses of engines' memory are not in it. Names of requests and
// transfers are: pins name their oldest owner. So the daemon answers this machine only; see
// "Why is the status on the HTTP port?" in RATIONALE.md.
package status

import (
	"github.com/tierd/tierd/host/build"
)

// Form is the version of the JSON form.
const Form = 1

// AddressFile is the file in a daemon's state directory that holds an [Address], from the
// first moment at which the daemon answers to the last.
const AddressFile = "http.json"

// An Address is where a daemon answers.
type Address struct {
	NodeID     string `json:"node_id"`
	PID        int    `json:"pid"`
	HTTPListen string `json:"http_listen"`
}

// States of a daemon.
const (
	Starting = "starting"
	Checking = "checking"
	Serving  = "serving"
	Draining = "draining"
	Stopping = "stopping"
)

// A Status is a daemon at one moment.
type Status struct {
	Form int `json:"form"`
	// NodeID, PID and BootID name the process; a restarted one has another BootID, in hex.
	NodeID string `json:"node_id"`
	PID    int    `json:"pid"`
	BootID string `json:"boot_id"`
	// State is one of the constants above. Ready says that engines can work with the node:
	// only in state serving.
	State string `json:"state"`
	Ready bool   `json:"ready"`
	// NotReady says why not, and how far a check is; empty when it is ready.
	NotReady     string  `json:"not_ready"`
	CheckPercent int     `json:"check_percent"`
	UpSeconds    float64 `json:"up_seconds"`
	// Attention lists, in words, what an operator should look at. Peers are in it; they
	// never make a node unready.
	Attention  []string   `json:"attention"`
	Build      build.Info `json:"build"`
	Addresses  Addresses  `json:"addresses"`
	Deployment Deployment `json:"deployment"`
	// Verdict is null before the rules are accepted.
	Verdict *Verdict `json:"verdict"`
	// Engines attached, and Requests begun and not finished.
	Engines  int     `json:"engines"`
	Requests int     `json:"requests"`
	Device   Device  `json:"device"`
	Slots    Slots   `json:"slots"`
	Pins     []Pins  `json:"pins"`
	Parked   Parked  `json:"parked"`
	Waits    []Wait  `json:"waits"`
	Groups   []Group `json:"groups"`
	Peers    []Peer  `json:"peers"`
}

// Addresses are those that the daemon really has, once it has them; before, as they are
// configured.
type Addresses struct {
	EngineSocket string `json:"engine_socket"`
	Peer         string `json:"peer_listen"`
	Data         string `json:"data_listen"`
	HTTP         string `json:"http_listen"`
}

// A Deployment is what the node serves.
type Deployment struct {
	Model  string   `json:"model"`
	File   string   `json:"file"`
	Digest string   `json:"digest"`
	Legs   []string `json:"legs"`
	Roles  []string `json:"roles"`
}

// Where a verdict is from.
const (
	FromCheck       = "check"       // of this start
	FromKept        = "kept"        // of an earlier start, in the state directory
	FromCertificate = "certificate" // of somebody else, signed
)

// A Verdict is the one that lets the rules serve.
type Verdict struct {
	Verdict string `json:"verdict"`
	From    string `json:"from"`
	// DeploymentDigest, RulesDigest and Checker are what it depends on.
	DeploymentDigest string `json:"deployment_digest"`
	RulesDigest      string `json:"rules_digest"`
	Checker          string `json:"checker"`
	// CertificateKey signed it, when it is from a certificate.
	CertificateKey string  `json:"certificate_key"`
	Cases          uint64  `json:"cases"`
	Seconds        float64 `json:"seconds"`
	Rules          []Rule  `json:"rules"`
}

// A Rule serves a group, or is a policy.
type Rule struct {
	For     string `json:"for"`
	Name    string `json:"name"`
	Version string `json:"version"`
	Source  string `json:"source"`
	Digest  string `json:"digest"`
}

// A Device is where engines keep their blocks: host memory, or host memory and a GPU.
type Device struct {
	// Name is "mem", or "cuda:" and the driver's number of the GPU; Why is the reason for it.
	Name string `json:"name"`
	Why  string `json:"why"`
	// PinnedBytes of the slab are fast for the GPU, of PinnedOf; PinError says why there
	// will not be more.
	PinnedBytes int64  `json:"pinned_bytes"`
	PinnedOf    int64  `json:"pinned_of_bytes"`
	PinError    string `json:"pin_error"`
	// Copies are those since the start, by kind of device and direction.
	Copies []Copies `json:"copies"`
	// GPU is null without one.
	GPU *GPU `json:"gpu"`
}

// Copies between engine memory and the slab.
type Copies struct {
	Device    string  `json:"device"`    // mem or cuda
	Direction string  `json:"direction"` // store is out of engine memory, load into it
	InWork    int64   `json:"in_work"`
	Bytes     uint64  `json:"bytes_total"`
	Seconds   float64 `json:"seconds_total"` // of all calls, several at a time
	Failed    uint64  `json:"failed_total"`
}

// A GPU as its driver tells. What is not known is 0, or -1 for the NUMA node.
type GPU struct {
	Name     string `json:"name"`
	UUID     string `json:"uuid"`
	PCIBusID string `json:"pci_bus_id"`
	// Lost says why it cannot be used any more; empty while it works.
	Lost string `json:"lost"`
	// Memory of all processes.
	MemoryUsedBytes  int64 `json:"memory_used_bytes"`
	MemoryTotalBytes int64 `json:"memory_total_bytes"`
	// The PCIe link now, and the most that GPU and slot can do together. An idle GPU lowers
	// its generation.
	PCIeGeneration    int  `json:"pcie_generation"`
	PCIeGenerationMax int  `json:"pcie_generation_max"`
	PCIeLanes         int  `json:"pcie_lanes"`
	PCIeLanesMax      int  `json:"pcie_lanes_max"`
	Idle              bool `json:"idle"`
	NUMANode          int  `json:"numa_node"`
	ECC               bool `json:"ecc"`
	// UncorrectedErrors of memory since the driver was loaded, XIDErrors since the start.
	UncorrectedErrors uint64 `json:"uncorrected_memory_errors_total"`
	XIDErrors         uint64 `json:"xid_errors_total"`
	// NoHealth says why the driver's management library tells nothing.
	NoHealth       string  `json:"no_health"`
	CheckedSeconds float64 `json:"checked_seconds_ago"`
}

// Slots of the primary tier by state; together they are Total.
type Slots struct {
	Total     int   `json:"total"`
	SlotBytes int64 `json:"slot_bytes"`
	Free      int   `json:"free"`
	Writing   int   `json:"writing"`
	Readable  int   `json:"readable"`
	Detached  int   `json:"detached"`
	Fenced    int   `json:"fenced"`
	// Evictable are the readable slots that nobody pins.
	Evictable     int    `json:"evictable"`
	ResidentBytes int64  `json:"resident_bytes"`
	Evicted       uint64 `json:"evicted_total"`
	Refused       uint64 `json:"refused_total"`
}

// Pins are all that owners of one kind hold in one way.
type Pins struct {
	Owner string `json:"owner"` // request, produce or peer
	Kind  string `json:"kind"`  // read, write or grab
	Count int    `json:"count"`
	Bytes int64  `json:"bytes"`
	// OldestSeconds and OldestOwner are of the oldest.
	OldestSeconds float64 `json:"oldest_seconds"`
	OldestOwner   string  `json:"oldest_owner"`
}

// Parked is supply that waits for its consumer. A chunk takes a slot, whatever its size.
type Parked struct {
	Transfers int    `json:"transfers"`
	Chunks    int    `json:"chunks"`
	Bytes     uint64 `json:"bytes"`
	BytesMax  uint64 `json:"bytes_max"`
}

// A Wait is one kind of wait: lookup, transfer, pending (a chunk that another request
// writes) or event (what an engine recorded on its GPU).
type Wait struct {
	Wait          string  `json:"wait"`
	InWork        int     `json:"in_work"`
	OldestSeconds float64 `json:"oldest_seconds"`
	// Ended counts those that have ended, by outcome.
	Ended map[string]uint64 `json:"ended_total"`
}

// A Group counts chunks of one group on one leg, since the start. Demanded to Unmatched
// are those of this node's engines; the rest are what peers demanded here, by their end.
type Group struct {
	Group        string            `json:"group"`
	Leg          string            `json:"leg"`
	Demanded     uint64            `json:"demanded_total"`
	Supplied     uint64            `json:"supplied_total"`
	Transferred  uint64            `json:"transferred_total"`
	Unmatched    map[string]uint64 `json:"unmatched_total"`
	PeerDemanded uint64            `json:"peer_demanded_total"`
	PeerEnded    map[string]uint64 `json:"peer_ended_total"`
}

// A Peer is another node.
type Peer struct {
	ID         string `json:"id"`
	Control    string `json:"control"`
	Configured bool   `json:"configured"`
	// State is connecting, ready, suspect or dead, and Reason why it changed last.
	State    string `json:"state"`
	Reason   string `json:"reason"`
	Draining bool   `json:"draining"`
	// BootID of the peer's process, in hex; empty before the first session.
	BootID         string  `json:"boot_id"`
	RTTSeconds     float64 `json:"rtt_seconds"`
	SilenceSeconds float64 `json:"silence_seconds"`
	Sessions       uint64  `json:"sessions_total"`
	// Lookups and Demands of this node at the peer, and Serves of what it demands here.
	Lookups int `json:"lookups"`
	Demands int `json:"demands"`
	Serves  int `json:"serves"`
	// PinnedBytes are what those serves keep from being reused, at most PinnedBytesMax.
	PinnedBytes    uint64 `json:"pinned_bytes"`
	PinnedBytesMax uint64 `json:"pinned_bytes_max"`
	// DataLanes are the data connections that this node has with the peer.
	DataLanes int   `json:"data_lanes"`
	Legs      []Leg `json:"legs"`
	Pair      Pair  `json:"pair"`
}

// A Pair is what is known of this node's rules, parameters and limits and the peer's together.
type Pair struct {
	// State is none (no session yet), equal, checking, accepted, refused or undecided.
	State string `json:"state"`
	// Reason is the state in one line.
	Reason string `json:"reason"`
	// CounterexampleFile has the whole counterexample of a refusal.
	CounterexampleFile string `json:"counterexample_file"`
	// CounterexampleNotKept says where it was to be, and why it could not be written.
	CounterexampleNotKept string `json:"counterexample_not_kept"`
	// Kept says that the verdict is from before this start.
	Kept bool `json:"kept"`
	// Takes and Gives say, when the versions differ, which way this node allows legs pd and
	// demand: to itself and to the peer; PeerGives is what the peer allows this node, and
	// PeerReason why it does not.
	Takes      bool   `json:"takes"`
	Gives      bool   `json:"gives"`
	PeerGives  bool   `json:"peer_gives"`
	PeerReason string `json:"peer_reason"`
	// DeploymentDigest and RulesDigest are the peer's.
	DeploymentDigest string `json:"deployment_digest"`
	RulesDigest      string `json:"rules_digest"`
}

// A Leg says whether a request that names the peer may use it now, and why not.
type Leg struct {
	Leg     string `json:"leg"`
	Allowed bool   `json:"allowed"`
	Why     string `json:"why"`
}
