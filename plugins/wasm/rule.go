package wasm

import (
	"fmt"
	"slices"
	"sync"

	"github.com/tierd/tierd/abi"
)

// A Pinner is a rule that can be bound to one instance for the exclusive use of one
// goroutine, such as a worker of the registration check: no lock is taken and no
// instance is borrowed per call. Every rule of this package is one.
type Pinner interface {
	// Pin returns the same rule, bound; it satisfies abi.SpecRule when the rule does.
	// It never waits. release gives the instance back; the bound rule must not be used
	// after it, and Module.Close waits for it.
	Pin() (r abi.Rule, release func())
}

// Metered is a rule that says what its calls cost. The rules that Pin and Fresh return
// are.
type Metered interface {
	// Fuel returns the units that the last call has burnt, also when it failed; 0 before
	// the first.
	Fuel() uint64
}

// A Fresher is a rule of which there can be a copy whose state nothing has touched,
// which is how a rule with hidden state is told from one without. Every rule of this
// package is one.
type Fresher interface {
	// Fresh returns the same rule, bound to a newly made instance that has served no
	// call. It is used, and released, as what Pin returns.
	Fresh() (r abi.Rule, release func(), err error)
}

// A spec is one rule of a module's manifest.
type spec struct {
	module   *Module
	index    uint32
	manifest *abi.Manifest
}

func (s *spec) Manifest() *abi.Manifest { return s.manifest }

// Open checks the parameters against the manifest, then lets the guest open the rule.
// Opening the same values again costs nothing more.
func (s *spec) Open(params []uint64) (abi.Rule, error) {
	if err := s.manifest.CheckParams(params); err != nil {
		return nil, err
	}
	r := s.module.rules.intern(s, params)
	in, err := s.module.pool.get()
	if err != nil {
		return nil, fmt.Errorf("rule %s: %w", r.name, err)
	}
	_, err = in.handle(r)
	s.module.pool.put(in, isClean(err))
	if err != nil {
		return nil, err
	}
	if s.manifest.Kind == abi.KindSpec {
		return specRule{r}, nil
	}
	return r, nil
}

// A ruleTable gives every rule that was opened, that is, every spec with parameter
// values, a small number that instances find its handle by.
type ruleTable struct {
	mu    sync.Mutex
	rules map[string]*rule
}

func (t *ruleTable) intern(s *spec, params []uint64) *rule {
	key := fmt.Sprint(s.index, params)
	t.mu.Lock()
	defer t.mu.Unlock()
	if r := t.rules[key]; r != nil {
		return r
	}
	if t.rules == nil {
		t.rules = map[string]*rule{}
	}
	r := &rule{spec: s, name: s.manifest.Name, params: slices.Clone(params), id: len(t.rules)}
	t.rules[key] = r
	return r
}

// A rule is a spec with parameter values. It has no state of its own: each call runs
// in an instance that it borrows.
type rule struct {
	spec   *spec
	name   string
	params []uint64
	id     int // in the module's ruleTable
}

// checkRound guards the sizes that this package computes from a Round.
func (r *rule) checkRound(round *abi.Round) error {
	if round.Hi < round.Lo || round.Hi > abi.MaxChunks {
		return fmt.Errorf("rule %s: round asks for chunks %d to %d; Lo <= Hi <= %d", r.name, round.Lo, round.Hi, abi.MaxChunks)
	}
	return nil
}

// Reach implements abi.Rule.
func (r *rule) Reach(round abi.Round, out abi.Bitmap) error {
	if err := r.checkRound(&round); err != nil {
		return err
	}
	in, err := r.spec.module.pool.get()
	if err != nil {
		return err
	}
	err = in.reach(r, &round, out)
	r.spec.module.pool.put(in, isClean(err))
	return err
}

// Scan implements abi.Rule.
func (r *rule) Scan(round abi.Round, states abi.States, demand abi.Bitmap) (abi.Span, error) {
	if err := r.checkRound(&round); err != nil {
		return abi.Span{}, err
	}
	in, err := r.spec.module.pool.get()
	if err != nil {
		return abi.Span{}, err
	}
	span, err := in.scan(r, &round, states, demand)
	r.spec.module.pool.put(in, isClean(err))
	return span, err
}

// Pin implements Pinner.
func (r *rule) Pin() (abi.Rule, func()) {
	b := &bound{rule: r}
	return b, b.release
}

// Fresh implements Fresher.
func (r *rule) Fresh() (abi.Rule, func(), error) {
	b, err := r.fresh()
	if err != nil {
		return nil, nil, err
	}
	return b, b.release, nil
}

func (r *rule) fresh() (*bound, error) {
	in, err := r.spec.module.pool.pin(true)
	if err != nil {
		return nil, fmt.Errorf("rule %s: %w", r.name, err)
	}
	return &bound{rule: r, in: in, fresh: true}, nil
}

// A specRule is a rule of kind spec.
type specRule struct{ *rule }

// Need implements abi.SpecRule.
func (r specRule) Need(round abi.Round, out abi.Bitmap) error {
	if err := r.checkRound(&round); err != nil {
		return err
	}
	in, err := r.spec.module.pool.get()
	if err != nil {
		return err
	}
	err = in.need(r.rule, &round, out)
	r.spec.module.pool.put(in, isClean(err))
	return err
}

// Pin implements Pinner.
func (r specRule) Pin() (abi.Rule, func()) {
	b := &bound{rule: r.rule}
	return boundSpec{b}, b.release
}

// Fresh implements Fresher.
func (r specRule) Fresh() (abi.Rule, func(), error) {
	b, err := r.fresh()
	if err != nil {
		return nil, nil, err
	}
	return boundSpec{b}, b.release, nil
}

// A bound is a rule with an instance of its own, taken at the first call and replaced
// when it has to be thrown away. A fresh one takes newly made instances only, and does
// not give them back.
type bound struct {
	rule     *rule
	in       *instance
	burnt    uint64 // by the last call, when in is nil
	fresh    bool
	released bool
}

// Fuel implements Metered.
func (b *bound) Fuel() uint64 {
	if b.in != nil {
		return b.in.burnt()
	}
	return b.burnt
}

func (b *bound) instance(round *abi.Round) (*instance, error) {
	if err := b.rule.checkRound(round); err != nil {
		return nil, err
	}
	if b.in == nil {
		if b.released {
			return nil, fmt.Errorf("rule %s: used after its pin was released", b.rule.name)
		}
		in, err := b.rule.spec.module.pool.pin(b.fresh)
		if err != nil {
			return nil, err
		}
		b.in = in
	}
	return b.in, nil
}

// done drops the instance when err says that its state is unknown.
func (b *bound) done(err error) {
	if err != nil && !isClean(err) {
		b.drop(false)
	}
}

// drop gives the instance up, for others to use when it is clean.
func (b *bound) drop(clean bool) {
	b.burnt = b.in.burnt()
	b.rule.spec.module.pool.unpin(b.in, clean)
	b.in = nil
}

func (b *bound) release() {
	if b.in != nil {
		b.drop(!b.fresh)
	}
	b.released = true
}

func (b *bound) Reach(round abi.Round, out abi.Bitmap) error {
	in, err := b.instance(&round)
	if err != nil {
		return err
	}
	err = in.reach(b.rule, &round, out)
	b.done(err)
	return err
}

func (b *bound) Scan(round abi.Round, states abi.States, demand abi.Bitmap) (abi.Span, error) {
	in, err := b.instance(&round)
	if err != nil {
		return abi.Span{}, err
	}
	span, err := in.scan(b.rule, &round, states, demand)
	b.done(err)
	return span, err
}

type boundSpec struct{ *bound }

func (b boundSpec) Need(round abi.Round, out abi.Bitmap) error {
	in, err := b.instance(&round)
	if err != nil {
		return err
	}
	err = in.need(b.rule, &round, out)
	b.done(err)
	return err
}
