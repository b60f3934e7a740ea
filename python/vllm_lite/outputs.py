"""What a request gives back; vLLM's names."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Logprob:
    """One alternative at one position; rank 1 is the likeliest, decoded_token its own text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


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
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
    prompt_logprobs: None = None  # not computed
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
        self.error = delta.error
