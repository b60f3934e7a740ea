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
    plan: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Causal attention of any mix of prefills, chunks and decodes over a paged KV cache.

    out, query: ``[num_tokens, num_heads, head_size]`` (rows may be strided);
    kv_cache: ``[num_blocks, 2, num_kv_heads, block_size, head_size]``;
    block_tables: int32 ``[max_rows, max_blocks]``; rows, seq_lens: int32 ``[num_seqs]``;
    query_start: int32 ``[num_seqs + 1]``; alibi_slopes: float32 ``[num_heads]``.

    CUDA takes bfloat16 and float16 only, and needs the step's ``plan`` (``plan_attention``, copied
    to the device) and a ``workspace``: float32, at least ``attention_workspace_size`` elements,
    which launches in one stream may share. It does not check indices, but follows none that lead
    out of a tensor: the results of such a sequence are NaN. The CPU ignores both.
    kv_cache may be float8_e4m3fn on CUDA: keys are then times ``k_scale``, values ``v_scale``.
    """
    _ops.paged_attention(
        out, query, kv_cache, block_tables, rows, query_start, seq_lens, scale, sliding_window,
        soft_cap, alibi_slopes, plan, workspace, k_scale, v_scale, _stream(out),
    )  # fmt: skip


def plan_attention(
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    sliding_window: int,
    num_multiprocessors: int,
    plan: torch.Tensor,
) -> int:
    """Cuts a step's attention into the CUDA kernels' work, the same for every layer.

    All tensors are int32 on the CPU; plan: of ``attention_plan_size`` elements. Returns how many of
    them are the plan. A plan made without a window serves layers of any window, if less evenly.
    """
    return int(
        _ops.plan_attention(
            query_start, seq_lens, num_heads, num_kv_heads,
            sliding_window, num_multiprocessors, plan,
        )
    )  # fmt: skip


def attention_plan_size(
    num_tokens: int, num_seqs: int, num_heads: int, num_kv_heads: int, num_multiprocessors: int
) -> int:
    """Elements that every plan of at most so many tokens and sequences fits into."""
    return int(
        _ops.attention_plan_size(num_tokens, num_seqs, num_heads, num_kv_heads, num_multiprocessors)
    )


def attention_workspace_size(num_kv_heads: int, head_size: int) -> int:
    """float32 elements of the workspace of ``paged_attention`` on CUDA."""
    return int(_ops.attention_workspace_size(num_kv_heads, head_size))


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
    """
    _ops.sample(
        logits, rows, positions, float_state, int_state, seeds, output_counts, prompt_mask,
        bias_start, bias_ids, bias_values, allowed_start, allowed_ids, stop_start, stop_ids,
        token_ids, logprobs, ranks, top_ids, top_logprobs, _stream(logits),
    )  # fmt: skip


def cpu_isas() -> list[str]:
    """Instruction sets that this processor supports, least first."""
    names = ["portable", "avx2", "avx512"]
    return names[: int(_ops.best_cpu_isa()) + 1]


def set_cpu_isa(name: str) -> None:
    """Chooses the instruction set of every CPU kernel of this process; for tests and benchmarks."""
    _ops.set_cpu_isa(["portable", "avx2", "avx512"].index(name))


def current_cpu_isa() -> str:
    return ["portable", "avx2", "avx512"][int(_ops.current_cpu_isa())]
