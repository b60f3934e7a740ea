"""What an engine's requests add up to: vLLM's names under the prefix ``vllm_lite:``.

Requests write plain numbers, for every token of every stream; the engine's state is read when
somebody asks. A failure in here is logged and never reaches a request.
"""

import functools
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

from vllm_lite.outputs import RequestOutput
from vllm_lite.stats import EngineStats

logger = logging.getLogger(__name__)

PREFIX = "vllm_lite:"

_FAST = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
)
_FIRST = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
_WHOLE = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)

F = TypeVar("F", bound=Callable[..., None])


@dataclass
class Metric:
    """``labels``: name to value. ``text``: what it counts, in a sentence."""

    name: str
    labels: dict[str, str]
    text: str = field(repr=False)


@dataclass
class Counter(Metric):
    value: float = 0

    def inc(self, amount: float = 1) -> None:
        self.value += amount


@dataclass
class Gauge(Metric):
    value: float = 0


@dataclass
class Histogram(Metric):
    """``buckets``: upper bound to the number of values up to it; the last bound is ``+Inf``."""

    bounds: tuple[float, ...] = field(default=(), repr=False)
    count: int = 0
    sum: float = 0.0

    def __post_init__(self) -> None:
        self._counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self.bounds, value)] += times
        self.count += times
        self.sum += value * times

    @property
    def buckets(self) -> dict[str, int]:
        names = [*map(repr, map(float, self.bounds)), "+Inf"]
        total, found = 0, {}
        for name, count in zip(names, self._counts, strict=True):
            total += count
            found[name] = total
        return found


def _harmless(function: F) -> F:
    """A metric that fails is a line in the log, not a failed request."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except Exception:
            logger.exception("metrics: %s failed", function.__name__)

    return cast(F, call)


class Metrics:
    """``stats``: the engine's state; what it raises is logged, and its metrics are missing then."""

    def __init__(self, model: str, stats: Callable[[], EngineStats]) -> None:
        self._labels = {"model_name": model}
        self._stats = stats
        self._metrics: list[Counter | Histogram] = []

        def counter(name: str, text: str, **labels: str) -> Counter:
            made = Counter(PREFIX + name, {**self._labels, **labels}, text)
            self._metrics.append(made)
            return made

        def histogram(name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
            made = Histogram(PREFIX + name, self._labels, text, bounds)
            self._metrics.append(made)
            return made

        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that gave output.")
        self.generation_tokens = counter("generation_tokens", "Tokens generated.")
        self.time_to_first_token = histogram(
            "time_to_first_token_seconds",
            "Streams: from the engine's start to its first token.",
            _FIRST,
        )
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds",
            "Streams: time between outputs of one sample, divided by the tokens in the later one.",
            _FAST,
        )
        self.e2e_latency = histogram(
            "e2e_request_latency_seconds", "From the engine's start to the last token.", _WHOLE
        )
        self.ended = {
            reason: counter(
                "request_success",
                "Requests that the engine took, by how they ended: stop, length, abort, error."
                " With n > 1 the sample that finished last counts.",
                finished_reason=reason,
            )
            for reason in ("stop", "length", "abort", "error")
        }
        self._queries, self._hits, self._preemptions = _Total(), _Total(), _Total()
        self._drafts, self._draft_tokens, self._accepted_tokens = _Total(), _Total(), _Total()

    def watch(self, prompt_tokens: int, stream: bool) -> "RequestWatch":
        return RequestWatch(self, prompt_tokens, stream)

    def read(self) -> list[Metric]:
        """The present values, as objects of the caller's own."""
        found: list[Metric] = []
        for metric in self._metrics:
            copy = replace(metric, labels=dict(metric.labels))
            if isinstance(copy, Histogram):
                copy._counts = list(cast(Histogram, metric)._counts)
            found.append(copy)
        try:
            found += self._engine_metrics(self._stats())
        except Exception:
            logger.exception("metrics: the engine gave no statistics")
        return found

    def _engine_metrics(self, stats: EngineStats) -> Iterator[Metric]:
        used = stats.kv_used_blocks / stats.kv_total_blocks if stats.kv_total_blocks else 0.0
        for name, text, value in (
            ("num_requests_running", "Sequences in the running batch.", stats.num_running),
            ("num_requests_waiting", "Sequences waiting for room.", stats.num_waiting),
            ("kv_cache_usage_perc", "Share of KV cache blocks in use (1 is all).", used),
        ):
            yield Gauge(PREFIX + name, dict(self._labels), text, value)
        for name, text, value in (
            (
                "prefix_cache_queries",
                "Prompt tokens looked up in the prefix cache.",
                self._queries(stats.prefix_queries),
            ),
            ("prefix_cache_hits", "Prompt tokens found there.", self._hits(stats.prefix_hits)),
            (
                "num_preemptions",
                "Sequences preempted.",
                self._preemptions(stats.num_preemptions),
            ),
            (
                "spec_decode_num_drafts",
                "Steps of sequences in which draft tokens were verified.",
                self._drafts(stats.num_drafts),
            ),
            (
                "spec_decode_num_draft_tokens",
                "Draft tokens verified.",
                self._draft_tokens(stats.num_draft_tokens),
            ),
            (
                "spec_decode_num_accepted_tokens",
                "Draft tokens that were right.",
                self._accepted_tokens(stats.num_accepted_tokens),
            ),
        ):
            yield Counter(PREFIX + name, dict(self._labels), text, value)


class RequestWatch:
    """Follows one engine request. Of one that the engine refused, ``finish`` is not called."""

    __slots__ = ("_began", "_has_output", "_last", "_metrics", "_prompt_tokens", "_stream")

    def __init__(self, metrics: Metrics, prompt_tokens: int, stream: bool) -> None:
        self._metrics = metrics
        self._prompt_tokens = prompt_tokens
        self._stream = stream
        self._began = time.perf_counter()
        self._last: dict[int, float] = {}  # sample to the time of its last output
        self._has_output = False

    @_harmless
    def output(self, output: RequestOutput) -> None:
        metrics = self._metrics
        if not self._has_output:
            self._has_output = True
            metrics.prompt_tokens.inc(self._prompt_tokens)
        now = time.perf_counter() if self._stream else 0.0
        tokens = 0
        for sample in output.outputs:
            count = len(sample.token_ids)
            if not count:
                continue
            tokens += count
            if not self._stream:
                continue
            if not self._last:
                metrics.time_to_first_token.observe(now - self._began)
            before = self._last.get(sample.index)
            if before is not None:
                metrics.inter_token_latency.observe((now - before) / count, count)
            self._last[sample.index] = now
        metrics.generation_tokens.inc(tokens)

    @_harmless
    def finish(self, reason: str) -> None:
        self._metrics.ended[reason].inc()
        if reason in ("stop", "length"):
            self._metrics.e2e_latency.observe(time.perf_counter() - self._began)

    def end(self, output: RequestOutput) -> None:
        """``output`` and ``finish`` for an answer that came whole."""
        if any(sample.token_ids for sample in output.outputs):
            self.output(output)
        self.finish(output.outputs[-1].finish_reason or "error")


class _Total:
    """A total that never falls, also when the engine starts again from zero."""

    def __init__(self) -> None:
        self._base = 0
        self._seen = 0

    def __call__(self, value: int) -> int:
        if value < self._seen:
            self._base += self._seen
        self._seen = value
        return self._base + value
