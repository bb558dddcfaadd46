package session

import (
	"cmp"
	"iter"
	"slices"
)

// A table holds jobs by id. Ids are put in rising order, and walks follow it, so that
// a core's effects do not depend on the order of a map. Nothing is put during a walk.
type table[T any] struct {
	rows []row[T] // by rising id; v is nil when the job is gone
	live int
}

type row[T any] struct {
	id JobID
	v  *T
}

func (t *table[T]) len() int { return t.live }

func (t *table[T]) find(id JobID) (int, bool) {
	return slices.BinarySearchFunc(t.rows, id, func(r row[T], id JobID) int { return cmp.Compare(r.id, id) })
}

func (t *table[T]) get(id JobID) *T {
	if i, ok := t.find(id); ok {
		return t.rows[i].v
	}
	return nil
}

func (t *table[T]) put(id JobID, v *T) {
	switch {
	case t.live == 0:
		t.rows = t.rows[:0] // the peer's next process begins its ids anew
	case len(t.rows) > 2*t.live+16:
		t.rows = slices.DeleteFunc(t.rows, func(r row[T]) bool { return r.v == nil })
	}
	t.rows = append(t.rows, row[T]{id, v})
	t.live++
}

func (t *table[T]) drop(id JobID) {
	if i, ok := t.find(id); ok && t.rows[i].v != nil {
		t.rows[i].v = nil
		t.live--
	}
}

// all walks the jobs by rising id; the walk may drop them.
func (t *table[T]) all() iter.Seq2[JobID, *T] {
	return func(yield func(JobID, *T) bool) {
		for _, r := range t.rows {
			if t.live == 0 {
				return
			}
			if r.v != nil && !yield(r.id, r.v) {
				return
			}
		}
	}
}
