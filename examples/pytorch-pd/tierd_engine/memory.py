"""KV memory that engine and daemon share, as torch tensors.

A block of a group is 2 x layers pages: K of its first layer, V of its first layer, and so
on; a page is block_tokens x kv_heads x head_dim numbers. Where the pages lie is a list of
strides, one a page: page i of block b is at offset_bytes + b x stride_bytes of a memory.
The memory is the daemon's, and mapped here, or the engine's own, and named to the daemon.
"""

import ctypes
import mmap
import os
from dataclasses import dataclass

import torch

from . import engine_pb2 as pb

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Group:
    """A group of the deployment: AttachReply.deployment is JSON, and has these keys."""

    name: str
    rule: str
    params: dict
    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    chunk_blocks: int
    dtype: torch.dtype

    @classmethod
    def of(cls, fields):
        names = ("name", "rule", "layers", "kv_heads", "head_dim", "block_tokens", "chunk_blocks")
        return cls(params=fields.get("params") or {}, dtype=DTYPES[fields["dtype"]], **{n: fields[n] for n in names})

    @property
    def page_bytes(self):
        return self.block_tokens * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def block_bytes(self):
        return 2 * self.layers * self.page_bytes

    @property
    def chunk_tokens(self):
        return self.block_tokens * self.chunk_blocks

    @property
    def chunk_bytes(self):
        return self.chunk_blocks * self.block_bytes


def block_by_block(group):
    """Strides of the layout that an empty list stands for: a block is one run of bytes."""
    return [
        pb.Stride(offset_bytes=i * group.page_bytes, stride_bytes=group.block_bytes, length_bytes=group.page_bytes)
        for i in range(2 * group.layers)
    ]


def layer_by_layer(group, blocks, memory_per_layer=False):
    """Strides of a tensor [2, blocks, block_tokens, kv_heads, head_dim] for each layer.

    The tensors lie one behind the other in one memory, or in a memory each.
    """
    plane = blocks * group.page_bytes
    out = []
    for i in range(2 * group.layers):
        at = (i % 2 if memory_per_layer else i) * plane
        out.append(
            pb.Stride(
                memory=i // 2 if memory_per_layer else 0,
                offset_bytes=at,
                stride_bytes=group.page_bytes,
                length_bytes=group.page_bytes,
            )
        )
    return out


def views(memories, strides, group, blocks):
    """For each layer (K, V), each a tensor [blocks, block_tokens, kv_heads, head_dim].

    memories are byte tensors; strides has one entry a page.
    """
    size, row = group.dtype.itemsize, group.kv_heads * group.head_dim
    pages = []
    for s in strides:
        flat = memories[s.memory].view(group.dtype)
        pages.append(
            flat.as_strided(
                (blocks, group.block_tokens, group.kv_heads, group.head_dim),
                (s.stride_bytes // size, row, group.head_dim, 1),
                flat.storage_offset() + s.offset_bytes // size,
            )
        )
    return list(zip(pages[0::2], pages[1::2]))


def map_region(region, device):
    """The memory that the daemon has allocated for a pb.RegionReply, as a byte tensor.

    It is mapped as long as a tensor of it lives.
    """
    length = region.memory.length_bytes or region.stride_bytes * region.blocks
    if region.memory.kind == pb.MEMORY_CUDA_IPC:
        return map_cuda(region.memory.handle, region.memory.offset_bytes, length, device)
    fd = os.open(region.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        mapping = mmap.mmap(fd, region.offset_bytes + length)
    finally:
        os.close(fd)
    return torch.frombuffer(mapping, dtype=torch.uint8, offset=region.offset_bytes, count=length)


# CUDA, by the driver's own calls: torch has the context, and no words for these.

IPC_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * IPC_HANDLE_BYTES)]


class _Mapping:
    """Mapped GPU memory for torch.as_tensor, which keeps it as long as a tensor of it lives."""

    def __init__(self, address, offset, length):
        self._address = address
        self.__cuda_array_interface__ = {
            "shape": (length,),
            "typestr": "|u1",
            "data": (address + offset, False),
            "version": 3,
        }

    def __del__(self):
        # It may fail: the process that exported the memory may be gone.
        ctypes.CDLL("libcuda.so.1").cuIpcCloseMemHandle(ctypes.c_uint64(self._address))


def _cuda(name, *arguments):
    result = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
    if result != 0:
        raise RuntimeError(f"{name} failed with CUDA error {result}")


def map_cuda(handle, offset, length, device):
    """GPU memory that another process has exported, as a byte tensor.

    It is mapped as long as a tensor of it lives, and must not be used any more when that
    process has ended or has freed it.
    """
    with torch.cuda.device(device):
        torch.cuda.current_stream(device).synchronize()  # torch has made its context by now
        address = ctypes.c_uint64()
        _cuda("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)
        return torch.as_tensor(_Mapping(address.value, offset, length), device=device)


def export_cuda(tensor):
    """Names a contiguous GPU tensor of this process to the daemon, as a pb.Memory.

    The handle is of the whole allocation of which torch's allocator has cut the tensor, so
    the tensor has an offset in it. The tensor must live until the client is closed. It
    does not work with the allocator's expandable_segments.
    """
    address, base, size, handle = ctypes.c_uint64(tensor.data_ptr()), ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
    with torch.cuda.device(tensor.device):
        _cuda("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
        _cuda("cuIpcGetMemHandle", ctypes.byref(handle), base)
    return pb.Memory(
        kind=pb.MEMORY_CUDA_IPC,
        handle=bytes(handle),
        offset_bytes=address.value - base.value,
        length_bytes=tensor.numel() * tensor.element_size(),
    )


def device_uuid(device):
    """The UUID of a torch.device, as AttachRequest.device_uuid wants it."""
    return str(torch.cuda.get_device_properties(device).uuid)
