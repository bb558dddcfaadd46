// Package abitest checks that a rule keeps the laws of package abi, and holds rules
// that are wrong on purpose.
//
// Typical usage in the test of a rule is:
//
//	func TestLaws(t *testing.T) { abitest.Run(t, MyRule()) }
//
// Check is the same without package testing, for programs.
//
// # What it finds
//
// It draws parameters from the manifest's ranges and small rounds, with a fixed seed
// that every message repeats, asks the rule, and compares answers with each other: a
// call with the same call made again, on a fresh instance, in another order, between
// calls to the rule with other parameter values, after thousands of calls, and in
// pieces; a scan with the scan of a table in which one thing is different. It has no
// expected values,
// and so no false alarms: what it reports breaks a law. It may miss what only large
// or rare inputs show.
//
// It does not ask whether supply covers demand, or whether demand holds what attention
// needs: a rule that keeps every law can still fail there. That is the registration
// check's work (tierd check).
package abitest

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"

	"github.com/tierd/tierd/abi"
)

// Seed is where the draws of Check start. Two runs draw the same.
const Seed = 20261130

// The laws, by the names that a Violation carries.
const (
	LawPure     = "pure"
	LawTotal    = "total"
	LawComplete = "complete"
	LawKept     = "kept"
	LawAnswered = "answered"
	LawMonotone = "monotone"
	LawUnknown  = "unknown is not here"
	LawPending  = "pending is hit later"
)

// laws holds the sentence that explains each law in a message, in the order in which
// violations are reported.
var laws = []struct{ name, sentence string }{
	{LawTotal, "every parameter value in range and every valid Round gets an answer about [Lo, Hi)"},
	{LawPure, "the same input gives the same output, on a used or a fresh instance, whatever was called between, and for any split of [Lo, Hi) in Reach"},
	{LawComplete, "Reach names only chunks that end at or before stored_tokens"},
	{LawKept, "what going on at a token needs is kept whether resume_tokens, align_tokens or junction_tokens names it, up to stored_tokens"},
	{LawAnswered, "a scan that is not deferred demands only chunks that are Hit or Pending"},
	{LawMonotone, "more Hits never make fewer chunks usable"},
	{LawUnknown, "a Retry chunk is never counted as usable and never fetched; where it matters the scan is deferred and marks it, and only such chunks"},
	{LawPending, "turning Pending into Hit changes neither the usable count nor the demand"},
}

// A Violation is one law that a rule broke, with the first case that shows it.
type Violation struct {
	Law  string // LawPure, ...
	Rule string // name and parameter values
	Case string // the call and what it answered
}

func (v *Violation) Error() string {
	for _, l := range laws {
		if l.name == v.Law {
			return fmt.Sprintf("rule %s breaks the law %q (%s): %s", v.Rule, v.Law, l.sentence, v.Case)
		}
	}
	return fmt.Sprintf("rule %s breaks the law %q: %s", v.Rule, v.Law, v.Case)
}

const (
	paramSetsMax   = 12 // parameter values drawn for a rule; one that takes none is opened once
	roundsPerSet   = 32 // rounds drawn for each
	tablesPerRound = 12 // lookup tables drawn for each
	smallChunksMax = 9  // chunks of most rounds: small cases make short messages
	wideChunksMax  = 150

	// freshPerSet is how many fresh instances are made for each set of parameter values
	// beside the one of checkPurity: a plain Go guest takes 3 to 6 ms for one, a
	// subprocess 50 ms.
	freshPerSet = 2
	// trialCalls is how many calls checkPurity asks of one rule in several orders.
	trialCalls = 64
	// longRunCalls is how many calls one rule answers in a row, for state that builds up.
	longRunCalls = 8192
	// splitsPerReach is how often a range is asked for in drawn pieces, beside the
	// chunks alone.
	splitsPerReach = 2
)

// Check reports every law that the spec's rule breaks, one Violation a law, joined; nil
// when it found none.
func Check(s abi.Spec) error {
	m := s.Manifest()
	if err := m.Validate(); err != nil {
		return err
	}
	c := &checker{spec: s, manifest: m, rand: rand.New(rand.NewPCG(Seed, 0)), broken: map[string]*Violation{}}
	sets := c.paramSets()
	for i, params := range sets {
		c.params = params
		c.checkParams(i == 0, sets[(i+1)%len(sets)])
	}
	var errs []error
	for _, l := range laws {
		if l.name == LawKept && c.broken[LawPure] != nil {
			continue // two answers of a rule that keeps state say nothing
		}
		if v := c.broken[l.name]; v != nil {
			errs = append(errs, v)
		}
	}
	if errs != nil {
		errs = append(errs, fmt.Errorf("(abitest seed %d)", Seed))
	}
	return errors.Join(errs...)
}

type checker struct {
	spec     abi.Spec
	manifest *abi.Manifest
	rand     *rand.Rand
	params   []uint64
	broken   map[string]*Violation
}

// breaks records the first case against a law.
func (c *checker) breaks(law, format string, args ...any) {
	if c.broken[law] == nil {
		c.broken[law] = &Violation{Law: law, Rule: c.ruleName(), Case: fmt.Sprintf(format, args...)}
	}
}

func (c *checker) ruleName() string {
	var b strings.Builder
	b.WriteString(c.manifest.Name)
	for i := range c.manifest.Params {
		if i < len(c.params) {
			fmt.Fprintf(&b, " %s=%d", c.manifest.Params[i].Name, c.params[i])
		}
	}
	return b.String()
}

func (c *checker) isSpec() bool { return c.manifest.Kind == abi.KindSpec }

// paramSets draws parameter values: all lowest, all highest, and mostly small ones,
// since small rounds only tell those apart.
func (c *checker) paramSets() [][]uint64 {
	params := c.manifest.Params
	if len(params) == 0 {
		return [][]uint64{nil}
	}
	sets := make([][]uint64, paramSetsMax)
	for i := range sets {
		sets[i] = make([]uint64, len(params))
		for j := range params {
			p := &params[j]
			switch {
			case i == paramSetsMax-2: // not first: a rule of the lowest values shows little
				sets[i][j] = p.Min
			case i == paramSetsMax-1:
				sets[i][j] = p.Max
			default:
				sets[i][j] = p.Min + c.rand.Uint64N(min(p.Max-p.Min, 20)+1)
			}
		}
	}
	return sets
}

// open opens the rule with the current parameters.
func (c *checker) open() (r abi.Rule, ok bool) {
	defer c.recovered("Open")
	r, err := c.spec.Open(c.params)
	if err != nil {
		c.breaks(LawTotal, "Open answered the error %q", err)
		return nil, false
	}
	if _, is := r.(abi.SpecRule); c.isSpec() && !is {
		c.breaks(LawTotal, "its kind is spec, but what Open returned has no Need")
		return nil, false
	}
	return r, true
}

func (c *checker) recovered(what string) {
	if p := recover(); p != nil {
		c.breaks(LawTotal, "%s panicked: %v", what, p)
	}
}

// checkParams checks the rule with the current parameters. near are others.
func (c *checker) checkParams(first bool, near []uint64) {
	used, ok := c.open()
	if !ok {
		return
	}
	c.checkPurity(used, near, first)
	for i := range roundsPerSet {
		r := c.drawRound()
		second, release, ok := c.second(used, i < freshPerSet)
		if !ok {
			return
		}
		c.checkReach(used, second, c.producer(r))
		if c.isSpec() {
			c.checkNeed(used.(abi.SpecRule), second.(abi.SpecRule), r)
			c.checkKept(used.(abi.SpecRule), r)
		}
		c.checkScans(used, second, c.consumer(r))
		release()
	}
}
