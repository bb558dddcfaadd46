package vllm

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/abi"
)

// The rows of testdata/vllm_rules.jsonl are measured answers of vLLM's own functions.
// Every row is a test, and a row that no test takes fails.

// vectorRows is the number of rows per function, so that none can be lost unseen.
var vectorRows = map[string]int{
	"window_chunks": 48, "alignment": 48, "swa_reachable_A": 24, "swa_mask_B": 24,
	"mamba_mask_B": 24, "storable": 48, "prefix_scan": 24, "sw_scan": 48, "lookup": 48, "pd": 48,
}

type vectorGroup struct {
	K string // kind
	B uint64 // block tokens
	W uint64 // window
	X uint64 // extra retained tokens
	C uint64 // attention chunk
	M string // mamba mode
}

func (v vectorGroup) group(t *testing.T) Group {
	k, err := ParseKind(v.K)
	require.NoError(t, err)
	g := Group{Kind: k, BlockTokens: v.B, WindowTokens: v.W + v.C, ExtraTokens: v.X}
	if v.M != "" {
		g.Mode, err = ParseMambaMode(v.M)
		require.NoError(t, err)
	}
	return g
}

type chunkSets [][2]int // inclusive ranges

func (r chunkSets) bitmap() abi.Bitmap {
	var b abi.Bitmap
	for _, x := range r {
		for i := x[0]; i <= x[1]; i++ {
			set(&b, i)
		}
	}
	return b
}

type vector struct {
	F, Rev    string
	Groups    []vectorGroup
	BPC       uint64
	Eagle     json.RawMessage // true or false, or group indices
	Out       json.RawMessage
	Spec      vectorGroup
	TPC       int
	Align     *int
	W         int
	IW        int
	Storable  int
	BS        uint64
	RI        json.RawMessage // absent or null = none
	Boundary  int
	End       int
	FinalEnd  *int `json:"final_end"`
	Prompt    int
	Offload   int `json:"offloadable"`
	NBlocks   int `json:"n_blocks"`
	NKeys     int `json:"n_keys"`
	Finished  bool
	Seq       string
	Ret       *int
	N         int
	T         uint64
	Computed  uint64
	Res       []string
	Calls     [][3]int
	P         uint64
	Promo     string
	StepEvery uint64            `json:"step_every"`
	NullBelow map[string]uint64 `json:"null_below"`
	Max       *uint64           `json:"max_offload"`
	Rounds    [][]chunkSets
	Supply    []chunkSets
	Missing   []chunkSets
	OK        bool
}

func (v *vector) rev() Revision { return map[string]Revision{"A": RevA, "B": RevB}[v.Rev] }

func (v *vector) flag(t *testing.T) (eagle bool) {
	require.NoError(t, json.Unmarshal(v.Eagle, &eagle))
	return eagle
}

func (v *vector) retention(t *testing.T) Optional {
	if len(v.RI) == 0 || string(v.RI) == "null" {
		return Optional{}
	}
	var n uint64
	require.NoError(t, json.Unmarshal(v.RI, &n))
	return Some(n)
}

func (v *vector) rules(t *testing.T) *Rules {
	c := Defaults(v.rev())
	c.BlocksPerChunk = max(1, v.BPC)
	c.Policy = RequestLevel
	c.RetentionTokens = v.retention(t)
	if v.Promo == "R" {
		c.Promotion = PromotionRetry
	}
	for _, g := range v.Groups {
		c.Groups = append(c.Groups, g.group(t))
	}
	if len(v.Eagle) > 0 {
		var marked []int
		require.NoError(t, json.Unmarshal(v.Eagle, &marked))
		for _, i := range marked {
			c.Groups[i].Eagle = true
		}
	}
	r, err := New(c)
	require.NoError(t, err)
	return r
}

func TestVectors(t *testing.T) {
	data, err := os.ReadFile("testdata/vllm_rules.jsonl")
	require.NoError(t, err)
	run := map[string]func(*testing.T, *vector){
		"window_chunks": vectorWindow, "alignment": vectorAlignment,
		"swa_reachable_A": vectorReachable, "swa_mask_B": vectorMask, "mamba_mask_B": vectorMask,
		"storable": vectorStorable, "prefix_scan": vectorScan, "sw_scan": vectorScan,
		"lookup": vectorLookup, "pd": vectorPD,
	}
	rows := map[string]int{}
	s := bufio.NewScanner(bytes.NewReader(data))
	for line := 1; s.Scan(); line++ {
		d := json.NewDecoder(bytes.NewReader(s.Bytes()))
		d.DisallowUnknownFields()
		var v vector
		require.NoError(t, d.Decode(&v), "line %d", line)
		rows[v.F]++
		ok := t.Run(fmt.Sprintf("%s/%d", v.F, line), func(t *testing.T) { run[v.F](t, &v) })
		if !ok {
			t.Logf("line %d: %s", line, s.Text())
		}
	}
	require.NoError(t, s.Err())
	require.Equal(t, vectorRows, rows)
}

func vectorWindow(t *testing.T, v *vector) {
	g := v.Spec.group(t)
	g.BlockTokens = uint64(v.TPC)
	if string(v.Out) == `"assert"` {
		c := Defaults(v.rev(), g)
		require.ErrorContains(t, c.Validate(), "bare assertion")
		return
	}
	want := 0 // null: a prefix scan
	require.NoError(t, json.Unmarshal(v.Out, &want))
	require.Equal(t, want, windowChunks(v.rev(), &g, v.TPC))
}

func vectorAlignment(t *testing.T, v *vector) {
	var want struct {
		Align  int   `json:"alignment_tokens"`
		Counts []int `json:"alignment_chunk_count"`
		Window []int `json:"window_chunks"`
		Mamba  int   `json:"mamba_align"`
	}
	require.NoError(t, json.Unmarshal(v.Out, &want))
	r := v.rules(t)
	require.Equal(t, want.Align, r.align)
	require.Equal(t, want.Mamba, r.mamba)
	for i := range r.groups {
		require.Equal(t, want.Counts[i], r.groups[i].segment, "group %d", i)
		require.Equal(t, want.Window[i], r.groups[i].window, "group %d", i)
	}
}

func vectorReachable(t *testing.T, v *vector) {
	var want chunkSets
	require.NoError(t, json.Unmarshal(v.Out, &want))
	segment := 0
	if v.Align != nil {
		segment = *v.Align
	}
	var got abi.Bitmap
	for i := range v.Storable {
		if reachableA(i, v.Storable, segment, v.W, v.flag(t)) {
			set(&got, i)
		}
	}
	require.Equal(t, Ranges(want.bitmap()), Ranges(got))
}

func vectorMask(t *testing.T, v *vector) {
	g := group{Group: Group{Kind: Mamba}, block: int(v.BS)}
	if v.F == "swa_mask_B" {
		g.Kind, g.WindowTokens, g.eagle = SlidingWindow, uint64(v.W), v.flag(t)
	}
	r := reachB{align: *v.Align, retention: v.retention(t), boundaries: []int{v.Boundary}, horizon: -1}
	if v.FinalEnd != nil {
		r.horizon = *v.FinalEnd
	}
	m := g.maskB(r)
	require.Equal(t, string(v.Out) == "null", m.all)
	if m.all {
		return
	}
	var want chunkSets
	require.NoError(t, json.Unmarshal(v.Out, &want))
	var got abi.Bitmap
	for j := range v.End {
		if m.block(j) {
			set(&got, j)
		}
	}
	require.Equal(t, Ranges(want.bitmap()), Ranges(got))
}

func vectorStorable(t *testing.T, v *vector) {
	want := 0
	require.NoError(t, json.Unmarshal(v.Out, &want))
	g := group{chunk: v.TPC, perChunk: int(v.BPC), eagle: v.flag(t)}
	require.Equal(t, want, g.storable(v.rev(), stock{
		prompt: v.Prompt, offloadable: v.Offload, blocks: v.NBlocks, keys: v.NKeys, finished: v.Finished,
	}))
}

func vectorScan(t *testing.T, v *vector) {
	states, err := abi.ParseStates(v.Seq)
	require.NoError(t, err)
	n := 0
	look := func(i int) abi.State { n++; return states.At(i) }
	var got int
	var deferred bool
	if v.F == "prefix_scan" {
		got, deferred = prefixScan(0, len(v.Seq), look)
	} else {
		got, deferred = slidingScan(v.rev(), 0, len(v.Seq), v.W, max(v.IW, v.W), look)
	}
	require.Equal(t, v.Ret == nil, deferred)
	if !deferred {
		require.Equal(t, *v.Ret, got)
	}
	require.Equal(t, v.N, n)
}

func vectorLookup(t *testing.T, v *vector) {
	var want, got []Key
	for _, c := range v.Calls {
		step := 1
		if c[2] < c[1] {
			step = -1
		}
		for i := c[1]; i != c[2]+step; i += step {
			want = append(want, Key{c[0], i})
		}
	}
	m := v.rules(t).Match(Ask{TextTokens: v.T, LocalTokens: v.Computed}, func(k Key) abi.State {
		got = append(got, k)
		states, err := abi.ParseStates(v.Res[k.Group][k.Chunk : k.Chunk+1])
		require.NoError(t, err)
		return states.At(0)
	})
	require.Equal(t, want, got)
	require.Equal(t, v.Ret == nil, m.Deferred)
	if v.Ret != nil {
		require.Equal(t, uint64(*v.Ret), m.Tokens)
	}
}

func vectorPD(t *testing.T, v *vector) {
	c := Case{PromptTokens: v.P, StepTokens: v.StepEvery}
	if v.Max != nil {
		c.MaxOffloadTokens = Some(*v.Max)
	}
	for g, n := range v.NullBelow {
		if c.Warm.NullBelow == nil {
			c.Warm.NullBelow = map[int]uint64{}
		}
		i := 0
		_, err := fmt.Sscan(g, &i)
		require.NoError(t, err)
		c.Warm.NullBelow[i] = n
	}
	m, err := v.rules(t).Meet(c)
	require.NoError(t, err)
	requireSets(t, "supply", v.Supply, m.Supply)
	require.Len(t, m.Rounds, len(v.Rounds))
	for i, want := range v.Rounds {
		requireSets(t, fmt.Sprint("round ", i), want, m.Rounds[i])
	}
	if v.Missing == nil {
		v.Missing = make([]chunkSets, len(v.Groups))
	}
	requireSets(t, "missing", v.Missing, m.Missing)
	require.Equal(t, uint64(*v.Ret), m.Tokens)
	require.Equal(t, v.OK, empty(m.Missing))
}

func requireSets(t *testing.T, what string, want []chunkSets, got []abi.Bitmap) {
	t.Helper()
	require.Len(t, got, len(want), what)
	for i := range want {
		require.Equal(t, Ranges(want[i].bitmap()), Ranges(got[i]), "%s of group %d", what, i)
	}
}
