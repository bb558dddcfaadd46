package sim

// A rng is splitmix64: small, fast, and the same in every release of Go, so that a seed
// means the same run for ever.
type rng struct{ s uint64 }

func (r *rng) next() uint64 {
	r.s += 0x9e3779b97f4a7c15
	return mix(r.s)
}

func mix(z uint64) uint64 {
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// n returns a number in [0, n).
func (r *rng) n(n int) int { return int(r.next() % uint64(n)) }

// between returns a number in [lo, hi].
func (r *rng) between(lo, hi int64) int64 { return lo + int64(r.next()%uint64(hi-lo+1)) }

// one reports true once in n.
func (r *rng) one(n int) bool { return r.n(n) == 0 }

// stream returns a generator of its own for what the numbers name, so that a schedule that
// loses a part leaves the draws of the others as they were.
func stream(seed uint64, names ...uint64) rng {
	for _, n := range names {
		seed = mix(seed*0x9e3779b97f4a7c15 + n + 1)
	}
	return rng{seed}
}
