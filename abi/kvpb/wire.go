// Package kvpb is the subprocess ABI of tierd: the gRPC service of kv.proto, what both
// sides must agree on before they speak it, and the bounds that both hold the other to.
//
// An author of a rule in Go does not use it: see package abi/serve. An author in another
// language generates code from kv.proto, starts a server as hashicorp/go-plugin describes
// (a line on standard output, gRPC on a Unix socket, mutual TLS), and keeps the bounds
// below.
package kvpb

import (
	"fmt"

	"github.com/tierd/tierd/abi"
)

const (
	// RulesMax bounds the rules of one program, as of one WebAssembly module.
	RulesMax = 64

	// HandlesMax bounds the rules that are open in one process. A deployment opens as
	// many as it has groups and policies; only a check over parameter ranges opens
	// thousands. A handle lives as long as its process, so without a bound that memory
	// only grows.
	HandlesMax = 1 << 16

	// ItemsMax bounds the calls of one batch: more share the cost of a message no
	// better, and the first of them waits for the last.
	ItemsMax = 1024

	// ChunksMax bounds the chunks that a batch reaches over, the sum of Hi: as many as the
	// longest single call, so that a batch takes hardly longer than that and one deadline
	// fits both. States of 2 bits and sets of 1 bit make that 256 and 128 KiB.
	ChunksMax = abi.MaxChunks

	// MessageBytesMax bounds a message: ChunksMax chunks of states, ItemsMax items with
	// 150 bytes around each, and as much again. A reply with ItemsMax reasons of
	// ReasonBytesMax fits too.
	MessageBytesMax = 1 << 20

	// ReasonBytesMax is how much is kept of the reason that a rule gives for a failed call.
	ReasonBytesMax = 512
)

// FromRound returns the message for a Round.
func FromRound(r *abi.Round) *Round {
	return &Round{
		BlockTokens: r.BlockTokens, ChunkTokens: r.ChunkTokens, PromptTokens: r.PromptTokens,
		StoredTokens: r.StoredTokens, ResumeTokens: r.ResumeTokens, AlignTokens: r.AlignTokens,
		JunctionTokens: r.JunctionTokens, ResidentTokens: r.ResidentTokens, Offers: r.Offers,
		LocalTokens: r.LocalTokens, BoundTokens: r.BoundTokens, Lo: r.Lo, Hi: r.Hi,
	}
}

// ABI returns the Round that a message holds. It checks nothing: see abi.Round.Validate.
func (r *Round) ABI() abi.Round {
	return abi.Round{
		BlockTokens: r.GetBlockTokens(), ChunkTokens: r.GetChunkTokens(), PromptTokens: r.GetPromptTokens(),
		StoredTokens: r.GetStoredTokens(), ResumeTokens: r.GetResumeTokens(), AlignTokens: r.GetAlignTokens(),
		JunctionTokens: r.GetJunctionTokens(), ResidentTokens: r.GetResidentTokens(), Offers: r.GetOffers(),
		LocalTokens: r.GetLocalTokens(), BoundTokens: r.GetBoundTokens(), Lo: r.GetLo(), Hi: r.GetHi(),
	}
}

// FromManifest returns the message for a manifest.
func FromManifest(m *abi.Manifest) *Manifest {
	out := &Manifest{Name: m.Name, Version: m.Version, Kind: string(m.Kind), Mask: string(m.Mask), MaskArgs: m.MaskArgs}
	for i := range m.Params {
		p := &m.Params[i]
		out.Params = append(out.Params, &Param{
			Name: p.Name, Min: p.Min, Max: p.Max, Default: p.Default, Required: p.Required, Unit: p.Unit, Enum: p.Enum,
		})
	}
	return out
}

// ABI returns the manifest that a message holds. It checks nothing: see
// abi.Manifest.Validate.
func (m *Manifest) ABI() *abi.Manifest {
	out := &abi.Manifest{
		Name: m.GetName(), Version: m.GetVersion(), Kind: abi.Kind(m.GetKind()),
		Mask: abi.MaskKind(m.GetMask()), MaskArgs: m.GetMaskArgs(),
	}
	for _, p := range m.GetParams() {
		out.Params = append(out.Params, abi.Param{
			Name: p.GetName(), Min: p.GetMin(), Max: p.GetMax(), Default: p.GetDefault(),
			Required: p.GetRequired(), Unit: p.GetUnit(), Enum: p.GetEnum(),
		})
	}
	return out
}

// Check reports the first thing that makes a batch larger than the contract allows.
func (b *Batch) Check() error {
	if n := len(b.GetItems()); n > ItemsMax {
		return fmt.Errorf("the batch has %d items; at most %d are allowed", n, ItemsMax)
	}
	chunks := 0
	for i, it := range b.GetItems() {
		r := it.GetRound()
		if r == nil {
			return fmt.Errorf("item %d has no round", i)
		}
		if r.Hi < r.Lo || r.Hi > abi.MaxChunks {
			return fmt.Errorf("item %d asks for chunks %d to %d; lo <= hi <= %d", i, r.Lo, r.Hi, abi.MaxChunks)
		}
		chunks += int(r.Hi) // Need counts from chunk 0
	}
	if chunks > ChunksMax {
		return fmt.Errorf("the batch reaches over %d chunks; at most %d are allowed", chunks, ChunksMax)
	}
	return nil
}

// SetInto fills out, which has room for n bits, with the set of a result.
func (r *Result) SetInto(out abi.Bitmap, n int) error {
	switch {
	case len(r.GetSet()) != (n+7)/8:
		return fmt.Errorf("the set has %d bytes; %d chunks take exactly %d", len(r.GetSet()), n, (n+7)/8)
	case !out.DecodeWire(r.GetSet(), n):
		return fmt.Errorf("the set has a bit beyond its %d chunks; the padding of the last byte must be 0", n)
	}
	return nil
}
