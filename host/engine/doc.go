// Package engine is the API between an inference engine and the daemon of its node:
// gRPC on a Unix socket, a server that keeps the books, and a client in Go.
//
// # The story
//
// An engine attaches: it shows its deployment and how its blocks lie, and gets memory regions,
// one for each group, which both processes map, or gives its own (layout.go). It opens the stream of events, begins requests,
// and gives jobs: store (a step of a producer has ended) and load (bring what was
// fetched into these blocks). A job is answered at once with a number; its result
// comes as an event. Finish ends a request.
//
// The server checks each message against the deployment before anything else sees
// it, counts against its bounds, and orders the jobs of one request. What the jobs do
// is the Backend's: package host.
//
// # Laws
//
//   - Every job that was accepted has exactly one event, and every request ends
//     exactly once: by Finish, or because its engine is gone. One whose Begin was given up
//     is ended too: by the server, or by the Finish that the caller sends.
//   - The jobs of one request run in the order in which they were accepted. Requests
//     do not wait for one another.
//   - The closed stream of events is the last word for all requests of an engine.
//     Its regions are freed when the last job that uses them has ended.
//   - A message that is refused changes nothing. The refusal is a gRPC status whose
//     text names the value, the value that it was held against, and what to change.
//
// # Trust
//
// The socket has mode 0600, and the kernel's word on who connects is checked as well:
// the daemon's own user, or root. An engine id is a random token and is not printed
// in logs.
package engine
