package check

import (
	"context"
	"maps"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

// Refusing returns the names of all relations that refuse a subject, each stage run whether
// another one failed or not. Within a stage only the first failure counts.
func Refusing(ctx context.Context, s Subject, o Options) ([]string, error) {
	if o.Workers <= 0 {
		o.Workers = 2
	}
	r := &run{subject: s, options: o, cases: map[string]*atomic.Uint64{}}
	for _, name := range Relations {
		r.cases[name] = new(atomic.Uint64)
	}
	err := r.open()
	defer r.close()
	if err != nil {
		return nil, err
	}
	r.domain = newDomain(r.workers[0].model(), &s, o.Seed)
	r.plan()
	var names []string
	for _, st := range r.stages {
		ce, err := r.stage(ctx, st)
		if err != nil {
			return nil, err
		}
		if ce != nil && !slices.Contains(names, ce.Relation) {
			names = append(names, ce.Relation)
		}
	}
	return names, nil
}

// WithTables returns the options for a run that tries all lookup tables of up to n chunks,
// and of no longer ones: most of a run over a small deployment is those of six.
func (o Options) WithTables(n int) Options {
	o.tables = n
	return o
}

// RunOver is Run with other edge lengths: all of 1..MaxTokens, or those that the domain has by
// the period and the parameters alone, without the drawn ones. It returns how many.
func RunOver(ctx context.Context, s Subject, o Options, all bool) (*Counterexample, int, error) {
	r := &run{subject: s, options: o, cases: map[string]*atomic.Uint64{}}
	r.options.Workers = 1
	for _, name := range Relations {
		r.cases[name] = new(atomic.Uint64)
	}
	err := r.open()
	defer r.close()
	if err != nil {
		return nil, 0, err
	}
	r.domain = newDomain(r.workers[0].model(), &s, o.Seed)
	if o.tables > 0 {
		r.domain.TableChunks = o.tables
	}
	edges := r.domain.ruled(r.workers[0].model(), &s)
	for n := uint64(1); all && n <= s.MaxTokens; n++ {
		edges[n] = true
	}
	r.domain.edges = slices.Sorted(maps.Keys(edges))
	ce, err := r.all(ctx)
	return ce, len(r.domain.edges), err
}

// DomainOf returns the domain of a subject without running it.
func DomainOf(t testing.TB, s Subject) Domain {
	m, release, err := s.Open()
	require.NoError(t, err)
	defer release()
	return newDomain(&m, &s, 1)
}

// EdgesOf returns the edge lengths of a domain.
func EdgesOf(d Domain) []uint64 { return d.edges }
