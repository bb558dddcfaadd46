// Package transfer is the data plane between two peers: it puts the bytes of chunks
// from the producer's slab into destination slots of the consumer.
//
// # The story
//
// A session belongs to one pair of peers and is named by a random token that they
// agreed on over the control stream. The consumer dials the producer's data address
// several times; each connection is a lane of the session and begins with a Hello. The
// producer then pushes frames: a header that names job, destination slot and epoch,
// followed by the payload straight out of its slab. The consumer asks its Sink where
// the payload goes, reads it straight into that memory in pieces, and computes the
// checksum of each piece while it is hot in the cache. Only when the whole payload has
// the checksum that the header carries does the Sink hear that the chunk is good.
//
// Which chunks are sent, to which slots, and what a failure means to a request is
// settled on the control stream; nothing here waits for an answer from the consumer.
//
// # Laws
//
//   - Every item of Push has exactly one result, and when it is given the item's bytes
//     are no longer read. A nil result says that the kernel took the bytes, not that
//     the consumer has them.
//   - Every successful Sink.Begin is followed by exactly one call of its done, and when
//     it is called the memory is no longer written.
//   - A frame that the Sink does not want (unknown job, old epoch, too long) is read
//     and dropped without touching any memory of the Sink, and the lane lives on.
//   - A header that is not what this version writes ends the connection. Nothing after
//     it can be trusted, not even its length.
//   - Lanes fail one by one. The consumer dials a lost lane again; what was on it has
//     failed, the rest of the job goes over the others.
//   - No wait is without bound: connect and hello, each piece, each idle lane, each
//     write. An idle lane carries a ping, so silence means trouble.
//
// # Wire, version 1 (little-endian)
//
// Hello, 32 bytes, consumer to producer: magic "TDH1", version u16, lane u16, token 16
// bytes, reserved u32 (0), CRC-32C of the bytes before.
// Ack, 16 bytes, back: magic "TDA1", version u16, status u16, reserved u32 (0), CRC-32C.
// Frame header, 48 bytes: magic "TDF1", kind u16 (1 data, 2 ping), more u16, job u64,
// seq u32, slot u32, epoch u64, length u32, sum u32, reserved u32 (0), CRC-32C. A ping
// has zeros from more to sum, and no payload.
// Small frames travel in batches, so that one read call fills several slots: first the
// headers, each of which says how many more follow it, then their payloads in order.
//
// With TLS a token is of use only with the certificate of the node that it was made for
// (RegisterFor, Options.Verify). Connections that have not said hello are bounded by address,
// and the oldest goes (package halfopen).
//
// Without TLS the token is all that keeps a stranger out, and it can be read on the
// wire: that is for networks that are closed by other means.
package transfer
