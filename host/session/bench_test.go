package session

import "testing"

// BenchmarkArrived is one key of one demand while a thousand others are in work: what
// the actor pays for each chunk.
func BenchmarkArrived(b *testing.B) {
	s := newSolo(b).up()
	for range 1000 {
		s.Demand(0, testDemand(8, 0))
	}
	s.Take()
	const keys = 8192
	for n := 0; b.Loop(); n++ {
		if n%keys == 0 {
			b.StopTimer()
			s.Demand(0, testDemand(keys, 0))
			b.StartTimer()
		}
		s.Arrived(0, s.nextJob, n%keys, Transferred, "")
	}
}

// BenchmarkDemand is a demand of 8192 keys from command to message, and back at the
// producer to a job.
func BenchmarkDemand(b *testing.B) {
	s, p := newSolo(b).up(), newSolo(b).up()
	req := testDemand(8192, 0)
	for b.Loop() {
		id := s.Demand(0, req)
		for _, e := range s.Take() {
			p.Receive(0, e.(Send).Envelope)
		}
		p.LastWord(0, id)
		p.Take()
		s.Abort(0, id, "")
		s.Take()
	}
}
