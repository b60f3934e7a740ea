"""The gated feed-forward block."""

from collections.abc import Iterator

from vllm_lite.layers.buffers import StepBuffers
from vllm_lite.layers.linear import Linear
from vllm_lite.layers.memory import WeightMemory
from vllm_lite.loader.weights import Slot
from vllm_lite.model_config import ModelConfig


class GatedMlp:
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, name: str, config: ModelConfig, memory: WeightMemory) -> None:
        size = config.intermediate_size
        self._gate_up = Linear(
            [(f"{name}.gate_proj", size), (f"{name}.up_proj", size)],
            config.hidden_size,
            config.mlp_bias,
            memory,
        )
        self._down = Linear(
            [(f"{name}.down_proj", config.hidden_size)], size, config.mlp_bias, memory
        )

    def slots(self) -> Iterator[Slot]:
        yield from self._gate_up.slots()
        yield from self._down.slots()

    def __call__(self, buffers: StepBuffers) -> None:
        """From ``buffers.normed`` to ``buffers.projected``."""
        self._gate_up.silu_mul(buffers.activated, buffers.normed, buffers.gate_up)
        self._down(buffers.projected, buffers.activated)
