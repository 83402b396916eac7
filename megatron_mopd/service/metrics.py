"""What GET /metrics says, in Prometheus' text format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from megatron_mopd.service.work import WorkQueue

BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Metrics:
    """Of POST /score: answers by status, and how long they took. The queue counts the rest."""

    def __init__(self) -> None:
        self._by_status: Counter[int] = Counter()
        self._by_bucket: Counter[float] = Counter()
        self._seconds = 0.0

    def answered(self, status: int, seconds: float) -> None:
        self._by_status[status] += 1
        self._seconds += seconds
        self._by_bucket.update(bound for bound in BUCKETS_S if seconds <= bound)

    def text(self, queue: WorkQueue) -> str:
        total = self._by_status.total()
        buckets = {f'_bucket{{le="{bound:g}"}}': self._by_bucket[bound] for bound in BUCKETS_S}
        latency = buckets | {'_bucket{le="+Inf"}': total, "_sum": self._seconds, "_count": total}
        statuses = {f'{{status="{status}"}}': count for status, count in sorted(self._by_status.items())}
        scored = {f'{{teacher="{name}"}}': count for name, count in sorted(queue.scored_tokens.items())}
        families = [
            _family("requests_total", "counter", "Answers to POST /score.", statuses),
            _family("scored_tokens_total", "counter", "Response tokens with a log-prob.", scored),
            _family("waiting_tokens", "gauge", "Tokens in the queue.", {"": queue.waiting_tokens}),
            _family("batches_total", "counter", "Forward passes over merged requests.", {"": queue.num_batches}),
            _family("switches_total", "counter", "Batches of another teacher than before.", {"": queue.num_switches}),
            _family("request_seconds", "histogram", "From a request's arrival to its answer.", latency),
        ]
        return "\n".join(line for family in families for line in family) + "\n"


def _family(name: str, kind: str, purpose: str, samples: Mapping[str, float]) -> Iterable[str]:
    name = f"mopd_teacher_service_{name}"
    lines = (f"{name}{labels} {value}" for labels, value in samples.items())
    return [f"# HELP {name} {purpose}", f"# TYPE {name} {kind}", *lines]
