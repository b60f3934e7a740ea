"""What the worker does on a GPU alone: checks, memory for the KV cache, graphs of decode steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from vllm_lite import ops
from vllm_lite.worker.step_inputs import StepInputs

# What of the device's memory no measured step shows, each an upper estimate. Not torch's to count:
# the CUDA context with the code of all kernels, which is loaded as they are first used.
_CONTEXT_BYTES = 768 << 20
# Made when decode graphs are captured, later than the arena: the cuBLAS workspaces that torch makes
# for the capturing stream, and the driver's copy of every kernel launch in a graph.
_CAPTURE_WORKSPACE_BYTES = 64 << 20
_LAUNCH_BYTES = 16 << 10
_LAUNCHES_PER_LAYER = 16  # five products, split or not, two norms, rope, attention, activation
_LEAST_CAPABILITY = (8, 0)

# A graph serves every smaller step down to the size below it; the padding costs little where the
# step is bound by the weights.
_SIZES = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 1025, 32))


def check_device() -> None:
    """Raises ValueError with what is missing if the kernels cannot run here."""
    if not ops.has_cuda_kernels():
        raise ValueError(
            "vllm_lite was built without CUDA kernels: install it where nvcc is found "
            "(VLLM_LITE_CUDA=ON makes its absence an error), or use --device cpu"
        )
    if not torch.cuda.is_available():
        raise ValueError(
            "torch finds no usable CUDA device (torch.cuda.is_available() is false): install a "
            "CUDA build of torch that fits the driver, or use --device cpu"
        )
    capability = torch.cuda.get_device_capability()
    if capability < _LEAST_CAPABILITY:
        raise ValueError(
            f"{torch.cuda.get_device_name()} has compute capability {capability[0]}."
            f"{capability[1]}; 8.0 (Ampere) or newer is needed"
        )


def unmeasured_bytes(num_layers: int, graph_input_bytes: Sequence[int]) -> int:
    """A bound of what the device holds beside what ``measured_kv_memory`` measures.

    graph_input_bytes: of each decode graph that may be captured, the inputs that it reads.
    """
    if not graph_input_bytes:
        return _CONTEXT_BYTES
    launches = len(graph_input_bytes) * (num_layers + 1) * _LAUNCHES_PER_LAYER
    graphs = sum(graph_input_bytes) + launches * _LAUNCH_BYTES
    return _CONTEXT_BYTES + _CAPTURE_WORKSPACE_BYTES + graphs


def measured_kv_memory(
    utilization: float, unmeasured: int, run_largest_step: Callable[[], None]
) -> int:
    """Bytes for the KV cache: a share of the device less what everything else takes at its peak.

    Called with the weights loaded. The peak is measured in one step of the largest size, with all
    that is otherwise allocated when a request first needs it, and ``unmeasured`` bytes are added;
    what other processes hold at the moment plays no part. Raises ValueError if nothing is left.
    """
    torch.cuda.reset_peak_memory_stats()
    run_largest_step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_reserved() + unmeasured
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    memory = int(total * utilization) - peak
    if memory <= 0:
        raise ValueError(
            f"the GPU has {total} bytes, of which {utilization:.0%} are to be used, and the model "
            f"needs {peak} without any KV cache: raise --gpu-memory-utilization, or lower "
            "--max-num-batched-tokens or --max-num-seqs"
        )
    return memory


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of sequences, ascending, that decode graphs are captured for."""
    return [size for size in _SIZES if size < max_num_seqs] + [max_num_seqs]


@dataclass(slots=True)
class _Size:
    inputs: StepInputs
    graph: torch.cuda.CUDAGraph | None = None
    logits: torch.Tensor | None = None


class DecodeGraphs:
    """One graph for each padded number of sequences, captured when it is first needed.

    ``make_inputs(num_seqs)`` makes the buffer that a graph reads; ``forward`` computes logits from
    one, always into the same buffers.
    """

    def __init__(
        self,
        max_num_seqs: int,
        make_inputs: Callable[[int], StepInputs],
        forward: Callable[[StepInputs], torch.Tensor],
    ) -> None:
        self._sizes = graph_sizes(max_num_seqs)
        self._make_inputs = make_inputs
        self._forward = forward
        self._made: dict[int, _Size] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def inputs_for(self, num_seqs: int) -> StepInputs:
        """Where a decode step of ``num_seqs`` sequences is to be loaded; then call ``run``."""
        padded = next(size for size in self._sizes if size >= num_seqs)
        if padded not in self._made:
            self._made[padded] = _Size(self._make_inputs(padded))
        return self._made[padded].inputs

    def run(self, inputs: StepInputs) -> torch.Tensor:
        """Logits of the padded step, valid until the next step."""
        size = self._made[inputs.sizes.num_seqs]
        if size.graph is None:
            # The first step of a size runs as it is: libraries set themselves up in it.
            logits = self._forward(inputs)
            graph = torch.cuda.CUDAGraph()
            # Other threads call the device meanwhile: the one that makes token masks waits for an
            # event and takes pinned memory, which "global" would make the capture's failure.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                size.logits = self._forward(inputs)
            size.graph = graph
            return logits
        size.graph.replay()
        assert size.logits is not None
        return size.logits
