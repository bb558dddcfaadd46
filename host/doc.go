// Package host is the node daemon: it owns memory, transfers and the sessions with
// peers, and runs the flows that bring a producer's chunks to a consumer.
//
// # The story
//
// Start first takes what can fail at once: the state directory, the HTTP port, which
// answers probes from then on, the slab, the other ports and the engine socket's lock.
// Then it has the deployment judged, which may take a minute; no rule serves before its
// verdict is "accepted", so the peers' port is bound but not served until then. Last
// comes the engine socket: an engine that can connect finds everything ready.
//
// An engine attaches with its memory: a region a group, in host memory or on the node's GPU
// (package devices), allocated here or its own, whose blocks lie in fragments at strides of
// the engine's choice. On a GPU it works ahead of its host, so a store or a load names an
// event in the engine's stream to wait for. A GPU that is lost fails the jobs on it, each with
// the reason; its engines compute for themselves, and engines in host memory go on.
//
// A producer's engine begins a request. The node pins what its tier holds of the
// prompt already, and a plan.Machine says which GPU prefix may be reused and, step by
// step, which blocks to copy into slots, several chunks at a time. A chunk that is whole
// gets its checksum and becomes readable; when it belongs to the supply, it is offered to the
// transfer beside the copies that go on, and waits there, pinned, for its consumer. The end
// of the request is the last word.
//
// A consumer's engine begins the same request on another node. The node plans what to
// fetch: in leg pd from what the producer of the same prompt must supply, in leg probe
// from two lookups at most; leg demand plans as leg pd, and hears from the producer of
// each chunk, as soon as that has begun, whether it will come. Its own tier's chunks are
// pinned, slots for the others are taken, all or none, and one demand goes to the peer
// with their numbers and epochs. The producer pushes each chunk over the data connections
// straight into its slot; it becomes readable when its checksum is right. The load compares
// each chunk's checksum again and copies it into the engine's blocks as it comes; once every
// demanded chunk has ended, it plans once more over what is there. A plan of leg probe may
// count on chunks that are still being written. When one of them does not come, the node
// plans once more without it and demands what is new; the engine was told of those chunks as
// well, as a fallback, so that they have a place. In leg demand the same is done after the first refusals, without waiting for the rest: what the new plan does
// not use is given up at once.
//
// # Versions
//
// A peer of other rules, parameters or caps is on leg probe until package pairs has found
// out whether what each side demands is what the other one supplies, in the background and
// in a process of its own (see peerrules.go). What the peer runs by is asked of it over the
// session, by digest, and this node gives out the same of itself and nothing else.
//
// # Faults
//
// Whatever goes wrong ends as a lower resume point with the chunks named that could
// not be had, and why; the engine computes the rest itself. Every wait has a deadline
// and one end. Wrong bytes are dropped where they are noticed: on the producer before
// they are sent, on the wire before they are readable, on the consumer before they
// leave for the engine. A request that finds no slot takes those of supply that nobody has
// asked for, oldest first; only then is there no room.
//
// # Who may come
//
// A peer is in the configuration, or dials from one of its ranges; with TLS its certificate
// is for its identity, on control and data, whoever dialed (package admit). The only address
// that a peer can make this node connect to is its data port, at its own host or in a range:
// an engine names peers by their ids. What has not said who it is is bounded by address.
//
// # What it says
//
// The counters have every chunk, by group, leg and cause. The log has a fault once, with the
// groups and chunks that the first request missed by it (see faults.go and package
// limitlog); that somebody gives a request up is no warning. Status says what the node
// holds and waits for at this moment, at every stage of its life, and never waits itself
// for a peer or an engine.
//
// # Who holds what
//
// Every pin has an owner: "request" a consumer, "produce" a producer and the supply
// that it has offered, "peer" a peer's demand in leg probe, and in leg demand what
// the tier holds beside the transfer's supply. A chunk that another request is just writing
// is not waited for on the producer's side: it is kept a second time, in a slot without a
// key, until somebody is done with it.
//
// What the demands of one peer keep from being reused, pinned for them or bound to them, is
// bounded in bytes; see "What bounds a peer?" in RATIONALE.md.
package host
