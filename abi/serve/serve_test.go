package serve

import (
	"context"
	"errors"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/abi/kvpb"
	"github.com/tierd/tierd/specs"
	"github.com/tierd/tierd/specs/policy"
)

// A trickster does what its parameter says.
type trickster struct{ opens *atomic.Int32 }

const (
	panics = iota
	panicsOnce
	failsLong
	callsTooMuchUsable
	setsTooMuch
	noResume
	counts
	refuses
	panicsInOpen
)

func (trickster) Manifest() *abi.Manifest {
	return &abi.Manifest{
		Name: "trickster", Version: "1", Kind: abi.KindSpec, Mask: abi.MaskCausal,
		Params: []abi.Param{{Name: "trick", Max: panicsInOpen}},
	}
}

func (s trickster) Open(p []uint64) (abi.Rule, error) {
	n := s.opens.Add(1)
	switch {
	case p[0] == refuses:
		return nil, errors.New("not today")
	case p[0] == panicsInOpen:
		panic("no table")
	}
	return &trick{trick: int(p[0]), first: n == 1}, nil
}

type trick struct {
	trick int
	first bool
	busy  atomic.Bool
}

func (r *trick) Reach(_ abi.Round, out abi.Bitmap) error {
	if !r.busy.CompareAndSwap(false, true) {
		return errors.New("two goroutines at once")
	}
	defer r.busy.Store(false)
	switch {
	case r.trick == panics, r.trick == panicsOnce && r.first:
		var none []int
		none[r.trick]++
	case r.trick == failsLong:
		return errors.New(strings.Repeat("\xff", kvpb.ReasonBytesMax))
	case r.trick == setsTooMuch:
		out.Set(9)
	default:
		out.Set(0)
	}
	return nil
}

func (r *trick) Scan(x abi.Round, _ abi.States, _ abi.Bitmap) (abi.Span, error) {
	if r.trick == callsTooMuchUsable {
		return abi.Span{Usable: uint32(x.Chunks()) + 1}, nil
	}
	return abi.Span{}, nil
}

func (r *trick) Need(abi.Round, abi.Bitmap) error {
	if r.trick == noResume {
		return abi.ErrNoResume
	}
	return nil
}

// lines replaces what changes when this file does.
var lines = regexp.MustCompile(`:\d+\)`)

func newTestServer() (*server, *atomic.Int32) {
	opens := new(atomic.Int32)
	return newServer([]abi.Spec{trickster{opens}, policy.RequestLevel(), specs.Full()}, func() {}), opens
}

func open(t *testing.T, s *server, rule uint32, params ...uint64) (uint32, *string) {
	t.Helper()
	reply, err := s.Open(context.Background(), &kvpb.OpenRequest{Openings: []*kvpb.Opening{{Rule: rule, Params: params}}})
	require.NoError(t, err)
	require.Len(t, reply.Opened, 1)
	return reply.Opened[0].Handle, reply.Opened[0].Error
}

func round() *kvpb.Round { return &kvpb.Round{BlockTokens: 1, ChunkTokens: 1, Hi: 9} }

func one(t *testing.T, call func(context.Context, *kvpb.Batch) (*kvpb.Results, error), it *kvpb.Item) *kvpb.Result {
	t.Helper()
	reply, err := call(context.Background(), &kvpb.Batch{Items: []*kvpb.Item{it}})
	require.NoError(t, err)
	require.Len(t, reply.Results, 1)
	return reply.Results[0]
}

// TestTricks: whatever a rule does is the answer of its own item, and the next rule's is
// not touched.
func TestTricks(t *testing.T) {
	s, _ := newTestServer()
	honest, refused := open(t, s, 0, counts)
	require.Nil(t, refused)
	states := make([]byte, 8)
	for _, c := range []struct {
		trick uint64
		call  func(context.Context, *kvpb.Batch) (*kvpb.Results, error)
		item  *kvpb.Item
		want  string
	}{
		{panics, s.Reach, &kvpb.Item{Round: round()}, "the rule panicked: runtime error: index out of range [0] with length 0 (serve_test.go:LINE)"},
		{failsLong, s.Reach, &kvpb.Item{Round: round()}, strings.Repeat("\uFFFD", 1)},
		{setsTooMuch, s.Reach, &kvpb.Item{Round: round()}, "the rule set bit 9, but only 9 chunks were asked for"},
		{callsTooMuchUsable, s.Scan, &kvpb.Item{Round: round(), States: make([]byte, 8)}, "usable is 10, but only 9 chunks were asked for"},
		{counts, s.Scan, &kvpb.Item{Round: round(), States: make([]byte, 7)}, "7 bytes of states; 9 chunks take exactly 8"},
		{counts, s.Reach, &kvpb.Item{Round: &kvpb.Round{Hi: 9}}, "round: block_tokens is 0; a block holds at least 1 token"},
	} {
		handle, refused := open(t, s, 0, c.trick)
		require.Nil(t, refused)
		c.item.Handle = handle
		reply, err := c.call(context.Background(), &kvpb.Batch{Items: []*kvpb.Item{{Handle: honest, Round: round(), States: states}, c.item, {Handle: honest, Round: round(), States: states}}})
		require.NoError(t, err)
		require.Len(t, reply.Results, 3)
		require.NotNil(t, reply.Results[1].Error)
		require.Equal(t, c.want, lines.ReplaceAllString(*reply.Results[1].Error, ":LINE)"))
		require.Empty(t, reply.Results[1].Set)
		for _, i := range []int{0, 2} {
			require.Nil(t, reply.Results[i].Error)
			require.Len(t, reply.Results[i].Set, 2)
		}
	}
}

func TestNeed(t *testing.T) {
	s, _ := newTestServer()
	h, _ := open(t, s, 0, noResume)
	res := one(t, s.Need, &kvpb.Item{Handle: h, Round: round()})
	require.True(t, res.NoResume)
	require.Nil(t, res.Error)
	require.Empty(t, res.Set)
	h, _ = open(t, s, 1)
	require.Equal(t, "rule request-level is a policy, which has no Need", *one(t, s.Need, &kvpb.Item{Handle: h, Round: round()}).Error)
	require.Equal(t, "no rule is open under handle 77", *one(t, s.Need, &kvpb.Item{Handle: 77, Round: round()}).Error)
}

// TestPanicReopens: after a panic the rule is opened anew, and not before it is called.
func TestPanicReopens(t *testing.T) {
	s, opens := newTestServer()
	h, _ := open(t, s, 0, panicsOnce)
	require.EqualValues(t, 1, opens.Load())
	require.NotNil(t, one(t, s.Reach, &kvpb.Item{Handle: h, Round: round()}).Error)
	require.EqualValues(t, 1, opens.Load())
	for range 2 {
		require.Nil(t, one(t, s.Reach, &kvpb.Item{Handle: h, Round: round()}).Error)
		require.EqualValues(t, 2, opens.Load())
	}
}

func TestOpen(t *testing.T) {
	s, _ := newTestServer()
	for want, o := range map[string]*kvpb.Opening{
		"not today": {Params: []uint64{refuses}},
		"the rule panicked: no table (serve_test.go:LINE)": {Params: []uint64{panicsInOpen}},
		"there is no rule 3; the manifest has 3":           {Rule: 3},
	} {
		reply, err := s.Open(context.Background(), &kvpb.OpenRequest{Openings: []*kvpb.Opening{o}})
		require.NoError(t, err)
		require.Equal(t, want, lines.ReplaceAllString(*reply.Opened[0].Error, ":LINE)"))
	}
	_, err := s.Open(context.Background(), &kvpb.OpenRequest{Openings: make([]*kvpb.Opening, kvpb.ItemsMax+1)})
	require.Equal(t, codes.InvalidArgument, status.Code(err))
	require.ErrorContains(t, err, "1025 openings; at most 1024 are allowed at a time")

	openings := make([]*kvpb.Opening, kvpb.ItemsMax)
	for i := range openings {
		openings[i] = &kvpb.Opening{Rule: 2}
	}
	for range kvpb.HandlesMax / kvpb.ItemsMax {
		reply, err := s.Open(context.Background(), &kvpb.OpenRequest{Openings: openings})
		require.NoError(t, err)
		require.Nil(t, reply.Opened[kvpb.ItemsMax-1].Error)
	}
	_, refused := open(t, s, 2)
	require.Equal(t, "65536 rules are open; at most 65536 are allowed in one process", *refused)
}

func TestBatchBounds(t *testing.T) {
	s, _ := newTestServer()
	_, err := s.Scan(context.Background(), &kvpb.Batch{Items: make([]*kvpb.Item, kvpb.ItemsMax+1)})
	require.Equal(t, codes.InvalidArgument, status.Code(err))
	reply, err := s.Scan(context.Background(), &kvpb.Batch{})
	require.NoError(t, err)
	require.Empty(t, reply.Results)
}

// TestOneGoroutineAtATime: batches that are served at the same time do not meet in a rule.
func TestOneGoroutineAtATime(t *testing.T) {
	s, _ := newTestServer()
	h, _ := open(t, s, 0, counts)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 200 {
				reply, err := s.Reach(context.Background(), &kvpb.Batch{Items: []*kvpb.Item{{Handle: h, Round: round()}, {Handle: h, Round: round()}}})
				if err != nil || reply.Results[0].Error != nil || reply.Results[1].Error != nil {
					t.Error(err, reply)
				}
			}
		})
	}
	wg.Wait()
}

func TestManifestBegins(t *testing.T) {
	begun := 0
	s := newServer([]abi.Spec{specs.Full(), policy.RequestLevel()}, func() { begun++ })
	for range 2 {
		reply, err := s.Manifest(context.Background(), nil)
		require.NoError(t, err)
		require.Len(t, reply.Rules, 2)
		require.Equal(t, specs.Full().Manifest(), reply.Rules[0].ABI())
	}
	require.Equal(t, 1, begun)
}

// needless claims to be a spec, and is none.
type needless struct{ abi.Spec }

func (needless) Open([]uint64) (abi.Rule, error) { return policy.RequestLevel().Open(nil) }

type nameless struct{ abi.Spec }

func (nameless) Manifest() *abi.Manifest { return &abi.Manifest{} }

func TestSpecsThatCannotBeServed(t *testing.T) {
	require.NoError(t, check([]abi.Spec{specs.Full(), specs.Window()}))
	require.EqualError(t, check(nil), "serve.Main got 0 specs; give it 1 to 64")
	require.EqualError(t, check(make([]abi.Spec, kvpb.RulesMax+1)), "serve.Main got 65 specs; give it 1 to 64")
	require.EqualError(t, check([]abi.Spec{specs.Full(), specs.Full()}), "two specs have the name full; a name stands for one rule of a program")
	require.EqualError(t, check([]abi.Spec{nameless{}}), `rule name "": 1 to 64 of a-z, 0-9, - and _ are allowed`)
	s := newServer([]abi.Spec{needless{specs.Full()}}, func() {})
	_, refused := open(t, s, 0)
	require.Equal(t, "rule full is of kind spec, but what Open returns has no Need", *refused)
}

func TestReason(t *testing.T) {
	for want, err := range map[string]error{
		"":                                  errors.New(""),
		"a\uFFFDb":                          errors.New("a\xffb"),
		strings.Repeat("\u00e9", 256):       errors.New(strings.Repeat("\u00e9", 400)),
		"x" + strings.Repeat("\u00e9", 255): errors.New("x" + strings.Repeat("\u00e9", 400)),
	} {
		require.Equal(t, want, *reason(err))
	}
}
