"""What a forward step computes."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What the CUDA attention kernels are given beside the batch; see ``ops.plan_attention``."""

    plan: torch.Tensor  # int32, on the device
    workspace: torch.Tensor  # float32, shared by all layers


@dataclass(slots=True)
class ForwardBatch:
    """The tokens of a step, sequence after sequence, and where their KV lies."""

    token_ids: torch.Tensor  # int32 [num_tokens]
    positions: torch.Tensor  # int32 [num_tokens]
    slot_mapping: torch.Tensor  # int64 [num_tokens], where a token's KV goes; negative: nowhere
    query_start: torch.Tensor  # int32 [num_seqs + 1], cumulative tokens
    seq_lens: torch.Tensor  # int32 [num_seqs], tokens with KV, this step's included
    rows: torch.Tensor  # int32 [num_seqs], row of block_tables
    block_tables: torch.Tensor  # int32 [max_rows, max_blocks]
    logits_indices: torch.Tensor  # int32 or int64 [num_logits], tokens whose logits are wanted
    # int32 [max_rows]: what each row sampled last, for the token ids that are placeholders.
    last_tokens: torch.Tensor | None = None
    attention_plan: AttentionPlan | None = None  # the CPU's kernels plan by themselves
