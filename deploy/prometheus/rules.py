"""Recording rules and alerts for Prometheus, as one rule file on standard output.

    python -m deploy.prometheus.rules > deploy/prometheus/rules.yaml          # `make rules`
    python -m deploy.prometheus.rules --window-scale 0.02                     # a staged run: one hour becomes 72 s

Every range, every `for` and every evaluation interval is multiplied by the window scale; names of recorded series keep the window
of production, so that dashboards work with both. Series are summed by the label `namespace`: several clusters in one Prometheus stay apart,
and a cluster without that label is one group too. `up` is read by the label `component`, which the scrape config sets (README.md).

SLO alerts compare the share of misses with the error budget over a long and a short window at once: the long one says that it matters,
the short one that it still goes on. Factors and windows: Google SRE Workbook, chapter 5 (https://sre.google/workbook/alerting-on-slos/),
for a budget of 30 days.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.utils import floatToGoString

from moontide.errors import ERRORS_BY_CODE, MoontideError, RejectReason
from moontide.metrics import ERROR_BUCKETS, LATENCY_BUCKETS_S

RULES_FILE = Path(__file__).parent / "rules.yaml"
RUNBOOKS = "docs/runbooks"
FAST_WINDOWS = ("5m", "30m", "1h", "2h")
SLOW_WINDOWS = ("6h", "1d", "3d")
FAST_INTERVAL, SLOW_INTERVAL = "30s", "2m"
SHORTEST_INTERVAL_S = 1.0
"""Of evaluations, whatever the window scale is."""
PREDICTION_BOUND = 0.5
"""A prediction that is further off than half of what happened is a miss."""

OVERLOAD_REASONS = (RejectReason.TTFT_SLO, RejectReason.TBT_SLO, RejectReason.QUEUE_FULL)
"""Refusals that more nodes would have avoided; the others are limits of one tenant or one request."""

_UNIT_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_RANGE = re.compile(r"\[(\d+[smhd])\]")


class WrongOption(Exception):
    """An option that gives rules which cannot work; says which and why."""


@dataclass(frozen=True, kw_only=True)
class Slo:
    """A share `objective` of what `metric` observes is within `bound_s`."""

    name: str
    metric: str
    bound_s: float
    objective: float
    counted: str
    """What one observation is, in plain words."""
    min_events: int
    """Fewer observations in the long window of the fast pair say nothing."""

    def __post_init__(self) -> None:
        if self.bound_s not in LATENCY_BUCKETS_S:
            near = min(LATENCY_BUCKETS_S, key=lambda bound: abs(bound - self.bound_s))
            raise WrongOption(
                f"--{self.name}-slo-s {self.bound_s:g} is no bound of a bucket of {self.metric}, so nobody counted what was within it; "
                f"take one of {', '.join(f'{bound:g}' for bound in LATENCY_BUCKETS_S)} (nearest: {near:g})"
            )
        if not 0 < self.objective < 1:
            raise WrongOption(
                f"--{self.name}-objective {self.objective:g} must be a share between 0 and 1, such as 0.95"
            )
        most = max(factor for burn in BURNS for _, _, factor in burn.pairs)
        if most * self.budget >= 1:
            raise WrongOption(
                f"--{self.name}-objective {self.objective:g}: misses can never be {most:g} times the budget of {self.budget:g}, so the "
                f"fast alert would never fire; take an objective above {1 - 1 / most:.3f}"
            )

    @property
    def budget(self) -> float:
        return round(1 - self.objective, 9)

    @property
    def within(self) -> str:
        """The bucket that counts what met the bound."""
        return f'{self.metric}_bucket{{le="{le_of(self.bound_s)}"}}'


@dataclass(frozen=True, kw_only=True)
class Burn:
    """When an error budget burns too fast: any of the pairs (long window, short window, factor)."""

    suffix: str
    severity: str
    pairs: tuple[tuple[str, str, float], ...]
    events_window: str
    meaning: str


BURNS = (
    Burn(
        suffix="BurnFast",
        severity="critical",
        pairs=(("1h", "5m", 14.4), ("6h", "30m", 6)),
        events_window="1h",
        meaning="2 % of the budget of 30 days went within an hour, or 5 % within six hours",
    ),
    Burn(
        suffix="BurnSlow",
        severity="warning",
        pairs=(("1d", "2h", 3), ("3d", "6h", 1)),
        events_window="6h",
        meaning="10 % of the budget of 30 days went within a day or within three days",
    ),
)


DEFAULT_SLOS = (
    Slo(
        name="ttft",
        metric="conductor_ttft_seconds",
        bound_s=10.0,
        objective=0.95,
        counted="first tokens",
        min_events=10,
    ),
    Slo(
        name="tbt",
        metric="conductor_tbt_seconds",
        bound_s=0.15,
        objective=0.99,
        counted="gaps between tokens",
        min_events=100,
    ),
)
"""What rules and dashboards take when nothing else is said."""


@dataclass(frozen=True, kw_only=True)
class Record:
    record: str
    expr: str
    labels: Mapping[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class Alert:
    name: str
    expr: str
    hold: str = ""
    """How long it must be true; empty: no time, since the expression looks over one itself."""
    severity: str
    """critical: somebody looks at once; warning: in working hours."""
    owner: str
    """serving: models, capacity, admission; platform: hosts, network, Kubernetes, Redis, disks."""
    summary: str
    description: str
    slo: str = ""


@dataclass(frozen=True, kw_only=True)
class Group:
    name: str
    interval: str
    rules: Sequence[Record | Alert]


# What is recorded.


def le_of(bound: float) -> str:
    """The label of a bucket as our services write it."""
    return str(floatToGoString(bound))  # type: ignore[no-untyped-call]


def slo_records(slo: Slo, windows: Sequence[str]) -> list[Record]:
    """The share of misses by window; no sample while nothing was observed."""
    return [
        Record(
            record=f"moontide:slo_miss:ratio_rate{window}",
            labels={"slo": slo.name},
            expr=f"1 - sum by (namespace) (rate({slo.within}[{window}]))\n"
            f"  / (sum by (namespace) (rate({slo.metric}_count[{window}])) > 0)",
        )
        for window in windows
    ]


def slo_events(slo: Slo, window: str) -> Record:
    return Record(
        record=f"moontide:slo_events:increase{window}",
        labels={"slo": slo.name},
        expr=f"sum by (namespace) (increase({slo.metric}_count[{window}]))",
    )


def slo_constants(slo: Slo) -> list[Record]:
    """For dashboards, which draw the bound and divide by the budget."""
    labels = {"slo": slo.name}
    return [
        Record(record="moontide:slo_bound:seconds", labels=labels, expr=f"vector({slo.bound_s:g})"),
        Record(record="moontide:slo_objective:ratio", labels=labels, expr=f"vector({slo.objective:g})"),
    ]


def share_of(part: str, whole: str, window: str) -> str:
    """Part over whole as rates; 0 when no series of the part exists yet, no sample while nothing of the whole happens."""
    total = f"sum by (namespace) (rate({whole}[{window}]))"
    return f"(sum by (namespace) (rate({part}[{window}])) or 0 * {total})\n  / ({total} > 0)"


def failure_codes() -> list[str]:
    """Outcomes of requests that are our fault: every error with an HTTP code from 500."""
    return sorted(
        code for code, error in ERRORS_BY_CODE.items() if error.http_code >= 500 and error is not MoontideError
    )


def prediction_misses(kind: str) -> Record:
    metric = f"conductor_{kind}_prediction_error_ratio"
    low, high = (le_of(bound) for bound in (-PREDICTION_BOUND, PREDICTION_BOUND))
    return Record(
        record="moontide:prediction_miss:ratio_rate30m",
        labels={"kind": kind},
        expr=f'1 - (sum by (namespace) (rate({metric}_bucket{{le="{high}"}}[30m]))\n'
        f'  - sum by (namespace) (rate({metric}_bucket{{le="{low}"}}[30m])))\n'
        f"  / (sum by (namespace) (rate({metric}_count[30m])) > 0)",
    )


def prediction_events(kind: str) -> Record:
    return Record(
        record="moontide:prediction_events:increase30m",
        labels={"kind": kind},
        expr=f"sum by (namespace) (increase(conductor_{kind}_prediction_error_ratio_count[30m]))",
    )


def records() -> list[Record]:
    """What alerts and dashboards read beside the SLOs."""
    assert {PREDICTION_BOUND, -PREDICTION_BOUND} <= set(ERROR_BUCKETS), "predictions are counted by bucket"
    overload = "|".join(reason.value for reason in OVERLOAD_REASONS)
    return [
        Record(
            record="moontide:requests_failed:ratio_rate5m",
            expr=share_of(
                f'conductor_requests_total{{outcome=~"{"|".join(failure_codes())}"}}', "conductor_requests_total", "5m"
            ),
        ),
        Record(
            record="moontide:requests_rejected:ratio_rate5m",
            expr=share_of(f'conductor_rejected_total{{reason=~"{overload}"}}', "conductor_requests_total", "5m"),
        ),
        Record(
            record="moontide:requests_retried:ratio_rate10m",
            expr=share_of('conductor_retries_total{reason!~"Declined|Rejected"}', "conductor_requests_total", "10m"),
        ),
        Record(
            record="moontide:prefix_hit:ratio_rate30m",
            expr=share_of("conductor_prefix_hit_tokens_total", "conductor_prompt_tokens_total", "30m"),
        ),
        Record(record="moontide:queued_requests:sum", expr="sum by (namespace) (conductor_queued_requests)"),
        Record(record="moontide:nodes:max", expr="max by (namespace, role) (conductor_nodes)"),
        *(prediction_misses(kind) for kind in ("ttft", "tbt")),
        *(prediction_events(kind) for kind in ("ttft", "tbt")),
    ]


# What is alerted on.


def burn_alert(slo: Slo, burn: Burn) -> Alert:
    series = f'{{slo="{slo.name}"}}'
    pairs = [
        f"    (moontide:slo_miss:ratio_rate{long}{series} > {factor:g} * {slo.budget:g}\n"
        f"      and moontide:slo_miss:ratio_rate{short}{series} > {factor:g} * {slo.budget:g})"
        for long, short, factor in burn.pairs
    ]
    short = burn.pairs[0][1]
    return Alert(
        name=f"Moontide{slo.name.title()}{burn.suffix}",
        expr="(\n"
        + "\n  or\n".join(pairs)
        + f"\n)\nand moontide:slo_events:increase{burn.events_window}{series} >= {slo.min_events}",
        severity=burn.severity,
        owner="serving",
        slo=slo.name,
        summary=f"Too many {slo.counted} take longer than {slo.bound_s:g} s",
        description=f"The objective is {slo.objective * 100:g} % of {slo.counted} within {slo.bound_s:g} s. {burn.meaning[0].upper()}"
        f"{burn.meaning[1:]}; {{{{ $value | humanizePercentage }}}} miss the bound over the long window, more over the last {short}.",
    )


def failure_alerts() -> list[Alert]:
    return [
        Alert(
            name="MoontideNoConductor",
            expr="absent(conductor_active_requests)",
            hold="1m",
            severity="critical",
            owner="platform",
            summary="No conductor answers Prometheus",
            description="Clients reach no conductor, or Prometheus does not. No other alert of requests can fire meanwhile.",
        ),
        Alert(
            name="MoontideNoPrefillGroup",
            expr='moontide:nodes:max{role="prefill"} == 0',
            hold="1m",
            severity="critical",
            owner="serving",
            summary="No prefill group is complete",
            description="Conductors see no prefill group. New requests wait, then end with NoCapacity (503).",
        ),
        Alert(
            name="MoontideNoDecode",
            expr='moontide:nodes:max{role="decode"} == 0',
            hold="1m",
            severity="critical",
            owner="serving",
            summary="No decode instance is there",
            description="Conductors see no decode instance. New requests wait, then end with NoCapacity (503).",
        ),
        Alert(
            name="MoontidePrefillGroupIncomplete",
            expr="prefill_group_complete == 0",
            hold="5m",
            severity="warning",
            owner="serving",
            summary="Stage {{ $labels.instance }} waits for the rest of its prefill group",
            description="A stage of the same group is lost or does not join; this group takes no prompts.",
        ),
        Alert(
            name="MoontidePrefillGroupFlaps",
            expr="increase(prefill_group_epochs_total[30m]) > 3",
            severity="warning",
            owner="serving",
            summary="The prefill group of {{ $labels.instance }} forms again and again",
            description="{{ $value | humanize }} new epochs within 30 minutes. Each one makes the group's open prompts start again.",
        ),
        Alert(
            name="MoontideNodesLost",
            expr='moontide:nodes:max{role=~"prefill|decode"}\n  < max_over_time(moontide:nodes:max{role=~"prefill|decode"}[15m])',
            hold="2m",
            severity="warning",
            owner="serving",
            summary="Fewer {{ $labels.role }} nodes than 15 minutes ago",
            description="{{ $value }} are left. A scale-down or a change of role looks the same for 15 minutes.",
        ),
        Alert(
            name="MoontideTargetDown",
            expr='up{component=~"conductor|prefill|decode"} == 0',
            hold="2m",
            severity="warning",
            owner="platform",
            summary="{{ $labels.component }} {{ $labels.instance }} does not answer Prometheus",
            description="The process is dead, frozen, or not reachable from Prometheus.",
        ),
        Alert(
            name="MoontideStoreMasterLost",
            expr='count by (namespace) (up{component="master"} == 0)\n'
            '  or max by (namespace) (moontide:nodes:max{role="kvstore"}) == 0\n'
            '    unless on (namespace) count by (namespace) (up{component="kvstore"} == 0)',
            hold="30s",
            severity="critical",
            owner="platform",
            summary="The store's master is gone, or no store process can reach it",
            description="No KV can be stored or read: new requests wait and end with NoCapacity (503). Running answers go on.",
        ),
        Alert(
            name="MoontideStoreProcessLost",
            expr='up{component="kvstore"} == 0\n'
            "  or on (namespace) max by (namespace) (\n"
            '    moontide:nodes:max{role="kvstore"} < max_over_time(moontide:nodes:max{role="kvstore"}[15m])\n'
            "  )",
            hold="1m",
            severity="critical",
            owner="platform",
            summary="A store process is gone{{ if $labels.instance }}: {{ $labels.instance }}{{ end }}",
            description="The blocks in its segment are lost, and the prefill and decode nodes of its host are not ready without it.",
        ),
        Alert(
            name="MoontideRegistryLost",
            expr="min by (namespace) (conductor_registry_connected) == 0",
            hold="1m",
            severity="critical",
            owner="platform",
            summary="Conductors do not reach Redis",
            description="Routing goes on with the last known state: nodes that come are not used, nodes that go are still tried.",
        ),
        Alert(
            name="MoontideIndexBehind",
            expr="max by (namespace, instance) (conductor_index_nodes_behind) > 0",
            hold="2m",
            severity="warning",
            owner="serving",
            summary="The prefix index of {{ $labels.instance }} is not whole",
            description="The blocks of {{ $value }} store processes are not all known: prompts are computed that could have been hits.",
        ),
        Alert(
            name="MoontideErrorRatioHigh",
            expr="moontide:requests_failed:ratio_rate5m > 0.05",
            hold="5m",
            severity="critical",
            owner="serving",
            summary="{{ $value | humanizePercentage }} of the requests fail",
            description="They end with an error of ours (HTTP 5xx), after all attempts.",
        ),
        Alert(
            name="MoontideRetriesHigh",
            expr="moontide:requests_retried:ratio_rate10m > 0.05",
            hold="5m",
            severity="warning",
            owner="serving",
            summary="{{ $value | humanizePercentage }} of the requests need another attempt",
            description="Nodes or blocks are lost under requests. Clients see pauses; work is done twice.",
        ),
        Alert(
            name="MoontideStoreCallsFail",
            expr="sum by (namespace, operation) (increase(conductor_store_errors_total[10m])) > 3",
            severity="warning",
            owner="platform",
            summary="Conductors cannot {{ $labels.operation }} reservations",
            description="{{ $value | humanize }} calls failed within 10 minutes. A lease that is not renewed ends its prompt's hand-off.",
        ),
        Alert(
            name="MoontidePushStalled",
            expr="(prefill_put_waiting_bytes > 0 or prefill_open_puts > 0)\n  and rate(prefill_put_bytes_total[5m]) == 0",
            hold="1m",
            severity="critical",
            owner="platform",
            summary="KV of {{ $labels.instance }} does not get into the store",
            description="Computed KV waits, and no put has returned for 5 minutes. No prompt of this stage can be handed to decode.",
        ),
        Alert(
            name="MoontidePutsFail",
            expr="increase(prefill_puts_failed_total[10m]) > 0",
            severity="warning",
            owner="platform",
            summary="Puts of {{ $labels.instance }} fail for good",
            description="{{ $value | humanize }} objects were given up within 10 minutes, after four tries; their prompts start again.",
        ),
        Alert(
            name="MoontideStorePeerUnreachable",
            expr="kvstore_unreachable_peers > 0",
            hold="2m",
            severity="warning",
            owner="platform",
            summary="{{ $labels.instance }} does not reach the data ports of {{ $value }} other hosts",
            description="Blocks there cannot be read from this host: prompts are computed again, hand-offs between these hosts fail.",
        ),
        Alert(
            name="MoontideObjectsCorrupt",
            expr='sum by (namespace, instance) (increase(kvstore_client_gets_total{result="corrupt"}[1h])) > 0',
            severity="warning",
            owner="platform",
            summary="{{ $labels.instance }} read objects whose checksum is wrong",
            description="{{ $value | humanize }} within an hour. They were not used, but something damages KV in memory or on its way.",
        ),
        Alert(
            name="MoontideSsdDamaged",
            expr="increase(kvstore_ssd_damaged_blocks_total[1h]) > 0",
            severity="warning",
            owner="platform",
            summary="The SSD of {{ $labels.instance }} gives back other bytes than were written",
            description="{{ $value | humanize }} blocks within an hour, not used. Without a power loss before, the disk is failing.",
        ),
    ]


def saturation_alerts() -> list[Alert]:
    return [
        Alert(
            name="MoontideRejectionsHigh",
            expr="moontide:requests_rejected:ratio_rate5m > 0.05",
            hold="10m",
            severity="warning",
            owner="serving",
            summary="{{ $value | humanizePercentage }} of the requests are refused for want of capacity",
            description="Their SLO would not be met, or the queue is full. Clients get 429 with Retry-After.",
        ),
        Alert(
            name="MoontideQueueGrowing",
            expr="min_over_time(moontide:queued_requests:sum[15m]) > 0\n  and deriv(moontide:queued_requests:sum[15m]) > 0",
            severity="warning",
            owner="serving",
            summary="The queue before the prefill groups has been growing for 15 minutes",
            description="More prompt tokens arrive than the prefill groups compute.",
        ),
        Alert(
            name="MoontideRoleOverloaded",
            expr="max by (namespace, role) (conductor_role_load) > 1",
            hold="10m",
            severity="warning",
            owner="serving",
            summary="The {{ $labels.role }} nodes have more work than their SLO allows",
            description="Load {{ $value | humanize }}, where 1 is just enough.",
        ),
        Alert(
            name="MoontidePoolFull",
            expr='sum by (namespace, instance) (rate(kvstore_reserves_total{result="wait"}[10m]))\n'
            "  / (sum by (namespace, instance) (rate(kvstore_reserves_total[10m])) > 0) > 0.2",
            hold="5m",
            severity="warning",
            owner="serving",
            summary="Prompts wait for room in the pool of {{ $labels.instance }}",
            description="{{ $value | humanizePercentage }} of the reservations have to wait: prompts under way fill the pool.",
        ),
        Alert(
            name="MoontidePrefillPagesExhausted",
            expr="prefill_free_pages / (prefill_num_pages > 0) < 0.05\n  and sum without (priority) (prefill_waiting_requests) > 0",
            hold="5m",
            severity="warning",
            owner="serving",
            summary="The prefill group of {{ $labels.instance }} has no free pages",
            description="{{ $value | humanizePercentage }} of the pages are free, and prompts wait.",
        ),
        Alert(
            name="MoontideDecodePagesExhausted",
            expr="decode_free_pages / (decode_pages > 0) < 0.05\n  and decode_waiting_requests > 0",
            hold="5m",
            severity="warning",
            owner="serving",
            summary="The decode instance {{ $labels.instance }} has no free pages",
            description="{{ $value | humanizePercentage }} of the pages are free, and requests wait for theirs.",
        ),
        Alert(
            name="MoontidePushSlow",
            expr="rate(prefill_put_wait_seconds_total[10m])\n  / (rate(prefill_stage_busy_seconds_total[10m]) > 0) > 0.5",
            hold="10m",
            severity="warning",
            owner="platform",
            summary="The store takes KV of {{ $labels.instance }} slower than it is computed",
            description="Steps wait for earlier puts {{ $value | humanizePercentage }} as long as they compute. Hand-offs come late.",
        ),
        Alert(
            name="MoontidePredictionErrorHigh",
            expr="moontide:prediction_miss:ratio_rate30m > 0.3\n  and moontide:prediction_events:increase30m >= 20",
            hold="30m",
            severity="warning",
            owner="serving",
            summary="Predictions of {{ $labels.kind }} are wrong",
            description="{{ $value | humanizePercentage }} are off by more than half. Routing and admission decide by them.",
        ),
    ]


def groups(slos: Sequence[Slo]) -> list[Group]:
    return [
        Group(
            name="moontide-slo-fast",
            interval=FAST_INTERVAL,
            rules=[
                *(constant for slo in slos for constant in slo_constants(slo)),
                *(record for slo in slos for record in slo_records(slo, FAST_WINDOWS)),
                *(slo_events(slo, "1h") for slo in slos),
            ],
        ),
        Group(
            name="moontide-slo-slow",
            interval=SLOW_INTERVAL,
            rules=[
                *(record for slo in slos for record in slo_records(slo, SLOW_WINDOWS)),
                *(slo_events(slo, "6h") for slo in slos),
            ],
        ),
        Group(name="moontide-records", interval=FAST_INTERVAL, rules=records()),
        Group(
            name="moontide-slo-alerts",
            interval=FAST_INTERVAL,
            rules=[burn_alert(slo, burn) for slo in slos for burn in BURNS],
        ),
        Group(name="moontide-failures", interval=FAST_INTERVAL, rules=failure_alerts()),
        Group(name="moontide-saturation", interval=FAST_INTERVAL, rules=saturation_alerts()),
    ]


# The file.


@dataclass(frozen=True)
class Times:
    """Durations of production -> those of the file."""

    scale: float

    def __post_init__(self) -> None:
        if not 0 < self.scale <= 1:
            raise WrongOption(f"--window-scale {self.scale:g} must be above 0 and at most 1, the windows of production")

    def of(self, duration: str) -> str:
        return self._written(self._seconds(duration))

    def interval(self, duration: str) -> str:
        return self._written(max(self._seconds(duration), min(SHORTEST_INTERVAL_S, seconds_of(duration))))

    def in_expr(self, expr: str) -> str:
        return _RANGE.sub(lambda found: f"[{self.of(found[1])}]", expr)

    def _seconds(self, duration: str) -> float:
        return seconds_of(duration) * self.scale

    @staticmethod
    def _written(seconds: float) -> str:
        millis = round(seconds * 1000)
        if millis < 1:
            raise WrongOption("--window-scale is so small that a window becomes shorter than 1 ms")
        for unit in ("d", "h", "m", "s"):
            whole, rest = divmod(millis, round(_UNIT_S[unit] * 1000))
            if rest == 0:
                return f"{whole}{unit}"
        return f"{millis}ms"


def seconds_of(duration: str) -> float:
    return int(duration[:-1]) * _UNIT_S[duration[-1]]


def rule_file(slos: Sequence[Slo], *, window_scale: float = 1.0, runbook_base: str = RUNBOOKS) -> dict[str, Any]:
    """The content of the file. Raises: WrongOption."""
    times = Times(window_scale)
    return {
        "groups": [
            {
                "name": group.name,
                "interval": times.interval(group.interval),
                "rules": [
                    _record(rule, times) if isinstance(rule, Record) else _alert(rule, times, runbook_base)
                    for rule in group.rules
                ],
            }
            for group in groups(slos)
        ]
    }


def _record(rule: Record, times: Times) -> dict[str, Any]:
    written: dict[str, Any] = {"record": rule.record, "expr": times.in_expr(rule.expr)}
    if rule.labels:
        written["labels"] = dict(rule.labels)
    return written


def _alert(rule: Alert, times: Times, runbook_base: str) -> dict[str, Any]:
    written: dict[str, Any] = {"alert": rule.name, "expr": times.in_expr(rule.expr)}
    if rule.hold:
        written["for"] = times.of(rule.hold)
    written["labels"] = {"severity": rule.severity, "owner": rule.owner} | ({"slo": rule.slo} if rule.slo else {})
    written["annotations"] = {
        "summary": rule.summary,
        "description": rule.description,
        "runbook_url": f"{runbook_base.rstrip('/')}/{rule.name}.md",
    }
    return written


class _Dumper(yaml.SafeDumper):
    """Expressions of several lines are written as such."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def render(content: Mapping[str, Any], arguments: Sequence[str] = ()) -> str:
    command = " ".join(("python -m deploy.prometheus.rules", *arguments))
    text: str = yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=10_000, allow_unicode=True)
    return f"# Generated: {command}\n{text}"


def slos_of(args: argparse.Namespace) -> list[Slo]:
    """Raises: WrongOption."""
    return [
        replace(
            slo,
            bound_s=getattr(args, f"{slo.name}_slo_s"),
            objective=getattr(args, f"{slo.name}_objective"),
        )
        for slo in DEFAULT_SLOS
    ]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m deploy.prometheus.rules", description="Write recording rules and alerts for Prometheus."
    )
    parser.add_argument(
        "--window-scale", type=float, default=1.0, help="factor for all windows, below 1 for staged runs (default 1)"
    )
    for slo in DEFAULT_SLOS:
        parser.add_argument(
            f"--{slo.name}-slo-s",
            type=float,
            default=slo.bound_s,
            help=f"bound for {slo.counted}, in seconds (default {slo.bound_s:g})",
        )
        parser.add_argument(
            f"--{slo.name}-objective",
            type=float,
            default=slo.objective,
            help=f"share of {slo.counted} within it (default {slo.objective:g})",
        )
    parser.add_argument(
        "--runbook-base",
        default=RUNBOOKS,
        metavar="URL",
        help=f"where alerts say that the runbooks are (default {RUNBOOKS})",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for a wrong option."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    try:
        content = rule_file(slos_of(args), window_scale=args.window_scale, runbook_base=args.runbook_base)
    except WrongOption as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(render(content, argv), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
