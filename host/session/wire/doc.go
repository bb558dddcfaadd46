// Package wire runs peer sessions over gRPC: it brings the messages of connections,
// the commands of the node and the time to a session.Core per peer, and carries the
// core's effects out.
//
// # Goroutines
//
// Each peer has one goroutine, its actor, that owns the peer's Core; commands reach
// it through a mailbox and never block the caller. A connection has a reader and a
// writer of its own with bounded queues, so a peer that does not read or is frozen
// stops only its own connection. No lock is shared between peers while one works.
//
// # One session per pair
//
// Either side may dial, and both may at once. The connection that the node with the
// smaller id dialed stays. A connection of the other kind is taken while there is no
// better one: the smaller node refuses it only when its own is open, and not when
// the peer behind it is silent or has become another process. See session.KeepNew.
//
// # What a peer runs by
//
// Fetch brings bytes by their digest over the session, and Host.OnAsk gives them out; see
// package session. One answer is on its way at a time, so what a session has to say stands
// behind 32 KiB at most. The actors of one peer, when it is configured anew, follow each
// other: the host hears of the end of the one before the beginning of the next.
//
// # A goodbye
//
// A peer that closes says so first. What follows from it, such as attempts that find nobody and
// a state that becomes suspect and dead, is told at info until the peer has a session again.
// Everything else that goes wrong is told at warn, a peer that comes back and is refused
// included. A stream that its dialer gives up before its hello is no fault either: it closes, or
// has another one by now.
//
// # Trust
//
// With TLS both sides present certificates (the caller's tls.Config demands them),
// and Config.Verify ties the node id of the Hello to one. Config.Admit says which nodes may
// dial, and Config.CheckHello what they may say, before anything is kept of them; Review
// asks again. What comes in before a Hello is bounded in size, time and count, and when
// there is too much of it the oldest goes (package halfopen), so that a flood keeps nobody
// out; garbage on the port costs one closed connection and one line of log a second.
//
// What waits for a peer that does not read is bounded in messages and bytes; one more
// ends the connection.
package wire
