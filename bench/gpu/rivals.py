"""Attention by others over the KV of an attention benchmark: torch's and FlashInfer's.

Each function prepares a call that returns ``[num_tokens, heads, head_size]``, or says why there is
none.
"""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from attention import Case

Attend = Callable[[], torch.Tensor]
MOST_CONTIGUOUS_BYTES = 8 << 30
FLASHINFER_WORKSPACE_BYTES = 256 << 20


def torch_attention(case: "Case") -> Attend | str:
    """scaled_dot_product_attention, given contiguous keys and values: it pays for no pages."""
    if 1 < case.num_query < case.length:
        return "no such mask"
    if case.kv_bytes > MOST_CONTIGUOUS_BYTES:
        return "too large"
    shape = (case.num_seqs, case.num_query, case.heads, case.head_size)
    query = case.query.view(shape).transpose(1, 2).contiguous()
    key, value = case.contiguous_kv()
    attend = partial(
        torch.nn.functional.scaled_dot_product_attention, query, key, value,
        is_causal=case.num_query > 1, enable_gqa=case.heads != case.kv_heads,
    )  # fmt: skip
    return lambda: attend().transpose(1, 2).reshape(case.query.shape)


def flashinfer_attention(case: "Case") -> Attend | str:
    if find_spec("flashinfer") is None:
        return "not installed"
    try:
        return _flashinfer(case)
    except Exception as error:  # another release's interface, or a kernel that it cannot compile
        return f"{type(error).__name__}: {error}"[:100]


def _flashinfer(case: "Case") -> Attend:
    import flashinfer

    workspace = torch.empty(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=case.query.device)
    num_seqs, blocks = case.tables.shape
    starts = torch.arange(0, num_seqs * blocks + 1, blocks, dtype=torch.int32)
    in_last = torch.full((num_seqs,), (case.length - 1) % case.block_size + 1, dtype=torch.int32)
    pages = (starts, case.tables.flatten(), in_last)
    sizes = (case.heads, case.kv_heads, case.head_size, case.block_size)
    dtypes = {"q_data_type": case.query.dtype, "kv_data_type": case.cache.dtype}
    if case.num_query == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "HND", use_tensor_cores=case.heads > case.kv_heads
        )
        wrapper.plan(*pages, *sizes, **dtypes)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        wrapper.plan(case.starts.cpu(), *pages, *sizes, causal=True, **dtypes)
    attend = partial(wrapper.run, case.query, case.cache)
    attend()  # compiles, and says so if it cannot
    return attend
