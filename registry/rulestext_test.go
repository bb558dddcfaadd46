package registry_test

import (
	"crypto/sha256"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/registry"
	"github.com/tierd/tierd/registry/deploy"
)

// TestHandedOn: a deployment and its rules are the bytes that their digests are of, and what
// is read from these bytes has the same digests.
func TestHandedOn(t *testing.T) {
	e := entry(t, "a.yaml", strings.Replace(file, "policies:", "max_store_tokens: 64\npolicies:", 1))
	d := e.Deployment
	require.Equal(t, d.Digest(), fmt.Sprintf("sha256:%x", sha256.Sum256(d.Canonical())))
	again, err := deploy.ParseCanonical("b", d.Canonical())
	require.NoError(t, err)
	require.Equal(t, d.Digest(), again.Digest())
	require.Equal(t, d.Layout(), again.Layout())
	bare, err := deploy.Parse("c", []byte(`{model: m, max_tokens: 8, groups: [{name: "a<b", rule: full, block_tokens: 4, layers: 1, kv_heads: 1, head_dim: 1, dtype: fp8}]}`))
	require.NoError(t, err)
	again, err = deploy.ParseCanonical("d", bare.Canonical())
	require.NoError(t, err)
	require.Equal(t, bare.Digest(), again.Digest())
	_, err = deploy.ParseCanonical("d", append(bare.Canonical(), ' '))
	require.EqualError(t, err, "d: these 300 bytes are not the canonical form of the deployment that they describe")
	_, err = deploy.ParseCanonical("d", []byte(`{"model":"m","colour":1}`))
	require.EqualError(t, err, `d: json: unknown field "colour"`)

	require.Equal(t, e.RulesDigest(), fmt.Sprintf("sha256:%x", sha256.Sum256(e.RulesText())))
	ids, err := registry.ParseRulesText(e.RulesText())
	require.NoError(t, err)
	for i, id := range e.Rules() {
		require.Equal(t, registry.RuleID{For: id.For, Name: id.Name, Version: id.Version, Digest: id.Digest}, ids[i])
	}
	require.Len(t, ids, len(e.Rules()))

	for bad, why := range map[string]string{
		"":                          "rules text of 0 bytes does not end with a line",
		"a\x00b\x00c\x00d\x00[1]":   "rules text of 11 bytes does not end with a line",
		"a\x00b\x00c\x00[1]\n":      "rules text: line 1 has 4 fields; a rule has 5",
		"a\x00b\x00c\x00d\x00e\n\n": "rules text: line 2 has 1 fields; a rule has 5",
	} {
		_, err := registry.ParseRulesText([]byte(bad))
		require.EqualError(t, err, why)
	}
}
