package session

// Current is what KeepNew must know of the connection in use with a peer.
type Current struct {
	Exists     bool
	Dialed     bool // by this node
	HasSession bool // Hellos are exchanged on it
	Ready      bool // and the peer is not silent
	BootID     uint64
}

// KeepNew says whether a connection that the peer dialed, and that begins with the
// peer's Hello, replaces the current one. Of two connections that both sides dialed
// at once, both sides keep the one that the smaller id dialed; a newer connection of
// the peer replaces its older one.
func KeepNew(local, remote string, cur Current, bootID uint64) bool {
	switch {
	case !cur.Exists, !cur.Dialed, remote < local:
		return true
	case !cur.HasSession:
		return false // it is open and about to say its Hello
	}
	return !cur.Ready || cur.BootID != bootID
}
