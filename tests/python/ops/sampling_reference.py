"""The sampler in plain numpy, with full sorts and float64, and the op's call from plain rows.

The order of processing is that of ``csrc/ops/ops.h``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import compress

import numpy as np
import torch

from vllm_lite import ops
from vllm_lite.worker.step_plan import NEW_ROW


@dataclass(frozen=True)
class Row:
    """One row's sampling parameters, lists and history."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    num_logprobs: int = -1
    min_total_tokens: int = 0
    seed: int = 0
    position: int = 0
    bias: dict[int, float] = field(default_factory=dict)
    allowed: Sequence[int] = ()
    stop: Sequence[int] = ()
    unmasked: Sequence[int] | None = None  # what the row's token mask allows; None: it has none
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()

    def __str__(self) -> str:
        """What differs from the defaults, for test ids."""
        plain = Row()
        names = [f.name for f in fields(self) if getattr(self, f.name) != getattr(plain, f.name)]
        return "-".join(f"{name}={getattr(self, name)}" for name in names)

    def at(self, position: int) -> "Row":
        return replace(self, position=position)


@dataclass
class Outcome:
    token_ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor
    output_counts: torch.Tensor | None

    def tokens(self) -> list[int]:
        return [int(token) for token in self.token_ids]


def _row_state(row: Row) -> np.ndarray:
    """The words of csrc/core/row_state.h."""
    state = np.zeros(1, dtype=NEW_ROW)
    state["temperature"], state["min_p"] = row.temperature, row.min_p
    state["top_p"], state["top_k"] = row.top_p, row.top_k
    state["repetition_penalty"] = row.repetition
    state["presence_penalty"], state["frequency_penalty"] = row.presence, row.frequency
    state["num_logprobs"], state["min_total_tokens"] = row.num_logprobs, row.min_total_tokens
    state["seed"] = row.seed & 2**32 - 1, row.seed >> 32 & 2**32 - 1
    state["num_bias"], state["num_allowed"] = len(row.bias), len(row.allowed)
    state["num_stop"] = len(row.stop)
    return state.view(np.int32)[1:]


def _id_lists(row: Row) -> np.ndarray:
    values = np.array(list(row.bias.values()), dtype=np.float32).view(np.int32)
    return np.concatenate([[*row.bias], values, row.allowed, row.stop]).astype(np.int32)


def _token_masks(
    rows: Sequence[Row], vocab_size: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The masks that rows have, last one first, and which of them each row has."""
    masked = [index for index, row in enumerate(rows) if row.unmasked is not None][::-1]
    if not masked:
        return None, None
    num_words = (vocab_size + 31) // 32
    bits = np.zeros((len(masked), num_words * 32), dtype=np.uint8)
    bits[:, vocab_size:] = 1  # of no token
    mask_index = torch.full((len(rows),), -1, dtype=torch.int32)
    for place, index in enumerate(masked):
        bits[place, list(rows[index].unmasked or ())] = 1
        mask_index[index] = place
    masks = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    return torch.from_numpy(masks), mask_index


def sample(
    logits: torch.Tensor,
    rows: Sequence[Row],
    state_rows: Sequence[int] | None = None,
    max_rows: int | None = None,
) -> Outcome:
    """Runs the op; row i keeps its state at ``state_rows[i]`` (i if not given) of ``max_rows``.

    There are as many as the state rows need if ``max_rows`` is not given. A row whose state row is
    not one of them has no state.
    """
    num_rows, vocab_size = logits.shape
    slots = list(range(num_rows)) if state_rows is None else list(state_rows)
    max_rows = max(slots) + 1 if max_rows is None else max_rows
    inside = [0 <= slot < max_rows for slot in slots]
    # What the other rows have is not looked at.
    state = torch.full((max_rows, 16), 0x7FC00000, dtype=torch.int32)
    lists = [_id_lists(row) for row in rows]
    longest = max(len(words) for words in lists)
    id_lists = torch.full((max_rows, longest + 1), 7, dtype=torch.int32) if longest > 0 else None
    has_history = any(row.prompt or row.output for row in rows)
    counts = torch.zeros(max_rows, vocab_size, dtype=torch.int32) if has_history else None
    mask = torch.zeros(max_rows, vocab_size, dtype=torch.uint8) if has_history else None
    for slot, row, words in compress(zip(slots, rows, lists, strict=True), inside):
        state[slot] = torch.from_numpy(_row_state(row))
        if id_lists is not None:
            id_lists[slot, : len(words)] = torch.from_numpy(words)
    if counts is not None and mask is not None:
        for slot, row in compress(zip(slots, rows, strict=True), inside):
            for token in row.output:
                counts[slot, token] += 1
            mask[slot, list(row.prompt)] = 1
    max_logprobs = max(1, max(row.num_logprobs for row in rows) + 1)
    last_tokens = torch.full((max_rows,), -9, dtype=torch.int32)
    token_masks, mask_index = _token_masks(rows, vocab_size)
    outcome = Outcome(
        torch.full((num_rows,), -9, dtype=torch.int32),
        torch.full((num_rows,), 9.0),
        torch.full((num_rows,), -9, dtype=torch.int32),
        torch.full((num_rows, max_logprobs), -9, dtype=torch.int32),
        torch.full((num_rows, max_logprobs), 9.0),
        counts,
    )
    ops.sample(
        logits,
        torch.tensor(slots, dtype=torch.int32),
        torch.tensor([row.position for row in rows], dtype=torch.int32),
        state,
        id_lists,
        counts,
        mask,
        outcome.token_ids,
        outcome.logprobs,
        outcome.ranks,
        outcome.top_ids,
        outcome.top_logprobs,
        # Whatever an earlier call left there.
        torch.full((ops.sample_workspace_bytes(num_rows, vocab_size),), 0x5A, dtype=torch.uint8),
        last_tokens,
        token_masks,
        mask_index,
    )
    expected = torch.full_like(last_tokens, -9)
    for slot, token in compress(zip(slots, outcome.token_ids.tolist(), strict=True), inside):
        expected[slot] = max(token, 0)
    assert torch.equal(last_tokens, expected)
    return outcome


def philox4x32(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Philox4x32-10 of counters uint64 ``[n, 4]`` (32 bits each)."""
    c0, c1, c2, c3 = (counter[:, i].astype(np.uint64) for i in range(4))
    low = np.uint64(0xFFFFFFFF)
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (p1 >> np.uint64(32)) ^ c1 ^ np.uint64(k0),
            p1 & low,
            (p0 >> np.uint64(32)) ^ c3 ^ np.uint64(k1),
            p0 & low,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=1)


def gumbel_noise(seed: int, position: int, vocab_size: int) -> np.ndarray:
    """The noise of every token id, float64."""
    seed &= 2**64 - 1
    counter = np.zeros(((vocab_size + 3) // 4, 4), dtype=np.uint64)
    counter[:, 0] = np.arange(len(counter))
    counter[:, 1] = position
    words = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32)).reshape(-1)[:vocab_size]
    return -np.log(-np.log((words.astype(np.float64) + 0.5) * 2.0**-32))


def processed_logits(logits: np.ndarray, row: Row) -> np.ndarray:
    """Steps 1 to 3 of ops.h in float32."""
    x = logits.astype(np.float32).copy()
    for token, value in row.bias.items():
        if 0 <= token < len(x):
            x[token] += np.float32(value)
    if row.allowed:
        masked = np.full_like(x, -np.inf)
        inside = [i for i in row.allowed if 0 <= i < len(x)]
        masked[inside] = x[inside]
        x = masked
    if row.unmasked is not None:
        masked = np.full_like(x, -np.inf)
        masked[list(row.unmasked)] = x[list(row.unmasked)]
        x = masked
    if row.position < row.min_total_tokens:
        x[[i for i in row.stop if 0 <= i < len(x)]] = -np.inf
    counts = np.bincount(np.array(row.output, dtype=np.int64), minlength=len(x))
    seen = counts > 0
    seen[list(row.prompt)] = True
    repetition = np.float32(row.repetition)
    x = np.where(seen, np.where(x > 0, x / repetition, x * repetition), x)
    x = x - np.float32(row.frequency) * counts.astype(np.float32)
    return np.where(counts > 0, x - np.float32(row.presence), x).astype(np.float32)


def survivors(x: np.ndarray, row: Row) -> np.ndarray:
    """Ids left after top_k, top_p and min_p, likeliest first."""
    order = np.lexsort((np.arange(len(x)), -x))
    order = order[x[order] > -np.inf]
    if row.top_k > 0:
        order = order[: row.top_k]
    scale = np.float64(1.0) / np.float64(np.float32(row.temperature))
    weights = np.exp((x[order].astype(np.float64) - np.float64(x[order[0]])) * scale)
    kept = np.ones(len(order), dtype=bool)
    top_p = float(np.float32(row.top_p))
    if top_p < 1.0:
        mass = np.cumsum(weights) / weights.sum()
        kept &= np.arange(len(order)) <= np.searchsorted(mass, max(top_p, 0.0))
    kept &= weights >= min(row.min_p, 1.0)
    return order[kept]


def reference_token(logits: np.ndarray, row: Row) -> int:
    if np.isnan(logits).any() or np.isposinf(logits).any():
        return -1
    if not (logits > -np.inf).any():
        return -1
    x = processed_logits(logits, row)
    if not (x > -np.inf).any():
        return -2
    if row.temperature == 0.0:
        return int(np.argmax(x))
    ids = np.sort(survivors(x, row))
    scale = np.float32(1.0) / np.float32(row.temperature)
    scaled = (x[ids] - x.max()) * scale
    noise = gumbel_noise(row.seed, row.position, len(x))
    return int(ids[np.argmax(scaled.astype(np.float64) + noise[ids])])
