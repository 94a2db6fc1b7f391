"""Request drill-down: from the distribution of latencies to the story of one request."""

from __future__ import annotations

from deploy.grafana.promql import Scope
from deploy.grafana.style import Board, Link, Query, Row, heat, lines, markdown, signed_lines, typed_in

DRILL_DOWN = Link(
    "Request drill-down", "/d/moontide-request?${__url_time_range}&${datasource:queryparam}&${namespace:queryparam}"
)
_ALL = Scope()
_BAD = 'outcome!~"stop|length|cancelled"'
_STORY = """
Every answer carries its id: `X-Request-Id` of its headers, `id` of its JSON. The conductor that served a request remembers its latest ones.

| question | answer |
|---|---|
| where did its time go? | [timeline as JSON](${conductor}/v1/timelines/${request_id}) |
| the same as a picture, chunk x stage | `moontide timeline ${request_id} --address ${grpc_address}` |
| the same as a trace | the same command with `--out trace.json`; open the file in the [trace viewer](${trace_viewer}) |
| why did it go where it went, and what was expected? | `moontide explain ${request_id} --address ${grpc_address}` |
| what do the logs say? | look for `${request_id}`: every line about a request has its id |
"""
_STEPS = (
    ("whole: arrival to first token (conductor)", "conductor_ttft_seconds"),
    ("prefill: arrival at stage 0 to first token", "prefill_ttft_seconds"),
    ("hand-off: prefill over to decode holding all KV cache", "conductor_handoff_seconds"),
    ("decode: wait for pages", "decode_wait_pages_seconds"),
    ("decode: step", "decode_step_seconds"),
)


def board() -> Board:
    return Board(
        name="request",
        title="Moontide / Request drill-down",
        description="Distributions of the parts of a request, and the ways to its timeline, its trace and the decision that placed it.",
        variables=(
            typed_in("request_id", "Request", "Id of a request or of its answer.", "REQUEST_ID"),
            typed_in(
                "conductor", "Conductor (HTTP)", "Where a browser reaches the conductor.", "http://127.0.0.1:8000"
            ),
            typed_in("grpc_address", "Conductor (gRPC)", "Where the command line reaches it.", "127.0.0.1:8001"),
            typed_in("trace_viewer", "Trace viewer", "Page that opens Chrome traces.", "https://ui.perfetto.dev"),
        ),
        rows=(_one(), _parts(), _heatmaps()),
    )


def _one() -> Row:
    return Row(title="One request", panels=(markdown("Request ${request_id}", _STORY.strip(), height=7),))


def _parts() -> Row:
    front_door = f"{_ALL.mean('conductor_ttft_seconds')} - {_ALL.mean('prefill_ttft_seconds')}"
    return Row(
        title="Parts",
        panels=(
            lines(
                "Mean of each part",
                "Where the time of a usual request goes.",
                *(Query(_ALL.mean(histogram), part) for part, histogram in _STEPS),
                unit="s",
            ),
            lines(
                "p99 of each part",
                "Where the slow ones lose their time.",
                *(Query(_ALL.quantile(0.99, histogram), part) for part, histogram in _STEPS),
                unit="s",
            ),
            signed_lines(
                "Time before prefill",
                "Mean TTFT less that of stage 0: tokenizing, queue, network. Below 0 while decode instances compute prompts.",
                Query(front_door, "before prefill"),
                unit="s",
            ),
            lines(
                "Failed requests",
                "By the name of the error.",
                Query(_ALL.total_rate("conductor_requests_total", "outcome", _BAD), "{{outcome}}"),
                unit="reqps",
            ),
        ),
    )


def _heatmaps() -> Row:
    shown = (
        ("TTFT", "Arrival to first token.", "conductor_ttft_seconds"),
        ("Prefill", "Arrival at the first stage to first token.", "prefill_ttft_seconds"),
        ("TBT", "Time between two tokens of a request.", "conductor_tbt_seconds"),
        ("Hand-off", "Prefill over to decode holding all KV cache.", "conductor_handoff_seconds"),
        ("Pull", "One read of KV cache from the store.", "decode_pull_seconds"),
        ("Push tail", "First token to all KV cache of the prompt in the store.", "prefill_tail_seconds"),
    )
    return Row(
        title="Distributions",
        panels=[heat(title, description, _ALL.buckets(histogram), unit="s") for title, description, histogram in shown],
    )
