package transfer

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"math/big"
	mrand "math/rand/v2"
	"net"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/tierd/tierd/host/tier"
)

// tierSink is how a node joins the two packages: a frame goes into the slot that its
// header names if the slot still has that epoch; what arrived whole is committed.
type tierSink struct {
	p *tier.Primary

	mu    sync.Mutex
	ended []error
	begun chan tier.Slot
}

func (s *tierSink) Begin(h Header) ([]byte, func(error), error) {
	slot := tier.Slot{Index: h.Slot, Epoch: h.Epoch}
	dst, end, err := s.p.Grab(slot)
	if err != nil {
		return nil, nil, err
	}
	if int64(h.Length) > int64(len(dst)) {
		_ = end()
		return nil, nil, ErrTooLong
	}
	if s.begun != nil {
		s.begun <- slot
	}
	return dst[:h.Length], func(err error) {
		if late := end(); err == nil {
			err = late
		}
		if err == nil {
			_, err = s.p.Commit(slot, h.Sum, int64(h.Length), false)
		} else {
			_ = s.p.Drop(slot)
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		s.ended = append(s.ended, err)
	}, nil
}

func newSlab(t *testing.T, slots int, slotBytes int64) *tier.Primary {
	p, err := tier.New(tier.Options{Path: filepath.Join(t.TempDir(), "slab"), SlotBytes: slotBytes, Slots: slots})
	require.NoError(t, err)
	t.Cleanup(func() { p.Close() })
	return p
}

func tierKeys(n int) []tier.Key {
	keys := make([]tier.Key, n)
	for i := range keys {
		keys[i] = tier.MakeKey(tier.Tenant(nil), []byte{byte(i), byte(i >> 8)}, 0)
	}
	return keys
}

// From slab to slab: pinned at the producer, admitted at the consumer, and readable
// there only with the producer's bytes. Some destinations are dropped on the way.
func TestSlabToSlab(t *testing.T) {
	const n, size = 100, 40000
	producer, consumer := newSlab(t, n, size), newSlab(t, n, size)
	owner := tier.Owner{Kind: "session", ID: "1"}
	keys := tierKeys(n)
	as, err := producer.Admit(owner, keys)
	require.NoError(t, err)
	for _, a := range as {
		b, err := producer.Bytes(a.Slot)
		require.NoError(t, err)
		k := mrand.IntN(size)
		rand.Read(b[:k])
		_, err = producer.Commit(a.Slot, tier.Checksum(b[:k]), int64(k), false)
		require.NoError(t, err)
	}
	refs, _ := producer.Pin(owner, keys)
	dst, err := consumer.Admit(owner, keys)
	require.NoError(t, err)
	items := make([]Item, n)
	for i, r := range refs {
		items[i] = Item{Slot: dst[i].Slot.Index, Epoch: dst[i].Slot.Epoch, Bytes: r.Bytes, Sum: r.Sum, Seq: uint32(i)}
	}
	srv, token := listen(t, Options{}), newToken()
	srv.Register(token)
	sink := &tierSink{p: consumer}
	cl := dial(t, srv.Addr().String(), token, 4, sink, Options{})
	for i := 0; i < n; i += 7 {
		_ = consumer.Drop(dst[i].Slot)
	}
	require.NoError(t, srv.Push(t.Context(), token, 1, items, nil))
	producer.Release(owner)
	require.Eventually(t, func() bool {
		st := cl.Stats()
		return st.Frames+st.Dropped+st.Mismatched == n && consumer.Snapshot().Writing == 0
	}, 10*time.Second, time.Millisecond)
	got, found := consumer.Pin(owner, keys)
	for i := range keys {
		if i%7 == 0 {
			require.Equal(t, tier.Absent, found[i])
			continue
		}
		require.Equal(t, tier.Readable, found[i])
		require.Equal(t, items[i].Sum, got[i].Sum)
		require.NoError(t, got[i].Verify())
	}
	consumer.Release(owner)
	require.Empty(t, consumer.Snapshot().Pins)
}

// The consumer aborts in the middle of a payload, again and again, and gives the slot
// to somebody else as soon as it can: the new owner's bytes are never touched.
func TestAbortMidPayload(t *testing.T) {
	const size = 1 << 20
	p := newSlab(t, 1, size)
	srv, token := listen(t, Options{}), newToken()
	srv.Register(token)
	sink := &tierSink{p: p, begun: make(chan tier.Slot)}
	addr := proxy(t, srv.Addr().String(), func(_ int, offset int64, _ []byte) error {
		if offset%(256<<10) < 8192 {
			time.Sleep(time.Millisecond) // time to abort in
		}
		return nil
	})
	dial(t, addr, token, 1, sink, Options{})
	keys := tierKeys(2)
	payload := make([]byte, size)
	rand.Read(payload)
	old := tier.Owner{Kind: "request", ID: "old"}
	fresh := tier.Owner{Kind: "request", ID: "new"}
	for range 10 {
		as, err := p.Admit(old, keys[:1])
		require.NoError(t, err)
		pushed := make(chan error)
		go func() {
			pushed <- srv.Push(t.Context(), token, 1, []Item{{Slot: as[0].Slot.Index, Epoch: as[0].Slot.Epoch, Bytes: payload, Sum: checksum(payload)}}, nil)
		}()
		require.Equal(t, as[0].Slot, <-sink.begun)
		p.Release(old)
		var next []tier.Admission
		require.Eventually(t, func() bool {
			next, err = p.Admit(fresh, keys[1:])
			return err == nil
		}, 10*time.Second, 100*time.Microsecond)
		b, err := p.Bytes(next[0].Slot)
		require.NoError(t, err)
		clear(b)
		require.NoError(t, <-pushed)
		time.Sleep(2 * time.Millisecond)
		require.Equal(t, make([]byte, size), b)
		p.Release(fresh)
	}
	require.Empty(t, p.Snapshot().Pins)
	sink.mu.Lock()
	defer sink.mu.Unlock()
	for _, err := range sink.ended {
		require.ErrorIs(t, err, tier.ErrStale)
	}
}

func testTLS(t *testing.T) (server, client *tls.Config) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key)
	require.NoError(t, err)
	cert, err := x509.ParseCertificate(der)
	require.NoError(t, err)
	pool := x509.NewCertPool()
	pool.AddCert(cert)
	pair := tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
	return &tls.Config{Certificates: []tls.Certificate{pair}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: pool},
		&tls.Config{Certificates: []tls.Certificate{pair}, RootCAs: pool}
}

func TestTLS(t *testing.T) {
	server, client := testTLS(t)
	srv, token := listen(t, Options{TLS: server, HelloTimeout: 5 * time.Second}), newToken()
	srv.Register(token)
	o := Options{TLS: client, Log: quiet, HelloTimeout: 5 * time.Second}
	sink := newSlabSink(50, 100<<10, 1)
	dial(t, srv.Addr().String(), token, 3, sink, o)
	require.NoError(t, srv.Push(t.Context(), token, 1, randomItems(50, 100<<10), nil))
	for k, err := range sink.await(t, 50) {
		require.NoError(t, err, k)
	}
	// Without a certificate, and without TLS at all: refused, not hung.
	for _, cfg := range []*tls.Config{{RootCAs: client.RootCAs}, nil} {
		o.TLS, o.HelloTimeout = cfg, time.Second
		_, err := Dial(t.Context(), srv.Addr().String(), token, 1, sink, o)
		require.Error(t, err)
	}
}

// The transport is an interface; TCP is one.
func TestTransport(t *testing.T) {
	var tr Transport = TCP{}
	push, err := tr.Listen(t.Context(), "127.0.0.1:0", Options{Log: quiet})
	require.NoError(t, err)
	defer push.Close()
	token := newToken()
	push.Register(token)
	sink := newSlabSink(1, 10, 1)
	recv, err := tr.Dial(t.Context(), push.(*Server).Addr().String(), token, 1, sink, Options{Log: quiet})
	require.NoError(t, err)
	defer recv.Close()
	require.NoError(t, push.Push(t.Context(), token, 1, randomItems(1, 10), nil))
	require.NoError(t, sink.await(t, 1)["1/0"])
}
