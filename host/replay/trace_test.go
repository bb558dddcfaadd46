package replay

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

const goodLine = `{"timestamp": 27482, "input_length": 600, "output_length": 52, "hash_ids": [46, 47]}`

func TestReadTrace(t *testing.T) {
	got, err := ReadTrace("t", strings.NewReader(goodLine+"\n\n"+goodLine+"\n"), 0)
	require.NoError(t, err)
	require.Len(t, got, 2)
	require.Equal(t, Request{TimestampMS: 27482, PromptTokens: 600, OutputTokens: 52, IDs: []uint64{46, 47}, At: "t:1"}, got[0])
	require.Equal(t, "t:3", got[1].At, "empty lines count")

	got, err = ReadTrace("t", strings.NewReader(goodLine+"\n"+goodLine+"\nnot read"), 2)
	require.NoError(t, err)
	require.Len(t, got, 2)
}

func TestReadTraceSaysWhatIsWrongAndWhere(t *testing.T) {
	for want, text := range map[string]string{
		"t: no request in it":                                         "",
		"t:1: this is no JSON from byte 1":                            "oops",
		"t:2: this is no JSON from byte 20":                           goodLine + "\n" + goodLine[:20],
		"t:1: the line is a JSON array; it must be an object":         "[1]",
		"t:2: input_length is missing":                                goodLine + "\n{}",
		"t:1: hash_ids is missing":                                    `{"input_length": 5}`,
		"t:1: input_length is 0; a request has at least 1 token":      `{"input_length": 0, "hash_ids": []}`,
		"t:1: input_length is a string; it must be a whole number":    strings.Replace(goodLine, "600", `"600"`, 1),
		"t:1: input_length is a number -5; it must be a whole number": strings.Replace(goodLine, "600", "-5", 1),
		"t:1: timestamp is a number 1.5":                              strings.Replace(goodLine, "27482", "1.5", 1),
		"t:1: hash_ids is or holds a string":                          strings.Replace(goodLine, "46", `"46"`, 1),
		"t:1: hash_ids is or holds a number":                          strings.Replace(goodLine, "[46, 47]", "46", 1),
		"t:1: hash_ids has 1 entries; an input_length of 600 needs 2": strings.Replace(goodLine, ", 47", "", 1),
		"t:1: input_length is 99999999999":                            strings.Replace(goodLine, "600", "99999999999", 1),
		"t:2: the line is longer than 1048576 bytes":                  goodLine + "\n" + strings.Repeat(" ", lineBytesMax+1),
	} {
		_, err := ReadTrace("t", strings.NewReader(text), 0)
		require.ErrorContains(t, err, want)
		for _, jargon := range []string{"Go ", "uint64", "unmarshal", "struct", "json:"} {
			require.NotContains(t, err.Error(), jargon)
		}
	}
	_, err := LoadTrace("no-such-file", 0)
	require.EqualError(t, err, "trace no-such-file cannot be read: no such file or directory")
	dir := t.TempDir()
	_, err = LoadTrace(dir, 0)
	require.EqualError(t, err, "trace "+dir+" cannot be read: is a directory")
}

func FuzzReadTrace(f *testing.F) {
	for _, s := range []string{goodLine, goodLine + "\n" + goodLine, "", "{}", "[1]", "\x00", `{"input_length":1,"hash_ids":[0]}`} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got, err := ReadTrace("t", strings.NewReader(s), 0)
		if (err == nil) != (len(got) > 0) {
			t.Fatalf("%d requests and error %v", len(got), err)
		}
		for _, r := range got {
			if r.check() != nil {
				t.Fatalf("accepted %+v", r)
			}
		}
	})
}

func drawRequest(t *rapid.T, name string) *Request {
	r := &Request{PromptTokens: rapid.Uint64Range(1, 2000).Draw(t, name+" tokens")}
	for range (r.PromptTokens + tokensPerID - 1) / tokensPerID {
		r.IDs = append(r.IDs, rapid.Uint64Range(0, 2).Draw(t, name+" id"))
	}
	return r
}

// Two prefixes have the same hash exactly when they have the same tokens.
func TestHashesNameTheTokens(t *testing.T) {
	token := func(r *Request, p uint64) string { return fmt.Sprint(r.IDs[p/tokensPerID], p%tokensPerID) }
	rapid.Check(t, func(t *rapid.T) {
		granule := rapid.SampledFrom([]uint64{1, 8, 16, 100, 512}).Draw(t, "granule")
		a, b := drawRequest(t, "a"), drawRequest(t, "b")
		pa, pb := newPrompt(a, "salt", granule), newPrompt(b, "salt", granule)
		na := rapid.Uint64Range(0, a.PromptTokens).Draw(t, "na")
		nb := na
		if nb > b.PromptTokens || rapid.Bool().Draw(t, "other length") {
			nb = rapid.Uint64Range(0, b.PromptTokens).Draw(t, "nb")
		}
		same := na == nb
		for p := uint64(0); same && p < na; p++ {
			same = token(a, p) == token(b, p)
		}
		require.Equal(t, same, pa.at(na) == pb.at(nb))
	})
}

func TestHashesOfTwoSaltsAreDisjoint(t *testing.T) {
	req := &Request{PromptTokens: 700, IDs: []uint64{1, 2}}
	a, b := newPrompt(req, "pd", 16), newPrompt(req, "probe", 16)
	for _, h := range a.chain {
		require.False(t, slices.Contains(b.chain, h))
	}
	require.Len(t, a.wire(), 700/16*32)
	require.Equal(t, a.chain[1][:], a.wire()[:32])
}
