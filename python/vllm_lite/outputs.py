"""What a request gives back; vLLM's names."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import overload

from vllm_lite.messages import TokenLogprobs


@dataclass(slots=True)
class Logprob:
    """One alternative at one position; rank 1 is the likeliest, decoded_token its own text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


# A token first, then the likeliest where alternatives were asked for; by token id.
Position = dict[int, Logprob]


def decode_position(token: int, entry: TokenLogprobs, text_of: Callable[[int], str]) -> Position:
    position = {token: Logprob(entry.logprob, entry.rank, text_of(token))}
    for rank, (top, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), 1):
        if top >= 0 and top not in position:
            position[top] = Logprob(logprob, rank, text_of(top))
    return position


class PromptLogprobs(Sequence[Position | None]):
    """One entry for each of the prompt's tokens; None for the first, which nothing comes before,
    and for those that were not asked for.

    Entries are made when they are looked at: a long prompt has a great many.
    """

    def __init__(
        self,
        token_ids: Sequence[int],
        entries: Sequence[TokenLogprobs],
        text_of: Callable[[int], str],
    ) -> None:
        """entries: of the last tokens."""
        self._token_ids = token_ids
        self._entries = entries
        self._text_of = text_of

    def __len__(self) -> int:
        return len(self._token_ids)

    @overload
    def __getitem__(self, index: int) -> Position | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[Position | None]: ...
    def __getitem__(self, index: int | slice) -> Position | list[Position | None] | None:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        entry = index - (len(self) - len(self._entries))
        if entry < 0:
            return None
        return decode_position(self._token_ids[index], self._entries[entry], self._text_of)

    def values(self) -> list[float]:
        """The log-probabilities of the tokens that were asked for."""
        return [entry.logprob for entry in self._entries]


@dataclass(slots=True)
class CompletionOutput:
    """One of the request's ``n`` samples."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None  # "stop", "length", "abort", "error"
    stop_reason: int | str | None = None  # the stop string or token id; None for EOS

    def finished(self) -> bool:
        return self.finish_reason is not None

    def append(self, delta: "CompletionOutput") -> None:
        """Makes this delta one with the next of the same sample."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.cumulative_logprob = delta.cumulative_logprob
        if self.logprobs is not None:
            self.logprobs += delta.logprobs or []
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason


@dataclass(slots=True)
class BeamSearchSequence:
    """One sequence of a beam search. ``tokens`` and ``text`` begin with the prompt's, as vLLM's do;
    ``tokens`` ends with the token that ended it.
    """

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]  # of the output tokens
    cum_logprob: float
    text: str
    finish_reason: str | None  # "stop", "length"
    stop_reason: int | str | None  # the stop token's id; None for EOS


@dataclass(slots=True)
class BeamSearchOutput:
    sequences: list[BeamSearchSequence]  # best first


@dataclass(slots=True)
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
    # If they were asked for. Of deltas, one has them: the first of sample 0.
    prompt_logprobs: PromptLogprobs | None = None
    metrics: None = None  # per request; the engine's are in ``Engine.stats`` and /metrics
    error: str | None = None  # why the request failed; its samples then end with "error"

    def append(self, delta: "RequestOutput") -> None:
        """Makes this delta one with the next of the same request."""
        own = {output.index: output for output in self.outputs}
        for output in delta.outputs:
            if output.index in own:
                own[output.index].append(output)
            else:
                self.outputs.append(output)
        self.finished = delta.finished
        self.num_cached_tokens = delta.num_cached_tokens
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs
        self.error = delta.error


@dataclass(slots=True)
class PoolingOutput:
    data: list[float]

    @property
    def embedding(self) -> list[float]:
        return self.data


@dataclass(slots=True)
class PoolingRequestOutput:
    """What a prompt's hidden states were pooled to."""

    request_id: str
    outputs: PoolingOutput
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int = 0
    error: str | None = None  # why the request failed; its vector is then empty


@dataclass(slots=True)
class ScoringOutput:
    score: float  # above 0, at most 1: vllm_lite/scoring.py


@dataclass(slots=True)
class ScoringRequestOutput:
    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int = 0
