package transfer

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func drawHeader(t *rapid.T) Header {
	return Header{
		Job: rapid.Uint64().Draw(t, "job"), Seq: rapid.Uint32().Draw(t, "seq"), Slot: rapid.Uint32().Draw(t, "slot"),
		Epoch: rapid.Uint64().Draw(t, "epoch"), Length: rapid.Uint32().Draw(t, "length"), Sum: rapid.Uint32().Draw(t, "sum"),
	}
}

// What is written is read, and no single flipped bit is.
func TestRecords(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h := drawHeader(t)
		more := rapid.IntRange(0, batchItemsMax-1).Draw(t, "more")
		frame := appendFrame(nil, kindData, more, h)
		kind, gotMore, got, err := decodeFrame(frame)
		require.NoError(t, err)
		require.Equal(t, kindData, kind)
		require.Equal(t, h, got)
		require.Equal(t, more, gotMore)

		hi := hello{version: rapid.Uint16().Draw(t, "version"), lane: rapid.Uint16().Draw(t, "lane")}
		copy(hi.token[:], rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "token"))
		hello := hi.append(nil)
		gotHello, err := decodeHello(hello)
		require.NoError(t, err)
		require.Equal(t, hi, gotHello)

		a := ack{version: 1, status: status(rapid.Uint16().Draw(t, "status"))}
		answer := a.append(nil)
		gotAck, err := decodeAck(answer)
		require.NoError(t, err)
		require.Equal(t, a, gotAck)

		bit := rapid.IntRange(0, 8*ackBytes-1).Draw(t, "bit")
		for _, rec := range [][]byte{frame, hello, answer} {
			rec[bit/8] ^= 1 << (bit % 8)
		}
		_, _, _, err = decodeFrame(frame)
		require.ErrorIs(t, err, ErrWire)
		_, err = decodeHello(hello)
		require.ErrorIs(t, err, ErrWire)
		_, err = decodeAck(answer)
		require.ErrorIs(t, err, ErrWire)
	})
}

func TestSizesOnTheWire(t *testing.T) {
	require.Len(t, appendFrame(nil, kindPing, 0, Header{}), headerBytes)
	require.Len(t, hello{}.append(nil), helloBytes)
	require.Len(t, ack{}.append(nil), ackBytes)
	_, _, _, err := decodeFrame(appendFrame(nil, kindPing, 0, Header{Job: 1}))
	require.ErrorContains(t, err, "a ping carries")
	_, _, _, err = decodeFrame(appendFrame(nil, 3, 0, Header{}))
	require.ErrorContains(t, err, "kind is 3")
	_, _, _, err = decodeFrame(appendFrame(nil, kindData, batchItemsMax, Header{}))
	require.ErrorContains(t, err, "64 more follow, but a batch has at most 64")
}

func FuzzFrame(f *testing.F) {
	f.Add(appendFrame(nil, kindData, 0, Header{Job: 1, Seq: 2, Slot: 3, Epoch: 4, Length: 5, Sum: 6}))
	f.Add(appendFrame(nil, kindPing, 0, Header{}))
	f.Add([]byte("GET / HTTP/1.1\r\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		kind, more, h, err := decodeFrame(b)
		if err == nil && !bytes.Equal(b, appendFrame(nil, kind, more, h)) {
			t.Fatal("accepted bytes that this version does not write")
		}
	})
}

func FuzzHello(f *testing.F) {
	f.Add(hello{version: 1, lane: 2, token: Token{3}}.append(nil))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := decodeHello(b)
		if err == nil && !bytes.Equal(b, h.append(nil)) {
			t.Fatal("accepted bytes that this version does not write")
		}
	})
}

func FuzzAck(f *testing.F) {
	f.Add(ack{version: 1, status: statusToken}.append(nil))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		a, err := decodeAck(b)
		if err == nil && !bytes.Equal(b, a.append(nil)) {
			t.Fatal("accepted bytes that this version does not write")
		}
	})
}
