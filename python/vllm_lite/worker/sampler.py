"""Per-row sampling state on the device, and the one op that samples a step's rows."""

from collections.abc import Iterator

import torch

from vllm_lite import ops
from vllm_lite.worker.step_plan import NEW_ROW_WORDS, RowLists, StepChanges, StepPlan, encode_result


class PendingResult:
    """A step's result on its way from the device; ``wait`` gives its words."""

    def __init__(self, plan: StepPlan, vector_size: int, words: torch.Tensor) -> None:
        """words: int32, of the result without its header."""
        self._plan = plan
        self._vector_size = vector_size
        self._words = words
        self._event: torch.cuda.Event | None = None
        if words.is_cuda:
            # Pinned memory comes from torch's cache, which keeps it until the copy has been made.
            pinned = torch.empty(words.shape, dtype=torch.int32, pin_memory=True)
            self._words = pinned.copy_(words, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's lacks types
            self._event.record()

    @property
    def is_pending(self) -> bool:
        return self._event is not None

    def token_ids(self) -> list[int]:
        """Of each logit, below 0 if it failed. Waits; RuntimeError if the device failed."""
        if self._event is not None:
            self._event.synchronize()
        ids: list[int] = self._words[: self._plan.num_logits].tolist()
        return ids

    def wait(self) -> bytes:
        """The words of csrc/scheduler/step_plan.h. Raises RuntimeError if the device failed."""
        if self._event is not None:
            self._event.synchronize()
        return encode_result(self._plan, self._vector_size, self._words.numpy())


class Sampler:
    """Rows keep their state from admission to finish or preemption, as step plans say.

    Nothing is done when a row is freed: whoever gets it next brings a state of its own.
    """

    def __init__(
        self, max_rows: int, workspace_rows: int, vocab_size: int, device: torch.device
    ) -> None:
        """workspace_rows: the most that one call of the op has, here or with the same workspace."""
        self._vocab_size = vocab_size
        self._max_rows = max_rows
        self._device = device
        self._row_state = self._zeros(torch.int32, max_rows, NEW_ROW_WORDS - 1)
        # What each row sampled last, for plans that were made before it was known.
        self.last_tokens = self._zeros(torch.int32, max_rows)
        # Made when the first row with lists, or with penalties, comes.
        self._id_lists: torch.Tensor | None = None
        self._output_counts: torch.Tensor | None = None
        self._prompt_mask: torch.Tensor | None = None
        # What each row has sampled in a step with drafts.
        self._accepted: torch.Tensor | None = None
        self.workspace: torch.Tensor | None = None
        if device.type == "cuda":
            size = ops.sample_workspace_bytes(workspace_rows, vocab_size)
            self.workspace = torch.empty(size, dtype=torch.uint8, device=device)

    def add_rows(self, changes: StepChanges, lists: Iterator[RowLists]) -> None:
        """changes: on the device; lists: of the rows that have any."""
        new_rows = changes.new_rows
        self._row_state.index_copy_(0, new_rows[:, 0].long(), new_rows[:, 1:])
        for new in lists:
            ids, output = changes.row_lists[new.ids], changes.row_lists[new.output]
            if len(ids):
                self._lists_of(len(ids))[new.row, : len(ids)] = ids
            if new.prompt.start < new.output.stop:
                self._set_history(new.row, changes.row_lists[new.prompt], output)

    def _lists_of(self, length: int) -> torch.Tensor:
        """``[max_rows, length or more]``, with what the rows have in it."""
        lists = self._id_lists
        width = 0 if lists is None else lists.shape[1]
        if lists is None or width < length:
            length = max(length, min(2 * width, self._vocab_size))
            grown = self._zeros(torch.int32, self._max_rows, length)
            if lists is not None:
                grown[:, :width] = lists
            self._id_lists = lists = grown
        return lists

    def _set_history(self, row: int, prompt: torch.Tensor, output: torch.Tensor) -> None:
        if self._output_counts is None or self._prompt_mask is None:
            self._output_counts = self._zeros(torch.int32, self._max_rows, self._vocab_size)
            self._prompt_mask = self._zeros(torch.uint8, self._max_rows, self._vocab_size)
        self._prompt_mask[row].zero_().index_fill_(0, prompt.long(), 1)
        self._output_counts[row].zero_().index_add_(0, output, torch.ones_like(output))

    def sample(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        plan: StepPlan,
        token_masks: torch.Tensor | None = None,
        mask_index: torch.Tensor | None = None,
        input_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Samples from ``logits`` ``[num_logits, vocab_size]`` of the plan. Returns the words of
        the result's first sections.

        rows, positions: int32 ``[num_logits]``, on the device; so are the masks, if there are any
        (``ops.sample``), and, if the plan has drafts, ``input_ids``: the tokens at the logits.
        """
        num_logits, num_top = plan.num_logits, plan.max_logprobs
        # The sections of a result.
        lengths = [num_logits]
        if num_top >= 0:
            lengths += [num_logits, num_logits]
        if num_top > 0:
            lengths += [num_logits * num_top] * 2
        words = torch.empty(sum(lengths), dtype=torch.int32, device=self._device)
        if num_logits == 0:
            return words
        token_ids = words
        logprobs = ranks = top_ids = top_logprobs = None
        if num_top >= 0:
            token_ids, logprobs, ranks, *tops = words.split_with_sizes(lengths)
            logprobs = logprobs.view(torch.float32)
            if num_top > 0:
                top_ids, top_logprobs = (top.view(num_logits, num_top) for top in tops)
                top_logprobs = top_logprobs.view(torch.float32)
        if input_ids is None:
            ops.sample(
                logits, rows, positions, self._row_state, self._id_lists, self._output_counts,
                self._prompt_mask, token_ids, logprobs, ranks, top_ids, top_logprobs,
                self.workspace, self.last_tokens, token_masks, mask_index,
            )  # fmt: skip
            return words
        # A round after the other, since penalties count what the round before has sampled. Where
        # that was not the draft there is no row any more, and nothing is counted.
        if self._accepted is None:
            self._accepted = self._zeros(torch.int32, self._max_rows)
        begin = 0
        for size in plan.logits_rounds():
            part = slice(begin, begin + size)
            sampled = rows[part]
            if begin > 0:
                sampled = torch.where(self._accepted[sampled] == input_ids[part], sampled, -1)
            ops.sample(
                logits[part], sampled, positions[part], self._row_state, self._id_lists,
                self._output_counts, self._prompt_mask, token_ids[part], _part(logprobs, part),
                _part(ranks, part), _part(top_ids, part), _part(top_logprobs, part),
                self.workspace, self.last_tokens, token_masks, _part(mask_index, part),
            )  # fmt: skip
            self._accepted[rows[part]] = token_ids[part]
            begin += size
        return words

    def _zeros(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._device)


def _part(tensor: torch.Tensor | None, part: slice) -> torch.Tensor | None:
    return None if tensor is None else tensor[part]
