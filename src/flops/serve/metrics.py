"""Metrics of the service for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

HELP = {
    "rows": "Rows computed",
    "rounds": "Calls of the scorer",
    "model_seconds": "Seconds of model computation",
    "batches": "Batches encoded",
    "encoded": "Rows of batches without padding",
    "padding": "Padding rows of batches",
    "text_hits": "Text features found in the cache",
    "text_misses": "Text features encoded",
    "image_hits": "Image features found in the cache",
    "image_misses": "Image features encoded",
    "waiting_requests": "Requests in flight",
    "held_bytes": "Bytes of request bodies in memory",
    "resident_bytes": "Resident memory of the process",
}


class Metrics(Collector):
    """Reads counters and gauges at each scrape; has its own registry.

    Args:
        counters: Returns counters by name.
        gauges: Returns gauges by name.

    Attributes:
        statuses: HTTP responses by status.
    """

    def __init__(
        self,
        counters: Callable[[], Mapping[str, float]],
        gauges: Callable[[], Mapping[str, float]],
    ) -> None:
        self.statuses: Counter[int] = Counter()
        self._counters, self._gauges = counters, gauges
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """All metrics, as `prometheus_client` reads them."""
        requests = CounterMetricFamily("flops_http_requests", "HTTP responses", labels=["status"])
        for status, count in sorted(self.statuses.items()):
            requests.add_metric([str(status)], count)
        yield requests
        for name, value in self._counters().items():
            yield CounterMetricFamily(f"flops_{name}", HELP[name], value)
        for name, value in self._gauges().items():
            yield GaugeMetricFamily(f"flops_{name}", HELP[name], value)

    def exposition(self) -> bytes:
        """All metrics in the text format of Prometheus."""
        return generate_latest(self._registry)


def resident_bytes() -> int:
    """Resident memory of this process; 0 if unknown."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096
    except (OSError, ValueError, IndexError):
        return 0
