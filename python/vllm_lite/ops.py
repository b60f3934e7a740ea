"""The tensor ops of ``_ops.so``, one Python function each.

CPU and CUDA are one contract: the same arguments, the same results within rounding. Shapes are in
the docstrings; the kernels' own notes are in ``csrc/attention/params.h``,
``csrc/cache/store_kv.h``, ``csrc/ops/ops.h``, ``csrc/ops/linear.h`` and ``csrc/ops/moe.h``. All
functions write into tensors that the caller gives; none allocates. A shape, dtype or device that an
op does not support raises ``RuntimeError`` naming it; so does, on CPU, an index that leads out of a
tensor. On CUDA, where the kernel alone sees the indices, such an index is never followed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
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
    plan: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Causal attention of any mix of prefills, chunks and decodes over a paged KV cache.

    out, query: ``[num_tokens, num_heads, head_size]`` (rows may be strided);
    kv_cache: ``[num_blocks, 2, num_kv_heads, block_size, head_size]``, written by ``store_kv``;
    block_size is a power of two from 16 to 256; on the CPU rows stand as in
    ``csrc/core/kv_layout_cpu.h``;
    block_tables: int32 ``[max_rows, max_blocks]``; rows, seq_lens: int32 ``[num_seqs]``;
    query_start: int32 ``[num_seqs + 1]``; alibi_slopes: float32 ``[num_heads]``.

    CUDA takes bfloat16 and float16 only, and needs the step's ``plan`` (``plan_attention``, copied
    to the device at a multiple of 16 bytes) and a ``workspace``: float32, at least
    ``attention_workspace_size`` elements, which launches in one stream may share. It does not check
    indices, but follows none that lead out of a tensor: the results of such a sequence are NaN. The
    CPU ignores both.
    kv_cache may be float8_e4m3fn on CUDA: keys are then times ``k_scale``, values ``v_scale``. On
    the CPU it may be int8, with ``head_size + 4`` as its last dimension: a row has its scale, too.
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


def allow_hopper_attention(allowed: bool) -> None:
    """For tests and benchmarks: whether CUDA attention uses Hopper's bulk copies and wgmma."""
    _ops.allow_hopper_attention(allowed)


def store_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Stores ``[num_tokens, num_kv_heads, head_size]`` keys and values into their slots.

    slot_mapping: int64 ``[num_tokens]``, block * block_size + offset; negative: not stored. On CUDA
    nor is what lies beyond the cache.
    kv_cache: the model's dtype; on CUDA also float8_e4m3fn, which holds ``key / k_scale`` and
    ``value / v_scale``, at most 448; on the CPU also int8, each row with its scale: the row's
    largest magnitude over 127. See ``paged_attention``.
    """
    _ops.store_kv(key, value, kv_cache, slot_mapping, k_scale, v_scale, _stream(key))


def copy_blocks(kv_arena: torch.Tensor, block_pairs: torch.Tensor) -> None:
    """Copies whole blocks in every layer.

    kv_arena: ``[num_layers, num_blocks, 2, num_kv_heads, block_size, head_size]``, contiguous (of
    int8, the last is head_size + 4);
    block_pairs: int32 ``[num_pairs, 2]``, (source, destination).
    """
    _ops.copy_blocks(kv_arena, block_pairs, _stream(kv_arena))


def swap_blocks(
    from_arena: torch.Tensor, to_arena: torch.Tensor, block_pairs: torch.Tensor
) -> None:
    """Copies whole blocks in every layer from one arena to another, in stream order.

    from_arena, to_arena: as in ``copy_blocks``, alike but in num_blocks; on CUDA each on the device
    or in pinned host memory, which must stay as it is until the stream has come this far;
    block_pairs: int32 ``[num_pairs, 2]``, (source, destination), on the CPU.
    """
    on_device = from_arena if from_arena.is_cuda else to_arena
    _ops.swap_blocks(from_arena, to_arena, block_pairs, _stream(on_device))


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
    positions: int32 ``[num_tokens]``; cos_sin: float32 ``[max_position, rotary_size]``. On CUDA a
    position outside the table gives NaN.
    """
    _ops.rope(query, key, positions, cos_sin, _stream(query))


def rope_store_kv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """``rope`` and ``store_kv`` of the rotated keys in one; what ``key`` holds afterwards is open.

    On CUDA it saves a launch per layer, which is what a small decode step is made of, and the way
    of the keys to memory and back.
    """
    _ops.rope_store_kv(
        query, key, value, positions, cos_sin, kv_cache, slot_mapping, k_scale, v_scale,
        _stream(query),
    )  # fmt: skip


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


def route_experts(
    weights: torch.Tensor, ids: torch.Tensor, logits: torch.Tensor, renormalize: bool
) -> None:
    """Chooses each token's k experts, largest logit first, the lowest id among equals.

    logits: ``[num_tokens, num_experts]``, up to 512 experts; weights: float32 ``[num_tokens, k]``,
    the softmax over all experts or (renormalize) over the chosen; ids: int32 ``[num_tokens, k]``,
    k up to 16.
    """
    _ops.route_experts(weights, ids, logits, renormalize, _stream(logits))


def permute_tokens(
    ids: torch.Tensor, order: torch.Tensor, rows: torch.Tensor, expert_start: torch.Tensor
) -> None:
    """Sorts the pairs (token, choice), numbered token * k + choice, by expert; stable.

    ids: int32 ``[num_tokens, k]``; order: int32 ``[num_tokens * k]``, row to pair; rows: int32
    ``[num_tokens * k]``, pair to row; expert_start: int32 ``[num_experts + 1]``, where each
    expert's rows begin. Pairs with an id outside the experts come last and have row -1.
    """
    _ops.permute_tokens(ids, order, rows, expert_start, _stream(ids))


def gather_rows(out: torch.Tensor, input: torch.Tensor, order: torch.Tensor, k: int) -> None:
    """``out[row] = input[order[row] // k]``: tokens as the experts' rows.

    out: ``[num_rows, size]``; input: ``[num_tokens, size]``; order: int32 ``[num_rows]``.
    """
    _ops.gather_rows(out, input, order, k, _stream(out))


def combine_experts(
    out: torch.Tensor, expert_rows: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor
) -> None:
    """``out[token] = sum of weights[token, c] * expert_rows[rows[token, c]]``, c in order, float32.

    out: ``[num_tokens, size]``; expert_rows: ``[num_rows, size]``; rows: int32 and weights: float32
    ``[num_tokens, k]``. A negative row adds nothing.
    """
    _ops.combine_experts(out, expert_rows, rows, weights, _stream(out))


def dequantize(out: torch.Tensor, blocks: torch.Tensor, ggml_type: int) -> None:
    """Decodes GGUF blocks (uint8, 1-D) of a ggml type into ``out`` (contiguous, any shape)."""
    _ops.dequantize(out, blocks, ggml_type)


# As csrc/ops/linear.h has them.
PANEL_ROWS = 16
WEIGHT_FORMATS = (
    "float32", "bfloat16", "float16", "int8", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K",
)  # fmt: skip


def _weight_format(name: str) -> int:
    if name not in WEIGHT_FORMATS:
        raise ValueError(f"weight format is {name!r}, must be one of {', '.join(WEIGHT_FORMATS)}")
    return WEIGHT_FORMATS.index(name)


def packed_weight_bytes(format: str, rows: int, columns: int) -> int:
    """Bytes of a packed weight ``[rows, columns]``. CPU only, like the three below.

    Raises where the format's blocks (32 columns; 256 of the K formats) do not divide ``columns``.
    """
    return int(_ops.packed_weight_bytes(_weight_format(format), rows, columns))


def pack_weight(
    packed: torch.Tensor,
    source: torch.Tensor,
    format: str,
    rows: int,
    columns: int,
    first_row: int,
    scales: torch.Tensor | None = None,
) -> None:
    """Packs rows of a weight ``[rows, columns]`` for ``linear``, from ``first_row`` on.

    packed: uint8 ``[packed_weight_bytes(format, rows, columns)]`` at a multiple of 64 bytes; the
    rows of a stacked weight may come in several calls;
    source: ``[num_rows, columns]`` of the format's dtype or, for GGUF's formats, uint8
    ``[num_rows, bytes of a row]`` as in the file; scales: float32 ``[num_rows]``, with int8.
    """
    _ops.pack_weight(packed, source, _weight_format(format), rows, columns, first_row, scales)


def linear(
    out: torch.Tensor,
    input: torch.Tensor,
    packed: torch.Tensor,
    format: str,
    bias: torch.Tensor | None = None,
) -> None:
    """``out = input @ weight^T + bias``, summed in float32.

    A row of ``out`` has the same bits whatever num_tokens is and however many threads there are.
    out: ``[num_tokens, rows]``, float32 or input's dtype; input: ``[num_tokens, columns]`` (rows of
    both may be strided); packed: by ``pack_weight``; bias: ``[rows]`` of out's dtype.
    """
    _ops.linear(out, input, packed, _weight_format(format), bias)


def linear_silu_mul(
    out: torch.Tensor,
    input: torch.Tensor,
    packed: torch.Tensor,
    format: str,
    bias: torch.Tensor | None = None,
) -> None:
    """``silu_mul`` of what ``linear`` gives, bit for bit, without a tensor between them.

    Only subnormal results of bfloat16 may differ: some instruction sets store them as zeros.
    The weight (and bias) is ``[2 * size, columns]``, the rows of gate before those of up; out:
    ``[num_tokens, size]``, size a multiple of ``PANEL_ROWS``; the rest as in ``linear``.
    """
    _ops.linear_silu_mul(out, input, packed, _weight_format(format), bias)


def packed_embedding(
    out: torch.Tensor,
    packed: torch.Tensor,
    format: str,
    rows: int,
    token_ids: torch.Tensor,
    last_tokens: torch.Tensor | None = None,
) -> None:
    """``embedding`` from a packed weight ``[rows, columns]`` as the table. CPU only."""
    _ops.packed_embedding(out, packed, _weight_format(format), rows, token_ids, last_tokens)


def sample(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    row_state: torch.Tensor,
    id_lists: torch.Tensor | None,
    output_counts: torch.Tensor | None,
    prompt_mask: torch.Tensor | None,
    token_ids: torch.Tensor,
    logprobs: torch.Tensor | None,
    ranks: torch.Tensor | None,
    top_ids: torch.Tensor | None,
    top_logprobs: torch.Tensor | None,
    workspace: torch.Tensor | None = None,
    last_tokens: torch.Tensor | None = None,
    token_masks: torch.Tensor | None = None,
    mask_index: torch.Tensor | None = None,
) -> None:
    """Chooses one token per row; the order of processing is documented in ``csrc/ops/ops.h``.

    logits: float32 ``[num_rows, vocab_size]``; rows, positions: int32 ``[num_rows]``;
    row_state: int32 ``[max_rows, 16]``, the words of ``csrc/core/row_state.h``; id_lists: int32
    ``[max_rows, words]``, each row's bias ids, bias values (float32's bits), allowed ids and stop
    ids back to back, as many as its state says; output_counts: int32 ``[max_rows, vocab_size]``,
    counted up by the op; prompt_mask: uint8 of the same shape; token_masks: int32 ``[num_masks,
    ceil(vocab_size / 32)]``, a bit for each token, lowest first, 1: allowed; mask_index: int32
    ``[num_rows]``, which of them a row has, -1: none.
    Results: token_ids, ranks: int32 ``[num_rows]``; logprobs: float32 ``[num_rows]``;
    top_ids (int32), top_logprobs (float32): ``[num_rows, max_logprobs]``.
    last_tokens: int32 ``[max_rows]``; that of each sampled row becomes its token, 0 if it failed.
    workspace: uint8, ``sample_workspace_bytes(num_rows, vocab_size)`` or more; CUDA needs it.
    """
    _ops.sample(
        logits, rows, positions, row_state, id_lists, output_counts, prompt_mask,
        token_masks, mask_index, token_ids, logprobs, ranks, top_ids, top_logprobs, workspace,
        last_tokens, _stream(logits),
    )  # fmt: skip


def sample_workspace_bytes(num_rows: int, vocab_size: int) -> int:
    """Bytes of the workspace with which ``sample`` runs on CUDA."""
    return int(_ops.sample_workspace_bytes(num_rows, vocab_size))


# In the order of csrc/core/isa.h.
_CPU_ISAS = ("portable", "avx2", "avx512", "avx512_bf16", "amx")


def load_step(
    plan: torch.Tensor,
    inputs: torch.Tensor,
    plan_words: int,
    num_tokens: int,
    num_seqs: int,
    num_logits: int,
    pad: bool,
) -> None:
    """What a step plan says of the forward pass, into the sections of ``inputs``; see
    ``csrc/bindings/step_ops.cpp``. The numbers are those of the largest step.

    plan: int32, the plan's words; inputs: int32, on the CPU. pad: what the plan does not fill
    becomes tokens whose KV is stored nowhere and sequences without tokens.
    """
    _ops.load_step(plan, inputs, plan_words, num_tokens, num_seqs, num_logits, pad)


class OpList:
    """Calls of CPU ops, made once with the largest tensors and run for every step.

    The tensors' memory must stay; ops that have no place in a list are made at once, as ever.
    """

    def __init__(self) -> None:
        self._handle = int(_ops.op_list_new())

    @contextmanager
    def record(self) -> Iterator[None]:
        """Calls that this thread makes inside go to the end of the list, and are not made."""
        _ops.op_list_begin(self._handle)
        try:
            yield
        finally:
            _ops.op_list_end()

    def run(self, num_tokens: int, num_seqs: int = 0) -> None:
        """Makes the calls for the first ``num_tokens`` rows of their tensors, and sequences."""
        _ops.op_list_run(self._handle, num_tokens, num_seqs)

    def __del__(self) -> None:
        _ops.op_list_delete(self._handle)


def set_num_threads(num_threads: int) -> None:
    """Threads of the CPU kernels, the caller included, from the next call on."""
    _ops.set_num_threads(num_threads)


def pin_threads(cpus: list[int]) -> bool:
    """Keeps each of these threads on a CPU: the caller on the first. Whether all could be."""
    return bool(_ops.pin_threads(cpus))


def cpu_isas() -> list[str]:
    """Instruction sets that this processor supports, least first."""
    return list(_CPU_ISAS[: int(_ops.best_cpu_isa()) + 1])


def set_cpu_isa(name: str) -> None:
    """Chooses the instruction set of every CPU kernel of this process; for tests and benchmarks."""
    _ops.set_cpu_isa(_CPU_ISAS.index(name))


def current_cpu_isa() -> str:
    return _CPU_ISAS[int(_ops.current_cpu_isa())]
