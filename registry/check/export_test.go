package check

import (
	"context"
	"slices"
	"sync/atomic"
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
