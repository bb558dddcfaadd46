package plugins

import (
	"context"
	"fmt"
	"strings"
)

// OpenBytes opens the rule that a reference names in a module whose bytes are given, as when
// another machine's deployment is judged: the reference is that deployment's, and its path
// means nothing here. source stands in messages in the place of a path. A reference to a
// program has no module, and is an error.
func (l *Loader) OpenBytes(ctx context.Context, ref, source string, bytes []byte) (*Plugin, error) {
	if strings.HasPrefix(ref, "exec:") || strings.HasPrefix(ref, "oci:") {
		return nil, fmt.Errorf("rule %s: it is no module", ref)
	}
	path, name, _ := strings.Cut(ref, "#")
	if !isPath(path) {
		name = path // a shipped one
	}
	m, err := l.load(ctx, source, bytes)
	if err != nil {
		return nil, fmt.Errorf("rule %s: %w", ref, err)
	}
	spec, err := choose(m.Specs(), name, "module")
	if err != nil {
		return nil, fmt.Errorf("rule %s: %w", ref, err)
	}
	return &Plugin{Spec: spec, Digest: m.Digest(), Source: source}, nil
}

// ProgramOf returns the path of the program that a reference names, as the deployment file
// has it, and the name of the rule in it; ok is false when it names none.
func ProgramOf(ref string) (path, name string, ok bool) {
	program, ok := strings.CutPrefix(ref, "exec:")
	if !ok {
		return "", "", false
	}
	path, name, _ = strings.Cut(program, "#")
	return path, name, true
}
