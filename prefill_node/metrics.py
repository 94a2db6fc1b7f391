"""Prometheus metrics of a stage process. Those of the group live on its stage 0."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from moontide.metrics import LATENCY_BUCKETS_S


class StageMetrics:
    """What one stage does."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.busy_seconds = Counter("prefill_stage_busy_seconds", "Time in forwards.", registry=registry)
        self.wait_seconds = Counter(
            "prefill_stage_wait_seconds", "Time idle while a step was in the log: the bubble.", registry=registry
        )
        self.chunk_tokens = Counter("prefill_chunk_tokens", "Prompt tokens computed.", registry=registry)
        self.put_seconds = Counter(
            "prefill_put_seconds", "Time from first to last put of the steps.", registry=registry
        )
        self.puts_failed = Counter(
            "prefill_puts_failed", "Objects whose put failed after all attempts.", registry=registry
        )
        self.is_grouped = Gauge("prefill_group_complete", "1 while this stage is part of a group.", registry=registry)
        self.epochs = Counter("prefill_group_epochs", "Group epochs that this stage has joined.", registry=registry)


class GroupMetrics:
    """What a group does with its requests."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.ttft_seconds = Histogram(
            "prefill_ttft_seconds",
            "Arrival at stage 0 to the first token's departure.",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.requests = Counter(
            "prefill_requests", "Requests that ended, by outcome (completed, or the error's name).", ["outcome"],
            registry=registry,
        )  # fmt: skip
        self.waiting = Gauge(
            "prefill_waiting_requests", "Requests without pages or room in the store.", registry=registry
        )
        self.running = Gauge("prefill_running_requests", "Requests with pages.", registry=registry)
        self.queued_tokens = Gauge(
            "prefill_queued_tokens", "Prompt tokens that no micro-batch has taken.", registry=registry
        )
        self.free_pages = Gauge("prefill_free_pages", "Pages that no request holds.", registry=registry)
        self.num_pages = Gauge("prefill_num_pages", "Pages of the group.", registry=registry)
        self.in_flight_steps = Gauge(
            "prefill_in_flight_steps", "Micro-batches that some stage has not computed.", registry=registry
        )
        self.open_puts = Gauge("prefill_open_puts", "Micro-batches whose objects are not all put.", registry=registry)
        self.hit_tokens = Counter(
            "prefill_hit_tokens", "Prompt tokens whose KV came from the store.", registry=registry
        )
        self.rewinds = Counter(
            "prefill_rewinds", "Prefix hits that were shorter than the store had said.", registry=registry
        )
