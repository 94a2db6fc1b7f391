"""Metrics of a decode node."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from decode_node.batch import Batch, Phase
from moontide.errors import ERRORS_BY_CODE
from moontide.metrics import ERROR_BUCKETS, LATENCY_BUCKETS_S, start_at_zero


class DecodeMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str) -> Histogram:
            return Histogram(name, text, buckets=LATENCY_BUCKETS_S, registry=registry)

        self._registry = registry
        self.ended = Counter(
            "decode_requests",
            "Requests that ended, by outcome: stop, length, dropped (their session ended), or the name of the error.",
            ["outcome"],
            registry=registry,
        )
        start_at_zero(self.ended, "stop", "length", "dropped", *ERRORS_BY_CODE)
        self.tokens = Counter("decode_tokens", "Tokens drawn.", registry=registry)
        self.pulled_bytes = Counter(
            "decode_pulled_bytes", "KV bytes read from the store into pages.", registry=registry
        )
        self.missed_blocks = Counter(
            "decode_missed_blocks",
            "Blocks that a pull did not find, or found damaged; each is tried again.",
            registry=registry,
        )
        self.late_joins = Counter(
            "decode_late_joins",
            "Requests whose last layer groups were not there when their first step needed them; each joins again.",
            registry=registry,
        )
        self.step_seconds = histogram("decode_step_seconds", "One step: forward and sampling of the whole batch.")
        self.step_requests = Histogram(
            "decode_step_requests", "Requests in a step.", buckets=(1, 2, 4, 8, 16, 32, 64, 128), registry=registry
        )
        self.wait_pages_seconds = histogram("decode_wait_pages_seconds", "Open to pages for the whole request.")
        self.handoff_seconds = histogram(
            "decode_handoff_seconds", "Start (prefill is over) to the last block in pages."
        )
        self.write_backs = Counter(
            "decode_write_backs",
            "Write-backs of ended requests, and of prompts computed here, by outcome: written, cached (all was there), dropped (pages "
            "were needed), full, too_large (the store has no room), or the name of the error.",
            ["outcome"],
            registry=registry,
        )
        start_at_zero(self.write_backs, "written", "cached", "dropped", "full", "too_large", *ERRORS_BY_CODE)
        self.written_blocks = Counter("decode_written_blocks", "Full blocks put into the store.", registry=registry)
        self.written_bytes = Counter("decode_written_bytes", "KV bytes put into the store.", registry=registry)
        self.write_back_seconds = histogram(
            "decode_write_back_seconds", "End of a request to the release of its write-back."
        )
        self.pull_seconds = histogram("decode_pull_seconds", "One pull: all layer groups of a few blocks.")
        self.step_prediction_error = Histogram(
            "decode_step_prediction_error",
            "Predicted over measured time of a step, minus 1.",
            buckets=ERROR_BUCKETS,
            registry=registry,
        )
        self.local_prefill_seconds = histogram(
            "decode_local_prefill_seconds", "A prompt that was computed here: its first chunk to its first token."
        )
        self.local_prefill_prediction_error = Histogram(
            "decode_local_prefill_prediction_error",
            "Predicted over measured compute time of a prompt, minus 1.",
            buckets=ERROR_BUCKETS,
            registry=registry,
        )
        self.local_prefill_tokens = Counter(
            "decode_local_prefill_tokens",
            "Tokens of prompts that were prefilled here, by where their KV came from: hit (the store) or computed.",
            ["source"],
            registry=registry,
        )
        start_at_zero(self.local_prefill_tokens, "hit", "computed")

    def watch(self, batch: Batch) -> None:
        """Show the state of `batch` at every scrape."""
        gauges = {
            "decode_waiting_requests": ("Requests without pages.", lambda: batch.count(Phase.WAITING_PAGES)),
            "decode_pulling_requests": ("Requests whose KV arrives.", lambda: batch.count(Phase.PULLING, Phase.READY)),
            "decode_running_requests": ("Requests in the batch.", lambda: batch.count(Phase.RUNNING)),
            "decode_pages": ("Pages of this node.", lambda: batch.num_pages),
            "decode_free_pages": ("Pages that no request holds.", lambda: batch.num_free_pages),
            "decode_write_back_pages": (
                "Pages of ended requests that are written back.",
                lambda: batch.num_write_pages,
            ),
        }
        for name, (text, value) in gauges.items():
            Gauge(name, text, registry=self._registry).set_function(value)
