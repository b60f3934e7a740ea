"""Per-row sampling state on the device, and the one op that samples a step's rows."""

from dataclasses import dataclass, field

import numpy as np
import torch

from vllm_lite import ops
from vllm_lite.worker.step_plan import NewRow, StepPlan, encode_result, to_device


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


class PendingResult:
    """A step's result on its way from the device; ``wait`` gives its words."""

    def __init__(self, step_words: list[int], parts: list[torch.Tensor | None]) -> None:
        """parts: token ids, then logprobs, ranks, top ids and top logprobs, or None."""
        self._step_words = step_words
        self._event: torch.cuda.Event | None = None
        self._parts = parts
        token_ids = parts[0]
        if token_ids is not None and token_ids.is_cuda:
            # Pinned memory comes from torch's cache, which keeps it until the copy has been made.
            self._parts = [part if part is None else _to_pinned(part) for part in parts]
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's lacks types
            self._event.record()

    @property
    def is_pending(self) -> bool:
        return self._event is not None

    def wait(self) -> bytes:
        """The words of csrc/scheduler/step_plan.h. Raises RuntimeError if the device failed."""
        if self._event is not None:
            self._event.synchronize()
        token_ids, *others = (part if part is None else part.numpy() for part in self._parts)
        assert token_ids is not None
        return encode_result(self._step_words, token_ids, *others)


def _to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


class Sampler:
    """Rows keep their state from admission to finish or preemption, as step plans say."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._max_rows = max_rows
        self._device = device
        self._float_state = torch.zeros(6, max_rows, device=device)
        self._int_state = torch.zeros(3, max_rows, dtype=torch.int32, device=device)
        self._seeds = torch.zeros(max_rows, dtype=torch.int64, device=device)
        # What each row sampled last, for plans that were made before it was known.
        self.last_tokens = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._lists = _RowLists()
        # Made when the first row with penalties comes.
        self._output_counts: torch.Tensor | None = None
        self._prompt_mask: torch.Tensor | None = None
        self._workspace: torch.Tensor | None = None
        if device.type == "cuda":
            size = ops.sample_workspace_bytes(max_rows, vocab_size)
            self._workspace = torch.empty(size, dtype=torch.uint8, device=device)

    def penalty_bytes(self) -> int:
        """What the first row with penalties will take."""
        return self._max_rows * self._vocab_size * (4 + 1)

    def free_row(self, row: int) -> None:
        self._lists.forget(row)

    def add_rows(self, new_rows: list[NewRow]) -> None:
        if not new_rows:
            return
        rows = self._upload(np.array([new.row for new in new_rows], dtype=np.int64))
        floats = np.stack([new.floats for new in new_rows], axis=1)
        ints = np.array(
            [[new.top_k, new.num_logprobs, new.min_total_tokens] for new in new_rows],
            dtype=np.int32,
        ).T
        seeds = np.array([new.seed for new in new_rows], dtype=np.int64)
        self._float_state.index_copy_(1, rows, self._upload(floats))
        self._int_state.index_copy_(1, rows, self._upload(ints))
        self._seeds.index_copy_(0, rows, self._upload(seeds))
        for new in new_rows:
            self._add_lists(new)
            if len(new.history):
                self._set_history(new)

    def _add_lists(self, new: NewRow) -> None:
        lists = self._lists
        lists.forget(new.row)
        if len(new.bias_ids):
            lists.bias[new.row] = (new.bias_ids, new.bias_values)
        if len(new.allowed_ids):
            lists.allowed[new.row] = new.allowed_ids
        if new.min_total_tokens and len(new.stop_ids):
            lists.stop[new.row] = new.stop_ids

    def _set_history(self, new: NewRow) -> None:
        if self._output_counts is None or self._prompt_mask is None:
            shape = (self._max_rows, self._vocab_size)
            self._output_counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
            self._prompt_mask = torch.zeros(shape, dtype=torch.uint8, device=self._device)
        counts = np.zeros(self._vocab_size, dtype=np.int32)
        mask = np.zeros(self._vocab_size, dtype=np.uint8)
        mask[new.history[: new.num_prompt_tokens]] = 1
        np.add.at(counts, new.history[new.num_prompt_tokens :], 1)
        self._output_counts[new.row].copy_(self._upload(counts))
        self._prompt_mask[new.row].copy_(self._upload(mask))

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        return to_device(torch.from_numpy(np.ascontiguousarray(array)), self._device)

    def _ragged(
        self, rows: list[int], lists: dict[int, np.ndarray]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(starts ``[len(rows) + 1]``, the lists of ``rows`` back to back)."""
        empty = np.empty(0, dtype=np.int32)
        chosen = [lists.get(row, empty) for row in rows]
        starts = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum([len(ids) for ids in chosen], out=starts[1:])
        return self._upload(starts), self._upload(np.concatenate(chosen))

    def sample(
        self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, plan: StepPlan
    ) -> PendingResult:
        """Samples from ``logits`` ``[num_logits, vocab_size]`` of the plan.

        rows, positions: int32 ``[num_logits]``, on the device.
        """
        num_logits = plan.num_logits
        token_ids = self._empty(torch.int32, num_logits)
        if num_logits == 0:
            return PendingResult(plan.step_words, [token_ids])
        logprobs = ranks = top_ids = top_logprobs = None
        if plan.max_logprobs >= 0:
            logprobs = self._empty(torch.float32, num_logits)
            ranks = self._empty(torch.int32, num_logits)
            if plan.max_logprobs > 0:
                top_ids = self._empty(torch.int32, num_logits, plan.max_logprobs)
                top_logprobs = self._empty(torch.float32, num_logits, plan.max_logprobs)
        bias_start = bias_ids = bias_values = None
        allowed_start = allowed_ids = stop_start = stop_ids = None
        lists = self._lists
        if lists.bias or lists.allowed or lists.stop:
            row_list = plan.sampled_rows()
            if lists.bias:
                bias_start, bias_ids = self._ragged(
                    row_list, {r: v[0] for r, v in lists.bias.items()}
                )
                _, bias_values = self._ragged(row_list, {r: v[1] for r, v in lists.bias.items()})
                bias_values = bias_values.float()
            if lists.allowed:
                allowed_start, allowed_ids = self._ragged(row_list, lists.allowed)
            if lists.stop:
                stop_start, stop_ids = self._ragged(row_list, lists.stop)
        ops.sample(
            logits, rows, positions, self._float_state, self._int_state, self._seeds,
            self._output_counts, self._prompt_mask, bias_start, bias_ids, bias_values,
            allowed_start, allowed_ids, stop_start, stop_ids,
            token_ids, logprobs, ranks, top_ids, top_logprobs, self._workspace, self.last_tokens,
        )  # fmt: skip
        return PendingResult(plan.step_words, [token_ids, logprobs, ranks, top_ids, top_logprobs])

    def _empty(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)
