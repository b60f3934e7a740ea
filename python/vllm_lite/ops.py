"""The tensor ops of ``_ops.so``, one Python function each.

CPU and CUDA are one contract: the same arguments, the same results within rounding. Shapes are in
the docstrings; the kernels' own notes are in ``csrc/attention/params.h``,
``csrc/cache/store_kv.h`` and ``csrc/ops/ops.h``. All functions write into tensors that the caller
gives; none allocates. A shape, dtype or device that an op does not support, or an index that leads
out of a tensor, raises ``RuntimeError`` naming it.
"""

from importlib.util import find_spec

import torch

# Found like a module, so that an editable install, which keeps built files elsewhere, works too.
_library = find_spec("vllm_lite._ops")
if _library is None or _library.origin is None:
    raise ImportError("vllm_lite._ops is not built: run `pip install .` in the source tree")
torch.ops.load_library(_library.origin)  # type: ignore[no-untyped-call]  # torch's lacks types
_ops = torch.ops.vllm_lite


def has_cuda_kernels() -> bool:
    """Whether this build has the kernels for CUDA tensors."""
    return bool(
        torch._C._dispatch_has_kernel_for_dispatch_key("vllm_lite::paged_attention", "CUDA")
    )


def _stream(tensor: torch.Tensor) -> int:
    """The CUDA stream to launch on; 0 on CPU."""
    return torch.cuda.current_stream().cuda_stream if tensor.is_cuda else 0


def paged_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    rows: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
) -> None:
    """Causal attention of any mix of prefills, chunks and decodes over a paged KV cache.

    out, query: ``[num_tokens, num_heads, head_size]`` (rows may be strided);
    kv_cache: ``[num_blocks, 2, num_kv_heads, block_size, head_size]``;
    block_tables: int32 ``[max_rows, max_blocks]``; rows, seq_lens: int32 ``[num_seqs]``;
    query_start: int32 ``[num_seqs + 1]``; alibi_slopes: float32 ``[num_heads]``.
    """
    _ops.paged_attention(
        out, query, kv_cache, block_tables, rows, query_start, seq_lens,
        scale, sliding_window, soft_cap, alibi_slopes, _stream(out),
    )  # fmt: skip


def store_kv(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Stores ``[num_tokens, num_kv_heads, head_size]`` keys and values into their slots.

    slot_mapping: int64 ``[num_tokens]``, block * block_size + offset; negative: not stored.
    """
    _ops.store_kv(key, value, kv_cache, slot_mapping, _stream(key))


def copy_blocks(kv_arena: torch.Tensor, block_pairs: torch.Tensor) -> None:
    """Copies whole blocks in every layer.

    kv_arena: ``[num_layers, num_blocks, 2, num_kv_heads, block_size, head_size]``, contiguous;
    block_pairs: int32 ``[num_pairs, 2]``, (source, destination).
    """
    _ops.copy_blocks(kv_arena, block_pairs, _stream(kv_arena))


def rms_norm(
    out: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    residual: torch.Tensor | None = None,
) -> None:
    """RMS norm over the last dimension of a 2-D or 3-D tensor; ``out`` may be ``input``.

    With ``residual``: ``residual += input`` in place first, and the norm is of the new residual.
    """
    _ops.rms_norm(out, input, weight, epsilon, residual, _stream(out))


def rope(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
) -> None:
    """Rotates query and key in place.

    query: ``[num_tokens, num_heads, head_size]``; key: ``[num_tokens, num_kv_heads, head_size]``;
    positions: int32 ``[num_tokens]``; cos_sin: float32 ``[max_position, rotary_size]``.
    """
    _ops.rope(query, key, positions, cos_sin, _stream(query))


def silu_mul(out: torch.Tensor, gate_up: torch.Tensor) -> None:
    """``out = silu(gate) * up``, where a row of ``gate_up`` is ``[gate | up]``.

    out: ``[num_tokens, size]``; gate_up: ``[num_tokens, 2 * size]``.
    """
    _ops.silu_mul(out, gate_up, _stream(out))


def embedding(
    out: torch.Tensor,
    table: torch.Tensor,
    token_ids: torch.Tensor,
    last_tokens: torch.Tensor | None = None,
) -> None:
    """``out[i] = table[token_ids[i]]``, rounded to ``out``'s dtype.

    An id ``-1 - r`` stands for ``last_tokens[r]``, the token that row r sampled last. An id that
    leads out of the table or of last_tokens raises on CPU and gives zeros on CUDA.
    out: ``[num_tokens, size]`` (rows may be strided); table: ``[vocab_size, size]``;
    token_ids: int32 ``[num_tokens]``; last_tokens: int32 ``[max_rows]``.
    """
    _ops.embedding(out, table, token_ids, last_tokens, _stream(out))


def dequantize(out: torch.Tensor, blocks: torch.Tensor, ggml_type: int) -> None:
    """Decodes GGUF blocks (uint8, 1-D) of a ggml type into ``out`` (contiguous, any shape)."""
    _ops.dequantize(out, blocks, ggml_type)


def sample(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    float_state: torch.Tensor,
    int_state: torch.Tensor,
    seeds: torch.Tensor,
    output_counts: torch.Tensor | None,
    prompt_mask: torch.Tensor | None,
    bias_start: torch.Tensor | None,
    bias_ids: torch.Tensor | None,
    bias_values: torch.Tensor | None,
    allowed_start: torch.Tensor | None,
    allowed_ids: torch.Tensor | None,
    stop_start: torch.Tensor | None,
    stop_ids: torch.Tensor | None,
    token_ids: torch.Tensor,
    logprobs: torch.Tensor | None,
    ranks: torch.Tensor | None,
    top_ids: torch.Tensor | None,
    top_logprobs: torch.Tensor | None,
    workspace: torch.Tensor | None = None,
) -> None:
    """Chooses one token per row; the order of processing is documented in ``csrc/ops/ops.h``.

    logits: float32 ``[num_rows, vocab_size]``; rows, positions: int32 ``[num_rows]``;
    float_state: float32 ``[6, max_rows]``: temperature, top_p, min_p, repetition, presence and
    frequency penalty; int_state: int32 ``[3, max_rows]``: top_k, num_logprobs, min_total_tokens;
    seeds: int64 ``[max_rows]`` (its bits); output_counts: int32 ``[max_rows, vocab_size]``, counted
    up by the op; prompt_mask: uint8 of the same shape; ``*_start``: int32 ``[num_rows + 1]`` with
    their ragged lists of ids (int32) and values (float32).
    Results: token_ids, ranks: int32 ``[num_rows]``; logprobs: float32 ``[num_rows]``;
    top_ids (int32), top_logprobs (float32): ``[num_rows, max_logprobs]``.
    workspace: uint8, ``sample_workspace_bytes(num_rows, vocab_size)`` or more; CUDA needs it.
    """
    _ops.sample(
        logits, rows, positions, float_state, int_state, seeds, output_counts, prompt_mask,
        bias_start, bias_ids, bias_values, allowed_start, allowed_ids, stop_start, stop_ids,
        token_ids, logprobs, ranks, top_ids, top_logprobs, workspace, _stream(logits),
    )  # fmt: skip


def sample_workspace_bytes(num_rows: int, vocab_size: int) -> int:
    """Bytes of the workspace with which ``sample`` runs on CUDA."""
    return int(_ops.sample_workspace_bytes(num_rows, vocab_size))


def cpu_isas() -> list[str]:
    """Instruction sets that this processor supports, least first."""
    names = ["portable", "avx2", "avx512"]
    return names[: int(_ops.best_cpu_isa()) + 1]


def set_cpu_isa(name: str) -> None:
    """Chooses the instruction set of every CPU kernel of this process; for tests and benchmarks."""
    _ops.set_cpu_isa(["portable", "avx2", "avx512"].index(name))


def current_cpu_isa() -> str:
    return ["portable", "avx2", "avx512"][int(_ops.current_cpu_isa())]
