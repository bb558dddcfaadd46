package host

import (
	"crypto/tls"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tierd/tierd/host/config"
	"github.com/tierd/tierd/host/engine/enginepb"
	"github.com/tierd/tierd/host/tier/crc32c"
)

// garbageSecondsEnv gives TestGarbageOnEveryPort another length than 3 s.
const garbageSecondsEnv = "TIERD_GARBAGE_SECONDS"

// openings are how a conversation on one of the ports begins, so that what follows gets
// past the first bytes.
var openings = map[string]func(r *rand.Rand) []byte{
	"nothing": func(*rand.Rand) []byte { return nil },
	"http/1":  func(*rand.Rand) []byte { return []byte("GET /metrics HTTP/1.1\r\nHost: x\r\n") },
	"http/2": func(*rand.Rand) []byte {
		return []byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")
	},
	"http/2 frame": func(r *rand.Rand) []byte {
		b := []byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")
		return append(b, 0, byte(r.IntN(64)), byte(r.Uint32()), byte(r.IntN(12)), byte(r.Uint32()), 0, 0, 0, byte(r.IntN(6)))
	},
	"tls record": func(r *rand.Rand) []byte { return []byte{22, 3, 1, byte(r.IntN(65)), byte(r.Uint32())} },
	"data hello": func(r *rand.Rand) []byte {
		b := append([]byte("TDH1\x01\x00"), byte(r.IntN(80)), 0)
		for range 16 {
			b = append(b, byte(r.Uint32()))
		}
		b = append(b, 0, 0, 0, 0)
		sum := crc32c.Checksum(b)
		return append(b, byte(sum), byte(sum>>8), byte(sum>>16), byte(sum>>24))
	},
}

// babble opens a connection, says something that begins well or not at all, and goes in
// one of several ways. It returns the bytes written.
func babble(r *rand.Rand, network, addr string, opening []byte, wrap *tls.Config) (n int) {
	c, err := net.DialTimeout(network, addr, time.Second)
	if err != nil {
		return 0
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(time.Duration(1+r.IntN(200)) * time.Millisecond))
	if wrap != nil && r.IntN(2) == 0 { // garbage of somebody with a certificate
		c = tls.Client(c, wrap)
	}
	k, _ := c.Write(opening)
	n += k
	for range r.IntN(4) {
		b := make([]byte, r.IntN(8<<10))
		for i := range b {
			b[i] = byte(r.Uint32())
		}
		k, err := c.Write(b)
		n += k
		if err != nil {
			return n
		}
		if r.IntN(4) == 0 {
			_, _ = c.Read(make([]byte, 512))
		}
	}
	if tc, ok := c.(*net.TCPConn); ok {
		switch r.IntN(4) {
		case 0:
			_ = tc.SetLinger(0) // reset
		case 1:
			_ = tc.CloseWrite()
			_, _ = c.Read(make([]byte, 512))
		}
	}
	return n
}

func withSlab(bytes int64) nodeOption {
	return func(c *config.Config) { c.SlabBytes, c.Bounds.ParkedBytes = bytes, bytes/2 }
}

func descriptors(t *testing.T) int {
	d, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	return len(d)
}

// TestGarbageOnEveryPort: arbitrary bytes on every port of a live node, with TLS and
// without, leave it serving; its peers are served meanwhile, and what the garbage took is
// given back.
func TestGarbageOnEveryPort(t *testing.T) {
	seconds := 3
	if s := os.Getenv(garbageSecondsEnv); s != "" {
		var err error
		seconds, err = strconv.Atoi(s)
		require.NoError(t, err, garbageSecondsEnv)
	}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d, %d s; %s sets another length", seed, seconds, garbageSecondsEnv)
	for _, secured := range []bool{false, true} {
		t.Run(fmt.Sprintf("tls %v", secured), func(t *testing.T) {
			// Room for all requests: supply that nobody demands stays parked.
			po, co := []nodeOption{withSlab(256 << 20)}, []nodeOption{withSlab(256 << 20)}
			var wrap *tls.Config
			if secured {
				a := newAuthority(t)
				po, co = append(po, a.issue(t, "producer")), append(co, a.issue(t, "consumer"))
				c := a.write(t, "babbler", "babbler")
				cert, err := tls.LoadX509KeyPair(c.Cert, c.Key)
				require.NoError(t, err)
				wrap = &tls.Config{InsecureSkipVerify: true, Certificates: []tls.Certificate{cert}}
			}
			producer := startNode(t, "producer", po...)
			consumer := startNode(t, "consumer", append(co, withPeer("producer", producer.Addresses().Peer))...)
			serves(t, producer, consumer)
			p, c := attach(t, producer), attach(t, consumer)
			fds, goroutinesBefore := descriptors(t), runtime.NumGoroutine()

			at := producer.Addresses()
			var conns, written atomic.Int64
			var babblers sync.WaitGroup
			end := time.Now().Add(time.Duration(seconds) * time.Second)
			names := []string{"nothing", "http/1", "http/2", "http/2 frame", "tls record", "data hello"}
			require.Len(t, names, len(openings))
			for k := range 8 {
				babblers.Go(func() {
					r := rand.New(rand.NewPCG(seed, uint64(k)))
					for time.Now().Before(end) {
						ports := [][2]string{{"tcp", at.Peer}, {"tcp", at.Data}, {"tcp", at.HTTP}, {"unix", at.EngineSocket}}
						port := ports[r.IntN(len(ports))]
						written.Add(int64(babble(r, port[0], port[1], openings[names[r.IntN(len(names))]](r), wrap)))
						conns.Add(1)
					}
				})
			}
			requests, slowest := 0, time.Duration(0)
			for ; time.Now().Before(end); requests++ {
				id := fmt.Sprintf("g-%v-%d", secured, requests)
				p.fresh()
				c.fresh()
				x := text{id, 200}
				p.produce(id, x, enginepb.Leg_PD)
				began := time.Now()
				rq := c.beginConsumer(id, x, enginepb.Leg_PD)
				hit(t, rq, rq.load())
				rq.finish()
				slowest = max(slowest, time.Since(began))
			}
			babblers.Wait()
			t.Logf("%d connections wrote %d bytes in %d s; beside them %d requests of a peer, all hits, slowest %v", conns.Load(), written.Load(), seconds, requests, slowest)
			require.Positive(t, requests)
			clean(t, producer, consumer)
			require.NoError(t, p.c.Close())
			require.NoError(t, c.c.Close())
			serves(t, producer, consumer)
			status, _ := get(t, "http://"+at.HTTP+"/healthz")
			require.Equal(t, 200, status)
			require.Eventually(t, func() bool {
				return descriptors(t) <= fds && runtime.NumGoroutine() <= goroutinesBefore
			}, 30*time.Second, 10*time.Millisecond, "descriptors %d, goroutines %d before", fds, goroutinesBefore)
			halfOpen, _ := producer.peers.HalfOpen()
			require.Zero(t, halfOpen)
		})
	}
}
