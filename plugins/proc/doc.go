// Package proc runs rules in a program of their own: hashicorp/go-plugin, gRPC over a Unix
// socket, the service of package abi/kvpb. It is for a rule that cannot be a WebAssembly
// module; a module is faster and is fenced in better.
//
// # What a subprocess may do
//
// It is native code with the rights of the daemon's user. What is kept from harm is the
// daemon's work, from a program that is wrong: one that crashes, hangs, answers nonsense,
// floods its output or never starts. Nothing here protects from a program that means harm.
// Run only what you would run as that user.
//
// # From a file to a rule
//
// Load reads the file's digest, starts it and asks for its manifests. The process gets no
// environment but go-plugin's own variables, no standard input, a private directory (mode
// 0700) for its socket and as its working directory, which is removed afterwards, and both
// sides prove by one-time certificates that they are the two that were started together. It
// is in a process group of its own, which is killed as a whole, and the kernel kills it
// when the daemon dies. Before each start the file's digest is compared with the one that
// Load read, which is what a verdict names; between that look and the start there is a
// moment in which somebody who may write the file can replace it.
//
// # Calls
//
// Rules are safe for concurrent use. One message to the process costs about as much as a
// hundred small calls, so calls that come while one is on its way travel together in the
// next: a caller that finds nothing on its way sends at once, and nobody waits for a batch
// to fill. Rule.Concurrency says how many callers make good batches.
//
// # Failure
//
// No call waits longer than Options.CallTimeout for the message on its way and as long
// again for its own. A process that does not answer by then is killed, and so is one whose
// messages break the protocol; what it dies of is a *TimeoutError, a *CallError or a
// *ProtocolError, and every call in work gets it. The process is started again in the
// background, after a wait that doubles, at most RestartsMax times in a row; calls never
// wait for that, they fail at once with ErrRestarting, and with ErrGivenUp when it is not
// started any more. Both wrap the failure that led there. An answer of one call that makes
// no sense is an error of that call alone, and so is a *RuleError, which the rule itself
// gave.
package proc
