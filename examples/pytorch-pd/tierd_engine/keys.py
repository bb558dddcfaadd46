"""What keys and plans are made of: prefix hashes, and chunks as runs of blocks."""

import hashlib
import struct

HASH_BYTES = 32


def prefix_hashes(tokens, hash_tokens, before=b""):
    """The chained prefix hashes of a text, one for each whole granule, in one string.

    Hash i covers tokens [0, (i+1)*hash_tokens). before is the hash that the chain goes on
    from, when tokens is the rest of a text. An engine that has such hashes of its own
    sends those instead: any chain of 16 to 32 bytes will do that all engines of one
    deployment compute alike, and that tells apart whatever makes KV differ (an adapter,
    an image). What tells tenants apart is the tenant salt.
    """
    out = []
    for i in range(0, len(tokens) - hash_tokens + 1, hash_tokens):
        granule = tokens[i : i + hash_tokens]
        before = hashlib.sha256(before + struct.pack(f"<{hash_tokens}I", *granule)).digest()
        out.append(before)
    return b"".join(out)


def blocks_of(groups, chunk_blocks):
    """The logical blocks of a plan: {group: [first block of a chunk, ...]}, ascending.

    groups is BeginReply.demand, BeginReply.fallback or Event.loaded, chunk_blocks the
    blocks of a chunk for each group.
    """
    out = {}
    for g in groups:
        firsts = out.setdefault(g.group, [])
        for r in g.chunks:
            firsts.extend(c * chunk_blocks[g.group] for c in range(r.first, r.last + 1))
    return out
