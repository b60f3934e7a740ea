"""Reads step plans and writes step results; the layout is csrc/scheduler/step_plan.h's."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

PLAN_MAGIC = 0x564C5031
RESULT_MAGIC = 0x564C5231
HEADER_WORDS = 22
# A new row: its number, then a RowState (csrc/core/row_state.h).
NEW_ROW = np.dtype(
    [
        ("row", "i4"),
        ("temperature", "f4"),
        ("top_p", "f4"),
        ("min_p", "f4"),
        ("top_k", "i4"),
        ("repetition_penalty", "f4"),
        ("presence_penalty", "f4"),
        ("frequency_penalty", "f4"),
        ("num_logprobs", "i4"),
        ("min_total_tokens", "i4"),
        ("num_prompt_tokens", "i4"),
        ("seed", "u4", 2),
        ("num_bias", "i4"),
        ("num_allowed", "i4"),
        ("num_stop", "i4"),
        ("num_history", "i4"),
    ]
)
NEW_ROW_WORDS = NEW_ROW.itemsize // 4
POOLING_MEAN = 2  # csrc/scheduler/sequence.h
_MAX_ERROR_BYTES = 4096


@dataclass(slots=True)
class StepChanges:
    """What a plan changes of what the worker keeps, all int32."""

    table_updates: torch.Tensor  # [count, 3]: row, index, block
    block_copies: torch.Tensor  # [count, 2]: source, destination
    new_rows: torch.Tensor  # [count, 17]: row, RowState
    row_lists: torch.Tensor  # [words], of the new rows back to back; then their constraints
    scored: torch.Tensor  # [count, 3]: index into token_ids, token, how many of the likeliest


@dataclass(slots=True)
class RowLists:
    """Where the lists of a new row are in ``StepChanges.row_lists``."""

    row: int
    ids: slice  # bias ids, bias values, allowed ids, stop ids
    prompt: slice  # the history's tokens
    output: slice


@dataclass(slots=True)
class RowConstraint:
    """A new row's SamplingParams::constraint and the tokens that its sequence has given so far."""

    row: int
    constraint: bytes
    output: list[int]


@dataclass(slots=True)
class PooledPart:
    """What a step computes of a sequence whose hidden states are pooled."""

    row: int
    first: int  # its tokens in the step: [first, end)
    end: int
    num_tokens: int  # of the sequence so far, these included
    is_mean: bool  # else of the last token
    ends: bool  # the vector is due


def step_words_of(plan: memoryview | bytes) -> list[int]:
    """The two words of a plan's step number, for an answer to a plan that failed."""
    words: list[int] = np.frombuffer(plan, dtype=np.int32, count=4)[2:4].tolist()
    return words


class StepPlan:
    """A copy of a plan's words, and what of it the worker itself needs.

    ``changes``: the words after those that ``ops.load_step`` reads.
    """

    def __init__(self, plan: memoryview | bytes) -> None:
        words = np.frombuffer(plan, dtype=np.int32).copy()
        header = words[:HEADER_WORDS].tolist()
        if header[0] != PLAN_MAGIC or header[1] != len(words):
            raise ValueError("not a step plan")
        self.words = torch.from_numpy(words)
        self.step_words = header[2:4]
        self.num_tokens, self.num_seqs, self.num_logits = header[4:7]
        num_updates, num_copies, num_freed, self._num_new_rows, self._num_list_words = header[7:12]
        self.max_logprobs, self.num_placeholders = header[14:16]
        self.num_scored, self.max_prompt_logprobs, self.num_pooled, self.num_vectors = header[16:20]
        self.num_drafts, num_draft_rounds = header[20:]
        self._query_start_at = HEADER_WORDS + 4 * self.num_tokens
        begin = self._query_start_at + 3 * self.num_seqs + 1 + self.num_logits
        self.changes = self.words[begin:]
        self._change_words = (
            3 * num_updates,
            2 * num_copies,
            num_freed,
            NEW_ROW_WORDS * self._num_new_rows,
            self._num_list_words,
            3 * self.num_scored,
            3 * self.num_pooled,
            num_draft_rounds,
        )

    def split_changes(self, words: torch.Tensor) -> StepChanges:
        """words: those of ``changes``, on any device. Raises RuntimeError if they are not as many
        as the plan says.
        """
        updates, copies, _, new_rows, lists, scored, *_ = words.split_with_sizes(self._change_words)
        return StepChanges(
            updates.view(-1, 3), copies.view(-1, 2), new_rows.view(-1, NEW_ROW_WORDS), lists,
            scored.view(-1, 3),
        )  # fmt: skip

    def pooled_parts(self) -> list[PooledPart]:
        """Of the sequences whose hidden states are pooled, in the plan's order."""
        words = self.words.numpy()
        begin = HEADER_WORDS + 4 * self.num_tokens
        starts = words[begin : begin + self.num_seqs + 1]
        lens = words[begin + self.num_seqs + 1 :][: self.num_seqs]
        rows = words[begin + 2 * self.num_seqs + 1 :][: self.num_seqs]
        pooled = self.changes.split_with_sizes(self._change_words)[6].view(-1, 3).tolist()
        return [
            PooledPart(
                row=int(rows[sequence]),
                first=int(starts[sequence]),
                end=int(starts[sequence + 1]),
                num_tokens=int(lens[sequence]),
                is_mean=pooling == POOLING_MEAN,
                ends=bool(ends),
            )
            for sequence, pooling, ends in pooled
        ]

    def row_lists(self) -> Iterator[RowLists]:
        """Of the new rows that have any."""
        if self._num_list_words == 0:
            return
        new_rows = self._new_rows()
        names = ("row", "num_bias", "num_allowed", "num_stop", "num_prompt_tokens", "num_history")
        columns = (new_rows[name].tolist() for name in names)
        end = 0
        for row, num_bias, num_allowed, num_stop, num_prompt, num_history in zip(
            *columns, strict=True
        ):
            begin = end
            history = begin + 2 * num_bias + num_allowed + num_stop
            end = history + num_history
            output = min(history + num_prompt, end)
            if end > begin:
                yield RowLists(
                    row, slice(begin, history), slice(history, output), slice(output, end)
                )
        if end > self._num_list_words:
            raise ValueError("the lists of the step plan's new rows have a wrong length")

    def constraints(self) -> list[RowConstraint]:
        """Of the new rows that have any. They stand behind the lists of all new rows."""
        if self._num_list_words == 0:
            return []
        new_rows = self._new_rows()
        at = int(2 * new_rows["num_bias"].sum())
        at += sum(int(new_rows[name].sum()) for name in ("num_allowed", "num_stop", "num_history"))
        words = self.split_changes(self.changes).row_lists.numpy()
        found = []
        while at < len(words):
            row, num_bytes, num_output = words[at : at + 3].tolist()
            output_at = at + 3 + (num_bytes + 3) // 4
            constraint = words[at + 3 : output_at].tobytes()[:num_bytes]
            at = output_at + num_output
            found.append(RowConstraint(row, constraint, words[output_at:at].tolist()))
        if at != len(words):
            raise ValueError("the lists of the step plan's new rows have a wrong length")
        return found

    def freed_rows(self) -> list[int]:
        rows: list[int] = self.changes.split_with_sizes(self._change_words)[2].tolist()
        return rows

    def new_row_numbers(self) -> list[int]:
        rows: list[int] = self._new_rows()["row"].tolist()
        return rows

    def logits_rounds(self) -> list[int]:
        """How the logits are divided: those at the sequences' last known tokens, then at their
        first drafts, and so on.
        """
        rounds: list[int] = self.changes.split_with_sizes(self._change_words)[7].tolist()
        return [self.num_logits - self.num_drafts, *rounds]

    def drafts(self) -> dict[int, list[int]]:
        """By row, of the rows that have any."""
        token_ids = self.words[HEADER_WORDS + 2 * self.num_tokens :]
        begin = self.num_logits - self.num_drafts
        found: dict[int, list[int]] = {}
        drafts = token_ids[self._logits_indices()[begin:]].tolist()
        for row, draft in zip(self.sampled_rows()[begin:], drafts, strict=True):
            found.setdefault(row, []).append(draft)
        return found

    def sampled_rows(self) -> list[int]:
        """The row of each logit."""
        words = self.words.numpy()
        at, count = self._query_start_at, self.num_seqs
        query_start = words[at : at + count + 1]
        rows = words[at + 2 * count + 1 : at + 3 * count + 1]
        places = query_start.searchsorted(self._logits_indices().numpy(), side="right") - 1
        sampled: list[int] = rows[places].tolist()
        return sampled

    def _logits_indices(self) -> torch.Tensor:
        at = self._query_start_at + 3 * self.num_seqs + 1
        return self.words[at : at + self.num_logits]

    def _new_rows(self) -> np.ndarray:
        """[count], of NEW_ROW."""
        rows: np.ndarray = self.split_changes(self.changes).new_rows.numpy().view(NEW_ROW)[:, 0]
        return rows


def encode_result(plan: StepPlan, vector_size: int, words: np.ndarray) -> bytes:
    """A step's result. words: int32, what follows the header."""
    header = [
        plan.num_logits, plan.max_logprobs, 0, 0, plan.num_scored, plan.max_prompt_logprobs,
        plan.num_vectors, vector_size,
    ]  # fmt: skip
    return _header(plan.step_words, words.nbytes, header) + words.tobytes()


def encode_error(step_words: list[int], message: str) -> bytes:
    # Bounded, so that it fits into the ring: torch's messages can be pages long.
    whole = message.encode(errors="replace")  # it may hold lone surrogates
    text = whole[:_MAX_ERROR_BYTES].decode(errors="ignore").encode()
    body = text + b"\0" * (-len(text) % 4)
    return _header(step_words, len(body), [0, -1, 1, len(text), 0, 0, 0, 0]) + body


def _header(step_words: list[int], body_bytes: int, rest: list[int]) -> bytes:
    """rest: the header's words behind the step's number."""
    words = [RESULT_MAGIC, 4 + len(rest) + body_bytes // 4, *step_words, *rest]
    return np.array(words, dtype=np.int32).tobytes()
