package main

import (
	"bytes"
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/host/build"
)

func TestVersionAsJSON(t *testing.T) {
	var out bytes.Buffer
	require.NoError(t, printVersion(&out, build.This(), true))
	var back build.Info
	require.NoError(t, json.Unmarshal(out.Bytes(), &back))
	require.Equal(t, build.This(), back)
	require.NotEmpty(t, back.Version)
	require.Regexp(t, "^sha256:", back.ShippedRules)
}
