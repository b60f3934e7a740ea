"""What a step gives of its hidden states beside sampled tokens: log-probabilities of the prompts'
tokens, and pooled vectors.
"""

from collections.abc import Callable

import torch

from vllm_lite import ops
from vllm_lite.config import MIN_LOGITS_ROWS
from vllm_lite.worker.step_plan import NEW_ROW, NEW_ROW_WORDS, PooledPart

# Of tokens of the step (int32 indices, at most MIN_LOGITS_ROWS, which is enough for the weights of
# the vocabulary to be read rarely): one row each, until the next call.
StatesOf = Callable[[torch.Tensor], torch.Tensor]

# Means are of integers in this unit, whose sums do not depend on their order nor on how a prompt is
# cut. Half a unit is below float32's rounding of numbers above 0.1. Numbers of up to _LARGEST leave
# room for 2^20 tokens in 64 bits.
_UNITS = 2.0**26
_LARGEST = 2.0**17


class PromptScorer:
    """Log-probabilities of given tokens: the sampler's own, with one token allowed in each row."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        states = torch.zeros(MIN_LOGITS_ROWS, NEW_ROW_WORDS - 1, dtype=torch.int32)
        fields = states.numpy().view(_ROW_STATE)[:, 0]
        for name in ("top_p", "repetition_penalty"):
            fields[name] = 1.0
        fields["num_allowed"] = 1
        self._row_states = states.to(device)
        self._rows = torch.arange(MIN_LOGITS_ROWS, dtype=torch.int32, device=device)
        self._tokens = torch.zeros(MIN_LOGITS_ROWS, 1, dtype=torch.int32, device=device)

    def score(
        self,
        scored: torch.Tensor,
        num_top: int,
        logits_of: StatesOf,
        workspace: torch.Tensor | None,
    ) -> list[torch.Tensor]:
        """The sections of a result, as int32 words: logprobs, ranks, top ids, top logprobs.

        scored: int32 ``[count, 3]`` on the device, as a plan has it; num_top: the largest number of
        likeliest tokens that one asks for.
        """
        count = len(scored)
        logprobs = torch.empty(count, dtype=torch.float32, device=self._device)
        ranks = torch.empty(count, dtype=torch.int32, device=self._device)
        top_ids = torch.empty(count, num_top, dtype=torch.int32, device=self._device)
        top_logprobs = torch.empty(count, num_top, dtype=torch.float32, device=self._device)
        chosen = torch.empty(MIN_LOGITS_ROWS, dtype=torch.int32, device=self._device)
        for begin in range(0, count, MIN_LOGITS_ROWS):
            indices, tokens, counts = scored[begin : begin + MIN_LOGITS_ROWS].t().contiguous()
            n, end = len(indices), begin + len(indices)
            self._tokens[:n, 0] = tokens
            self._row_states[:n, _NUM_LOGPROBS] = counts
            ops.sample(
                logits_of(indices), self._rows[:n], self._rows[:n], self._row_states, self._tokens,
                None, None, chosen[:n], logprobs[begin:end], ranks[begin:end],
                top_ids[begin:end] if num_top else None,
                top_logprobs[begin:end] if num_top else None, workspace,
            )  # fmt: skip
        words = [logprobs.view(torch.int32), ranks]
        return [*words, top_ids.view(-1), top_logprobs.view(torch.int32).view(-1)]


class Pooler:
    """Vectors of hidden states. The sums of rows whose mean is wanted stay from step to step."""

    def __init__(self, max_rows: int, hidden_size: int, device: torch.device) -> None:
        self._shape = max_rows, hidden_size
        self._device = device
        self._sums: torch.Tensor | None = None  # made when the first mean is asked for
        self._broken: torch.Tensor | None = None  # of each row: numbers that have no place in a sum

    def pool(self, parts: list[PooledPart], states_of: StatesOf) -> torch.Tensor:
        """float32 ``[parts that end, hidden_size]``; NaN where a state is not finite."""
        places = {id(part): place for place, part in enumerate(p for p in parts if p.ends)}
        vectors = torch.empty(len(places), self._shape[1], device=self._device)
        last = [part for part in parts if not part.is_mean]
        for begin in range(0, len(last), MIN_LOGITS_ROWS):
            piece = last[begin : begin + MIN_LOGITS_ROWS]
            states = states_of(self._ids([part.end - 1 for part in piece]))
            vectors[self._ids([places[id(part)] for part in piece])] = states.float()
        for part in parts:
            if part.is_mean:
                self._add(part, states_of)
                if part.ends:
                    vectors[places[id(part)]] = self._mean(part)
        return vectors

    def _add(self, part: PooledPart, states_of: StatesOf) -> None:
        if self._sums is None or self._broken is None:
            self._sums = torch.zeros(self._shape, dtype=torch.int64, device=self._device)
            self._broken = torch.zeros(self._shape[0], dtype=torch.int64, device=self._device)
        if part.num_tokens == part.end - part.first:  # the sequence's first tokens
            self._sums[part.row] = 0
            self._broken[part.row] = 0
        for begin in range(part.first, part.end, MIN_LOGITS_ROWS):
            states = states_of(
                self._ids(range(begin, min(begin + MIN_LOGITS_ROWS, part.end)))
            ).double()
            broken = ~(states.abs() < _LARGEST)
            units = states.masked_fill(broken, 0.0).mul_(_UNITS).round_().long()
            self._sums[part.row] += units.sum(0)
            self._broken[part.row] += broken.sum()

    def _mean(self, part: PooledPart) -> torch.Tensor:
        assert self._sums is not None and self._broken is not None
        mean = self._sums[part.row].double() / (_UNITS * part.num_tokens)
        return mean.masked_fill(self._broken[part.row] > 0, torch.nan).float()

    def _ids(self, values: "list[int] | range") -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._device)


_ROW_STATE = [(name, *rest) for name, *rest in NEW_ROW.descr if name != "row"]
_NUM_LOGPROBS = [name for name, *_ in _ROW_STATE].index("num_logprobs")
