"""Per-row sampling state beside the model, and the one op that samples a step's rows."""

from dataclasses import dataclass, field

import numpy as np
import torch

from vllm_lite import ops
from vllm_lite.worker.step_plan import NewRow, StepPlan, encode_result


@dataclass(slots=True)
class _RowLists:
    """Id lists of the rows that have any: row -> arrays."""

    bias: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    allowed: dict[int, np.ndarray] = field(default_factory=dict)
    stop: dict[int, np.ndarray] = field(default_factory=dict)  # only rows with min_tokens

    def forget(self, row: int) -> None:
        self.bias.pop(row, None)
        self.allowed.pop(row, None)
        self.stop.pop(row, None)


def _ragged(rows: list[int], lists: dict[int, np.ndarray]) -> tuple[torch.Tensor, np.ndarray]:
    """(starts ``[len(rows) + 1]``, the lists of ``rows`` back to back)."""
    empty = np.empty(0, dtype=np.int32)
    chosen = [lists.get(row, empty) for row in rows]
    starts = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum([len(ids) for ids in chosen], out=starts[1:])
    return torch.from_numpy(starts), np.concatenate(chosen)


class Sampler:
    """Rows keep their state from admission to finish or preemption, as step plans say."""

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._max_rows = max_rows
        self._float_state = torch.zeros(6, max_rows)
        self._int_state = torch.zeros(3, max_rows, dtype=torch.int32)
        self._seeds = torch.zeros(max_rows, dtype=torch.int64)
        self._last_sampled = torch.zeros(max_rows, dtype=torch.int32)
        self._lists = _RowLists()
        # Made when the first row with penalties comes.
        self._output_counts: torch.Tensor | None = None
        self._prompt_mask: torch.Tensor | None = None

    def free_row(self, row: int) -> None:
        self._lists.forget(row)

    def add_row(self, new: NewRow) -> None:
        row = new.row
        self._float_state[:, row] = torch.from_numpy(new.floats)
        self._int_state[:, row] = torch.tensor(
            [new.top_k, new.num_logprobs, new.min_total_tokens], dtype=torch.int32
        )
        self._seeds[row] = new.seed
        self._lists.forget(row)
        if len(new.bias_ids):
            self._lists.bias[row] = (new.bias_ids, new.bias_values)
        if len(new.allowed_ids):
            self._lists.allowed[row] = new.allowed_ids
        if new.min_total_tokens and len(new.stop_ids):
            self._lists.stop[row] = new.stop_ids
        if len(new.history):
            self._set_history(new)

    def _set_history(self, new: NewRow) -> None:
        if self._output_counts is None or self._prompt_mask is None:
            shape = (self._max_rows, self._vocab_size)
            self._output_counts = torch.zeros(shape, dtype=torch.int32)
            self._prompt_mask = torch.zeros(shape, dtype=torch.uint8)
        counts = self._output_counts[new.row].zero_().numpy()
        mask = self._prompt_mask[new.row].zero_().numpy()
        mask[new.history[: new.num_prompt_tokens]] = 1
        np.add.at(counts, new.history[new.num_prompt_tokens :], 1)

    def known_token_ids(self, plan: StepPlan) -> torch.Tensor:
        """The plan's token ids, placeholders replaced by what their rows sampled last."""
        if plan.num_placeholders == 0:
            return plan.token_ids
        rows = (-1 - plan.token_ids).clamp(min=0)
        return torch.where(plan.token_ids < 0, self._last_sampled[rows], plan.token_ids)

    def sample(self, logits: torch.Tensor, plan: StepPlan) -> bytes:
        """The step's result for ``logits`` ``[num_logits, vocab_size]``."""
        num_logits = plan.num_logits
        token_ids = torch.empty(num_logits, dtype=torch.int32)
        if num_logits == 0:
            return encode_result(plan.step_words, token_ids.numpy())
        # The sequences that are sampled are those whose last token has logits.
        sampled = torch.searchsorted(plan.query_start, plan.logits_indices, right=True) - 1
        rows = plan.rows[sampled]
        positions = plan.seq_lens[sampled]
        logprobs = ranks = top_ids = top_logprobs = None
        if plan.max_logprobs >= 0:
            logprobs = torch.empty(num_logits)
            ranks = torch.empty(num_logits, dtype=torch.int32)
            if plan.max_logprobs > 0:
                top_ids = torch.empty(num_logits, plan.max_logprobs, dtype=torch.int32)
                top_logprobs = torch.empty(num_logits, plan.max_logprobs)
        bias_start = bias_ids = bias_values = None
        allowed_start = allowed_ids = stop_start = stop_ids = None
        lists = self._lists
        if lists.bias or lists.allowed or lists.stop:
            row_list = rows.tolist()
            if lists.bias:
                bias_start, ids = _ragged(row_list, {r: v[0] for r, v in lists.bias.items()})
                _, values = _ragged(row_list, {r: v[1] for r, v in lists.bias.items()})
                bias_ids = torch.from_numpy(ids)
                bias_values = torch.from_numpy(values.astype(np.float32))
            if lists.allowed:
                allowed_start, ids = _ragged(row_list, lists.allowed)
                allowed_ids = torch.from_numpy(ids)
            if lists.stop:
                stop_start, ids = _ragged(row_list, lists.stop)
                stop_ids = torch.from_numpy(ids)
        ops.sample(
            logits, rows, positions, self._float_state, self._int_state, self._seeds,
            self._output_counts, self._prompt_mask, bias_start, bias_ids, bias_values,
            allowed_start, allowed_ids, stop_start, stop_ids,
            token_ids, logprobs, ranks, top_ids, top_logprobs,
        )  # fmt: skip
        # A row that failed has -1, and what follows it is thrown away: any id will do.
        self._last_sampled[rows] = token_ids.clamp(min=0)
        return encode_result(
            plan.step_words,
            token_ids.numpy(),
            *(
                part if part is None else part.numpy()
                for part in (logprobs, ranks, top_ids, top_logprobs)
            ),
        )
