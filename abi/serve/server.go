package serve

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"runtime"
	"strings"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/abi/kvpb"
)

// A server answers the service for a list of specs.
type server struct {
	kvpb.UnimplementedKVServer
	specs []abi.Spec
	begun sync.Once
	begin func() // at the first call, before any rule is opened

	mu    sync.RWMutex
	rules []*rule // by handle
}

func newServer(specs []abi.Spec, begin func()) *server { return &server{specs: specs, begin: begin} }

// Manifest implements kvpb.KVServer.
func (s *server) Manifest(context.Context, *kvpb.ManifestRequest) (*kvpb.ManifestReply, error) {
	s.begun.Do(s.begin)
	reply := &kvpb.ManifestReply{}
	for _, spec := range s.specs {
		reply.Rules = append(reply.Rules, kvpb.FromManifest(spec.Manifest()))
	}
	return reply, nil
}

// Open implements kvpb.KVServer.
func (s *server) Open(_ context.Context, r *kvpb.OpenRequest) (*kvpb.OpenReply, error) {
	if n := len(r.GetOpenings()); n > kvpb.ItemsMax {
		return nil, status.Errorf(codes.InvalidArgument, "%d openings; at most %d are allowed at a time", n, kvpb.ItemsMax)
	}
	reply := &kvpb.OpenReply{}
	for _, o := range r.GetOpenings() {
		out := &kvpb.Opened{}
		handle, err := s.open(o)
		if out.Handle = handle; err != nil {
			out.Error = reason(err)
		}
		reply.Opened = append(reply.Opened, out)
	}
	return reply, nil
}

func (s *server) open(o *kvpb.Opening) (handle uint32, err error) {
	if o.GetRule() >= uint32(len(s.specs)) {
		return 0, fmt.Errorf("there is no rule %d; the manifest has %d", o.GetRule(), len(s.specs))
	}
	r := &rule{spec: s.specs[o.GetRule()], params: o.GetParams()}
	if err := r.open(); err != nil {
		return 0, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.rules) >= kvpb.HandlesMax {
		return 0, fmt.Errorf("%d rules are open; at most %d are allowed in one process", len(s.rules), kvpb.HandlesMax)
	}
	s.rules = append(s.rules, r)
	return uint32(len(s.rules) - 1), nil
}

// Reach implements kvpb.KVServer.
func (s *server) Reach(_ context.Context, b *kvpb.Batch) (*kvpb.Results, error) {
	return s.each(b, (*rule).reach)
}

// Scan implements kvpb.KVServer.
func (s *server) Scan(_ context.Context, b *kvpb.Batch) (*kvpb.Results, error) {
	return s.each(b, (*rule).scan)
}

// Need implements kvpb.KVServer.
func (s *server) Need(_ context.Context, b *kvpb.Batch) (*kvpb.Results, error) {
	return s.each(b, (*rule).need)
}

// each answers the items of a batch one after the other.
func (s *server) each(b *kvpb.Batch, call func(*rule, *kvpb.Item, abi.Round, *kvpb.Result) error) (*kvpb.Results, error) {
	if err := b.Check(); err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	results := make([]kvpb.Result, len(b.GetItems()))
	reply := &kvpb.Results{Results: make([]*kvpb.Result, len(results))}
	for i, it := range b.GetItems() {
		reply.Results[i] = &results[i]
		s.mu.RLock()
		var r *rule
		if int64(it.GetHandle()) < int64(len(s.rules)) {
			r = s.rules[it.GetHandle()]
		}
		s.mu.RUnlock()
		if r == nil {
			results[i].Error = reason(fmt.Errorf("no rule is open under handle %d", it.GetHandle()))
			continue
		}
		if err := r.answer(it, &results[i], call); err != nil {
			results[i].Reset()
			results[i].Error = reason(err)
		}
	}
	return reply, nil
}

// reason returns what is said of a failure: text that protobuf takes, and not too much.
func reason(err error) *string {
	s := strings.ToValidUTF8(err.Error(), "\uFFFD")
	if len(s) > kvpb.ReasonBytesMax {
		s = strings.ToValidUTF8(s[:kvpb.ReasonBytesMax], "") // the cut may split a character
	}
	return &s
}

// A rule is a spec with parameter values. Its lock makes one goroutine at a time of the
// many that serve batches.
type rule struct {
	spec   abi.Spec
	params []uint64

	mu     sync.Mutex
	opened abi.Rule   // nil after a panic: its state is unknown
	set    abi.Bitmap // scratch
	states abi.States // scratch
}

// open opens the rule.
func (r *rule) open() (err error) {
	defer recovered(&err)
	opened, err := r.spec.Open(r.params)
	if err != nil {
		return err
	}
	if _, ok := opened.(abi.SpecRule); !ok && r.spec.Manifest().Kind == abi.KindSpec {
		return fmt.Errorf("rule %s is of kind spec, but what Open returns has no Need", r.spec.Manifest().Name)
	}
	r.opened = opened
	return nil
}

// answer makes one call.
func (r *rule) answer(it *kvpb.Item, out *kvpb.Result, call func(*rule, *kvpb.Item, abi.Round, *kvpb.Result) error) (err error) {
	x := it.GetRound().ABI()
	if err := x.Validate(); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.opened == nil {
		if err := r.open(); err != nil {
			return fmt.Errorf("the rule panicked before and does not open again: %w", err)
		}
	}
	defer func() {
		if recovered := recover(); recovered != nil {
			r.opened = nil
			err = panicked(recovered)
		}
	}()
	return call(r, it, x, out)
}

func (r *rule) reach(_ *kvpb.Item, x abi.Round, out *kvpb.Result) error {
	set := r.empty(x.Chunks())
	if err := r.opened.Reach(x, set); err != nil {
		return err
	}
	return answerSet(out, set, x.Chunks())
}

func (r *rule) scan(it *kvpb.Item, x abi.Round, out *kvpb.Result) error {
	n := x.Chunks()
	if w := abi.StatesWords(n); cap(r.states) < w {
		r.states = make(abi.States, w+w/2)
	}
	states := r.states[:abi.StatesWords(n)]
	if !states.DecodeWire(it.GetStates(), n) {
		return fmt.Errorf("%d bytes of states; %d chunks take exactly %d", len(it.GetStates()), n, 8*abi.StatesWords(n))
	}
	set := r.empty(n)
	span, err := r.opened.Scan(x, states, set)
	if err != nil {
		return err
	}
	if int64(span.Usable) > int64(n) {
		return fmt.Errorf("usable is %d, but only %d chunks were asked for", span.Usable, n)
	}
	out.Usable, out.Deferred = span.Usable, span.Deferred
	return answerSet(out, set, n)
}

func (r *rule) need(_ *kvpb.Item, x abi.Round, out *kvpb.Result) error {
	spec, ok := r.opened.(abi.SpecRule)
	if !ok {
		return fmt.Errorf("rule %s is a policy, which has no Need", r.spec.Manifest().Name)
	}
	set := r.empty(int(x.Hi))
	err := spec.Need(x, set)
	if errors.Is(err, abi.ErrNoResume) {
		out.NoResume = true
		return nil
	}
	if err != nil {
		return err
	}
	return answerSet(out, set, int(x.Hi))
}

// empty returns a set of n bits, all zero, that is good until the next call.
func (r *rule) empty(n int) abi.Bitmap {
	w := abi.BitmapWords(n)
	if cap(r.set) < w {
		r.set = make(abi.Bitmap, w+w/2)
	}
	set := r.set[:w]
	set.Zero()
	return set
}

// answerSet puts a set of n chunks into a result.
func answerSet(out *kvpb.Result, set abi.Bitmap, n int) error {
	if i := set.Next(n); i >= 0 {
		return fmt.Errorf("the rule set bit %d, but only %d chunks were asked for", i, n)
	}
	out.Set = set.AppendWire(make([]byte, 0, (n+7)/8), n)
	return nil
}

// recovered turns a panic into an error; it is deferred.
func recovered(err *error) {
	if r := recover(); r != nil {
		*err = panicked(r)
	}
}

// panicked describes a panic by its value and the place in the rule where it began. It is
// called by a deferred function.
func panicked(value any) error {
	const framesMax = 64
	pcs := make([]uintptr, framesMax)
	frames := runtime.CallersFrames(pcs[:runtime.Callers(0, pcs)])
	panicking := false
	for {
		f, more := frames.Next()
		if panicking && !strings.HasPrefix(f.Function, "runtime.") {
			return fmt.Errorf("the rule panicked: %v (%s:%d)", value, filepath.Base(f.File), f.Line)
		}
		panicking = panicking || f.Function == "runtime.gopanic"
		if !more {
			return fmt.Errorf("the rule panicked: %v", value)
		}
	}
}
