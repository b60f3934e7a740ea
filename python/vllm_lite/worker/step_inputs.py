"""The tensors of a step's forward pass, in one buffer that reaches the device in one copy."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from vllm_lite.layers.batch import AttentionPlan, ForwardBatch
from vllm_lite.worker.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class InputSizes:
    """Sizes of the sections; at least those of the plans that are loaded."""

    num_tokens: int
    num_seqs: int
    num_logits: int
    plan_words: int = 0  # of the attention plan; 0: there is none


class StepInputs:
    """Sections at fixed places of an int32 buffer.

    What a plan does not fill is padding that computes nothing that anybody reads: tokens whose KV
    is stored nowhere, sequences without tokens. So a CUDA graph that was captured over the buffer
    serves every decode step up to its sizes.
    """

    def __init__(
        self,
        sizes: InputSizes,
        block_tables: torch.Tensor,
        last_tokens: torch.Tensor,
        workspace: torch.Tensor | None = None,
    ) -> None:
        """workspace: of the attention kernels, if they need a plan."""
        self.sizes = sizes
        tokens, seqs, logits = sizes.num_tokens, sizes.num_seqs, sizes.num_logits
        # The attention plan is read in chunks of 16 bytes and slots are 64-bit, hence their place;
        # plans are whole chunks.
        lengths = [sizes.plan_words, 2 * tokens]
        lengths += [tokens, tokens, seqs + 1, seqs, seqs, logits, logits, logits]
        self._starts = np.cumsum([0, *lengths]).tolist()
        device = block_tables.device
        self._words = torch.zeros(self._starts[-1], dtype=torch.int32, device=device)
        plan, slots, *parts = self._split(self._words)
        self.sample_rows, self.sample_positions = parts[6:]
        self.batch = ForwardBatch(
            token_ids=parts[0],
            positions=parts[1],
            slot_mapping=slots.view(torch.int64),
            query_start=parts[2],
            seq_lens=parts[3],
            rows=parts[4],
            block_tables=block_tables,
            logits_indices=parts[5],
            last_tokens=last_tokens,
            attention_plan=None if workspace is None else AttentionPlan(plan, workspace),
        )

    def _split(self, words: torch.Tensor) -> list[torch.Tensor]:
        return [words[begin:end] for begin, end in pairwise(self._starts)]

    def load(
        self,
        plan: StepPlan,
        plan_attention: Callable[[StepPlan, torch.Tensor], None] | None = None,
    ) -> None:
        """Copies a plan's tensors onto the device, and the attention plan that the function
        writes, if these inputs have one. If not, what the plan does not fill stays as it is: no
        op is told to look at it.
        """
        sizes = self.sizes
        assert plan.num_tokens <= sizes.num_tokens and plan.num_seqs <= sizes.num_seqs
        on_device = self._words.is_cuda
        staging = self._words
        if on_device:
            # Pinned memory comes from torch's cache, which keeps it until the copy has been made.
            staging = torch.empty(len(self._words), dtype=torch.int32, pin_memory=True)
        attention_plan, slots, *parts = self._split(staging)
        if plan_attention is not None:
            plan_attention(plan, attention_plan)
        sections = (
            (slots.view(torch.int64), plan.slot_mapping, -1),
            (parts[0], plan.token_ids, 0),
            (parts[1], plan.positions, 0),
            (parts[2], plan.query_start, plan.num_tokens),
            (parts[3], plan.seq_lens, 0),
            (parts[4], plan.rows, 0),
            (parts[5], plan.logits_indices, 0),
            (parts[6], plan.sample_rows, 0),
            (parts[7], plan.sample_positions, 0),
        )
        for part, values, padding in sections:
            count = len(values)
            part[:count] = values
            if sizes.plan_words:
                part[count:] = padding
        if on_device:
            self._words.copy_(staging, non_blocking=True)
