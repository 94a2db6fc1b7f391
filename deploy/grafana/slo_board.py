"""SLO overview: do clients get what was promised, and if not, who is turned away and why."""

from __future__ import annotations

from deploy.grafana.promql import Scope
from deploy.grafana.style import Board, Query, Row, choice, heat, latest_table, lines, number, signed_lines

_ALL = Scope()
_TTFT, _TBT = "conductor_ttft_seconds", "conductor_tbt_seconds"
TTFT_BOUNDS = ("0.25", "0.5", "1.0", "2.5", "5.0", "10.0", "20.0", "40.0", "80.0", "160.0")
TBT_BOUNDS = ("0.02", "0.04", "0.08", "0.15", "0.25", "0.5", "1.0")
"""Borders of buckets, as they are written on the wire: only there the share of what is within the bound is exact."""
_BURN_WINDOWS = ("5m", "30m", "1h", "6h")
_FAST_BURN, _SLOW_BURN = 14.4, 6.0
"""2 % of a 30 days' budget in an hour, 5 % in six hours. Source: Google, The Site Reliability Workbook, chapter 5."""


def board() -> Board:
    return Board(
        name="slo",
        title="Moontide / SLO overview",
        description="TTFT and TBT against their bounds, how fast the error budget burns, what is refused and why.",
        variables=(
            choice("ttft_slo", "TTFT bound (s)", "What a first token may take.", TTFT_BOUNDS, "2.5"),
            choice("tbt_slo", "TBT bound (s)", "What may lie between two tokens.", TBT_BOUNDS, "0.15"),
            choice(
                "objective",
                "Objective",
                "Share that has to be within the bound.",
                ("0.9", "0.95", "0.99", "0.995", "0.999"),
                "0.99",
            ),
        ),
        rows=(_now(), _latency("TTFT", _TTFT, "$ttft_slo"), _latency("TBT", _TBT, "$tbt_slo"), _refused(), _traffic()),
    )


def _now() -> Row:
    refused = _ALL.total_rate("conductor_rejected_total")
    ended = _ALL.total_rate("conductor_requests_total")
    return Row(
        title="Now",
        panels=(
            number(
                "TTFT within bound",
                "Share of first tokens of the last hour.",
                _ALL.share_within(_TTFT, "$ttft_slo", "1h"),
                unit="percentunit",
                bad_below=0.99,
            ),
            number(
                "TBT within bound",
                "Share of the gaps between tokens of the last hour.",
                _ALL.share_within(_TBT, "$tbt_slo", "1h"),
                unit="percentunit",
                bad_below=0.99,
            ),
            number(
                "TTFT burn rate, 1 h",
                "1: the error budget lasts exactly as long as its period.",
                _ALL.burn_rate(_TTFT, "$ttft_slo", "$objective", "1h"),
                unit="none",
                bad_above=_FAST_BURN,
            ),
            number(
                "TBT burn rate, 1 h",
                "1: the error budget lasts exactly as long as its period.",
                _ALL.burn_rate(_TBT, "$tbt_slo", "$objective", "1h"),
                unit="none",
                bad_above=_FAST_BURN,
            ),
            number("Requests ended", "Per second, however they ended.", ended, unit="reqps"),
            number("Requests refused", "Per second, before any work.", refused, unit="reqps"),
            number("Requests in work", "At all conductors.", _ALL.total("conductor_active_requests"), unit="none"),
            number(
                "Registry connected",
                "0: a conductor routes on the last known state, because Redis or Valkey is away.",
                f"min({_ALL.select('conductor_registry_connected')})",
                unit="none",
                bad_below=1,
            ),
        ),
    )


def _latency(name: str, histogram: str, bound: str) -> Row:
    return Row(
        title=name,
        panels=(
            lines(
                f"{name} attainment",
                "Share within the bound, and the objective.",
                Query(_ALL.share_within(histogram, bound), "within the bound"),
                Query("vector($objective)", "objective"),
                unit="percentunit",
                top=1,
                width=8,
            ),
            lines(
                f"{name} burn rate",
                "How many times faster than the objective allows the bound is missed. Lines: 14.4 (page, with 1 h "
                "and 5 m) and 6 (page,"
                "with 6 h and 30 m).",
                *(Query(_ALL.burn_rate(histogram, bound, "$objective", window), window) for window in _BURN_WINDOWS),
                unit="none",
                limits=(_SLOW_BURN, _FAST_BURN),
                width=8,
            ),
            lines(
                f"{name} quantiles",
                "Of all conductors together.",
                *(Query(_ALL.quantile(share, histogram), f"p{share * 100:g}") for share in (0.5, 0.9, 0.99)),
                unit="s",
                width=8,
            ),
            heat(
                f"{name} distribution",
                "Observations per second by bucket.",
                _ALL.buckets(histogram),
                unit="s",
                width=24,
            ),
        ),
    )


def _refused() -> Row:
    return Row(
        title="Refused",
        panels=(
            lines(
                "Refused by reason",
                "ttft_slo: add prefill groups. tbt_slo: add decode instances. tenant_limit: that tenant sends too "
                "much.",
                Query(_ALL.total_rate("conductor_rejected_total", "reason"), "{{reason}}"),
                unit="reqps",
                stacked=True,
                width=8,
            ),
            lines(
                "Refused by tenant",
                "Before any work.",
                Query(_ALL.total_rate("conductor_rejected_total", "tenant"), "{{tenant}}"),
                unit="reqps",
                stacked=True,
                width=8,
            ),
            latest_table(
                "Refused in the time shown",
                "By reason and tenant.",
                f"sum by (reason, tenant) (increase({_ALL.select('conductor_rejected_total')}[$__range]))",
                width=8,
            ),
            lines(
                "Queue of the conductors",
                "Requests that wait for their turn because every prefill group has enough work ahead.",
                Query(_ALL.total("conductor_queued_requests"), "requests"),
                unit="none",
                width=8,
            ),
            lines(
                "Queue of the conductors in seconds",
                "Predicted prefill time of what waits.",
                Query(_ALL.total("conductor_queued_seconds"), "seconds of prefill"),
                unit="s",
                width=8,
            ),
            lines(
                "Prefill time by tenant",
                "Predicted seconds of prefill that were dispatched, per second: the shares that tenants get.",
                Query(_ALL.total_rate("conductor_tenant_work_seconds_total", "tenant"), "{{tenant}}"),
                unit="none",
                stacked=True,
                width=8,
            ),
        ),
    )


def _traffic() -> Row:
    return Row(
        title="Traffic and pools",
        panels=(
            lines(
                "Requests by outcome",
                "stop, length and cancelled are well; everything else is the name of an error.",
                Query(_ALL.total_rate("conductor_requests_total", "outcome"), "{{outcome}}"),
                unit="reqps",
                stacked=True,
                width=8,
            ),
            lines(
                "Attempts after the first",
                "By the error that caused them: nodes or blocks were lost.",
                Query(_ALL.total_rate("conductor_retries_total", "reason"), "{{reason}}"),
                unit="reqps",
                width=8,
            ),
            lines(
                "Tokens",
                "Per second: of accepted prompts, of these from the cache, and sent to clients.",
                Query(_ALL.total_rate("conductor_prompt_tokens_total"), "prompt"),
                Query(_ALL.total_rate("conductor_prefix_hit_tokens_total"), "of these not computed"),
                Query(_ALL.total_rate("conductor_output_tokens_total"), "output"),
                unit="none",
                width=8,
            ),
            lines(
                "Nodes",
                "Alive in the registry, by role; the conductor that sees most.",
                Query(f"max by (role) ({_ALL.select('conductor_nodes')})", "{{role}}"),
                unit="none",
                width=8,
            ),
            lines(
                "Load of the pools",
                "Predicted time over the SLO, or how full. Above 1 for long: too few nodes of that role.",
                Query(f"max by (role) ({_ALL.select('conductor_role_load')})", "{{role}}"),
                unit="none",
                limits=(1,),
                width=8,
            ),
            lines(
                "Roles",
                "Nodes that should take a role, and orders to take it.",
                Query(_ALL.total_rate("conductor_role_proposals_total", "role"), "proposed: {{role}}"),
                Query(_ALL.total_rate("conductor_role_switches_total", "role, outcome"), "{{outcome}}: {{role}}"),
                unit="cps",
                width=8,
            ),
            signed_lines(
                "Error of predicted TTFT",
                "(predicted - actual) / actual, dispatch to first token. Admission is as wrong as this.",
                *_error_quantiles("conductor_ttft_prediction_error_ratio"),
                unit="percentunit",
                width=8,
            ),
            signed_lines(
                "Error of predicted TBT",
                "(predicted - actual) / actual of the mean time between tokens.",
                *_error_quantiles("conductor_tbt_prediction_error_ratio"),
                unit="percentunit",
                width=8,
            ),
            lines(
                "Requests with an idempotency key",
                "How they were answered; taken_over: conductors die or do not reach each other.",
                Query(_ALL.total_rate("conductor_keyed_requests_total", "how"), "{{how}}"),
                unit="reqps",
                width=8,
            ),
            lines(
                "Memory of kept answers",
                "Complete answers kept for retries under idempotency keys.",
                Query(_ALL.select("conductor_kept_answers_bytes")),
                unit="bytes",
                width=8,
            ),
        ),
    )


def _error_quantiles(histogram: str) -> list[Query]:
    return [Query(_ALL.quantile(share, histogram), f"p{share * 100:g}") for share in (0.1, 0.5, 0.9)]
