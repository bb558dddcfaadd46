package proc

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/tierd/tierd/abi"
	"github.com/tierd/tierd/abi/kvpb"
)

// concurrency is how many callers make good batches: with 64 the cost of a message is a
// sixtieth of what it is for one call, and that is less than the cost of the call itself.
const concurrency = 64

// A spec is one rule of a program's manifest.
type spec struct {
	program  *Program
	index    uint32
	manifest *abi.Manifest
}

// Manifest implements abi.Spec.
func (s *spec) Manifest() *abi.Manifest { return s.manifest }

// Open checks the parameters against the manifest, then lets the program open the rule.
// Opening the same values again costs nothing, and works while no process runs.
func (s *spec) Open(params []uint64) (abi.Rule, error) {
	if err := s.manifest.CheckParams(params); err != nil {
		return nil, err
	}
	p := s.program
	p.opening.Lock()
	defer p.opening.Unlock()
	key := fmt.Sprint(s.index, params)
	p.mu.Lock()
	r, n := p.opened[key], len(p.rules)
	p.mu.Unlock()
	if r != nil {
		return r.is(), nil
	}
	if n >= kvpb.HandlesMax {
		return nil, fmt.Errorf("rule %s: %d rules are open; at most %d are allowed in one process", s.manifest.Name, n, kvpb.HandlesMax)
	}
	pr, err := p.running()
	if err != nil {
		return nil, fmt.Errorf("rule %s: %w", s.manifest.Name, err)
	}
	id := &identity{index: s.index, manifest: s.manifest, params: slices.Clone(params)}
	if err := pr.openRules([]*identity{id}); err != nil {
		return nil, wrap(id, err)
	}
	r = &rule{identity: id, program: p, process: p.running}
	p.mu.Lock()
	p.rules = append(slices.Clip(p.rules), id)
	p.opened[key] = r
	p.mu.Unlock()
	return r.is(), nil
}

// An identity is a spec with parameter values: what a process has a handle for.
type identity struct {
	index    uint32
	manifest *abi.Manifest
	params   []uint64
}

// A rule is an opened rule, wherever it runs.
type rule struct {
	*identity
	program *Program
	process func() (*process, error)
}

// is returns the rule as what its kind is: only a specRule has Need.
func (r *rule) is() abi.Rule {
	if r.manifest.Kind == abi.KindSpec {
		return specRule{r}
	}
	return r
}

// Concurrency returns how many goroutines should call at once, so that their calls travel
// together and the way to the process does not decide how fast they are.
func (r *rule) Concurrency() int { return concurrency }

// Fresh starts a process that has served nothing and opens only this rule in it. It is not
// started again when it fails. release ends it; the rule must not be used after that.
func (r *rule) Fresh() (fresh abi.Rule, release func(), err error) {
	p := r.program
	p.mu.Lock()
	n := p.fresh
	if n < FreshMax {
		p.fresh++
	}
	p.mu.Unlock()
	if n >= FreshMax {
		return nil, nil, wrap(r.identity, fmt.Errorf("%d fresh processes of program %s are in use; at most %d are allowed: release some", n, p.path, FreshMax))
	}
	free := func() {
		p.mu.Lock()
		p.fresh--
		p.mu.Unlock()
	}
	pr, err := p.start(p.life)
	if err == nil {
		if err = pr.openRules([]*identity{r.identity}); err != nil {
			pr.stop(err)
		}
	}
	if err != nil {
		free()
		return nil, nil, wrap(r.identity, err)
	}
	alone := &rule{identity: r.identity, program: p, process: func() (*process, error) { return pr, nil }}
	return alone.is(), sync.OnceFunc(func() {
		pr.stop(ErrClosed)
		free()
	}), nil
}

// wrap names the rule whose call failed.
func wrap(r *identity, err error) error {
	var clean *RuleError
	if errors.As(err, &clean) {
		return err // names it already
	}
	return fmt.Errorf("rule %s: %w", r.manifest.Name, err)
}

// call makes one call, and tells a clean failure from an answer.
func (r *rule) call(m method, round *abi.Round, states []byte) (*kvpb.Result, error) {
	pr, err := r.process()
	if err != nil {
		return nil, wrap(r.identity, err)
	}
	res, err := pr.call(m, r.identity, &kvpb.Item{Round: kvpb.FromRound(round), States: states})
	switch {
	case err != nil:
		return nil, wrap(r.identity, err)
	case res.Error != nil:
		return nil, &RuleError{Rule: r.manifest.Name, Func: m.String(), Reason: cut(res.GetError())}
	case m != scan && (res.Usable != 0 || res.Deferred), m != need && res.NoResume:
		return nil, r.broke(m, "usable, deferred or no_resume is set where the call has none")
	}
	return res, nil
}

// broke is the error of an answer that makes no sense.
func (r *rule) broke(m method, problem string) error {
	return &ProtocolError{Rule: r.manifest.Name, Func: m.String(), Problem: problem}
}

// checkRound guards the sizes that are computed from a Round.
func (r *rule) checkRound(round *abi.Round) error {
	if round.Hi < round.Lo || round.Hi > abi.MaxChunks {
		return fmt.Errorf("rule %s: round asks for chunks %d to %d; Lo <= Hi <= %d", r.manifest.Name, round.Lo, round.Hi, abi.MaxChunks)
	}
	return nil
}

// Reach implements abi.Rule.
func (r *rule) Reach(round abi.Round, out abi.Bitmap) error {
	if err := r.checkRound(&round); err != nil {
		return err
	}
	res, err := r.call(reach, &round, nil)
	if err != nil {
		return err
	}
	return r.set(reach, res, out, round.Chunks())
}

// Scan implements abi.Rule.
func (r *rule) Scan(round abi.Round, states abi.States, demand abi.Bitmap) (abi.Span, error) {
	if err := r.checkRound(&round); err != nil {
		return abi.Span{}, err
	}
	n := round.Chunks()
	res, err := r.call(scan, &round, states.AppendWire(make([]byte, 0, 8*abi.StatesWords(n)), n))
	if err != nil {
		return abi.Span{}, err
	}
	if int64(res.Usable) > int64(n) {
		return abi.Span{}, r.broke(scan, fmt.Sprintf("usable is %d, but only %d chunks were asked for", res.Usable, n))
	}
	if err := r.set(scan, res, demand, n); err != nil {
		return abi.Span{}, err
	}
	return abi.Span{Usable: res.Usable, Deferred: res.Deferred}, nil
}

// set gives the caller the chunks of an answer.
func (r *rule) set(m method, res *kvpb.Result, out abi.Bitmap, n int) error {
	if err := res.SetInto(out, n); err != nil {
		return r.broke(m, err.Error())
	}
	return nil
}

// A specRule is a rule of kind spec.
type specRule struct{ *rule }

// Need implements abi.SpecRule.
func (r specRule) Need(round abi.Round, out abi.Bitmap) error {
	if err := r.checkRound(&round); err != nil {
		return err
	}
	res, err := r.call(need, &round, nil)
	switch {
	case err != nil:
		return err
	case res.NoResume && len(res.Set) > 0:
		return r.broke(need, "no_resume is set, and so are chunks")
	case res.NoResume:
		return abi.ErrNoResume
	}
	return r.set(need, res, out, int(round.Hi))
}
