package plugins

import (
	"context"
	"errors"
	"fmt"
	"strings"
)

// An AmbiguousError is that of a reference without #name to what holds several rules.
type AmbiguousError struct {
	What  string   // that holds them: module or program
	Names []string // of the rules, in the order of the manifest
}

func (e *AmbiguousError) Error() string {
	return fmt.Sprintf("the %s holds %d rules; add #name, one of: %s", e.What, len(e.Names), strings.Join(e.Names, ", "))
}

// OpenAll opens the rule that a reference leads to, or, where it says no name and the
// module or program holds several, all of them in the order of the manifest. refs holds, for each,
// the reference that leads to it alone.
func (l *Loader) OpenAll(ctx context.Context, ref string) (refs []string, all []*Plugin, err error) {
	p, err := l.Open(ctx, ref)
	var many *AmbiguousError
	switch {
	case err == nil && strings.Contains(ref, "#") || err == nil && p.Source == Shipped:
		return []string{ref}, []*Plugin{p}, nil
	case err == nil:
		return []string{ref + "#" + p.Spec.Manifest().Name}, []*Plugin{p}, nil
	case !errors.As(err, &many):
		return nil, nil, err
	}
	for _, name := range many.Names {
		p, err := l.Open(ctx, ref+"#"+name)
		if err != nil {
			return nil, nil, err
		}
		refs, all = append(refs, ref+"#"+name), append(all, p)
	}
	return refs, all, nil
}
