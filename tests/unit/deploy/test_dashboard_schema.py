"""Grafana's schema takes the checked-in dashboards and nothing that is wrong in them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from deploy.grafana.queries import load_dashboards

pytest.importorskip("jsonschema")

from deploy.grafana.schema import GrafanaSchema

BOARDS = load_dashboards()
SCHEMA = GrafanaSchema()
Dashboard = dict[str, Any]


def first(board: Dashboard, kind: str) -> dict[str, Any]:
    panel: dict[str, Any] = next(panel for panel in board["panels"] if panel["type"] == kind)
    return panel


@pytest.mark.parametrize("name", BOARDS)
def test_checked_in_dashboards_follow_the_schema(name: str) -> None:
    assert SCHEMA.problems(BOARDS[name]) == []


def _set(*path: Any) -> Callable[[Any], None]:
    """Sets the value that comes last at the path before it."""

    def change(tree: Any) -> None:
        *parents, key, value = path
        for parent in parents:
            tree = tree[parent]
        tree[key] = value

    return change


@pytest.mark.parametrize(
    ("kind", "change", "word"),
    [
        ("timeseries", _set("colour", "red"), "colour"),
        ("timeseries", _set("gridPos", "w", 25), "25"),
        ("timeseries", _set("options", "legend", "placement", "left"), "left"),
        ("timeseries", _set("options", "legends", {}), "legends"),
        ("timeseries", _set("fieldConfig", "defaults", "custom", "lineWidth", "thick"), "thick"),
        ("timeseries", _set("fieldConfig", "defaults", "unit", "seconds"), "no unit 'seconds'"),
        ("timeseries", _set("targets", 0, "expression", "up"), "expression"),
        ("timeseries", _set("targets", 0, "range", "yes"), "yes"),
        ("stat", _set("options", "graphMode", "pie"), "pie"),
        ("heatmap", _set("options", "yAxis", "unit", "sec"), "no unit 'sec'"),
        ("heatmap", _set("options", "tooltip", "show", True), "show"),
        ("timeseries", _set("type", "graph"), "graph"),
        ("row", _set("collapsed", "no"), "no"),
    ],
)
def test_a_wrong_field_of_a_panel_is_named(kind: str, change: Callable[[Any], None], word: str) -> None:
    board = copy.deepcopy(BOARDS["slo"])
    panel = first(board, kind)
    change(panel)
    problems = SCHEMA.problems(board)
    assert problems
    assert all(panel["title"] in problem for problem in problems)
    assert any(word in problem for problem in problems)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (_set("refreshed", "30s"), "refreshed"),
        (_set("templating", "list", 0, "kind", "custom"), "kind"),
        (_set("schemaVersion", "new"), "new"),
        (_set("links", 0, "type", "page"), "page"),
    ],
)
def test_a_wrong_field_of_a_dashboard_is_named(change: Callable[[Any], None], word: str) -> None:
    board = copy.deepcopy(BOARDS["slo"])
    change(board)
    assert any(problem.startswith("dashboard") and word in problem for problem in SCHEMA.problems(board))
