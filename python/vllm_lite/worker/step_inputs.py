"""The tensors of a step's forward pass, in one buffer that reaches the device in one copy."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from vllm_lite import ops
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
        # As ops.load_step has them. The attention plan is read in chunks of 16 bytes and slots are
        # 64-bit, hence their place; plans are whole chunks.
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
        plan_attention: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None] | None = None,
    ) -> None:
        """Copies a plan's tensors onto the device. plan_attention: writes the attention plan, if
        these inputs have one, from (query_start, seq_lens); without it, what the plan does not
        fill stays as it is: no op is told to look at it.
        """
        sizes, words = self.sizes, self._words
        if words.is_cuda:
            # Pinned memory comes from torch's cache, which keeps it until the copy has been made.
            words = torch.empty(len(words), dtype=torch.int32, pin_memory=True)
        ops.load_step(
            plan.words, words, sizes.plan_words, sizes.num_tokens, sizes.num_seqs,
            sizes.num_logits, plan_attention is not None,
        )  # fmt: skip
        if plan_attention is not None:
            attention_plan, _, _, _, query_start, seq_lens, *_ = self._split(words)
            num_seqs = plan.num_seqs
            plan_attention(query_start[: num_seqs + 1], seq_lens[:num_seqs], attention_plan)
        if words is not self._words:
            self._words.copy_(words, non_blocking=True)
