//go:build !cgo || !linux

package nvml

import "context"

// Built says whether this binary can read NVML.
const Built = false

// A Library is the management library, started. Without cgo there is none.
type Library struct{}

// Open returns ErrNotBuilt.
func Open() (*Library, error) { return nil, ErrNotBuilt }

// GPUs returns ErrNotBuilt.
func (*Library) GPUs() ([]GPU, error) { return nil, ErrNotBuilt }

// GPU returns ErrNotBuilt.
func (*Library) GPU(string) (GPU, error) { return GPU{}, ErrNotBuilt }

// Watch returns ErrNotBuilt.
func (*Library) Watch(context.Context, func(Event)) error { return ErrNotBuilt }

// Close does nothing.
func (*Library) Close() error { return nil }
