"""Decode: how full the batches are, how long a step takes, what arrives and what is turned away."""

from __future__ import annotations

from deploy.grafana.promql import PROCESS, Scope, optional
from deploy.grafana.style import Board, Query, Row, heat, label_values, lines, number, quantiles, signed_lines

_ONE = Scope(matchers=PROCESS)
_ALL = Scope()
_DECLINED = 'outcome="Declined"'


def board() -> Board:
    return Board(
        name="decode",
        title="Moontide / Decode",
        description=(
            "Decode instances draw the tokens of many requests in one batch. How full the batches are, how long a step takes, "
            "what arrives, what is turned away."
        ),
        variables=(label_values("instance", "Process", "decode_tokens_total"),),
        rows=(_now(), _batch(), _arrivals(), _local_prefill(), _pages(), _write_back()),
    )


def _now() -> Row:
    return Row(
        title="Now",
        panels=(
            number(
                "Tokens",
                "Output tokens per second, all instances.",
                _ONE.total_rate("decode_tokens_total"),
                unit="si:tok/s",
                width=4,
            ),
            number(
                "Requests in the batches",
                "Of all instances.",
                _ONE.total("decode_running_requests"),
                unit="short",
                width=4,
            ),
            number(
                "Step, p99",
                "One token for every request of a batch.",
                _ONE.quantile(0.99, "decode_step_seconds"),
                unit="s",
                width=4,
            ),
            number(
                "Pages in use",
                "A page holds the KV cache of one block of tokens. All instances.",
                f"1 - {_ONE.total('decode_free_pages')} / {_ONE.total('decode_pages')}",
                unit="percentunit",
                width=4,
            ),
            number(
                "Declined",
                "Requests per second that did not fit and went to another instance.",
                optional(_ONE.total_rate("decode_requests_total", extra=_DECLINED)),
                unit="reqps",
                bad_above=0.1,
                width=4,
            ),
            number(
                "Blocks not found",
                "KV cache missing from the store in the last hour. Growing: lost blocks.",
                f"sum(increase({_ONE.select('decode_missed_blocks_total')}[1h]))",
                unit="short",
                width=4,
            ),
        ),
    )


def _batch() -> Row:
    return Row(
        title="Batch and TBT",
        panels=(
            lines(
                "Batch size",
                "Requests in a step, mean, by instance.",
                Query(_ONE.mean("decode_step_requests", "instance")),
                unit="none",
                width=8,
            ),
            lines(
                "Time of a step",
                "One token for every request of a batch, all instances.",
                *quantiles(_ONE, "decode_step_seconds", (0.5, 0.9, 0.99)),
                unit="s",
                width=8,
            ),
            lines(
                "TBT",
                "Time between two tokens of a request, as conductors see it, all instances.",
                *quantiles(_ALL, "conductor_tbt_seconds", (0.5, 0.9, 0.99)),
                unit="s",
                width=8,
            ),
            heat(
                "Time of a step, distribution",
                "Steps per second by how long they took.",
                _ONE.buckets("decode_step_seconds"),
                unit="s",
            ),
            heat(
                "Batch size, distribution",
                "Steps per second by their requests.",
                _ONE.buckets("decode_step_requests"),
                unit="short",
            ),
            lines(
                "Tokens",
                "Output tokens per second, by instance.",
                Query(_ONE.rate("decode_tokens_total")),
                unit="si:tok/s",
                stacked=True,
                width=8,
            ),
            signed_lines(
                "Error of predicted steps",
                "Predicted / measured - 1. Far from 0 for long: requests are accepted and declined by wrong figures.",
                *quantiles(_ONE, "decode_step_prediction_error", (0.1, 0.5, 0.9)),
                unit="percentunit",
                width=8,
            ),
            lines(
                "Late joins",
                "Requests per second whose last KV cache did not arrive in time for their first step; they join a later one.",
                Query(_ONE.rate("decode_late_joins_total")),
                unit="cps",
                width=8,
            ),
        ),
    )


def _arrivals() -> Row:
    return Row(
        title="Arrivals",
        panels=(
            lines(
                "Requests",
                "running: in a batch. pulling: their KV cache arrives. waiting: no pages are free.",
                Query(_ONE.total("decode_running_requests"), "running"),
                Query(_ONE.total("decode_pulling_requests"), "pulling"),
                Query(_ONE.total("decode_waiting_requests"), "waiting"),
                unit="short",
                stacked=True,
                width=8,
            ),
            lines(
                "Requests by outcome",
                "stop, length: answered. Declined: did not fit here and went elsewhere; growing: add decode instances.",
                Query(_ONE.total_rate("decode_requests_total", "outcome"), "{{outcome}}"),
                unit="reqps",
                stacked=True,
                width=8,
            ),
            lines(
                "Wait for pages",
                "Arrival of a request to pages for all of it.",
                *quantiles(_ONE, "decode_wait_pages_seconds", (0.5, 0.99)),
                unit="s",
                width=8,
            ),
            lines(
                "Hand-off",
                "End of prefill to all KV cache here.",
                *quantiles(_ONE, "decode_handoff_seconds", (0.5, 0.99)),
                unit="s",
                width=8,
            ),
            lines(
                "Pulled",
                "KV cache read from the store, by instance.",
                Query(_ONE.rate("decode_pulled_bytes_total")),
                unit="Bps",
                width=8,
            ),
            lines(
                "Blocks not found, or damaged",
                "In the store, per second; their prompts are computed again.",
                Query(_ONE.rate("decode_missed_blocks_total")),
                unit="cps",
                width=8,
            ),
        ),
    )


def _local_prefill() -> Row:
    return Row(
        title="Short prompts computed by decode instances",
        panels=(
            lines(
                "Tokens of these prompts",
                "hit: their KV cache was in the store. computed: here.",
                Query(_ONE.total_rate("decode_local_prefill_tokens_total", "source"), "{{source}}"),
                unit="si:tok/s",
                stacked=True,
                width=8,
            ),
            lines(
                "Time of these prompts",
                "Start of the computation to first token.",
                *quantiles(_ONE, "decode_local_prefill_seconds", (0.5, 0.99)),
                unit="s",
                width=8,
            ),
            signed_lines(
                "Error of predicted time of these prompts",
                "Predicted / measured - 1.",
                *(
                    Query(_ONE.quantile(s, "decode_local_prefill_prediction_error"), f"p{s * 100:g}")
                    for s in (0.1, 0.5, 0.9)
                ),
                unit="percentunit",
                width=8,
            ),
        ),
    )


def _pages() -> Row:
    return Row(
        title="Pages",
        panels=(
            lines(
                "Pages in use",
                "Share, by instance. Must return to 0 when idle.",
                Query(f"1 - {_ONE.select('decode_free_pages')} / {_ONE.select('decode_pages')}"),
                unit="percentunit",
                top=1,
            ),
            lines(
                "Pages of ended requests",
                "Kept until their KV cache is in the store, by instance. Must return to 0 when idle.",
                Query(_ONE.select("decode_write_back_pages")),
                unit="short",
            ),
        ),
    )


def _write_back() -> Row:
    return Row(
        title="Write-back: KV cache of answers to the store",
        panels=(
            lines(
                "Write-backs by outcome",
                "written, cached: well. dropped: pages were needed. full: the store is too small. NodeLost: a store does not answer.",
                Query(_ONE.total_rate("decode_write_backs_total", "outcome"), "{{outcome}}"),
                unit="cps",
                stacked=True,
                width=6,
            ),
            lines(
                "Bytes written back",
                "Per second, all instances.",
                Query(_ONE.total_rate("decode_written_bytes_total"), "bytes"),
                unit="Bps",
                width=6,
            ),
            lines(
                "Blocks written back",
                "Per second, all instances.",
                Query(_ONE.total_rate("decode_written_blocks_total"), "blocks"),
                unit="cps",
                width=6,
            ),
            lines(
                "Time of a write-back",
                "From the end of an answer.",
                *quantiles(_ONE, "decode_write_back_seconds", (0.5, 0.99)),
                unit="s",
                width=6,
            ),
        ),
    )
