"""``/metrics``: vLLM's names under the prefix ``vllm_lite:``, in a registry of their own.

Requests write to plain Prometheus objects; the engine's state is read when somebody scrapes. A
failure in here is logged and never reaches a request.
"""

import functools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from vllm_lite.outputs import RequestOutput
from vllm_lite.server.engine import EngineLike
from vllm_lite.stats import EngineStats

logger = logging.getLogger("vllm_lite.server")

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
    content_type = CONTENT_TYPE_LATEST

    def __init__(self, engine: EngineLike) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a time stamp per counter
        self._registry = CollectorRegistry(auto_describe=False)
        model = engine.config.served_model_names[0]

        def counter(name: str, text: str) -> Counter:
            metric = Counter(f"vllm_lite:{name}", text, ["model_name"], registry=self._registry)
            return metric.labels(model)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            metric = Histogram(
                f"vllm_lite:{name}", text, ["model_name"], registry=self._registry, buckets=buckets
            )
            return metric.labels(model)

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
        self._success = Counter(
            "vllm_lite:request_success",
            "Requests that the engine took, by how they ended: stop, length, abort, error."
            " With n > 1 the sample that finished last counts.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self.ended = {
            reason: self._success.labels(model, reason)
            for reason in ("stop", "length", "abort", "error")
        }
        self._registry.register(_EngineCollector(engine, model))

    def watch(self, prompt_tokens: int, stream: bool) -> "RequestWatch":
        return RequestWatch(self, prompt_tokens, stream)

    def page(self) -> bytes:
        return generate_latest(self._registry)


class RequestWatch:
    """Follows one engine request. A request that was refused before any output is not counted."""

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
        tokens = sum(len(sample.token_ids) for sample in output.outputs)
        if tokens:
            metrics.generation_tokens.inc(tokens)
        if not self._stream or not tokens:
            return
        now = time.perf_counter()
        if not self._last:
            metrics.time_to_first_token.observe(now - self._began)
        for sample in output.outputs:
            count = len(sample.token_ids)
            if not count:
                continue
            before = self._last.get(sample.index)
            if before is not None:
                for _ in range(count):
                    metrics.inter_token_latency.observe((now - before) / count)
            self._last[sample.index] = now

    @_harmless
    def finish(self, reason: str) -> None:
        if reason == "error" and not self._has_output:
            return  # refused
        self._metrics.ended[reason].inc()
        if reason in ("stop", "length"):
            self._metrics.e2e_latency.observe(time.perf_counter() - self._began)


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


class _EngineCollector(Collector):
    """Reads ``engine.stats()`` at a scrape; gives nothing when that fails."""

    def __init__(self, engine: EngineLike, model: str) -> None:
        self._engine = engine
        self._model = model
        self._queries, self._hits, self._preemptions = _Total(), _Total(), _Total()

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        try:
            yield from self._read(self._engine.stats())
        except Exception:
            logger.exception("metrics: the engine gave no statistics")

    def _read(self, stats: EngineStats) -> list[Metric]:
        used = stats.kv_used_blocks / stats.kv_total_blocks if stats.kv_total_blocks else 0.0
        return [
            self._gauge(
                "num_requests_running", "Sequences in the running batch.", stats.num_running
            ),
            self._gauge("num_requests_waiting", "Sequences waiting for room.", stats.num_waiting),
            self._gauge("kv_cache_usage_perc", "Share of KV cache blocks in use (1 is all).", used),
            self._counter(
                "prefix_cache_queries",
                "Prompt tokens looked up in the prefix cache.",
                self._queries(stats.prefix_queries),
            ),
            self._counter(
                "prefix_cache_hits", "Prompt tokens found there.", self._hits(stats.prefix_hits)
            ),
            self._counter(
                "num_preemptions",
                "Sequences preempted.",
                self._preemptions(stats.num_preemptions),
            ),
        ]

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm_lite:{name}", text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm_lite:{name}", text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family
