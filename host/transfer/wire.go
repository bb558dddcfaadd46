package transfer

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/tierd/tierd/host/tier/crc32c"
)

// Version of the wire format.
const Version = 1

// Sizes of the fixed records, in bytes.
const (
	helloBytes  = 32
	ackBytes    = 16
	headerBytes = 48
)

var (
	le = binary.LittleEndian

	helloMagic = [4]byte{'T', 'D', 'H', '1'}
	ackMagic   = [4]byte{'T', 'D', 'A', '1'}
	frameMagic = [4]byte{'T', 'D', 'F', '1'}
)

// ErrWire is wrapped by every refusal of a record. The connection that it came from is
// closed.
var ErrWire = errors.New("data plane: bad record")

// A Token names a session. It is a secret of the two peers.
type Token [16]byte

// hello is what a consumer says first on each connection.
type hello struct {
	version uint16
	lane    uint16
	token   Token
}

func (h hello) append(b []byte) []byte {
	at := len(b)
	b = append(b, helloMagic[:]...)
	b = le.AppendUint16(b, h.version)
	b = le.AppendUint16(b, h.lane)
	b = append(b, h.token[:]...)
	b = le.AppendUint32(b, 0)
	return le.AppendUint32(b, crc32c.Checksum(b[at:]))
}

func decodeHello(b []byte) (h hello, err error) {
	if err := checkRecord("hello", b, helloBytes, helloMagic); err != nil {
		return h, err
	}
	if v := le.Uint32(b[24:]); v != 0 {
		return h, fmt.Errorf("%w: hello: reserved field is %d, must be 0", ErrWire, v)
	}
	h.version, h.lane = le.Uint16(b[4:]), le.Uint16(b[6:])
	copy(h.token[:], b[8:])
	return h, nil
}

// status is the producer's answer to a hello.
type status uint16

const (
	statusOK status = iota
	statusVersion
	statusToken
	statusLane
	statusClosing
	statusIdentity
)

func (s status) String() string {
	names := [...]string{"ok", "wire version not spoken here", "token of no session", "lane number too high", "shutting down", "certificate is not that of the token's node"}
	if int(s) < len(names) {
		return names[s]
	}
	return fmt.Sprintf("status %d", uint16(s))
}

type ack struct {
	version uint16
	status  status
}

func (a ack) append(b []byte) []byte {
	at := len(b)
	b = append(b, ackMagic[:]...)
	b = le.AppendUint16(b, a.version)
	b = le.AppendUint16(b, uint16(a.status))
	b = le.AppendUint32(b, 0)
	return le.AppendUint32(b, crc32c.Checksum(b[at:]))
}

func decodeAck(b []byte) (a ack, err error) {
	if err := checkRecord("ack", b, ackBytes, ackMagic); err != nil {
		return a, err
	}
	if v := le.Uint32(b[8:]); v != 0 {
		return a, fmt.Errorf("%w: ack: reserved field is %d, must be 0", ErrWire, v)
	}
	return ack{version: le.Uint16(b[4:]), status: status(le.Uint16(b[6:]))}, nil
}

type frameKind uint16

const (
	kindData frameKind = 1
	kindPing frameKind = 2
)

// A Header describes one frame: where its payload belongs and what it must be.
type Header struct {
	// Job is the transfer that both sides agreed on, Seq the item's number in it.
	Job uint64
	Seq uint32
	// Slot and Epoch name the destination.
	Slot  uint32
	Epoch uint64
	// Length of the payload in bytes.
	Length uint32
	// Sum is the CRC-32C of the payload, computed when the chunk was stored.
	Sum uint32
}

// appendFrame appends a header; more headers follow it before its payload.
func appendFrame(b []byte, kind frameKind, more int, h Header) []byte {
	at := len(b)
	b = append(b, frameMagic[:]...)
	b = le.AppendUint16(b, uint16(kind))
	b = le.AppendUint16(b, uint16(more))
	b = le.AppendUint64(b, h.Job)
	b = le.AppendUint32(b, h.Seq)
	b = le.AppendUint32(b, h.Slot)
	b = le.AppendUint64(b, h.Epoch)
	b = le.AppendUint32(b, h.Length)
	b = le.AppendUint32(b, h.Sum)
	b = le.AppendUint32(b, 0)
	return le.AppendUint32(b, crc32c.Checksum(b[at:]))
}

func decodeFrame(b []byte) (kind frameKind, more int, h Header, err error) {
	if err := checkRecord("frame header", b, headerBytes, frameMagic); err != nil {
		return 0, 0, h, err
	}
	kind, more = frameKind(le.Uint16(b[4:])), int(le.Uint16(b[6:]))
	if v := le.Uint32(b[40:]); v != 0 {
		return 0, 0, h, fmt.Errorf("%w: frame header: reserved field is %d, must be 0", ErrWire, v)
	}
	h = Header{
		Job: le.Uint64(b[8:]), Seq: le.Uint32(b[16:]), Slot: le.Uint32(b[20:]),
		Epoch: le.Uint64(b[24:]), Length: le.Uint32(b[32:]), Sum: le.Uint32(b[36:]),
	}
	switch {
	case kind != kindData && kind != kindPing:
		return 0, 0, h, fmt.Errorf("%w: frame header: kind is %d; version %d knows 1 and 2", ErrWire, kind, Version)
	case kind == kindPing && (h != Header{} || more != 0):
		return 0, 0, h, fmt.Errorf("%w: frame header: a ping carries %+v and %d more, must be zero", ErrWire, h, more)
	case more >= batchItemsMax:
		return 0, 0, h, fmt.Errorf("%w: frame header: %d more follow, but a batch has at most %d", ErrWire, more, batchItemsMax)
	}
	return kind, more, h, nil
}

// checkRecord checks length, magic and the CRC-32C in the last 4 bytes.
func checkRecord(what string, b []byte, size int, magic [4]byte) error {
	if len(b) != size {
		return fmt.Errorf("%w: %s has %d bytes, must have %d", ErrWire, what, len(b), size)
	}
	if [4]byte(b) != magic {
		return fmt.Errorf("%w: %s begins with %q, must begin with %q: is this a tierd data port?", ErrWire, what, b[:4], magic[:])
	}
	want, got := le.Uint32(b[size-4:]), crc32c.Checksum(b[:size-4])
	if want != got {
		return fmt.Errorf("%w: %s carries CRC-32C %08x, its bytes have %08x", ErrWire, what, want, got)
	}
	return nil
}
