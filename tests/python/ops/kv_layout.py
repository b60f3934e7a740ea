"""The KV cache as the kernels of the back end in use keep it (``csrc/core/kv_layout_cpu.h``)."""

import torch

from ops.back_ends import runs_cuda_kernels

STRIP_TOKENS = 16


def as_stored(plain: torch.Tensor) -> torch.Tensor:
    """A copy of ``[num_blocks, 2, num_kv_heads, block_size, head_size]`` as the kernels keep it."""
    return _with_keys(plain, from_plain=True)


def as_plain(stored: torch.Tensor) -> torch.Tensor:
    """What ``as_stored`` was given."""
    return _with_keys(stored, from_plain=False)


def _with_keys(cache: torch.Tensor, from_plain: bool) -> torch.Tensor:
    if runs_cuda_kernels():
        return cache.clone()
    keys, values = cache.unbind(1)
    word = 4 // keys.element_size()
    num_words = keys.shape[3] // word
    parts = (STRIP_TOKENS, num_words) if from_plain else (num_words, STRIP_TOKENS)
    strips = keys.unflatten(2, (-1, STRIP_TOKENS)).flatten(3).unflatten(3, (*parts, word))
    return torch.stack([strips.transpose(3, 4).reshape(keys.shape), values], 1)
