"""The tensors of a step's forward pass, and the one copy that takes a step to the device."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_lite import ops
from vllm_lite.layers.batch import AttentionPlan, ForwardBatch
from vllm_lite.worker.step_plan import StepPlan

# Writes the attention plan from (query_start, seq_lens), all on the CPU.
PlanAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class InputSizes:
    """Sizes of the sections; at least those of the plans that are loaded."""

    num_tokens: int
    num_seqs: int
    num_logits: int
    plan_words: int = 0  # of the attention plan; 0: there is none

    def sections(self) -> list[int]:
        """Words of each section, as ops.load_step has them. The attention plan is read in chunks of
        16 bytes and slots are 64-bit, hence their place; plans are whole chunks.
        """
        tokens, seqs, logits = self.num_tokens, self.num_seqs, self.num_logits
        lengths = [self.plan_words, 2 * tokens, tokens, tokens, seqs + 1, seqs, seqs]
        return [*lengths, logits, logits, logits]

    def num_words(self) -> int:
        return sum(self.sections())


class StepInputs:
    """The sections of int32 ``words`` as the forward pass takes them.

    What a plan does not fill is padding that computes nothing that anybody reads: tokens whose KV
    is stored nowhere, sequences without tokens. So a CUDA graph that was captured over the words
    serves every decode step up to their sizes.
    """

    def __init__(
        self,
        sizes: InputSizes,
        words: torch.Tensor,
        block_tables: torch.Tensor,
        last_tokens: torch.Tensor,
        workspace: torch.Tensor | None = None,
    ) -> None:
        """workspace: of the attention kernels, if they need a plan."""
        self.sizes = sizes
        self.words = words
        plan, slots, *parts = words.split_with_sizes(sizes.sections())
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


def load(
    plan: StepPlan,
    sizes: InputSizes,
    words: torch.Tensor,
    plan_attention: PlanAttention | None = None,
) -> None:
    """Writes a plan's sections into ``words``, on the CPU. Without plan_attention, what the plan
    does not fill stays as it is: no op is told to look at it.
    """
    ops.load_step(
        plan.words, words, sizes.plan_words, sizes.num_tokens, sizes.num_seqs, sizes.num_logits,
        plan_attention is not None,
    )  # fmt: skip
    if plan_attention is not None:
        attention_plan, _, _, _, query_start, seq_lens, *_ = words.split_with_sizes(
            sizes.sections()
        )
        num_seqs = plan.num_seqs
        plan_attention(query_start[: num_seqs + 1], seq_lens[:num_seqs], attention_plan)


def upload(
    plan: StepPlan, sizes: InputSizes, plan_attention: PlanAttention, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Takes all that a step needs to the device, in one copy from pinned memory, so that nobody
    waits: (the words of its inputs, those of ``plan.changes``). On the CPU nothing is copied twice.
    """
    lengths = [sizes.num_words(), len(plan.changes)]
    staged = torch.empty(sum(lengths), dtype=torch.int32, pin_memory=device.type == "cuda")
    inputs, changes = staged.split_with_sizes(lengths)
    load(plan, sizes, inputs, plan_attention)
    changes.copy_(plan.changes)
    # torch's cache keeps the pinned memory until the copy has been made.
    inputs, changes = staged.to(device, non_blocking=True).split_with_sizes(lengths)
    return inputs, changes
