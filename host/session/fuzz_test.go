package session

import (
	"go/parser"
	"go/token"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/tierd/tierd/host/session/sessionpb"
)

// frames cuts bytes into messages: each has a length of two bytes before it.
func frames(b []byte) (out [][]byte) {
	for len(b) >= 2 && len(out) < 64 {
		n := min(int(b[0])<<8|int(b[1]), len(b)-2)
		out = append(out, b[2:2+n])
		b = b[2+n:]
	}
	return out
}

func frame(ms ...proto.Message) (out []byte) {
	for _, m := range ms {
		b, err := proto.Marshal(envelope(m))
		if err != nil {
			panic(err)
		}
		out = append(append(out, byte(len(b)>>8), byte(len(b))), b...)
	}
	return out
}

// FuzzReceive brings arbitrary bytes as messages: the core never panics, does not
// grow beyond its bounds, ends every job once, and what is malformed closes the
// session with a reason.
func FuzzReceive(f *testing.F) {
	l := DefaultLimits()
	d := testDemand(2, 0)
	demand := &sessionpb.Demand{Job: 1, TransferId: "t", Leg: LegPD, Keys: packKeys(d.Keys), Slots: d.Slots, Epochs: d.Epochs, DeadlineMs: 900}
	hello := fillHello(testHello("b", 2), &l)
	f.Add(true, frame(demand, &sessionpb.Abort{Job: 1}, &sessionpb.Ping{BootId: 2, Seq: 4}))
	f.Add(true, frame(&sessionpb.Lookup{Job: 1, Keys: packKeys(d.Keys), DeadlineMs: 1}, &sessionpb.Done{Job: 1, Release: true}))
	f.Add(true, frame(&sessionpb.Supply{Job: 2, Available: []uint32{0}, Last: true}, &sessionpb.Done{Job: 2, Codes: []sessionpb.Code{1, 1}}))
	f.Add(true, frame(&sessionpb.States{Job: 1, States: make([]byte, 8)}, &sessionpb.Supply{Job: 2, Refused: []*sessionpb.Refused{{Indices: []uint32{1}}}}))
	f.Add(true, frame(demand, &sessionpb.Done{Job: 1, Release: true, Codes: []sessionpb.Code{1, 7}}, &sessionpb.Goaway{}))
	f.Add(true, frame(demand, &sessionpb.Renew{Jobs: []uint64{1}}, &sessionpb.Renew{Jobs: []uint64{2}}))
	f.Add(true, frame(&sessionpb.Supply{Job: 2, WillCome: []uint32{0, 1, 0}}, &sessionpb.Supply{Job: 2, WillCome: []uint32{7}}))
	f.Add(true, frame(&sessionpb.Ask{Seq: 1, Digest: make([]byte, 32)}, &sessionpb.Ask{Seq: 2, Digest: make([]byte, 32), Offset: 1 << 40}, &sessionpb.Part{Seq: 1}))
	f.Add(true, frame(&sessionpb.Legs{Supply: true, Reason: "r"}, &sessionpb.Part{Seq: 1, TotalBytes: 1 << 60, Data: []byte{1}}, &sessionpb.Ask{Digest: []byte{1}}))
	f.Add(false, frame(hello, demand))
	f.Add(false, frame(&sessionpb.HelloRefused{Reason: "no", Differences: []*sessionpb.Difference{{Field: "x"}}}))
	f.Add(true, []byte{0, 3, 0xff, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, up bool, b []byte) {
		s := newSolo(t, func(c *Config) { c.Limits.KeysMax, c.Limits.JobsMax, c.Limits.JobKeysMax = 64, 3, 100 })
		if up {
			s.up()
			s.Lookup(0, "r", testKeys(2), 0)
			s.Demand(0, testDemand(2, 0))
		} else {
			s.Connected(0)
		}
		var asked, answered, jobs, ended, wanted, parts int
		if up {
			asked = 2
			_, err := s.Ask(0, [32]byte{1}, 0)
			require.NoError(t, err)
			wanted = 1
		}
		count := func() (closed []Close) {
			answered += len(take[LookupDone](s)) + len(take[DemandDone](s))
			for _, j := range take[Demanded](s) {
				jobs++
				s.Answer(s.at, j.Job.ID, Answer{Available: []uint32{0}, Last: j.Job.ID%2 == 0})
			}
			ended += len(take[JobEnded](s))
			parts += len(take[PartCame](s))
			for _, a := range take[Asked](s) {
				if a.Seq%3 > 0 {
					s.AnswerAsk(s.at, a.Seq, a.Offset, make([]byte, 99), "")
				}
			}
			return take[Close](s)
		}
		for _, m := range frames(b) {
			e := &sessionpb.Envelope{}
			if proto.Unmarshal(m, e) != nil {
				continue // the edge closes the connection
			}
			linked := s.link != linkNone
			s.Receive(s.at, e)
			closed := count()
			require.Equal(t, linked && s.link == linkNone, len(closed) == 1, "a lost link and a Close come together")
			for _, c := range closed {
				require.NotEmpty(t, c.Reason)
				require.Less(t, len(c.Reason), 64<<10)
			}
			require.LessOrEqual(t, s.jobs.len()+s.queries.len(), 3)
			require.LessOrEqual(t, s.jobsKeys, 100)
			s.at += ms
			s.Tick(s.at)
		}
		count()
		s.Shut(s.at, "the end")
		count()
		require.Equal(t, asked, answered, "each job of this node ends once")
		require.Equal(t, jobs, ended, "each job of the peer ends once")
		require.Equal(t, wanted, parts, "each question ends once")
		require.True(t, s.Idle())
	})
}

// TestPure: the core has no I/O, clock, goroutine or random, by what its files import
// and call.
func TestPure(t *testing.T) {
	files, err := os.ReadDir(".")
	require.NoError(t, err)
	for _, e := range files {
		if !strings.HasSuffix(e.Name(), ".go") || strings.HasSuffix(e.Name(), "_test.go") {
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), e.Name(), nil, 0)
		require.NoError(t, err)
		for _, i := range f.Imports {
			path, _ := strconv.Unquote(i.Path.Value)
			for _, bad := range []string{"net", "os", "io", "sync", "math/rand", "context", "log", "google.golang.org/grpc"} {
				require.False(t, path == bad || strings.HasPrefix(path, bad+"/"), "%s imports %s", e.Name(), path)
			}
		}
		src, err := os.ReadFile(e.Name())
		require.NoError(t, err)
		for _, bad := range []string{"time.Now(", "time.Since(", "time.After", "time.NewTimer", "\tgo "} {
			require.NotContains(t, string(src), bad, e.Name())
		}
	}
}
