"""Counts of requests and their times, in the text format that Prometheus reads."""

from __future__ import annotations

import threading
from collections.abc import Mapping

EDGES_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class Metrics:
    """Thread-safe; routes are names of ours, never what a client sent."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count: dict[tuple[str, int], int] = {}
        self._buckets: dict[str, list[int]] = {}
        self._seconds: dict[str, float] = {}

    def add(self, route: str, status: int, seconds: float) -> None:
        """One request that was answered."""
        with self._lock:
            self._count[route, status] = self._count.get((route, status), 0) + 1
            buckets = self._buckets.setdefault(route, [0] * (len(EDGES_S) + 1))
            buckets[next((i for i, edge in enumerate(EDGES_S) if seconds <= edge), len(EDGES_S))] += 1
            self._seconds[route] = self._seconds.get(route, 0.0) + seconds

    def text(self, gauges: Mapping[str, float]) -> str:
        """Everything, with further figures as they are now."""
        lines = ["# TYPE vlretrieval_requests_total counter"]
        with self._lock:
            for (route, status), count in sorted(self._count.items()):
                lines.append(f'vlretrieval_requests_total{{route="{route}",status="{status}"}} {count}')
            lines.append("# TYPE vlretrieval_request_seconds histogram")
            for route, buckets in sorted(self._buckets.items()):
                total = 0
                for edge, count in zip((*EDGES_S, "+Inf"), buckets, strict=True):
                    total += count
                    lines.append(f'vlretrieval_request_seconds_bucket{{route="{route}",le="{edge}"}} {total}')
                lines.append(f'vlretrieval_request_seconds_sum{{route="{route}"}} {self._seconds[route]:.6f}')
                lines.append(f'vlretrieval_request_seconds_count{{route="{route}"}} {total}')
        for name, value in gauges.items():
            lines += [f"# TYPE vlretrieval_{name} gauge", f"vlretrieval_{name} {value:g}"]
        return "\n".join(lines) + "\n"


def resident_bytes() -> int:
    """Memory of this process (Linux; 0 elsewhere)."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096
    except OSError:
        return 0
