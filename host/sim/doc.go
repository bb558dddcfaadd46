// Package sim plays clusters of 2 to 50 nodes in one process, under a fake clock and a
// seeded network, and checks after every step what must always hold.
//
// # What is real
//
// Each node is made of the cores that a daemon runs: a session.Core for each peer, a
// join.Join, a tier.Primary with its slots, epochs, pins and bytes (in memory of its own
// instead of a file), and the planner and the producer's machine of registry/plan with
// shipped rules, opened natively. Chunks hold real bytes, which follow from their keys,
// with real checksums.
//
// # What stands in for the rest
//
// The goroutines of package host are a thin glue here, which keeps to the same order:
//
//	here           mirrors in host
//	consumer.go    consumer.go, fetch.go (fetch)
//	reconsider.go  reconsider.go
//	producer.go    producer.go
//	serve.go       supply.go
//	hold.go        hold.go, meeting.go
//	data.go        fetch.go (connectData, sink) and package transfer: two lanes a link,
//	               frames that begin and end, torn ones, waits for a lane
//	net.go         session/wire: connections, attempts, what is under way
//	node.go        node.go (Close), session/wire's actors
//
// A wait of host in a goroutine is a state here, at which the node looks after each of its
// steps. What a mirror cannot cover is the glue itself: its locks, its contexts, its order
// of goroutines. For that there are the drawn deployments of package host under the race
// detector, and the tests with real processes. Of rules that differ only the session's side
// is played: what the check of a pair comes to, and when, is drawn.
//
// # A run
//
// A seed is a [Schedule]: nodes, a model, whether both sides of a pair dial, whether the nodes
// run two versions of the rules, whether a message takes only a few keys, whether a peer's
// budget is tight, at least 20 requests with the whims of their
// engines (queueing, preemption, native prefixes, generated tokens, aborts, a producer that
// never begins or has less of the prompt), and at least 3 faults. A fault waits for a message boundary: the n-th Hello, Lookup, Demand, ... between
// two nodes that is sent or delivered. It is struck between two events of that very
// instant; one that meets no boundary in time strikes anyway. Faults end. Two seconds
// after the last one has, pulls go over every pair that requests have used. At the end all
// ages pass, and nothing may be left.
//
// All time is that of the world; a node sees its own clock, which may drift. Everything
// that is drawn follows from the seed, the delays of each path from a stream of their own,
// so that a schedule that loses a request or a fault leaves the rest much as it was.
//
// # What must hold
//
// After every step, for every node that it touched:
//
//   - every lookup, demand, peer's job and request has exactly one result;
//   - what is kept for a peer is what its jobs have, and within its budget; a pair that is not
//     accepted uses only leg probe;
//   - each pin, slot and grab of the tier has an owner that knows of it, and each hold that
//     the join was given is parked, or bound by a job;
//   - bytes that are readable, pushed or loaded are those of their key; they go only into the
//     epoch of a slot that they were sent for, and no slot is handed out while bytes for an
//     earlier epoch still come into it;
//   - no wait is beyond its limit, and none that ends for its limit ends before: to the
//     nanosecond, two under a drifting clock; silence makes a peer suspect and dead exactly
//     then, a refused connection at once, pings go out and peers are dialed again when they must. A node that was frozen ends what is due at the instant at which it goes on;
//   - the producer's last word leaves no key without a word, and a demand after it has its
//     words at once; an Abort ends its job in the same step, and is acknowledged; what is
//     being pushed is cancelled before its job ends;
//   - nobody finds that a peer breaks the protocol, and nothing panics.
//
// At the end: 95 % of the last pulls have hit, every session is ready, and no pin, slot in
// state writing, transfer, job or remembered key is left.
//
// # A seed that fails
//
// It plays again to the last step (Result.Digest), and [Shrink] leaves out faults, requests
// and nodes while the same invariant still breaks. `make sim SEED=n SEEDS=1` plays one
// seed; go test ./host/sim -run TestSeeds -seed n -seeds 1 -trace prints each step.
//
// # Legs
//
// A leg is a row of the table legs, and a name that schedules draw.
package sim
