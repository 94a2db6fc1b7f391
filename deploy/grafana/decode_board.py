"""Decode: how full the batches are, how long a step takes, what arrives and what is turned away."""

from __future__ import annotations

from deploy.grafana.promql import PROCESS, Scope, optional
from deploy.grafana.style import Board, Query, Row, heat, label_values, lines, number, signed_lines

_ONE = Scope(matchers=PROCESS)
_ALL = Scope()
_DECLINED = 'outcome="Declined"'


def board() -> Board:
    return Board(
        name="decode",
        title="Moontide / Decode",
        description="Batch, TBT, prompts computed here, requests declined, pages, write-back.",
        variables=(label_values("instance", "Process", "decode_tokens_total"),),
        rows=(_now(), _batch(), _arrivals(), _local_prefill(), _pages(), _write_back()),
    )


def _now() -> Row:
    return Row(
        title="Now",
        panels=(
            number("Tokens", "Drawn per second.", _ONE.total_rate("decode_tokens_total"), unit="none", width=4),
            number(
                "Requests in the batches",
                "Of all instances.",
                _ONE.total("decode_running_requests"),
                unit="none",
                width=4,
            ),
            number(
                "Step, p99",
                "Forward and sampling of a whole batch.",
                _ONE.quantile(0.99, "decode_step_seconds"),
                unit="s",
                width=4,
            ),
            number(
                "Pages in use",
                "Of all instances.",
                f"1 - {_ONE.total('decode_free_pages')} / {_ONE.total('decode_pages')}",
                unit="percentunit",
                width=4,
            ),
            number(
                "Declined",
                "Requests per second that did not fit the TBT SLOs or the room here and went elsewhere.",
                optional(_ONE.total_rate("decode_requests_total", extra=_DECLINED)),
                unit="reqps",
                bad_above=0.1,
                width=4,
            ),
            number(
                "Blocks not found",
                "Of the last hour; now and then is a retry, growing means lost blocks.",
                f"sum(increase({_ONE.select('decode_missed_blocks_total')}[1h]))",
                unit="none",
                width=4,
            ),
        ),
    )


def _batch() -> Row:
    return Row(
        title="Batch and TBT",
        panels=(
            lines(
                "Requests in a step",
                "Mean, by instance.",
                Query(_ONE.mean("decode_step_requests", "instance")),
                unit="none",
                width=8,
            ),
            lines(
                "Time of a step",
                "All instances.",
                *(
                    Query(_ONE.quantile(share, "decode_step_seconds"), f"p{share * 100:g}")
                    for share in (0.5, 0.9, 0.99)
                ),
                unit="s",
                width=8,
            ),
            lines(
                "TBT of clients",
                "Between two tokens of a request, as conductors see it, all instances.",
                *(
                    Query(_ALL.quantile(share, "conductor_tbt_seconds"), f"p{share * 100:g}")
                    for share in (0.5, 0.9, 0.99)
                ),
                unit="s",
                width=8,
            ),
            heat("Time of a step", "Steps per second by bucket.", _ONE.buckets("decode_step_seconds"), unit="s"),
            heat(
                "Requests in a step", "Steps per second by bucket.", _ONE.buckets("decode_step_requests"), unit="none"
            ),
            lines(
                "Tokens",
                "Drawn per second, by instance.",
                Query(_ONE.rate("decode_tokens_total")),
                unit="none",
                stacked=True,
                width=8,
            ),
            signed_lines(
                "Error of predicted steps",
                "Predicted / measured - 1. Far from 0 for long: SLOs are kept by wrong predictions.",
                *(
                    Query(_ONE.quantile(share, "decode_step_prediction_error"), f"p{share * 100:g}")
                    for share in (0.1, 0.5, 0.9)
                ),
                unit="percentunit",
                width=8,
            ),
            lines(
                "Late joins",
                "First steps per second that waited in vain for the last layer groups of a prompt.",
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
                "In the batch, whose KV arrives, and without pages.",
                Query(_ONE.total("decode_running_requests"), "running"),
                Query(_ONE.total("decode_pulling_requests"), "pulling"),
                Query(_ONE.total("decode_waiting_requests"), "waiting"),
                unit="none",
                stacked=True,
                width=8,
            ),
            lines(
                "Requests by outcome",
                "Declined growing: add decode instances.",
                Query(_ONE.total_rate("decode_requests_total", "outcome"), "{{outcome}}"),
                unit="reqps",
                stacked=True,
                width=8,
            ),
            lines(
                "Wait for pages",
                "Open to pages for the whole request.",
                *(
                    Query(_ONE.quantile(share, "decode_wait_pages_seconds"), f"p{share * 100:g}")
                    for share in (0.5, 0.99)
                ),
                unit="s",
                width=8,
            ),
            lines(
                "Hand-off",
                "Prefill is over to the last block in pages.",
                *(Query(_ONE.quantile(share, "decode_handoff_seconds"), f"p{share * 100:g}") for share in (0.5, 0.99)),
                unit="s",
                width=8,
            ),
            lines(
                "Pulled",
                "KV bytes read into pages, per second.",
                Query(_ONE.rate("decode_pulled_bytes_total")),
                unit="Bps",
                width=8,
            ),
            lines(
                "Blocks not found, or damaged",
                "Per second; each is tried again.",
                Query(_ONE.rate("decode_missed_blocks_total")),
                unit="cps",
                width=8,
            ),
        ),
    )


def _local_prefill() -> Row:
    return Row(
        title="Prompts computed by decode instances",
        panels=(
            lines(
                "Their tokens",
                "Per second, by where their KV came from.",
                Query(_ONE.total_rate("decode_local_prefill_tokens_total", "source"), "{{source}}"),
                unit="none",
                stacked=True,
                width=8,
            ),
            lines(
                "Their time",
                "First chunk to first token.",
                *(
                    Query(_ONE.quantile(share, "decode_local_prefill_seconds"), f"p{share * 100:g}")
                    for share in (0.5, 0.99)
                ),
                unit="s",
                width=8,
            ),
            signed_lines(
                "Error of predicted time",
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
                "Pages that are written back",
                "Of ended requests. Must return to 0 when idle.",
                Query(_ONE.select("decode_write_back_pages")),
                unit="none",
            ),
        ),
    )


def _write_back() -> Row:
    return Row(
        title="Write-back",
        panels=(
            lines(
                "Write-backs by outcome",
                "dropped: raise decode.num_pages. full: the pool is too small. NodeLost: a store does not answer.",
                Query(_ONE.total_rate("decode_write_backs_total", "outcome"), "{{outcome}}"),
                unit="cps",
                stacked=True,
                width=8,
            ),
            lines(
                "Written",
                "Full blocks and bytes per second.",
                Query(_ONE.total_rate("decode_written_bytes_total"), "bytes"),
                unit="Bps",
                width=8,
            ),
            lines(
                "Blocks written, and how long after the answer",
                "Blocks per second; time from the end of an answer, p99.",
                Query(_ONE.total_rate("decode_written_blocks_total"), "blocks per second"),
                Query(_ONE.quantile(0.99, "decode_write_back_seconds"), "seconds, p99"),
                unit="none",
                width=8,
            ),
        ),
    )
