"""Prometheus metrics of a stage process. Those of the group live on its stage 0."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

from moontide.errors import ERRORS_BY_CODE
from moontide.fair_share import PRIORITY_LABELS
from moontide.metrics import ERROR_BUCKETS, LATENCY_BUCKETS_S, start_at_zero


class StageMetrics:
    """What one stage does."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.busy_seconds = Counter("prefill_stage_busy_seconds", "Time in forwards.", registry=registry)
        self.wait_recv_seconds = Counter(
            "prefill_stage_wait_recv_seconds", "Time without the hidden states of a step in the log.", registry=registry
        )
        self.wait_store_seconds = Counter(
            "prefill_stage_wait_store_seconds",
            "Time without a step while fetches or puts were open.",
            registry=registry,
        )
        self.overhead_seconds = Counter(
            "prefill_stage_overhead_seconds", "Time with everything there for a step that had not begun.",
            registry=registry,
        )  # fmt: skip
        self.idle_seconds = Counter(
            "prefill_stage_idle_seconds", "Time of a complete group without any work.", registry=registry
        )
        self.wait_send_seconds = Counter(
            "prefill_stage_wait_send_seconds", "Time that hidden states waited for older ones to be sent.",
            registry=registry,
        )  # fmt: skip
        self.steps = Counter("prefill_stage_steps", "Forwards that ran.", registry=registry)
        self.chunk_tokens = Counter("prefill_chunk_tokens", "Prompt tokens computed.", registry=registry)
        self.pushes = Counter(
            "prefill_pushes", "Steps whose KV is put layer-wise, at-end (of the step) or after-prefill (of the prompt).",
            ["mode"], registry=registry,
        )  # fmt: skip
        start_at_zero(self.pushes, "layer-wise", "at-end", "after-prefill")
        self.put_seconds = Counter("prefill_put_seconds", "Time in calls that put.", registry=registry)
        self.put_wait_seconds = Counter(
            "prefill_put_wait_seconds", "Time that steps with KV to be put waited for the puts before them.",
            registry=registry,
        )  # fmt: skip
        self.put_bytes = Counter("prefill_put_bytes", "Bytes given to calls that put.", registry=registry)
        self.put_waiting_bytes = Gauge(
            "prefill_put_waiting_bytes", "Computed KV that no call has taken yet.", registry=registry
        )
        self.put_batch_objects = Histogram(
            "prefill_put_batch_objects", "Objects of a call that puts.", registry=registry,
            buckets=[2**power for power in range(11)],
        )  # fmt: skip
        self.puts_failed = Counter(
            "prefill_puts_failed", "Objects whose put failed after all attempts.", registry=registry
        )
        self.is_grouped = Gauge("prefill_group_complete", "1 while this stage is part of a group.", registry=registry)
        self.epochs = Counter("prefill_group_epochs", "Group epochs that this stage has joined.", registry=registry)


class GroupMetrics:
    """What a group does with its requests."""

    def __init__(self, registry: CollectorRegistry, *, num_stages: int) -> None:
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
        start_at_zero(self.requests, "completed", *ERRORS_BY_CODE)
        self.waiting = Gauge(
            "prefill_waiting_requests", "Requests without pages or room in the store, by priority: high, normal, low.",
            ["priority"], registry=registry,
        )  # fmt: skip
        start_at_zero(self.waiting, *PRIORITY_LABELS)
        self.running = Gauge("prefill_running_requests", "Requests with pages.", registry=registry)
        self.queued_tokens = Gauge(
            "prefill_queued_tokens", "Prompt tokens that no micro-batch has taken.", registry=registry
        )
        self.queued_seconds = Gauge(
            "prefill_queued_seconds", "Predicted time of the slowest stage for all that is here.", registry=registry
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
        self.copies = Counter(
            "prefill_copies", "Prefixes that the conductor wanted from another host's store: whole, part, given up, failed.",
            ["outcome"], registry=registry,
        )  # fmt: skip
        start_at_zero(self.copies, "whole", "part", "given up", "failed")
        self.copy_wait_seconds = Counter(
            "prefill_copy_wait_seconds", "Time that prompts with pages waited for their copy.", registry=registry
        )
        self.tail_seconds = Histogram(
            "prefill_tail_seconds", "First token to everything of the prompt sealed.", buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )  # fmt: skip
        self.rewinds = Counter(
            "prefill_rewinds", "Prefix hits that were shorter than the store had said.", registry=registry
        )
        self.page_hit_tokens = Counter(
            "prefill_page_hit_tokens", "Prompt tokens whose KV was still in the stages' pages.", registry=registry
        )
        self.bubble_seconds = Counter(
            "prefill_bubble_seconds", "Time that a stage was idle while its group had steps in flight.", ["stage"],
            registry=registry,
        )  # fmt: skip
        start_at_zero(self.bubble_seconds, *map(str, range(num_stages)))
        self.drops = Counter(
            "prefill_drops", "Prompts whose pages were taken away for one that goes first.", registry=registry
        )
        self.preemptions = Counter(
            "prefill_preemptions", "Times that a started prompt let another one go first.", registry=registry
        )
        self.step_chunks = Histogram(
            "prefill_step_chunks", "Prompts that shared a step.", buckets=(1, 2, 4, 8, 16, 32), registry=registry
        )
        self.step_tokens = Histogram(
            "prefill_step_tokens", "Tokens of a planned step.", buckets=[2**power for power in range(4, 17)],
            registry=registry,
        )  # fmt: skip
        self.planned_step_seconds = Histogram(
            "prefill_planned_step_seconds", "Expected time of a step on the slowest stage.",
            buckets=LATENCY_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self.starved_steps = Counter(
            "prefill_starved_steps", "Steps of prompts that went first because they had waited too long.",
            registry=registry,
        )  # fmt: skip
        self.plan = Info(
            "prefill_plan", "Mode, policy and chunking of the group, and stage 0's attention.", registry=registry
        )
        self.step_prediction_error = Histogram(
            "prefill_step_prediction_error", "Predicted over measured time of a step, minus 1.", ["stage"],
            buckets=ERROR_BUCKETS, registry=registry,
        )  # fmt: skip
        start_at_zero(self.step_prediction_error, *map(str, range(num_stages)))
        self.prompt_prediction_error = Histogram(
            "prefill_prompt_prediction_error", "Predicted over measured compute time of a prompt, minus 1.",
            buckets=ERROR_BUCKETS, registry=registry,
        )  # fmt: skip
