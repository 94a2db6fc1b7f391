"""Prometheus metrics of a conductor; one object per process, handed to the parts that count."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from moontide.errors import ERRORS_BY_CODE, RejectReason
from moontide.fair_share import PRIORITY_LABELS
from moontide.metrics import ERROR_BUCKETS, LATENCY_BUCKETS_S, start_at_zero


class ConductorMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.ttft = Histogram(
            "conductor_ttft_seconds", "Arrival to the first token.", buckets=LATENCY_BUCKETS_S, registry=registry
        )
        self.tbt = Histogram(
            "conductor_tbt_seconds",
            "Between two tokens of one request.",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.handoff = Histogram(
            "conductor_handoff_seconds",
            "Prefill completed to the decode instance holding all KV.",
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.requests = Counter(
            "conductor_requests_total",
            "Requests by how they ended: stop, length, cancelled or the name of an error.",
            ["outcome"],
            registry=registry,
        )
        start_at_zero(self.requests, "stop", "length", "cancelled", *ERRORS_BY_CODE)
        self.active = Gauge("conductor_active_requests", "Requests in work.", registry=registry)
        self.prompt_tokens = Counter("conductor_prompt_tokens_total", "Tokens of accepted prompts.", registry=registry)
        self.output_tokens = Counter("conductor_output_tokens_total", "Tokens sent to clients.", registry=registry)
        self.prefix_hit_tokens = Counter(
            "conductor_prefix_hit_tokens_total", "Prompt tokens whose KV came from the store.", registry=registry
        )
        self.retries = Counter(
            "conductor_retries_total",
            "Attempts after the first, by the error that caused them.",
            ["reason"],
            registry=registry,
        )
        start_at_zero(self.retries, "Rejected", *(code for code, error in ERRORS_BY_CODE.items() if error.retriable))
        self.store_errors = Counter(
            "conductor_store_errors_total",
            "Renewals and releases of store reservations that failed; the lease ends what they left.",
            ["operation"],
            registry=registry,
        )
        start_at_zero(self.store_errors, "renew", "release")
        self.registry_connected = Gauge(
            "conductor_registry_connected", "1 while the node registry answers, 0 while routing uses its last known state.",
            registry=registry,
        )  # fmt: skip
        self.nodes = Gauge("conductor_nodes", "Nodes alive in the registry, by role.", ["role"], registry=registry)
        self.indexed_blocks = Gauge(
            "conductor_indexed_blocks", "Blocks in the prefix index, summed over store nodes.", registry=registry
        )
        self.rejected = Counter(
            "conductor_rejected_total",
            "Requests refused before any work, by reason and tenant.",
            ["reason", "tenant"],
            registry=registry,
        )
        self.queued_requests = Gauge(
            "conductor_queued_requests", "Requests that wait for their turn, before a prefill group gets them.", ["priority"],
            registry=registry,
        )  # fmt: skip
        self.queued_s = Gauge(
            "conductor_queued_seconds", "Predicted prefill time of the requests that wait for their turn.", ["priority"],
            registry=registry,
        )  # fmt: skip
        start_at_zero(self.queued_requests, *PRIORITY_LABELS)
        start_at_zero(self.queued_s, *PRIORITY_LABELS)
        self.tenant_work = Counter(
            "conductor_tenant_work_seconds_total",
            "Predicted prefill time of dispatched requests, by tenant.",
            ["tenant"],
            registry=registry,
        )
        self.ttft_error = Histogram(
            "conductor_ttft_prediction_error_ratio",
            "(predicted - actual) / actual of the time from dispatch to the first token.",
            buckets=ERROR_BUCKETS,
            registry=registry,
        )
        self.tbt_error = Histogram(
            "conductor_tbt_prediction_error_ratio",
            "(predicted - actual) / actual of the mean time between tokens.",
            buckets=ERROR_BUCKETS,
            registry=registry,
        )

    def expect_tenants(self, names: Iterable[str]) -> None:
        """Show the series of these tenants before their first request."""
        for name in names:
            start_at_zero(self.tenant_work, name)
            for reason in RejectReason:
                self.rejected.labels(reason.value, name)
