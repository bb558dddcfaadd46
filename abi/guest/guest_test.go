package guest

import (
	"encoding/json"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/tierd/tierd/abi"
	"pgregory.net/rapid"
)

type fake struct {
	m    abi.Manifest
	rule abi.Rule
	err  error
}

func (f *fake) Manifest() *abi.Manifest           { return &f.m }
func (f *fake) Open(p []uint64) (abi.Rule, error) { return f.rule, f.err }

// echo answers what it was given: Reach the round's low bits, Scan the Hits.
type echo struct{ err error }

func (e echo) Reach(r abi.Round, out abi.Bitmap) error {
	out.SetRange(0, min(int(r.StoredTokens), r.Chunks()))
	return e.err
}

func (e echo) Scan(r abi.Round, s abi.States, demand abi.Bitmap) (abi.Span, error) {
	s.Mark(1<<abi.Hit, 0, r.Chunks(), demand)
	return abi.Span{Usable: uint32(demand.Count()), Deferred: s.First(abi.Unknown, 0, r.Chunks()) < r.Chunks()}, e.err
}

func (e echo) Need(r abi.Round, out abi.Bitmap) error { return e.err }

func (c *core) load(b []byte) int {
	copy(bytesOf(room(&c.in, (len(b)+7)/8), len(b)), b)
	return len(b)
}

func opening(index uint32, params ...uint64) []byte {
	b := []byte{byte(8 + 8*len(params)), 0, 0, 0, byte(index), 0, 0, 0}
	for _, p := range params {
		b = append(b, byte(p), byte(p>>8), 0, 0, 0, 0, 0, 0)
	}
	return b
}

// The hand-written encoder says exactly what encoding/json would read back.
func TestManifestIsJSON(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var specs []abi.Spec
		var want []abi.Manifest
		for range rapid.IntRange(0, 3).Draw(t, "rules") {
			m := abi.Manifest{
				Name: rapid.String().Draw(t, "name"), Version: rapid.String().Draw(t, "version"),
				Kind: abi.Kind(rapid.String().Draw(t, "kind")), Mask: abi.MaskKind(rapid.String().Draw(t, "mask")),
			}
			for range rapid.IntRange(0, 2).Draw(t, "args") {
				m.MaskArgs = append(m.MaskArgs, rapid.String().Draw(t, "arg"))
			}
			for range rapid.IntRange(0, 2).Draw(t, "params") {
				p := abi.Param{
					Name: rapid.String().Draw(t, "param"), Min: rapid.Uint64().Draw(t, "min"), Max: rapid.Uint64().Draw(t, "max"),
					Default: rapid.Uint64().Draw(t, "default"), Required: rapid.Bool().Draw(t, "required"),
					Unit: rapid.String().Draw(t, "unit"),
				}
				for range rapid.IntRange(0, 2).Draw(t, "names") {
					p.Enum = append(p.Enum, rapid.String().Draw(t, "enum"))
				}
				m.Params = append(m.Params, p)
			}
			specs = append(specs, &fake{m: m})
			want = append(want, m)
		}
		var got struct{ Rules []abi.Manifest }
		b := appendManifest(nil, specs)
		if err := json.Unmarshal(b, &got); err != nil {
			t.Fatalf("%v in %s", err, b)
		}
		if len(want) > 0 {
			require.Equal(t, want, got.Rules)
		}
	})
	require.Equal(t, `{"rules":[{"name":"x\ufffd\"","version":"","kind":"spec"}]}`,
		toASCII(appendManifest(nil, []abi.Spec{&fake{m: abi.Manifest{Name: "x\xff\"", Kind: abi.KindSpec}}})))
}

func toASCII(b []byte) string {
	s := ""
	for _, r := range string(b) {
		if r == 0xFFFD {
			s += `\ufffd`
		} else {
			s += string(r)
		}
	}
	return s
}

func TestCallsAnswerWhatTheRuleAnswers(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := &core{specs: []abi.Spec{&fake{rule: echo{}}}}
		require.EqualValues(t, 0, c.open(c.load(opening(0))))
		for range 3 { // the buffers are used again
			n := rapid.IntRange(0, 300).Draw(t, "chunks")
			lo := rapid.Uint32Range(0, 9).Draw(t, "lo")
			r := abi.Round{BlockTokens: 16, ChunkTokens: 16, StoredTokens: rapid.Uint64Range(0, 400).Draw(t, "stored"), Lo: lo, Hi: lo + uint32(n)}
			states := abi.NewStates(n)
			for i := range n {
				states.Put(i, abi.State(rapid.IntRange(0, 3).Draw(t, "state")))
			}

			want := abi.NewBitmap(n)
			require.NoError(t, echo{}.Reach(r, want))
			got := c.reach(0, c.load(r.AppendWire(nil)))
			require.EqualValues(t, (n+7)/8, got)
			require.Equal(t, want.AppendWire([]byte{}, n), append([]byte{}, bytesOf(c.out, int(got))...))

			// A record of a newer minor version is longer, and by any number of bytes.
			wire := r.AppendWire(nil)
			extra := rapid.IntRange(0, 20).Draw(t, "extra")
			wire = append(wire, make([]byte, extra)...)
			wire[0] += byte(extra)
			demand := abi.NewBitmap(n)
			span, _ := echo{}.Scan(r, states, demand)
			got = c.scan(0, c.load(states.AppendWire(wire, n)))
			require.EqualValues(t, 8+(n+7)/8, got)
			require.Equal(t, span.Usable, uint32(c.out[0]))
			require.Equal(t, span.Deferred, c.out[0]>>32 == 1)
			require.Equal(t, demand.AppendWire([]byte{}, n), append([]byte{}, bytesOf(c.out[1:], (n+7)/8)...))
		}
	})
}

func TestFailures(t *testing.T) {
	round := abi.Round{BlockTokens: 16, ChunkTokens: 16, Hi: 40}
	c := &core{specs: []abi.Spec{
		&fake{rule: echo{errors.New("no such thing")}},
		&fake{rule: echo{abi.ErrNoResume}},
		&fake{err: errors.New("parameter x is 3")},
		&fake{rule: struct{ abi.Rule }{echo{}}},
	}}
	check := func(want string, got int64) {
		t.Helper()
		require.EqualValues(t, failed, got)
		require.Equal(t, want, c.reason)
	}
	require.EqualValues(t, 0, c.open(c.load(opening(0, 1, 2))))
	require.EqualValues(t, 1, c.open(c.load(opening(1))))
	require.EqualValues(t, 2, c.open(c.load(opening(3))))
	check("parameter x is 3", c.open(c.load(opening(2))))
	check("kv_open: rule index is 9; this module has 4 rules", c.open(c.load(opening(9))))
	check("kv_open: 3 bytes are not a record of size, rule index and parameters", c.open(c.load([]byte{8, 0, 0})))
	check("no such thing", c.reach(0, c.load(round.AppendWire(nil))))
	check("no such thing", c.need(0, c.load(round.AppendWire(nil))))
	require.EqualValues(t, noResume, c.need(1, c.load(round.AppendWire(nil))))
	check("no KV can be resumed at this token", c.scan(1, c.load(abi.NewStates(40).AppendWire(round.AppendWire(nil), 40))))
	check("kv_need: a policy has no need", c.need(2, c.load(round.AppendWire(nil))))
	check("handle 3 is not open; this instance opened 3", c.reach(3, c.load(round.AppendWire(nil))))
	check("handle -1 is not open; this instance opened 3", c.reach(-1, c.load(round.AppendWire(nil))))
	check("round record: 2 bytes, shorter than its 8-byte head", c.reach(0, c.load([]byte{1, 2})))
	check("kv_scan: the states of 40 chunks are 16 bytes, but only 0 follow the round", c.scan(0, c.load(round.AppendWire(nil))))
	round.Hi = abi.MaxChunks + 1
	check("round: chunks 0 to 1048577 are no range below 1048576", c.reach(0, c.load(round.AppendWire(nil))))
}

func TestCallsDoNotAllocate(t *testing.T) {
	c := &core{specs: []abi.Spec{&fake{rule: echo{}}}}
	c.open(c.load(opening(0)))
	r := abi.Round{BlockTokens: 16, ChunkTokens: 16, Hi: 1024}
	in := abi.NewStates(1024).AppendWire(r.AppendWire(nil), 1024)
	require.Zero(t, testing.AllocsPerRun(100, func() {
		n := c.load(in)
		c.scan(0, n)
		c.reach(0, n)
	}))
}

func TestExportAddsUp(t *testing.T) {
	defer func() { module = core{} }()
	Export(&fake{})
	Export(&fake{}, &fake{})
	require.Len(t, module.specs, 3)
}

// wide sets the bit behind the last chunk.
type wide struct{}

func (wide) Reach(r abi.Round, out abi.Bitmap) error { out.Set(r.Chunks()); return nil }
func (wide) Need(r abi.Round, out abi.Bitmap) error  { out.Set(int(r.Hi)); return nil }
func (wide) Scan(r abi.Round, _ abi.States, demand abi.Bitmap) (abi.Span, error) {
	demand.Set(r.Chunks())
	return abi.Span{}, nil
}

// The host sees whole bytes; a bit in a byte behind them must not be lost.
func TestBitsBeyondTheChunksFail(t *testing.T) {
	c := &core{specs: []abi.Spec{&fake{rule: wide{}}}}
	require.EqualValues(t, 0, c.open(c.load(opening(0))))
	for _, n := range []uint32{1, 7, 8, 9, 40, 63, 65, 72} {
		r := abi.Round{BlockTokens: 1, ChunkTokens: 1, Hi: n}
		require.EqualValues(t, failed, c.reach(0, c.load(r.AppendWire(nil))))
		require.Equal(t, fmt.Sprintf("kv_reach: the rule set a bit at or beyond %d, the chunks asked for", n), c.reason)
		require.EqualValues(t, failed, c.need(0, c.load(r.AppendWire(nil))))
		require.Contains(t, c.reason, "kv_need: the rule set a bit")
		require.EqualValues(t, failed, c.scan(0, c.load(abi.NewStates(int(n)).AppendWire(r.AppendWire(nil), int(n)))))
		require.Contains(t, c.reason, "kv_scan: the rule set a bit")
	}
}
