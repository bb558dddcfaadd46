// Package tier holds chunks in host memory and says who may read, write or reuse each
// of them.
//
// # The story
//
// The primary tier is one shared-memory file cut into slots of equal size; a slot has
// room for one chunk. A slot is in one of these states:
//
//   - free: no content, no owner;
//   - writing: an owner fills it. With a key, lookups answer Pending and readers wait;
//     without one (staged) nobody else sees it;
//   - readable: its content is what its key names. Any number of owners may pin it for
//     reading; without pins it may be evicted, least recently used first;
//   - detached: it was readable and its key is gone because its bytes proved wrong;
//     readers that hold pins keep the memory, nobody else finds it;
//   - fenced: its write ended while the data plane was still putting bytes into it. Its
//     key is gone at once, the memory is reused only when that grab ends.
//
// Everything that keeps a slot from being reused has an owner and an age: write pins,
// read pins and grabs. Release of an owner drops all that it holds, so an engine or a
// peer that dies leaks nothing. There is no other way to lose a slot, and the tests
// count all of them after every step.
//
// # Epochs
//
// A Slot handle is an index and an epoch, and the epoch rises each time a slot is
// handed out. An operation with the handle of an earlier owner gets ErrStale and
// changes nothing. That is the fence against late writes: a peer whose transfer was
// aborted still has the old epoch, and the slot can be given to somebody else at once.
//
// # Recency
//
// A batch of keys is used last key first, so that the head of a prefix ends up newest
// and a prefix is evicted from its tail: the head is what makes the rest useful.
// Admit, Name, Pin and Touch are uses. Lookup is not: looking is not fetching.
//
// # Cost
//
// All operations take batches, hold one mutex, and cost O(keys). Nothing in this
// package waits; who wants to wait takes a channel from Watch and brings a deadline.
package tier
