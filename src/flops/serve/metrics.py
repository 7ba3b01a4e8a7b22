"""Counters in the text format that Prometheus reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path


class Requests:
    """How many requests had which status."""

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()

    def lines(self) -> list[str]:
        """One line for every status."""
        return [
            "# TYPE flops_http_requests_total counter",
            *(
                f'flops_http_requests_total{{status="{status}"}} {count}'
                for status, count in sorted(self.statuses.items())
            ),
        ]


def exposition(counters: Mapping[str, float], gauges: Mapping[str, float]) -> list[str]:
    """Lines of metrics by name; names of counters end in total."""
    lines = []
    for kind, values in (("counter", counters), ("gauge", gauges)):
        for name, value in values.items():
            lines += [f"# TYPE flops_{name} {kind}", f"flops_{name} {value:.10g}"]
    return lines


def resident_bytes() -> int:
    """Memory of this process, 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096
    except (OSError, ValueError, IndexError):
        return 0
