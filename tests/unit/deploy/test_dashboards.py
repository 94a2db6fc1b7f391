"""The checked-in Grafana dashboards: what they ask for is what our services declare, and their code makes them again."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from deploy.grafana.declared import Metric, declared_metrics
from deploy.grafana.queries import default_values, load_dashboards, panel_queries, panels
from deploy.prometheus.rules import DEFAULT_SLOS
from moontide.metrics import LATENCY_BUCKETS_S

ROOT = Path(__file__).resolve().parents[3]
BOARDS = load_dashboards()
DECLARED = declared_metrics(ROOT)
SCRAPED_LABELS = {"le", "instance", "namespace"}
VARIABLE = re.compile(r"\$\{?([A-Za-z_]+)\}?")
METRIC_NAME = re.compile(r"\b(?:conductor|prefill|decode|kvstore)_[a-z0-9_]+")
GROUPED = re.compile(r"\bby \(([^)]*)\)")
MATCHER = re.compile(r"([a-z_]+)\s*(?:=~|!~|!=|=)\s*\"")
NOT_SHOWN: set[str] = set()
"""Metrics that no dashboard needs."""


def queries_of(name: str) -> list[tuple[str, str]]:
    return [(query.panel, query.expr) for query in panel_queries(name, BOARDS[name])]


def metrics_in(expr: str) -> dict[str, Metric | None]:
    names = METRIC_NAME.findall(re.sub(r'"[^"]*"', '""', expr))
    return {name: DECLARED.get(name) for name in names}


def test_there_are_the_five_dashboards() -> None:
    assert BOARDS.keys() == {"slo", "prefill", "kvstore", "decode", "request"}
    assert len({board["uid"] for board in BOARDS.values()}) == len(BOARDS)


@pytest.mark.parametrize("name", BOARDS)
def test_every_metric_of_a_query_is_declared_in_the_code(name: str) -> None:
    unknown = {
        (panel, metric)
        for panel, expr in queries_of(name)
        for metric, declared in metrics_in(expr).items()
        if declared is None
    }
    assert unknown == set()


@pytest.mark.parametrize("name", BOARDS)
def test_every_label_of_a_query_is_one_of_its_metrics(name: str) -> None:
    wrong = []
    for panel, expr in queries_of(name):
        labels = {label.strip() for group in GROUPED.findall(expr) for label in group.split(",")}
        labels |= set(MATCHER.findall(expr))
        known = SCRAPED_LABELS.union(*(metric.labels for metric in metrics_in(expr).values() if metric))
        wrong += [(panel, label) for label in labels - known]
    assert wrong == []


@pytest.mark.parametrize("name", BOARDS)
def test_every_query_parses(name: str) -> None:
    promql_parser = pytest.importorskip("promql_parser")
    for panel, expr in queries_of(name):
        try:
            promql_parser.parse(expr)
        except ValueError as error:
            pytest.fail(f"{panel}: {expr}: {error}")


@pytest.mark.parametrize("name", BOARDS)
def test_every_variable_of_a_dashboard_is_defined(name: str) -> None:
    board = BOARDS[name]
    known = default_values(board).keys()
    texts = [target["expr"] for panel in panels(board) for target in panel.get("targets", ())]
    texts += [panel["options"]["content"] for panel in panels(board) if panel["type"] == "text"]
    texts += [panel["title"] for panel in panels(board)]
    assert {variable for text in texts for variable in VARIABLE.findall(text)} - known == set()
    assert not any("$" in query.expr for query in panel_queries(name, board)), "a variable has no default"


def test_bounds_of_the_slo_board_are_borders_of_buckets() -> None:
    borders = {str(float(border)) for border in LATENCY_BUCKETS_S}
    for variable in BOARDS["slo"]["templating"]["list"]:
        if variable["name"].endswith("_slo"):
            assert {option["value"] for option in variable["options"]} <= borders


def test_slo_board_begins_with_the_bounds_and_objectives_of_the_alerts() -> None:
    values = default_values(BOARDS["slo"])
    for slo in DEFAULT_SLOS:
        assert float(values[f"{slo.name}_slo"]) == slo.bound_s
        assert float(values[f"{slo.name}_objective"]) == slo.objective


def test_each_dashboard_shows_what_it_is_for() -> None:
    needed = {  # (metric, label it is split by)
        "slo": {("conductor_ttft_seconds_bucket", ""), ("conductor_tbt_seconds_bucket", ""), ("conductor_rejected_total", "reason")},
        "prefill": {
            ("prefill_stage_busy_seconds_total", ""),
            ("prefill_bubble_seconds_total", "stage"),
            ("prefill_step_tokens_bucket", "le"),
            ("prefill_step_prediction_error_bucket", "stage"),
            ("prefill_waiting_requests", "priority"),
        },
        "kvstore": {
            ("kvstore_used_bytes", ""),
            ("prefill_page_hit_tokens_total", ""),
            ("kvstore_ssd_hit_blocks_total", ""),
            ("prefill_put_bytes_total", ""),
            ("decode_pulled_bytes_total", ""),
            ("conductor_handoff_seconds_bucket", ""),
            ("kvstore_evicted_blocks_total", ""),
            ("kvstore_replicated_blocks_total", ""),
        },
        "decode": {
            ("decode_step_requests_bucket", "le"),
            ("conductor_tbt_seconds_bucket", ""),
            ("decode_requests_total", "outcome"),
            ("decode_free_pages", ""),
        },
        "request": {("conductor_ttft_seconds_bucket", "le"), ("decode_pull_seconds_bucket", "le")},
    }  # fmt: skip
    for name, wanted in needed.items():
        for metric, label in wanted:
            asked = [expr for _, expr in queries_of(name) if metric in metrics_in(expr)]
            assert any(not label or label in ",".join(GROUPED.findall(expr)) for expr in asked), (name, metric, label)


def test_latencies_of_the_slo_board_lead_to_the_drill_down() -> None:
    linked = {
        panel["title"]
        for panel in panels(BOARDS["slo"])
        for link in panel.get("fieldConfig", {}).get("defaults", {}).get("links", ())
        if f"/d/{BOARDS['request']['uid']}?" in link["url"]
    }
    assert {"TTFT distribution", "TBT distribution", "TTFT attainment", "TBT attainment"} <= linked


@pytest.mark.parametrize("name", BOARDS)
def test_panels_say_what_they_show_and_do_not_overlap(name: str) -> None:
    cells: set[tuple[int, int]] = set()
    ids = []
    for panel in panels(BOARDS[name]):
        ids.append(panel["id"])
        place: dict[str, Any] = panel["gridPos"]
        if panel["type"] != "row":
            assert panel["title"], place
            assert panel["description"], panel["title"]
            assert panel["type"] == "text" or panel["targets"], panel["title"]
        own = {(place["x"] + dx, place["y"] + dy) for dx in range(place["w"]) for dy in range(place["h"])}
        assert place["x"] + place["w"] <= 24, panel["title"]
        assert not own & cells, f"{panel['title']} lies on another panel"
        cells |= own
    assert len(set(ids)) == len(ids)


def test_every_declared_metric_is_on_a_dashboard() -> None:
    shown = {
        metric.name for name in BOARDS for _, expr in queries_of(name) for metric in metrics_in(expr).values() if metric
    }
    assert {metric.name for metric in DECLARED.values()} - shown == NOT_SHOWN


def test_the_scan_of_the_source_finds_what_a_process_exposes() -> None:
    from functools import partial

    from prometheus_client import CollectorRegistry

    from conductor.metrics import ConductorMetrics
    from kvstore.metrics import ClientMetrics, SsdMetrics, StoreMetrics
    from prefill_node.metrics import GroupMetrics, StageMetrics

    registry = CollectorRegistry()
    for parts in (
        ConductorMetrics,
        ClientMetrics,
        SsdMetrics,
        StoreMetrics,
        partial(GroupMetrics, num_stages=2),
        StageMetrics,
    ):
        parts(registry)
    exposed = {(family.name, family.type) for family in registry.collect()}
    assert exposed <= {(metric.name, metric.kind) for metric in DECLARED.values()}


def test_files_are_what_the_code_makes_and_grafanas_model_reads_them() -> None:
    pytest.importorskip("grafana_foundation_sdk")
    import json

    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard

    from deploy.grafana.build import main, rendered

    assert main(["--check"]) == 0
    for text in rendered().values():
        board = json.loads(text)
        assert json.loads(json.dumps(Dashboard.from_json(board), cls=JSONEncoder)) == board
