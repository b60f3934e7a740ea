"""What the machine and the model allow at most, for benchmarks to print beside their figures."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_lite import ops
from vllm_lite.config import DTYPE_BYTES
from vllm_lite.cores import num_available_cores
from vllm_lite.layers.memory import WeightMemory
from vllm_lite.layers.packed_weight import PackedWeight
from vllm_lite.model_config import ModelConfig


@dataclass(frozen=True)
class Machine:
    cores: int
    read_bandwidth: float  # bytes/s, all cores reading one large array, the faster of two ways
    flops: float  # FLOP/s of a large matrix product in the model's dtype


def measure_machine(dtype: torch.dtype) -> Machine:
    """Best of a few short runs; takes about two seconds.

    Reads by torch's sum and by the product of one token, which fetches ahead and can be half as
    fast again: what reads a weight is measured against the faster.
    """
    torch.set_num_threads(num_available_cores())
    ops.set_num_threads(num_available_cores())
    rows, columns = 1 << 17, 1 << 11  # 512 MiB: far beyond the caches
    memory = WeightMemory(torch.bfloat16, torch.device("cpu"))
    weight = PackedWeight("bfloat16", rows, columns, memory)
    array = weight.packed.zero_().view(torch.float32)
    token = torch.ones(1, columns, dtype=torch.bfloat16)
    out = torch.empty(1, rows, dtype=torch.bfloat16)
    reads: list[Callable[[], object]] = [array.sum, lambda: weight.multiply(out, token)]
    read_seconds = min(_seconds(read) for read in reads * 5)
    left = torch.randn(1024, 2048).to(dtype)
    right = torch.randn(2048, 2048).to(dtype)
    product_seconds = min(_seconds(lambda: left @ right) for _ in range(5))
    return Machine(
        cores=num_available_cores(),
        read_bandwidth=array.numel() * 4 / read_seconds,
        flops=2 * 1024 * 2048 * 2048 / product_seconds,
    )


@dataclass(frozen=True)
class ModelCost:
    """What one step reads and computes."""

    weight_bytes: int  # read once per step
    kv_bytes_per_token: int  # read per token of context and sequence
    flops_per_token: int  # matrix products, attention aside

    @classmethod
    def of(cls, config: ModelConfig, dtype: str) -> "ModelCost":
        heads = config.num_heads * config.head_size
        kv_heads = config.num_kv_heads * config.head_size
        layer = config.hidden_size * (2 * heads + 2 * kv_heads + 3 * config.intermediate_size)
        weights = config.num_layers * layer + config.vocab_size * config.hidden_size
        return cls(
            weight_bytes=weights * DTYPE_BYTES[dtype],
            kv_bytes_per_token=2 * config.num_layers * kv_heads * DTYPE_BYTES[dtype],
            flops_per_token=2 * weights,
        )

    def decode_bound(self, machine: Machine, batch: int, context: float) -> float:
        """Tokens/s that a decode of ``batch`` sequences of ``context`` tokens cannot exceed."""
        step_bytes = self.weight_bytes + batch * context * self.kv_bytes_per_token
        seconds = max(
            step_bytes / machine.read_bandwidth, batch * self.flops_per_token / machine.flops
        )
        return batch / seconds

    def prefill_bound(self, machine: Machine) -> float:
        """Prompt tokens/s by FLOPs alone."""
        return machine.flops / self.flops_per_token


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
