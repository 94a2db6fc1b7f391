"""SLO overview: do clients get what was promised, and if not, who is turned away and why."""

from __future__ import annotations

from typing import Any

from deploy.grafana.promql import Scope
from deploy.grafana.request_board import DRILL_DOWN
from deploy.grafana.style import Board, Query, Row, choice, heat, latest_table, lines, number, quantiles, signed_lines
from deploy.prometheus.rules import BURNS, DEFAULT_SLOS, Slo, le_of

_ALL = Scope()
TTFT_BOUNDS = ("0.25", "0.5", "1.0", "2.5", "5.0", "10.0", "20.0", "40.0", "80.0", "160.0")
TBT_BOUNDS = ("0.02", "0.04", "0.08", "0.15", "0.25", "0.5", "1.0")
"""Borders of buckets, as they are written on the wire: only there the share of what is within the bound is exact."""
OBJECTIVES = ("0.9", "0.95", "0.99", "0.995", "0.999")
_PAGE = BURNS[0].pairs
"""(long window, short window, burn rate) of the alerts that call somebody."""
_BURN_WINDOWS = ("5m", "30m", "1h", "6h")
_WHAT = {"ttft": "TTFT, time to first token", "tbt": "TBT, time between tokens (ITL)"}


def board() -> Board:
    return Board(
        name="slo",
        title="Moontide / SLO overview",
        description=(
            "Time to first token (TTFT) and time between tokens (TBT) against their bounds, how fast the error budget burns, "
            "what is refused and why."
        ),
        variables=[
            variable
            for slo, bounds in zip(DEFAULT_SLOS, (TTFT_BOUNDS, TBT_BOUNDS), strict=True)
            for variable in _chosen(slo, bounds)
        ],
        rows=(_now(), *(_latency(slo) for slo in DEFAULT_SLOS), _refused(), _traffic()),
    )


def _chosen(slo: Slo, bounds: tuple[str, ...]) -> tuple[Any, Any]:
    name = slo.name.upper()
    return (
        choice(
            f"{slo.name}_slo",
            f"{name} bound (s)",
            f"How long one of the {slo.counted} may take.",
            bounds,
            le_of(slo.bound_s),
        ),
        choice(
            f"{slo.name}_objective",
            f"{name} objective",
            "Share that has to be within the bound.",
            OBJECTIVES,
            f"{slo.objective:g}",
        ),
    )


def _within(slo: Slo, window: str) -> Any:
    return number(
        f"{slo.name.upper()} within bound",
        f"Share of the {slo.counted} of the last {window}.",
        _ALL.share_within(slo.metric, f"${slo.name}_slo", window),
        unit="percentunit",
        bad_below=slo.objective,
    )


def _burn(slo: Slo, window: str, most: float) -> Any:
    return number(
        f"{slo.name.upper()} burn rate, {window}",
        f"At 1 the error budget just lasts. Red from {most:g}.",
        _ALL.burn_rate(slo.metric, f"${slo.name}_slo", f"${slo.name}_objective", window),
        unit="none",
        bad_above=most,
    )


def _now() -> Row:
    refused = _ALL.total_rate("conductor_rejected_total")
    ended = _ALL.total_rate("conductor_requests_total")
    return Row(
        title="Now",
        panels=(
            *(_within(slo, "1h") for slo in DEFAULT_SLOS),
            *(_burn(slo, _PAGE[0][0], _PAGE[0][2]) for slo in DEFAULT_SLOS),
            number("Requests ended", "Per second, however they ended.", ended, unit="reqps"),
            number("Requests refused", "Per second, before any work.", refused, unit="reqps"),
            number("Requests in work", "At all conductors.", _ALL.total("conductor_active_requests"), unit="short"),
            number(
                "Registry connected",
                "0: Redis is away; routing uses the last known state.",
                f"min({_ALL.select('conductor_registry_connected')})",
                unit="none",
                bad_below=1,
            ),
        ),
    )


def _latency(slo: Slo) -> Row:
    name, bound, objective = slo.name.upper(), f"${slo.name}_slo", f"${slo.name}_objective"
    pages = "; ".join(f"{factor:g}: alert, with {long} and {short}" for long, short, factor in _PAGE)
    return Row(
        title=_WHAT[slo.name],
        panels=(
            lines(
                f"{name} attainment",
                f"Share of the {slo.counted} within the bound, and the objective.",
                Query(_ALL.share_within(slo.metric, bound), "within the bound"),
                Query(f"vector({objective})", "objective"),
                unit="percentunit",
                top=1,
                width=8,
                links=(DRILL_DOWN,),
            ),
            lines(
                f"{name} burn rate",
                f"Misses over what the objective allows, by window. {pages}.",
                *(Query(_ALL.burn_rate(slo.metric, bound, objective, window), window) for window in _BURN_WINDOWS),
                unit="none",
                limits=sorted(factor for _, _, factor in _PAGE),
                width=8,
            ),
            lines(
                f"{name} quantiles",
                "Of all conductors together.",
                *quantiles(_ALL, slo.metric, (0.5, 0.9, 0.99)),
                unit="s",
                width=8,
                links=(DRILL_DOWN,),
            ),
            heat(
                f"{name} distribution",
                f"How many of the {slo.counted} took how long, per second.",
                _ALL.buckets(slo.metric),
                unit="s",
                width=24,
                links=(DRILL_DOWN,),
            ),
        ),
    )


def _refused() -> Row:
    return Row(
        title="Refused",
        panels=(
            lines(
                "Refused by reason",
                "ttft_slo, tbt_slo: the bound is out of reach; add prefill groups, or decode instances. tenant_limit: sends too much.",
                Query(_ALL.total_rate("conductor_rejected_total", "reason"), "{{reason}}"),
                unit="reqps",
                stacked=True,
                width=8,
            ),
            lines(
                "Refused by tenant",
                "Requests refused before any work, by who sent them.",
                Query(_ALL.total_rate("conductor_rejected_total", "tenant"), "{{tenant}}"),
                unit="reqps",
                stacked=True,
                width=8,
            ),
            latest_table(
                "Refused in the time shown",
                "Requests by reason and tenant.",
                f"round(sum by (reason, tenant) (increase({_ALL.select('conductor_rejected_total')}[$__range]))) > 0",
                unit="short",
                columns={"reason": "Reason", "tenant": "Tenant", "Value": "Requests"},
                width=8,
            ),
            lines(
                "Queue at the conductors, by priority",
                "Requests that wait for their turn because every prefill group has enough work ahead.",
                Query(_ALL.total("conductor_queued_requests", "priority"), "{{priority}}"),
                unit="short",
                stacked=True,
                width=8,
            ),
            lines(
                "Work queued at the conductors, by priority",
                "Predicted prefill time of the requests that wait for their turn.",
                Query(_ALL.total("conductor_queued_seconds", "priority"), "{{priority}}"),
                unit="s",
                stacked=True,
                width=8,
            ),
            lines(
                "Prefill time by tenant",
                "Predicted seconds of prefill that were handed out, per second: the shares that tenants get.",
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
                "stop, length: answered. cancelled: by the client. Everything else is the name of an error.",
                Query(_ALL.total_rate("conductor_requests_total", "outcome"), "{{outcome}}"),
                unit="reqps",
                stacked=True,
                width=8,
            ),
            lines(
                "Retries",
                "Attempts after the first, by the error that caused them: nodes or cached blocks were lost.",
                Query(_ALL.total_rate("conductor_retries_total", "reason"), "{{reason}}"),
                unit="reqps",
                width=8,
            ),
            lines(
                "Tokens",
                "Per second: of accepted prompts, of these from the cache, and sent to clients.",
                Query(_ALL.total_rate("conductor_prompt_tokens_total"), "prompt"),
                Query(_ALL.total_rate("conductor_prefix_hit_tokens_total"), "of these from the cache"),
                Query(_ALL.total_rate("conductor_output_tokens_total"), "output"),
                unit="si:tok/s",
                width=8,
            ),
            lines(
                "Nodes",
                "Alive in the registry, by role, as the conductor sees it that sees most.",
                Query(f"max by (role) ({_ALL.select('conductor_nodes')})", "{{role}}"),
                unit="short",
                width=8,
            ),
            lines(
                "Load of the pools",
                "Prefill: queue over the TTFT bound; decode: step over the TBT bound, or how full. Above 1 for long: too few nodes.",
                Query(f"max by (role) ({_ALL.select('conductor_role_load')})", "{{role}}"),
                unit="none",
                limits=(1,),
                width=8,
            ),
            lines(
                "Changes of role",
                "Nodes that should switch between prefill and decode, and orders to switch, per second.",
                Query(_ALL.total_rate("conductor_role_proposals_total", "role"), "proposed: {{role}}"),
                Query(_ALL.total_rate("conductor_role_switches_total", "role, outcome"), "{{outcome}}: {{role}}"),
                unit="cps",
                width=8,
            ),
            signed_lines(
                "Error of predicted TTFT",
                "(predicted - actual) / actual, dispatch to first token. What is refused is as wrong as this.",
                *quantiles(_ALL, "conductor_ttft_prediction_error_ratio", (0.1, 0.5, 0.9)),
                unit="percentunit",
                width=8,
            ),
            signed_lines(
                "Error of predicted TBT",
                "(predicted - actual) / actual of the mean time between tokens.",
                *quantiles(_ALL, "conductor_tbt_prediction_error_ratio", (0.1, 0.5, 0.9)),
                unit="percentunit",
                width=8,
            ),
            lines(
                "Requests with an idempotency key",
                "How they were answered. taken_over: the conductor that had it died or was not reached.",
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
