"""``/metrics``: an engine's metrics in Prometheus' text format."""

from collections.abc import Iterator
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from vllm_lite.metrics import Counter, Gauge, Histogram, Metrics

CONTENT_TYPE = CONTENT_TYPE_LATEST
_FAMILIES: dict[type, Any] = {
    Counter: CounterMetricFamily,
    Gauge: GaugeMetricFamily,
    Histogram: HistogramMetricFamily,
}


class MetricsPage(Collector):
    """``metrics`` as a page, in a registry of its own."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def __call__(self) -> bytes:
        return generate_latest(self._registry)

    def describe(self) -> list[Family]:
        return []

    def collect(self) -> Iterator[Family]:
        families: dict[str, Any] = {}  # metrics of one name are one family
        for metric in self._metrics.read():
            family = families.get(metric.name)
            if family is None:
                make = _FAMILIES[type(metric)]
                family = families[metric.name] = make(
                    metric.name, metric.text, labels=list(metric.labels)
                )
            values = list(metric.labels.values())
            if isinstance(metric, Histogram):
                family.add_metric(values, list(metric.buckets.items()), metric.sum)
            elif isinstance(metric, Counter | Gauge):
                family.add_metric(values, metric.value)
        yield from families.values()
