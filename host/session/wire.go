package session

import (
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/tierd/tierd/host/session/sessionpb"
)

// cut returns at most n bytes of s, on a character's border.
func cut(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}

// kind names a message for an error.
func kind(e *sessionpb.Envelope) string {
	if e.GetMessage() == nil {
		return "an empty envelope or a message of a later protocol"
	}
	return strings.TrimPrefix(fmt.Sprintf("%T", e.Message), "*sessionpb.Envelope_")
}

// packKeys writes keys one after the other.
func packKeys(keys []Key) []byte {
	b := make([]byte, 0, len(keys)*KeyBytes)
	for i := range keys {
		b = append(b, keys[i][:]...)
	}
	return b
}

// unpackKeys reads what packKeys writes, between 1 and most keys.
func unpackKeys(what string, b []byte, most int) ([]Key, error) {
	n := len(b) / KeyBytes
	switch {
	case len(b)%KeyBytes != 0:
		return nil, fmt.Errorf("%s: keys take %d bytes, no multiple of %d", what, len(b), KeyBytes)
	case n == 0:
		return nil, fmt.Errorf("%s: no keys", what)
	case n > most:
		return nil, fmt.Errorf("%s: %d keys; at most %d are allowed", what, n, most)
	}
	keys := make([]Key, n)
	for i := range keys {
		copy(keys[i][:], b[i*KeyBytes:])
	}
	return keys, nil
}

// milliseconds returns a wait as the wire carries it, rounded up and never 0.
func milliseconds(d time.Duration) uint32 {
	ms := (d + time.Millisecond - 1) / time.Millisecond
	return uint32(min(max(ms, 1), 1<<32-1))
}

// wait returns a wait of the wire, at most most.
func wait(ms uint32, most time.Duration) time.Duration {
	return min(time.Duration(ms)*time.Millisecond, most)
}
