"""Reads step plans and writes step results; the layout is csrc/scheduler/step_plan.h's."""

from dataclasses import dataclass

import numpy as np
import torch

PLAN_MAGIC = 0x564C5031
RESULT_MAGIC = 0x564C5231
_HEADER_WORDS = 16
_NEW_ROW_HEADER_WORDS = 6
_ROW_SAMPLING_WORDS = 12
_MAX_ERROR_BYTES = 4096


@dataclass(slots=True)
class NewRow:
    """Sampling parameters of a row that begins. ``history``: its tokens so far, if penalties need
    them.
    """

    row: int
    floats: np.ndarray  # temperature, top_p, min_p, repetition, presence, frequency penalty
    top_k: int
    num_logprobs: int
    min_total_tokens: int
    num_prompt_tokens: int
    seed: int  # as a signed 64-bit number
    bias_ids: np.ndarray
    bias_values: np.ndarray
    allowed_ids: np.ndarray
    stop_ids: np.ndarray
    history: np.ndarray


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``tensor`` itself on the CPU. To a GPU it goes from pinned memory, so that nobody waits."""
    if device.type == "cpu":
        return tensor
    # torch's cache keeps the pinned memory until the copy has been made.
    return tensor.pin_memory().to(device, non_blocking=True)


def step_words_of(plan: memoryview | bytes) -> list[int]:
    """The two words of a plan's step number, for an answer to a plan that failed."""
    words: list[int] = np.frombuffer(plan, dtype=np.int32, count=4)[2:4].tolist()
    return words


class StepPlan:
    """A copy of a plan's words, and what of it the worker itself needs."""

    def __init__(self, plan: memoryview | bytes) -> None:
        words = np.frombuffer(plan, dtype=np.int32).copy()
        header = words[:_HEADER_WORDS].tolist()
        if header[0] != PLAN_MAGIC or header[1] != len(words):
            raise ValueError("not a step plan")
        self.words = torch.from_numpy(words)
        self.step_words = header[2:4]
        self.num_tokens, self.num_seqs, self.num_logits = header[4:7]
        num_updates, num_copies, num_freed, num_new_rows, new_row_words = header[7:12]
        self.max_logprobs, self.num_placeholders = header[14:16]
        # After what ops.load_step reads.
        self._next = _HEADER_WORDS + 4 * self.num_tokens + 3 * self.num_seqs + 1 + self.num_logits
        self.table_updates = self._take_rows(num_updates, 3)
        self.block_copies = self._take_rows(num_copies, 2)
        self.freed_rows: list[int] = []
        if num_freed:
            self.freed_rows = words[self._next : self._next + num_freed].tolist()
            self._next += num_freed
        self.new_rows: list[NewRow] = []
        if num_new_rows or new_row_words:
            self.new_rows = self._read_new_rows(words, num_new_rows, new_row_words)

    def sampled_rows(self) -> list[int]:
        """The row of each token that is sampled from."""
        words, num_seqs = self.words.numpy(), self.num_seqs
        begin = _HEADER_WORDS + 4 * self.num_tokens
        query_start, _, rows, indices = np.split(
            words[begin : begin + 3 * num_seqs + 1 + self.num_logits],
            [num_seqs + 1, 2 * num_seqs + 1, 3 * num_seqs + 1],
        )
        sampled: list[int] = rows[np.searchsorted(query_start, indices, side="right") - 1].tolist()
        return sampled

    def _take_rows(self, count: int, width: int) -> torch.Tensor | None:
        """int32 ``[count, width]``; None if there are none."""
        if count == 0:
            return None
        begin = self._next
        self._next = begin + count * width
        return self.words[begin : self._next].view(count, width)

    def _read_new_rows(self, words: np.ndarray, count: int, num_words: int) -> list[NewRow]:
        new_rows = []
        position = self._next
        for _ in range(count):
            row, size, num_bias, num_allowed, num_stop, num_history = words[
                position : position + _NEW_ROW_HEADER_WORDS
            ].tolist()
            end = position + size
            position += _NEW_ROW_HEADER_WORDS
            sampling = words[position : position + _ROW_SAMPLING_WORDS]
            floats = sampling.view(np.float32)
            position += _ROW_SAMPLING_WORDS
            lists = []
            for length in (num_bias, num_bias, num_allowed, num_stop, num_history):
                lists.append(words[position : position + length])
                position += length
            if position != end:
                raise ValueError("a new-row record of the step plan has a wrong length")
            new_rows.append(
                NewRow(
                    row=row,
                    floats=floats[[0, 1, 2, 4, 5, 6]],
                    top_k=int(sampling[3]),
                    num_logprobs=int(sampling[7]),
                    min_total_tokens=int(sampling[8]),
                    num_prompt_tokens=int(sampling[9]),
                    seed=int(sampling[10:12].copy().view(np.int64)[0]),
                    bias_ids=lists[0],
                    bias_values=lists[1].view(np.float32),
                    allowed_ids=lists[2],
                    stop_ids=lists[3],
                    history=lists[4],
                )
            )
        if position - self._next != num_words:
            raise ValueError("the step plan's new rows have a wrong length")
        return new_rows


def encode_result(
    step_words: list[int],
    token_ids: np.ndarray,
    logprobs: np.ndarray | None = None,
    ranks: np.ndarray | None = None,
    top_ids: np.ndarray | None = None,
    top_logprobs: np.ndarray | None = None,
) -> bytes:
    """A step's result. Without ``logprobs`` no row asked for any; ``top_*``: ``[num_logits,
    max_logprobs]``.
    """
    parts = [token_ids]
    max_logprobs = -1
    if logprobs is not None:
        assert ranks is not None
        parts += [logprobs, ranks]
        max_logprobs = 0
        if top_ids is not None:
            assert top_logprobs is not None
            parts += [top_ids, top_logprobs]
            max_logprobs = top_ids.shape[1]
    body = b"".join(part.tobytes() for part in parts)
    return _header(step_words, len(body), len(token_ids), max_logprobs, 0, 0) + body


def encode_error(step_words: list[int], message: str) -> bytes:
    # Bounded, so that it fits into the ring: torch's messages can be pages long.
    text = message.encode()[:_MAX_ERROR_BYTES].decode(errors="ignore").encode()
    body = text + b"\0" * (-len(text) % 4)
    return _header(step_words, len(body), 0, -1, 1, len(text)) + body


def _header(
    step_words: list[int],
    body_bytes: int,
    num_logits: int,
    max_logprobs: int,
    error: int,
    message: int,
) -> bytes:
    num_words = 8 + body_bytes // 4
    return np.array(
        [RESULT_MAGIC, num_words, *step_words, num_logits, max_logprobs, error, message],
        dtype=np.int32,
    ).tobytes()
