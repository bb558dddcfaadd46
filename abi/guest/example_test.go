package guest_test

import (
	"testing"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/abi/abitest"
	"github.com/tierd/tierd/abi/guest"
)

// A chunkPrefix is the rule of full attention, written out: it stores every complete
// chunk, and uses the unbroken run of chunks from the left.
type chunkPrefix struct{}

func (chunkPrefix) Manifest() *abi.Manifest {
	return &abi.Manifest{Name: "chunk-prefix", Version: "1.0.0", Kind: abi.KindSpec, Mask: abi.MaskCausal}
}

func (chunkPrefix) Open([]uint64) (abi.Rule, error) { return chunkPrefix{}, nil }

func (chunkPrefix) Reach(r abi.Round, out abi.Bitmap) error {
	complete := min(r.StoredTokens/r.ChunkTokens, uint64(r.Hi))
	out.SetRange(0, int(complete)-int(r.Lo))
	return nil
}

func (chunkPrefix) Scan(r abi.Round, states abi.States, demand abi.Bitmap) (abi.Span, error) {
	end := states.First(abi.Absent, 0, r.Chunks())
	if states.First(abi.Unknown, 0, end) < end { // ask for these first
		states.Mark(abi.Unknown, 0, end, demand)
		return abi.Span{Deferred: true}, nil
	}
	demand.SetRange(0, end)
	return abi.Span{Usable: uint32(end)}, nil
}

func (chunkPrefix) Need(r abi.Round, out abi.Bitmap) error {
	read := (r.ResumeTokens + r.ChunkTokens - 1) / r.ChunkTokens // chunks that hold a token below the resume point
	out.SetRange(0, int(min(read, uint64(r.Hi))))
	return nil
}

// In a module this stands in init, and main is empty.
func ExampleExport() {
	guest.Export(chunkPrefix{})
}

func TestExampleKeepsTheLaws(t *testing.T) { abitest.Run(t, chunkPrefix{}) }
