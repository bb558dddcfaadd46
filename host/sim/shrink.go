package sim

// Shrink removes faults, requests and nodes from a schedule for as long as it still breaks
// the invariant of that kind, and returns the smallest one found.
func Shrink(s *Schedule, o Options, kind string) *Schedule {
	o.Trace = nil
	fails := func(c *Schedule) bool {
		r := Run(c, o)
		return r.Failure != nil && r.Failure.Kind == kind
	}
	best := s.clone()
	if !fails(best) {
		return best
	}
	for _, simpler := range []func(*Schedule){
		func(s *Schedule) { s.DialBoth = false }, func(s *Schedule) { s.RulesDiffer = false },
		func(s *Schedule) { s.FewKeys = false }, func(s *Schedule) { s.TightBudget = false },
	} {
		c := best.clone()
		if simpler(c); fails(c) {
			best = c
		}
	}
	for again := true; again; {
		again = false
		for size := max(len(best.Requests), len(best.Faults)); size >= 1; size /= 2 {
			again = cutRuns(&best, size, fails) || again
		}
	}
	for best.Nodes > 2 {
		c := best.clone()
		c.Nodes--
		if !c.dropNode() || !fails(c) {
			break
		}
		best = c
	}
	return best
}

// cutRuns tries to leave out each run of so many requests, and of so many faults.
func cutRuns(best **Schedule, size int, fails func(*Schedule) bool) (some bool) {
	for at := 0; at < len((*best).Faults); {
		c := (*best).clone()
		c.Faults = append(c.Faults[:at], c.Faults[min(at+size, len(c.Faults)):]...)
		if fails(c) {
			*best, some = c, true
			continue
		}
		at += size
	}
	for at := 0; at < len((*best).Requests); {
		c := (*best).clone()
		c.Requests = append(c.Requests[:at], c.Requests[min(at+size, len(c.Requests)):]...)
		if fails(c) {
			*best, some = c, true
			continue
		}
		at += size
	}
	return some
}

// dropNode makes room for one node less: a node that nothing names goes, and those above
// it move down. It reports false when every node is named.
func (s *Schedule) dropNode() bool {
	named := make([]bool, s.Nodes+1)
	for i := range s.Requests {
		named[s.Requests[i].Consumer], named[s.Requests[i].Producer] = true, true
	}
	for i := range s.Faults {
		named[s.Faults[i].A], named[s.Faults[i].B] = true, true
	}
	for gone := range named {
		if named[gone] {
			continue
		}
		down := func(i *int) {
			if *i > gone {
				*i--
			}
		}
		for i := range s.Requests {
			down(&s.Requests[i].Consumer)
			down(&s.Requests[i].Producer)
		}
		for i := range s.Faults {
			down(&s.Faults[i].A)
			down(&s.Faults[i].B)
		}
		return true
	}
	return false
}
