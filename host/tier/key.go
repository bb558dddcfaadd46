package tier

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"

	"github.com/tierd/tierd/host/tier/crc32c"
)

// Sizes of the parts of a Key, in bytes.
const (
	// TenantBytes of SHA-256 of the tenant's salt: keys of two tenants never meet.
	TenantBytes = 16
	// HashBytesMax of the engine's prefix hash, padded at the right with zeros.
	HashBytesMax = 32
	// KeyBytes is the size of a key.
	KeyBytes = TenantBytes + HashBytesMax + 4
)

// A Key names the content of one chunk: the tenant, the prefix hash up to the chunk's
// last token, and the group. Two chunks with equal keys hold equal bytes.
type Key [KeyBytes]byte

// Tenant returns the tenant part of keys for a salt.
func Tenant(salt []byte) (t [TenantBytes]byte) {
	sum := sha256.Sum256(salt)
	copy(t[:], sum[:])
	return t
}

// MakeKey returns the key of a chunk of a group whose prefix up to its last token has
// the given hash. A hash longer than HashBytesMax is cut, which keeps it a hash; hosts
// refuse such a hash scheme when an engine attaches.
func MakeKey(tenant [TenantBytes]byte, hash []byte, group uint32) (k Key) {
	copy(k[:TenantBytes], tenant[:])
	copy(k[TenantBytes:TenantBytes+HashBytesMax], hash)
	binary.BigEndian.PutUint32(k[TenantBytes+HashBytesMax:], group)
	return k
}

// Group returns the group index.
func (k Key) Group() uint32 { return binary.BigEndian.Uint32(k[TenantBytes+HashBytesMax:]) }

// String returns enough of the key to find it in two logs: 4 bytes of the tenant, 8
// of the hash, and the group.
func (k Key) String() string {
	return fmt.Sprintf("%s:%s/g%d", hex.EncodeToString(k[:4]), hex.EncodeToString(k[TenantBytes:TenantBytes+8]), k.Group())
}

// Checksum is the CRC-32C of a chunk's bytes, computed once at store and carried with
// them.
func Checksum(b []byte) uint32 { return crc32c.Checksum(b) }
