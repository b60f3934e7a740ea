"""The sampler in plain numpy, with full sorts and float64, and the op's call from plain rows.

The order of processing is that of ``csrc/ops/ops.h``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch

from vllm_lite import ops


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


def _ragged(lists: Sequence[Sequence[int]]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if not any(lists):
        return None, None
    start = np.cumsum([0, *map(len, lists)]).astype(np.int32)
    ids = np.array([i for one in lists for i in one], dtype=np.int32)
    return torch.from_numpy(start), torch.from_numpy(ids)


def sample(
    logits: torch.Tensor, rows: Sequence[Row], state_rows: Sequence[int] | None = None
) -> Outcome:
    """Runs the op; row i keeps its state at ``state_rows[i]`` (i if not given)."""
    num_rows, vocab_size = logits.shape
    slots = list(range(num_rows)) if state_rows is None else list(state_rows)
    max_rows = max(slots) + 1
    floats = torch.full((6, max_rows), float("nan"))
    ints = torch.full((3, max_rows), 7, dtype=torch.int32)
    seeds = torch.zeros(max_rows, dtype=torch.int64)
    has_history = any(row.prompt or row.output for row in rows)
    counts = torch.zeros(max_rows, vocab_size, dtype=torch.int32) if has_history else None
    mask = torch.zeros(max_rows, vocab_size, dtype=torch.uint8) if has_history else None
    floats[:, slots] = torch.tensor(
        [[r.temperature, r.top_p, r.min_p, r.repetition, r.presence, r.frequency] for r in rows]
    ).T
    ints[:, slots] = torch.tensor(
        [[r.top_k, r.num_logprobs, r.min_total_tokens] for r in rows], dtype=torch.int32
    ).T
    seeds[slots] = torch.tensor([row.seed for row in rows])
    if counts is not None and mask is not None:
        for slot, row in zip(slots, rows, strict=True):
            for token in row.output:
                counts[slot, token] += 1
            mask[slot, list(row.prompt)] = 1
    max_logprobs = max(1, max(row.num_logprobs for row in rows) + 1)
    bias_start, bias_ids = _ragged([list(row.bias) for row in rows])
    bias_values = torch.tensor([v for row in rows for v in row.bias.values()], dtype=torch.float32)
    allowed_start, allowed_ids = _ragged([row.allowed for row in rows])
    stop_start, stop_ids = _ragged([row.stop for row in rows])
    last_tokens = torch.full((seeds.numel(),), -9, dtype=torch.int32)
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
        floats,
        ints,
        seeds,
        counts,
        mask,
        bias_start,
        bias_ids,
        bias_values if bias_start is not None else None,
        allowed_start,
        allowed_ids,
        stop_start,
        stop_ids,
        outcome.token_ids,
        outcome.logprobs,
        outcome.ranks,
        outcome.top_ids,
        outcome.top_logprobs,
        # Whatever an earlier call left there.
        torch.full((ops.sample_workspace_bytes(num_rows, vocab_size),), 0x5A, dtype=torch.uint8),
        last_tokens,
    )
    expected = torch.full_like(last_tokens, -9)
    for slot, token in zip(slots, outcome.token_ids.tolist(), strict=True):
        if 0 <= slot < len(expected):
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
    x = processed_logits(logits, row)
    if not (x > -np.inf).any():
        return -1
    if row.temperature == 0.0:
        return int(np.argmax(x))
    ids = np.sort(survivors(x, row))
    scale = np.float32(1.0) / np.float32(row.temperature)
    scaled = (x[ids] - x.max()) * scale
    noise = gumbel_noise(row.seed, row.position, len(x))
    return int(ids[np.argmax(scaled.astype(np.float64) + noise[ids])])
