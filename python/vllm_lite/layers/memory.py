"""Memory of the weights."""

import contextlib
import mmap
from math import prod
from typing import Protocol

import torch

_CHUNK_BYTES = 64 << 20
_ALIGNMENT = 64  # a cache line, and the widest vector


class Allocate(Protocol):
    def __call__(self, *shape: int) -> torch.Tensor:
        """A new parameter, not initialised."""


class WeightMemory:
    """Hands out parameters of one dtype from large chunks.

    On the CPU those are mappings that ask for huge pages: a decode step streams all weights once,
    and with 4 KiB pages the processor spends a good part of that time on address translation. Most
    systems give huge pages only to memory that asks for them.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._chunk = torch.empty(0, dtype=torch.uint8)

    def __call__(self, *shape: int) -> torch.Tensor:
        num_bytes = prod(shape) * self._dtype.itemsize
        reserved = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if reserved > self._chunk.numel():
            self._chunk = self._new_chunk(max(reserved, _CHUNK_BYTES))
        memory, self._chunk = self._chunk[:num_bytes], self._chunk[reserved:]
        return memory.view(self._dtype).view(shape)

    def _new_chunk(self, num_bytes: int) -> torch.Tensor:
        if self._device.type == "cpu":
            return _map(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)


def _map(num_bytes: int) -> torch.Tensor:
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8)  # keeps the mapping alive
