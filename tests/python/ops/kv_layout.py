"""The KV cache as the kernels of the back end in use keep it (``csrc/core/kv_layout_cpu.h``)."""

import torch

from ops.back_ends import runs_cuda_kernels

STRIP_TOKENS = 16


def as_stored(plain: torch.Tensor) -> torch.Tensor:
    """A copy of ``[num_blocks, 2, num_kv_heads, block_size, head_size]`` as the kernels keep it."""
    if runs_cuda_kernels():
        return plain.clone()
    keys, values = plain.unbind(1)
    word = 4 // keys.element_size()
    strips = keys.unflatten(2, (-1, STRIP_TOKENS)).unflatten(4, (-1, word))
    keys = strips.transpose(3, 4).reshape(values.shape)
    if word == 2:
        values = values.unflatten(2, (-1, 2)).transpose(3, 4).reshape(values.shape)
    return torch.stack([keys, values], 1)


def as_plain(stored: torch.Tensor) -> torch.Tensor:
    """What ``as_stored`` was given."""
    if runs_cuda_kernels():
        return stored.clone()
    keys, values = stored.unbind(1)
    *_, head_size = keys.shape
    word = 4 // keys.element_size()
    strips = keys.unflatten(2, (-1, STRIP_TOKENS)).flatten(3)
    strips = strips.unflatten(3, (head_size // word, STRIP_TOKENS, word))
    keys = strips.transpose(3, 4).reshape(values.shape)
    if word == 2:
        pairs = values.unflatten(2, (-1, 2)).flatten(3).unflatten(3, (head_size, 2))
        values = pairs.transpose(3, 4).reshape(values.shape)
    return torch.stack([keys, values], 1)


# ---- int8


def quantised(plain: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(int8, float32 scales) of vectors ``[..., head_size]`` and ``[...]``."""
    plain = plain.float()
    largest = plain.abs().amax(-1)  # NaN if there is one
    largest[largest.isinf()] = torch.nan
    largest = largest.clamp(min=2.0**-100)
    most = torch.tensor(127.0).expand_as(largest)  # a number would be divided in two roundings
    inverses = torch.where(largest.isnan(), 0.0, most / largest)
    integers = (plain * inverses[..., None]).round()
    return integers.nan_to_num(nan=-127).to(torch.int8), largest / most


def dequantised(plain: torch.Tensor) -> torch.Tensor:
    """float64: what an int8 cache holds of vectors ``[..., head_size]``."""
    integers, scales = quantised(plain)
    return integers.double() * scales.double()[..., None]


def as_int8(plain: torch.Tensor) -> torch.Tensor:
    """``[num_blocks, 2, num_kv_heads, block_size, head_size]`` as the CPU keeps it in int8:
    ``head_size + 4`` in the last dimension.
    """
    integers, scales = quantised(plain)
    *_, block_size, head_size = plain.shape
    strips = as_stored(integers).unflatten(3, (-1, STRIP_TOKENS)).flatten(4)
    behind = scales.unflatten(3, (-1, STRIP_TOKENS)).contiguous().view(torch.int8)
    return torch.cat([strips, behind], -1).view(*plain.shape[:3], block_size, head_size + 4)
