// Package pairs finds out whether this node and a peer of another version may use legs pd
// and demand with each other.
//
// # The story
//
// A session says which rules, parameters, policies and caps the peer runs by, as digests
// (a [Version]). Equal ones need no check. Otherwise the node and the peer may only use leg
// probe, until each has judged the two versions by relation pair, by itself: package
// registry/check runs what a consumer of the one demands against what a producer of the
// other supplies, both ways.
//
// For that a node needs what the peer runs by. All of it is named by SHA-256: the
// deployment in its canonical form, the list of its rules, and the modules in that list. A
// [Shelf] is what a node gives out of its own deployment, and nothing else. What has a
// digest is taken from the first of: this node's own shelf (most upgrades change parameters
// and no module), the operator's directory (peer_rules), what was fetched before, and the
// peer. Whatever comes has the digest that was asked for, or is not used.
//
// A module is WebAssembly and runs as every other one does: without files, network or
// clock, with bounded memory and fuel. A rule that is a program is never fetched, and none
// is run because a peer named it: only one that is this node's own, or that the operator
// has put into peer_rules, with that digest.
//
// # What comes of it
//
//	               Up, other version                         every way covered
//	none, equal  --------------------->  checking  -----+-->  accepted
//	                                        ^           +-->  refused      a way has a counterexample
//	                                        |           +-->  undecided    no time, or something is not to be had
//	                                        +-----------------------+
//	                                          Retry; a pause; the peer's next session or process
//
// Each direction counts by itself: when one version stores enough for the other, and not the
// other way round, the first one may produce for the second. Refusals name the smallest
// failing prompt; a file has the whole counterexample. A verdict is kept by the two
// versions and the executable that judged, accepted or refused, and used again after a
// restart. What was undecided is tried again when something has changed: a reload
// ([Judge.Retry]) or another version; when a peer did not give what it should, with another
// peer of the version, or another process of the same; and when the way to it failed, or it was
// too slow, with its next sessions or its next word after a silence, a few times, and after
// pauses of a minute, doubling to an hour. What changes while the version is in work counts at
// the end of that.
//
// # In the background
//
// No method waits for a peer, a file or a check, so sessions and requests do not either.
// Checks run one at a time and each on one core; fetches a few at a time; both have
// deadlines, and end when the last peer of a version has gone and when the Judge is closed.
// Peers of one version share one check.
package pairs
