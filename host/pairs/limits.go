package pairs

import (
	"time"

	"github.com/tierd/tierd/plugins/wasm"
)

// Bounds of what peers can make this node fetch, hold and keep.
const (
	// deploymentBytesMax bounds a peer's deployment: 64 groups, the most there are, have some
	// 20 KiB.
	deploymentBytesMax = 256 << 10
	// rulesBytesMax bounds the list of its rules, of some 120 bytes each.
	rulesBytesMax = 64 << 10
	// moduleBytesMax is what a module of this node's own may have.
	moduleBytesMax = wasm.ModuleBytesMax
	// modulesMax bounds the modules of one peer: a deployment has the shipped one and
	// perhaps one of its author.
	modulesMax = 8
	// cacheBytesMax bounds the modules that are kept in the state directory: as many as one
	// peer may have, of the largest size.
	cacheBytesMax = modulesMax * moduleBytesMax
	// fetchesMax bounds the versions that are fetched at a time, or wait for their check with
	// what was fetched, up to modulesMax of the largest modules each. A peer that is slow holds
	// up the others of more than one version by its deadline at most.
	fetchesMax = 4
	// checksMax: one check keeps one core busy, and a node has other things to do.
	checksMax = 1
	// triesMax bounds the tries that sessions of one process of a peer, and its words after
	// silences, begin when the way to it failed: a peer that reconnects all the time is not
	// asked all the time.
	triesMax = 3
	// pauseMin and pauseMax are the pauses after which it is tried again all the same, doubling:
	// short enough that a peer that was busy with its own start is not waited for long, and in
	// the end one fetch in an hour, which costs nobody anything.
	pauseMin = time.Minute
	pauseMax = time.Hour
	// versionsMax bounds the versions that are remembered while no peer has them.
	versionsMax = 64
	// verdictsMax bounds the verdicts that are kept in the state directory, of some 50 KiB
	// each, and verdictBytesMax each of them.
	verdictsMax     = 64
	verdictBytesMax = 1 << 20
	// localFilesMax and localFileBytesMax bound what is looked at in peer_rules: more files
	// are a wrong directory, and a Go program has some 20 MB.
	localFilesMax     = 256
	localFileBytesMax = 256 << 20
)
