package tier

import (
	"errors"
	"fmt"
)

var (
	// ErrStale is wrapped when a handle's epoch is not the slot's, or the slot is no
	// longer in the state that the handle's holder left it in. The slot belongs to
	// somebody else; nothing was changed.
	ErrStale = errors.New("stale slot")
	// ErrExists is wrapped by Name when the key is readable or being written.
	ErrExists = errors.New("key is already present")
	// ErrUnnamed is wrapped by Commit of a staged slot that has no key yet.
	ErrUnnamed = errors.New("slot has no key")
	// ErrBusy is wrapped when a slot is grabbed by the data plane.
	ErrBusy = errors.New("slot is grabbed by the data plane")
	// ErrNotPinned is wrapped by Unpin of a pin that is gone, and by Bytes of a slot
	// that nobody pins.
	ErrNotPinned = errors.New("no such pin")
	// ErrClosed is returned after Close.
	ErrClosed = errors.New("tier is closed")
)

// An ErrNoRoom says that a batch needs more slots than can be had now. Nothing was
// changed. It says why, so that the refusal can be understood without a debugger.
type ErrNoRoom struct {
	// Need is the number of slots that the batch asked for.
	Need int
	// Free slots, and Evictable ones: readable, without pins, not part of the batch.
	Free, Evictable int
	// Pinned slots have readers, Writing ones a writer; both come back when their
	// owners end. Slots is the size of the tier.
	Pinned, Writing, Slots int
}

func (e *ErrNoRoom) Error() string {
	hint := "retry when pins end, or give the tier more memory (slab_bytes)"
	if e.Need > e.Slots {
		hint = "it can never fit: give the tier more memory (slab_bytes)"
	}
	return fmt.Sprintf("no room: %d slots needed, %d free and %d evictable of %d (%d pinned by readers, %d being written); %s",
		e.Need, e.Free, e.Evictable, e.Slots, e.Pinned, e.Writing, hint)
}

// An ErrChecksum says that bytes are not the bytes that were stored.
type ErrChecksum struct {
	// Want is the CRC-32C that was carried, Got that of the bytes.
	Want, Got uint32
}

func (e *ErrChecksum) Error() string {
	return fmt.Sprintf("checksum mismatch: carried %08x, bytes have %08x", e.Want, e.Got)
}

func stale(s Slot, why string, args ...any) error {
	return fmt.Errorf("slot %d epoch %d: %s: %w", s.Index, s.Epoch, fmt.Sprintf(why, args...), ErrStale)
}
