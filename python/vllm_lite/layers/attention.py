"""Self-attention over the paged cache."""

from collections.abc import Iterator

import torch

from vllm_lite import ops
from vllm_lite.layers.batch import ForwardBatch
from vllm_lite.layers.buffers import StepBuffers
from vllm_lite.layers.linear import Linear
from vllm_lite.layers.memory import WeightMemory
from vllm_lite.layers.rms_norm import RmsNorm
from vllm_lite.loader.weights import Slot
from vllm_lite.model_config import ModelConfig


class Attention:
    """q, k, v projection; head norms where the model has them; rope; attention; projection."""

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        sliding_window: int,
        cos_sin: torch.Tensor,
        memory: WeightMemory,
    ) -> None:
        """cos_sin: float32 ``[max_model_len, rotary_size]``, shared by all layers."""
        head_size = config.head_size
        query_size = config.num_heads * head_size
        kv_size = config.num_kv_heads * head_size
        self._qkv = Linear(
            [
                (f"{name}.q_proj", query_size),
                (f"{name}.k_proj", kv_size),
                (f"{name}.v_proj", kv_size),
            ],
            config.hidden_size,
            config.attention_bias,
            memory,
        )
        self._output = Linear(
            [(f"{name}.o_proj", config.hidden_size)],
            query_size,
            config.attention_output_bias,
            memory,
        )
        self._head_norms: tuple[RmsNorm, RmsNorm] | None = None
        if config.qk_norm:
            self._head_norms = (
                RmsNorm(f"{name}.q_norm", head_size, config.rms_norm_eps, memory),
                RmsNorm(f"{name}.k_norm", head_size, config.rms_norm_eps, memory),
            )
        self._cos_sin = cos_sin
        self._scale = head_size**-0.5
        self._sliding_window = sliding_window

    def slots(self) -> Iterator[Slot]:
        yield from self._qkv.slots()
        yield from self._output.slots()
        for norm in self._head_norms or ():
            yield from norm.slots()

    def __call__(self, buffers: StepBuffers, batch: ForwardBatch, kv_cache: torch.Tensor) -> None:
        """From ``buffers.normed`` to ``buffers.projected``.

        kv_cache: of this layer, as ``ops.paged_attention`` has it.
        """
        query, key = buffers.query, buffers.key
        self._qkv(buffers.qkv, buffers.normed)
        if self._head_norms is not None:
            query_norm, key_norm = self._head_norms
            query_norm(query, query)
            key_norm(key, key)
        ops.rope_store_kv(
            query, key, buffers.value, batch.positions, self._cos_sin, kv_cache,
            batch.slot_mapping,
        )  # fmt: skip
        plan = batch.attention_plan
        ops.paged_attention(
            buffers.attended_heads, query, kv_cache, batch.block_tables, batch.rows,
            batch.query_start, batch.seq_lens, self._scale, self._sliding_window,
            plan=None if plan is None else plan.plan,
            workspace=None if plan is None else plan.workspace,
        )  # fmt: skip
        self._output(buffers.projected, buffers.attended)
