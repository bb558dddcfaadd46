package transfer

import "github.com/tierd/tierd/host/tier/crc32c"

func checksum(b []byte) uint32 { return crc32c.Checksum(b) }
