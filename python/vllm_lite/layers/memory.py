"""Memory of the weights."""

import contextlib
import mmap
from collections.abc import Callable
from math import prod

import torch

_CHUNK_BYTES = 64 << 20
_ALIGNMENT = 64  # a cache line, and the widest vector


class WeightMemory:
    """Hands out parameters from large chunks.

    On the CPU those are mappings that ask for huge pages: a decode step streams all weights once,
    and with 4 KiB pages the processor spends a good part of that time on address translation. Most
    systems give huge pages only to memory that asks for them.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        weight_format: Callable[[str], str] | None = None,
    ) -> None:
        """weight_format: of the matrix of this name, for the CPU's packed products (one of
        ``ops.WEIGHT_FORMATS``); without it all have the dtype.
        """
        self.dtype = dtype
        self.device = device
        self._weight_format = weight_format
        self._chunk = torch.empty(0, dtype=torch.uint8)

    @property
    def is_packed(self) -> bool:
        """Whether matrices are packed for the CPU's products."""
        return self.device.type == "cpu"

    def weight_format(self, name: str) -> str:
        if self._weight_format is None:
            return str(self.dtype).removeprefix("torch.")
        return self._weight_format(name)

    def tensor(self, *shape: int) -> torch.Tensor:
        """A new parameter, not initialised."""
        return self.bytes(prod(shape) * self.dtype.itemsize).view(self.dtype).view(shape)

    def bytes(self, num_bytes: int) -> torch.Tensor:
        """uint8 ``[num_bytes]`` at a multiple of 64 bytes."""
        reserved = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if reserved > self._chunk.numel():
            self._chunk = self._new_chunk(max(reserved, _CHUNK_BYTES))
        memory, self._chunk = self._chunk[:num_bytes], self._chunk[reserved:]
        return memory

    def _new_chunk(self, num_bytes: int) -> torch.Tensor:
        if self.device.type == "cpu":
            return _map(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)


def _map(num_bytes: int) -> torch.Tensor:
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8)  # keeps the mapping alive
