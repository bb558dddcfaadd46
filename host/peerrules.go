package host

import (
	"cmp"
	"context"
	"crypto/sha256"
	"log/slog"

	"github.com/tierd/tierd/host/config"
	"github.com/tierd/tierd/host/metrics"
	"github.com/tierd/tierd/host/pairs"
	"github.com/tierd/tierd/host/rules"
	"github.com/tierd/tierd/host/session/sessionpb"
	"github.com/tierd/tierd/host/session/wire"
	"github.com/tierd/tierd/host/status"
)

// openPairs gets ready for peers of other versions: what this node gives out, and what
// finds out whether a pair of versions fits together.
func (n *Node) openPairs() error {
	checker, err := rules.Checker()
	if err != nil {
		return err
	}
	n.shelf = pairs.NewShelf(n.entry, checker)
	d := &n.cfg.Deadlines
	n.pairs = pairs.New(pairs.Options{
		Shelf: n.shelf, StateDir: n.cfg.StateDir, CompiledDir: rules.CompiledDir(n.cfg.StateDir), LocalDir: n.cfg.PeerRules, Command: n.cfg.PairCommand, Seed: rules.DefaultSeed,
		FetchWithin: config.Millis(d.PairFetchMS), CheckWithin: config.Millis(d.PairCheckMS),
		// n.peers is there before the first session is.
		Fetch: func(ctx context.Context, peer string, id [sha256.Size]byte, bytesMax int) ([]byte, error) {
			return n.peers.Fetch(ctx, peer, id, bytesMax)
		},
		Allow: func(peer string, v pairs.Version, take, give bool, why string) {
			n.peers.AllowLegs(peer, func(h *sessionpb.Hello) bool { return versionOf(h) == v }, take, give, why)
		},
		Tell: n.tellPair, Log: n.log,
	})
	return nil
}

// ReviewPairs looks again at the versions of peers that could not be judged, as SIGHUP does:
// peer_rules may hold what was missing.
func (n *Node) ReviewPairs() { n.pairs.Retry() }

// pairUp is called with each session that begins.
func (n *Node) pairUp(peer string, h *sessionpb.Hello, equal bool) {
	n.pairs.Up(peer, versionOf(h), h.BootId, equal)
}

func versionOf(h *sessionpb.Hello) pairs.Version {
	v := pairs.Version{MaxTokens: h.GetCaps().GetMaxTokens(), MaxStoreTokens: h.GetCaps().GetMaxStoreTokens()}
	copy(v.Rules[:], h.GetRulesDigest())
	copy(v.Deployment[:], h.GetDeploymentDigest())
	return v
}

// OnAsk implements wire.Host.
func (s sessions) OnAsk(_ string, id [sha256.Size]byte) ([]byte, string) {
	return s.node.shelf.Give(id)
}

// tellPair writes what a pair of versions came to.
func (n *Node) tellPair(peer string, f pairs.Finding) {
	if f.State == pairs.Accepted {
		n.log.Info("peer of another version: all legs are allowed", "peer", peer, "reason", f.Why, "deployment_digest", f.Deployment, "verdict_kept", f.Kept)
		return
	}
	n.faults.Log(slog.LevelWarn, "pair", peer+f.Rules+f.Deployment+f.Why, "peer of another version: not every leg is allowed with it",
		"peer", peer, "reason", f.Why, "takes", f.Take, "gives", f.Give, "deployment_digest", f.Deployment, "counterexample", cmp.Or(f.File, f.FileNot, "-"))
}

// pairRefuses says why this node may not demand of a peer of another version in every leg.
func (n *Node) pairRefuses(p *wire.PeerStatus) string {
	f := n.pairs.Of(p.ID)
	if !f.Take {
		return cmp.Or(f.TakeNot, "the pair of the two versions has not been looked at yet") + seeFile(f.File, f.FileNot)
	}
	return "this node accepts the pair of the two versions, and the peer does not yet supply: " + cmp.Or(p.SuppliesNot, "it has not said why")
}

// seeFile points to the whole counterexample, or says why there is none.
func seeFile(path, not string) string {
	switch {
	case path != "":
		return "; the whole counterexample is in " + path
	case not != "":
		return "; the whole counterexample could not be kept in " + not + "; make room there, and let this node write, before its next start"
	}
	return ""
}

// pairOf is a peer's pair for the status.
func (n *Node) pairOf(p *wire.PeerStatus) status.Pair {
	if !n.opened.Load() {
		return status.Pair{State: pairs.None}
	}
	f := n.pairs.Of(p.ID)
	out := status.Pair{State: f.State, Reason: f.Why, CounterexampleFile: f.File, CounterexampleNotKept: f.FileNot, Kept: f.Kept, Takes: f.Take, Gives: f.Give,
		PeerGives: p.Supplies, PeerReason: p.SuppliesNot, DeploymentDigest: f.Deployment, RulesDigest: f.Rules}
	if f.State == pairs.Equal {
		out.PeerGives, out.PeerReason = true, ""
	}
	return out
}

// pairStates are the states of each peer's pair.
func (n *Node) pairStates() map[string]metrics.PairStates {
	out := map[string]metrics.PairStates{}
	for _, p := range n.peersStatus() {
		out[p.ID] = metrics.PairStates{Consume: pairs.None, Produce: pairs.None}
		if n.opened.Load() {
			f := n.pairs.Of(p.ID)
			out[p.ID] = metrics.PairStates{Consume: f.TakeState, Produce: f.GiveState}
		}
	}
	return out
}

func (n *Node) pairsEnded(state string) uint64 {
	if !n.opened.Load() {
		return 0
	}
	return n.pairs.Ended(state)
}
