package replay

import "fmt"

// A pool is the blocks of one group's region. A block is in use by requests, or free.
// A free block whose contents are known by hash stays findable until it is taken for
// something else: the native prefix cache of an engine. Free blocks without known
// contents are taken first, last freed first; then the others, longest unused first.
type pool struct {
	blocks []poolBlock
	cached map[hash]uint32
	// plain is a stack of free blocks without known contents.
	plain []uint32
	// oldest and newest end the list of free blocks with known contents.
	oldest, newest int32
	free           int
}

type poolBlock struct {
	users  int
	known  bool
	hash   hash
	older  int32
	newer  int32
	inList bool
}

const noBlock = -1

func newPool(blocks uint32) *pool {
	p := &pool{
		blocks: make([]poolBlock, blocks),
		cached: map[hash]uint32{},
		oldest: noBlock, newest: noBlock,
		free: int(blocks),
	}
	for id := blocks; id > 0; id-- {
		p.plain = append(p.plain, id-1)
	}
	return p
}

// take returns n blocks for new contents, or an error and nothing taken.
func (p *pool) take(n int) ([]uint32, error) {
	if n > p.free {
		return nil, fmt.Errorf("%d blocks wanted, but only %d of %d are free", n, p.free, len(p.blocks))
	}
	ids := make([]uint32, 0, n)
	for range n {
		var id uint32
		if last := len(p.plain) - 1; last >= 0 {
			id = p.plain[last]
			p.plain = p.plain[:last]
		} else {
			id = uint32(p.oldest)
			p.unlink(id)
			p.forget(id)
		}
		p.blocks[id].users = 1
		p.free--
		ids = append(ids, id)
	}
	return ids, nil
}

// find returns the block that holds what h names.
func (p *pool) find(h hash) (uint32, bool) {
	id, ok := p.cached[h]
	return id, ok
}

// share makes the caller one more user of a block that find returned.
func (p *pool) share(id uint32) {
	b := &p.blocks[id]
	if b.users == 0 {
		p.unlink(id)
		p.free--
	}
	b.users++
}

// publish says what a block in use holds. When another block is known to hold the
// same, that one stays the findable one.
func (p *pool) publish(id uint32, h hash) {
	if _, ok := p.cached[h]; ok {
		return
	}
	p.forget(id)
	b := &p.blocks[id]
	b.known, b.hash = true, h
	p.cached[h] = id
}

// release gives blocks back, one use each. The first of ids is taken again last.
func (p *pool) release(ids ...uint32) {
	for i := len(ids) - 1; i >= 0; i-- {
		b := &p.blocks[ids[i]]
		if b.users--; b.users > 0 {
			continue
		}
		p.free++
		if b.known {
			p.link(ids[i])
		} else {
			p.plain = append(p.plain, ids[i])
		}
	}
}

func (p *pool) forget(id uint32) {
	if b := &p.blocks[id]; b.known {
		delete(p.cached, b.hash)
		b.known = false
	}
}

func (p *pool) link(id uint32) {
	b := &p.blocks[id]
	b.inList, b.older, b.newer = true, p.newest, noBlock
	if p.newest != noBlock {
		p.blocks[p.newest].newer = int32(id)
	} else {
		p.oldest = int32(id)
	}
	p.newest = int32(id)
}

func (p *pool) unlink(id uint32) {
	b := &p.blocks[id]
	if !b.inList {
		return
	}
	if b.older != noBlock {
		p.blocks[b.older].newer = b.newer
	} else {
		p.oldest = b.newer
	}
	if b.newer != noBlock {
		p.blocks[b.newer].older = b.older
	} else {
		p.newest = b.older
	}
	b.inList = false
}
