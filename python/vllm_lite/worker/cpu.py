"""The forward pass on the CPU."""

import torch

from vllm_lite import ops
from vllm_lite.models import CausalLM
from vllm_lite.worker.step_inputs import StepInputs, load
from vllm_lite.worker.step_plan import StepPlan


class RecordedForward:
    """Recorded once for the largest step; a step is two calls, whatever the model has of layers."""

    def __init__(self, model: CausalLM, inputs: StepInputs, kv_arena: torch.Tensor) -> None:
        """inputs: large enough for every step. It, the model and the arena must stay."""
        self._inputs = inputs
        self._kept = model, kv_arena
        model.reserve(inputs.sizes.num_tokens, inputs.sizes.num_logits)
        self._forward = ops.OpList()
        with self._forward.record():
            model.forward(inputs.batch, kv_arena)
        self._head = ops.OpList()
        indices = inputs.batch.logits_indices
        with self._head.record():
            self._logits = model.logits(indices)
        self._last_norm = ops.OpList()
        with self._last_norm.record():
            self._hidden = model.hidden(indices)

    def run(self, plan: StepPlan) -> tuple[StepInputs, torch.Tensor]:
        """(the step's tensors and what else fits into their memory, logits until the next step)"""
        load(plan, self._inputs.sizes, self._inputs.words)
        self._forward.run(plan.num_tokens, plan.num_seqs)
        self._head.run(plan.num_logits)
        return self._inputs, self._logits

    def logits(self, indices: torch.Tensor) -> torch.Tensor:
        """As ``CausalLM.logits``, of the step that ran last."""
        self._head.run(self._set_indices(indices))
        return self._logits[: len(indices)]

    def hidden(self, indices: torch.Tensor) -> torch.Tensor:
        """As ``CausalLM.hidden``, of the step that ran last."""
        self._last_norm.run(self._set_indices(indices))
        return self._hidden[: len(indices)]

    def _set_indices(self, indices: torch.Tensor) -> int:
        self._inputs.batch.logits_indices[: len(indices)] = indices
        return len(indices)
