"""What a stage does with its time: every second of an epoch gets one name.

no step in the log     wait_store while fetches or puts are open, else idle
a step in the log      wait_recv: its hidden states are not here | overhead | busy: its forward
beside the forwards    wait_send: hidden states that the link cannot take yet; it costs the next stage time, not this one
"""

from __future__ import annotations

from moontide.clock import Clock
from prefill_node.metrics import StageMetrics


class StageTimes:
    """Counts into the metrics of one stage. Lives on the event loop."""

    def __init__(self, metrics: StageMetrics, clock: Clock) -> None:
        self._metrics = metrics
        self._clock = clock
        self._steps = 0
        self._store_jobs = 0
        self._counted_until_s = clock.now()

    def open_step(self) -> None:
        """A step is in the log."""
        self.settle()
        self._steps += 1

    def close_step(self, *, ready_s: float | None, started_s: float, ended_s: float) -> float:
        """A forward is over; returns how long the stage waited for its hidden states.

        Args:
            ready_s: when they were here; None on the first stage.
        """
        wait_recv_s = 0.0 if ready_s is None else max(0.0, min(ready_s, started_s) - self._counted_until_s)
        self._metrics.busy_seconds.inc(ended_s - started_s)
        self._metrics.wait_recv_seconds.inc(wait_recv_s)
        self._metrics.overhead_seconds.inc(max(0.0, started_s - self._counted_until_s - wait_recv_s))
        self._metrics.steps.inc()
        self._steps -= 1
        self._counted_until_s = ended_s
        return wait_recv_s

    def open_store_job(self) -> None:
        """A fetch, or the puts of a step, are under way."""
        self.settle()
        self._store_jobs += 1

    def close_store_job(self) -> None:
        self.settle()
        self._store_jobs -= 1

    def settle(self) -> None:
        """Count the time until now while there is no step, so that the counters go on in a long pause too."""
        if self._steps:
            return
        now_s = self._clock.now()
        counter = self._metrics.wait_store_seconds if self._store_jobs else self._metrics.idle_seconds
        counter.inc(max(0.0, now_s - self._counted_until_s))
        self._counted_until_s = max(now_s, self._counted_until_s)
