package nvml_test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/tierd/tierd/gpu/nvml"
)

func TestWarningsHaveBothValues(t *testing.T) {
	good := nvml.GPU{UUID: "GPU-1", Link: nvml.Link{Generation: 5, GenerationMax: 5, Lanes: 16, LanesMax: 16}}
	require.Empty(t, good.Warnings())
	idle := good
	idle.Link.Generation, idle.Link.Idle = 1, true
	require.Empty(t, idle.Warnings(), "an idle GPU rests its link")
	silent := nvml.GPU{UUID: "GPU-1", Link: nvml.Link{GenerationMax: 5, LanesMax: 16}}
	require.Empty(t, silent.Warnings(), "what is not told is no fault")
	bad := good
	bad.Link.Generation, bad.Link.Lanes = 3, 8
	bad.UncorrectedErrors, bad.RemapPending, bad.RemapFailed = 2, true, true
	require.Equal(t, []string{
		"GPU-1: the PCIe link has 8 lanes, but GPU and slot can do 16; reseat the card or look at the riser",
		"GPU-1: the PCIe link runs at generation 3, but GPU and slot can do 5",
		"GPU-1: 2 memory errors could not be corrected since the driver was loaded",
		"GPU-1: rows of memory wait for replacement; reset the GPU when it is free",
		"GPU-1: a row of memory could not be replaced; replace the GPU",
	}, bad.Warnings())
}

// Where the library is absent, Open says so and nothing else is called. Where it is there,
// every GPU is found again by its UUID.
func TestLibrary(t *testing.T) {
	lib, err := nvml.Open()
	if errors.Is(err, nvml.ErrAbsent) {
		require.Nil(t, lib)
		if !nvml.Built {
			require.ErrorIs(t, err, nvml.ErrNotBuilt)
		} else {
			require.ErrorIs(t, err, nvml.ErrNoDriver)
		}
		t.Log(err)
		return
	}
	require.NoError(t, err)
	gpus, err := lib.GPUs()
	require.NoError(t, err)
	for _, g := range gpus {
		t.Logf("%+v %q", g, g.Warnings())
		require.NotEmpty(t, g.Name)
		require.Positive(t, g.TotalBytes)
		require.LessOrEqual(t, g.UsedBytes, g.TotalBytes)
		again, err := lib.GPU(g.UUID)
		require.NoError(t, err)
		require.Equal(t, g.PCIBusID, again.PCIBusID)
	}
	_, err = lib.GPU("GPU-00000000-0000-0000-0000-000000000000")
	require.ErrorIs(t, err, nvml.ErrNotFound)
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if err := lib.Watch(ctx, func(e nvml.Event) { t.Logf("%+v", e) }); !errors.Is(err, errors.ErrUnsupported) {
		require.ErrorIs(t, err, context.DeadlineExceeded)
	} else {
		t.Log(err)
	}
	require.NoError(t, lib.Close())
	require.NoError(t, lib.Close(), "closing twice is harmless")
	_, err = lib.GPUs()
	require.Error(t, err)
}

// Both files compile, whichever of them this test is built with.
func TestBothModesBuild(t *testing.T) {
	if _, err := exec.LookPath("go"); err != nil {
		t.Skip("no Go here: a test binary that was carried to another machine")
	}
	for _, cgo := range []string{"0", "1"} {
		cmd := exec.CommandContext(t.Context(), "go", "build", ".", "../cuda")
		cmd.Env = append(os.Environ(), "CGO_ENABLED="+cgo, "CGO_CFLAGS=-g -O2 -Wno-deprecated-declarations")
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "CGO_ENABLED=%s: %s", cgo, out)
	}
}
