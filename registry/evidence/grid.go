package evidence

import (
	"fmt"
	"slices"

	"github.com/tierd/tierd/registry/check"
)

// A grid is one group's chunks, laid out for a table: a column for each chunk, or, where
// there are many, for each run of chunks that are in the same sets.
type grid struct {
	Name        string
	ChunkTokens uint64
	Columns     []column
	Rows        []gridRow
	// Compressed says that columns hold more than one chunk; Mixed, that some hold chunks
	// that are not in the same sets.
	Compressed, Mixed bool
	// Broken are the runs of chunks that are missing or surplus, for the list below the table.
	Broken []broken
	// BrokenMore is how many more runs there are.
	BrokenMore int
}

// A column is a run of chunks.
type column struct {
	check.Range
	// Broken says that some of them are missing or surplus.
	Broken bool
}

// A gridRow is one set.
type gridRow struct {
	Name  string
	Cells []cell
}

// A cell says whether a column's chunks are in a set.
type cell struct {
	// Class and Letter: what is seen. Both are of the set, or of nothing.
	Class, Letter string
	// Says is what is heard.
	Says string
	// ID of a cell that breaks the relation; empty for others.
	ID string
}

// A broken run of chunks, and the cell that shows it.
type broken struct{ ID, Says string }

// Limits of a table's width.
const (
	// singleChunksMax: so many columns of one chunk can be read without being lost.
	singleChunksMax = 64
	// columnsMax: beyond it, runs in which nothing is broken are put together.
	columnsMax = 96
	// brokenRunsMax runs of broken chunks have columns of their own; the rest are counted.
	// A rule that is wrong everywhere is wrong in the first few, too.
	brokenRunsMax = 24
)

// letters of the sets; the classes of the style sheet are the sets' names.
var letters = map[string]string{"supply": "S", "demand": "D", "need": "N", "mask": "A", "missing": "M", "surplus": "X"}

func breaks(set string) bool { return set == "missing" || set == "surplus" }

// newGrid lays out the rows of group number i of finding number n, which make its ids.
func newGrid(n, i int, g *check.GroupRows) grid {
	out := grid{Name: g.Name, ChunkTokens: g.ChunkTokens, Columns: columnsOf(g)}
	for _, c := range out.Columns {
		out.Compressed = out.Compressed || c.Last > c.First
	}
	for _, r := range g.Rows {
		row := gridRow{Name: r.Name}
		for k, c := range out.Columns {
			x := out.cell(&r, c.Range)
			if x.ID != "" {
				out.Columns[k].Broken = true
				x.ID = fmt.Sprintf("f%d-g%d-%s", n, i, x.ID)
				if len(out.Broken) < 2*brokenRunsMax {
					out.Broken = append(out.Broken, broken{x.ID, x.Says})
				} else {
					out.BrokenMore++
				}
			}
			row.Cells = append(row.Cells, x)
		}
		out.Rows = append(out.Rows, row)
	}
	return out
}

// cell says how many of a column's chunks are in a set.
func (g *grid) cell(r *check.RowOfRanges, c check.Range) cell {
	in := overlap(r.Chunks, c)
	all := uint64(c.Last-c.First) + 1
	if in == 0 {
		return cell{Class: "none", Letter: "·", Says: "not in " + r.Name}
	}
	letter, class := letters[r.Name], r.Name
	if letter == "" {
		letter, class = "#", "other"
	}
	says := g.where(c) + ": " + r.Name
	x := cell{Class: class, Letter: letter, Says: says}
	if in < all {
		g.Mixed = true
		x.Class, x.Letter = class+" part", letter+"…"
		x.Says = fmt.Sprintf("%s: %d of them %s", g.where(c), in, r.Name)
	}
	if breaks(r.Name) {
		x.ID = fmt.Sprintf("%s-%d", r.Name, c.First)
	}
	return x
}

// where names a run of chunks and the tokens in it.
func (g *grid) where(c check.Range) string {
	tokens := fmt.Sprintf("tokens %d to %d", uint64(c.First)*g.ChunkTokens, (uint64(c.Last)+1)*g.ChunkTokens-1)
	if c.First == c.Last {
		return fmt.Sprintf("chunk %d, %s", c.First, tokens)
	}
	return fmt.Sprintf("chunks %d to %d, %s", c.First, c.Last, tokens)
}

// Label of a column's head.
func (c column) Label() string { return c.String() }

// overlap counts the chunks of c that are in a set of rising runs.
func overlap(set []check.Range, c check.Range) (n uint64) {
	for _, r := range set {
		if lo, hi := max(r.First, c.First), min(r.Last, c.Last); lo <= hi {
			n += uint64(hi-lo) + 1
		}
	}
	return n
}

// columnsOf divides the chunks from 0 to the last one that a set names.
func columnsOf(g *check.GroupRows) []column {
	cuts := []uint64{0} // firsts of runs
	var end uint64
	for _, r := range g.Rows {
		for _, c := range r.Chunks {
			cuts = append(cuts, uint64(c.First), uint64(c.Last)+1)
			end = max(end, uint64(c.Last)+1)
		}
	}
	var columns []column
	if end <= singleChunksMax {
		for k := range end {
			columns = append(columns, column{Range: check.Range{First: uint32(k), Last: uint32(k)}})
		}
		return columns
	}
	slices.Sort(cuts)
	cuts = slices.Compact(cuts)
	for i := 0; i+1 < len(cuts); i++ {
		columns = append(columns, column{Range: check.Range{First: uint32(cuts[i]), Last: uint32(cuts[i+1] - 1)}})
	}
	if len(columns) > columnsMax {
		columns = merge(columns, g)
	}
	return columns
}

// merge keeps the first columns that break the relation, the ones beside them and the two
// ends, and puts the others together.
func merge(columns []column, g *check.GroupRows) (out []column) {
	keep := make([]bool, len(columns))
	keep[0], keep[len(keep)-1] = true, true
	kept := 0
	for i, c := range columns {
		if kept == brokenRunsMax {
			break
		}
		for _, r := range g.Rows {
			if breaks(r.Name) && overlap(r.Chunks, c.Range) > 0 {
				keep[max(i-1, 0)], keep[i], keep[min(i+1, len(keep)-1)] = true, true, true
				kept++
				break
			}
		}
	}
	for i, c := range columns {
		if i > 0 && !keep[i] && !keep[i-1] {
			out[len(out)-1].Last = c.Last
			continue
		}
		out = append(out, c)
	}
	return out
}
