"""CUDA graphs of decode steps: hundreds of launches become one."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_lite.worker.step_inputs import StepInputs

# A graph serves every smaller step down to the size below it; the padding costs little where the
# step is bound by the weights.
_SIZES = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 1025, 32))


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
        self._sizes = [size for size in _SIZES if size < max_num_seqs] + [max_num_seqs]
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
        """Logits of the padded step, valid until the next ``run`` of this size."""
        size = self._made[inputs.sizes.num_seqs]
        if size.graph is None:
            # The first step of a size runs as it is: libraries set themselves up in it.
            logits = self._forward(inputs)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                size.logits = self._forward(inputs)
            size.graph = graph
            return logits
        size.graph.replay()
        assert size.logits is not None
        return size.logits
