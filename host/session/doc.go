// Package session is the protocol that two nodes speak about KV chunks, as a pure
// state machine: messages, ticks and local commands in, messages and results out, as
// etcd's raft. It has no I/O, clock, goroutine or random, so a cluster runs under a
// fake clock. Package session/wire is its edge on gRPC; package sessionpb holds the
// messages.
//
// # The story
//
// Two nodes share one session: a stream of messages in each direction. Both say Hello
// first: who they are, which process (boot id), which layout of bytes, which rules. A
// layout or hash scheme that differs is refused, naming the fields and both values.
// Rules, deployments or caps that differ leave only leg probe until the node says that
// the pair is accepted (AllowLegs), for each direction by itself: what one version stores
// may be enough for the other one and not the other way round. The peer is told (Legs), so a
// node demands only where both sides have accepted. To judge the pair a node needs what the
// other one runs by. It asks for it by digest (Ask, Part), a little at a time, over the same
// session, because a peer that only dials has no address at which it could be asked.
//
// Each node is consumer and producer on the same session. A consumer looks keys up
// (Lookup, States), which has no side effect, and demands keys (Demand), each into a
// slot of its own with an epoch, the fence: bytes for another epoch are dropped where
// they land, so an aborted slot can be used again at once. The producer says per key
// what is available and what is refused, when it knows (Supply), at the latest with its
// last word; pushes the available ones over the data connections, which are not part of
// this package; and says what became of each (Done). A producer that knows its plan says
// at once what will come and what never will (leg demand), whether the demand came before
// or while it computes. While bytes of a demand are due, the consumer renews its lease on
// them (Renew).
//
//	consumer                         producer
//	Demand{keys, slots, epochs} -->
//	                            <--  Supply{will come, refused}   leg demand, when it begins
//	                            <--  Supply{available, refused}   any number
//	                            <==  bytes on the data connections
//	                            <--  Supply{last}                 the last word
//	                            <--  Done{code a key}
//	Renew                       -->                               while bytes are due
//	Done{release} or Abort      -->
//	                            <--  AbortAck
//
//	Ask{digest, offset}         -->                               rules differ
//	                            <--  Part{bytes}
//	Legs{supply?}               <->                               when it changes
//
// # Waits
//
// Every wait has a limit and an end, all in Limits. A job reaches exactly one result,
// with a cause for each key; what arrived is kept when the rest fails. A peer from
// which no byte comes, on control or data, is suspect after Limits.Suspect: its jobs
// end, and requests that name it are answered at once until bytes come again. So is one
// whose address refuses the connection. FAULTS.md has what real daemons do under real
// faults.
//
// # Bounds
//
// Jobs, keys, texts and ids are bounded; what is over a bound is answered (Busy,
// Invalid, a refusal with a reason), and what a right peer never sends closes the
// session with a reason.
package session
