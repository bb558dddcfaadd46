package faults

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/tierd/tierd/host/session/sessionpb"
)

// rawCodec carries messages as they are, also such as are none.
type rawCodec struct{}

func (rawCodec) Marshal(v any) ([]byte, error) { return *v.(*[]byte), nil }
func (rawCodec) Unmarshal(data []byte, v any) error {
	*v.(*[]byte) = append([]byte(nil), data...)
	return nil
}
func (rawCodec) Name() string { return "proto" }

// A mode is what a relay does.
type mode int32

const (
	pass mode = iota
	// noLookups and noDemands: these messages do not arrive; everything else does.
	noLookups
	noDemands
	// garbage: what comes from the source is damaged, on control and on data.
	garbage
)

// A relay stands between the consumer and source a, on the session and on the data
// connections, and makes of a real source one that is half deaf, or that babbles.
type relay struct {
	target string // a's control address
	mode   atomic.Int32
	// damaged counts the messages and the pieces of data that were damaged, dropped the
	// messages that were held back.
	damaged, dropped atomic.Int64

	mu   sync.Mutex
	rng  *rand.Rand
	deaf map[uint64]bool // jobs that the source was not told of
	data net.Listener
	to   string // a's data address
	wg   sync.WaitGroup
}

// listen begins to serve; its address is where the consumer finds a.
func (r *relay) listen(t *testing.T, target string) (addr string) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("relay: seed %d", seed)
	r.target, r.rng, r.deaf = target, rand.New(rand.NewPCG(seed, 1)), map[uint64]bool{}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	r.data, err = net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	s := grpc.NewServer(grpc.ForceServerCodec(rawCodec{}), grpc.UnknownServiceHandler(r.session))
	go func() { _ = s.Serve(l) }()
	go r.serveData()
	t.Cleanup(func() {
		s.Stop()
		r.data.Close()
		r.wg.Wait()
	})
	return l.Addr().String()
}

// session carries one stream.
func (r *relay) session(_ any, in grpc.ServerStream) error {
	method, ok := grpc.MethodFromServerStream(in)
	if !ok {
		return status.Error(codes.Internal, "no method")
	}
	conn, err := grpc.NewClient(r.target, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := context.WithCancel(in.Context())
	defer cancel()
	if md, ok := metadata.FromIncomingContext(ctx); ok {
		ctx = metadata.NewOutgoingContext(ctx, md)
	}
	out, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, method, grpc.ForceCodec(rawCodec{}))
	if err != nil {
		return err
	}
	ends := make(chan error, 2)
	r.wg.Go(func() { ends <- pump(in.RecvMsg, out.SendMsg, r.toSource) })
	r.wg.Go(func() { ends <- pump(out.RecvMsg, in.SendMsg, r.fromSource) })
	err = <-ends
	if err == io.EOF {
		return nil
	}
	return err
}

// pump moves messages until one side ends. change makes of each what goes on, or nil.
func pump(recv, send func(any) error, change func([]byte) []byte) error {
	for {
		var m []byte
		if err := recv(&m); err != nil {
			return err
		}
		if m = change(m); m == nil {
			continue
		}
		if err := send(&m); err != nil {
			return err
		}
	}
}

// toSource drops what the source is deaf to, and for ever what belongs to it.
func (r *relay) toSource(m []byte) []byte {
	var e sessionpb.Envelope
	if proto.Unmarshal(m, &e) != nil {
		return m
	}
	now := mode(r.mode.Load())
	r.mu.Lock()
	defer r.mu.Unlock()
	switch x := e.Message.(type) {
	case *sessionpb.Envelope_Lookup:
		if now == noLookups {
			r.deaf[x.Lookup.Job] = true
			r.dropped.Add(1)
			return nil
		}
	case *sessionpb.Envelope_Demand:
		if now == noDemands {
			r.deaf[x.Demand.Job] = true
			r.dropped.Add(1)
			return nil
		}
	case *sessionpb.Envelope_Abort:
		if r.deaf[x.Abort.Job] {
			return nil
		}
	case *sessionpb.Envelope_Done:
		if r.deaf[x.Done.Job] {
			return nil
		}
	}
	return m
}

// fromSource puts the relay's own data port into the Hello, and damages messages.
func (r *relay) fromSource(m []byte) []byte {
	var e sessionpb.Envelope
	if proto.Unmarshal(m, &e) == nil && e.GetHello() != nil {
		r.mu.Lock()
		r.to = e.GetHello().DataAddress
		e.GetHello().DataAddress = r.data.Addr().String()
		r.mu.Unlock()
		if b, err := proto.Marshal(&e); err == nil {
			m = b
		}
	}
	if mode(r.mode.Load()) != garbage {
		return m
	}
	r.damaged.Add(1)
	return r.damage(m)
}

// damage makes a message wrong in one of several ways.
func (r *relay) damage(m []byte) []byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	m = append([]byte(nil), m...)
	switch k := r.rng.IntN(4); {
	case k == 0 && len(m) > 0: // a bit
		m[r.rng.IntN(len(m))] ^= 1 << r.rng.IntN(8)
	case k == 1: // cut
		m = m[:r.rng.IntN(len(m)+1)]
	case k == 2: // more behind it
		m = append(m, m[r.rng.IntN(len(m)+1):]...)
	default: // noise
		for i := range m {
			m[i] = byte(r.rng.Uint32())
		}
	}
	return m
}

// serveData carries the data connections.
func (r *relay) serveData() {
	for {
		c, err := r.data.Accept()
		if err != nil {
			return
		}
		r.mu.Lock()
		to := r.to
		r.mu.Unlock()
		r.wg.Go(func() {
			defer c.Close()
			d, err := net.Dial("tcp", to)
			if err != nil {
				return
			}
			defer d.Close()
			done := make(chan struct{}, 2)
			r.wg.Go(func() { r.carry(d, c, false); done <- struct{}{} })
			r.wg.Go(func() { r.carry(c, d, true); done <- struct{}{} })
			<-done
		})
	}
}

// carry copies bytes; those of the source are damaged here and there.
func (r *relay) carry(to io.Writer, from io.Reader, source bool) {
	b := make([]byte, 256<<10)
	for {
		n, err := from.Read(b)
		if n > 0 && source && mode(r.mode.Load()) == garbage {
			r.mu.Lock()
			b[r.rng.IntN(n)] ^= 1 << r.rng.IntN(8)
			r.mu.Unlock()
			r.damaged.Add(1)
		}
		if _, werr := to.Write(b[:n]); err != nil || werr != nil {
			return
		}
	}
}

// relayed is a cluster whose consumer finds a behind a relay, and is not dialed by it.
func relayed(t *testing.T, r *relay) *cluster {
	return newCluster(t, func(c *cluster) {
		c.c.peers[0].control = r.listen(t, c.a.control)
		c.a.peers = nil
	})
}

const (
	// deafTime is how long a source is half deaf or babbles.
	deafTime = 4 * time.Second
	// deafDeadline is the deadline of requests where nothing else ends a wait: the source
	// lives, and may begin the request at any moment.
	deafDeadline = time.Second
	// atTheLimit is what a request may take longer than the limit that ends it, as much as
	// one that names a killed peer.
	atTheLimit = 100 * time.Millisecond
)

// through puts a relay into a mode for a while. Nothing is detected: the session lives.
func through(r *relay, m mode) func(*cluster, *play, *fault) {
	return func(c *cluster, _ *play, f *fault) {
		r.dropped.Store(0)
		r.damaged.Store(0)
		r.mode.Store(int32(m))
		f.at = time.Now()
		f.detected = f.at
		time.Sleep(deafTime)
		r.mode.Store(int32(pass))
		f.healed = time.Now()
		f.note = fmt.Sprintf("%d messages did not arrive, %d were damaged on control or data", r.dropped.Load(), r.damaged.Load())
		require.Positive(c.t, r.dropped.Load()+r.damaged.Load())
	}
}

// lookupBound is the limit of a lookup.
const lookupBound = 500 * time.Millisecond

// relayScenarios need a relay before a.
func relayScenarios(r *relay) []scenario {
	return []scenario{
		{name: "pings, no lookups", legs: []string{"probe"}, bounds: bounds{max: lookupBound + atTheLimit, recovered: 2 * time.Second}, play: through(r, noLookups)},
		{name: "pings, no demands", bounds: bounds{max: deafDeadline + atTheLimit, recovered: 2 * time.Second}, deadline: deafDeadline, play: through(r, noDemands)},
		{name: "garbage on control and data", bounds: bounds{max: time.Second, recovered: 2 * time.Second}, play: through(r, garbage)},
		// Elsewhere a dials c as well, and is back with its own first dial. That a is gone is
		// known here only by the silence: the relay still takes connections.
		{name: "kill, restart, c alone dials", bounds: frozen, play: killAndRestart},
	}
}
