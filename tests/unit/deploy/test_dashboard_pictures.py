"""Pictures of dashboards: every panel is in them, values are written in their units, and a Prometheus is asked what the panels ask."""

from __future__ import annotations

import http.server
import json
import math
import re
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from deploy.grafana import svg
from deploy.grafana.draw import PrometheusError, draw, main
from deploy.grafana.picture import Answers, Series, draw_board, drawn_series, empty_panels
from deploy.grafana.queries import load_dashboards, panels
from deploy.grafana.units import format_value, ticks
from moontide.metrics import LATENCY_BUCKETS_S

BOARDS = load_dashboards()
START_S, END_S, STEP_S = 1000.0, 1060.0, 1.0
LABEL = re.compile(r"\{\{(\w+)\}\}")
SVG = "{http://www.w3.org/2000/svg}"


def made_up(board: Mapping[str, Any]) -> Answers:
    """Two series for what has labels, one for the rest; a growing count for each bucket."""
    series: dict[tuple[int, str], list[Series]] = {}
    for panel in panels(board):
        for target in panel.get("targets", ()):
            times = [END_S] if target.get("instant") else [START_S + STEP_S * idx for idx in range(61)]
            names = LABEL.findall(target.get("legendFormat", ""))
            if panel["type"] == "heatmap":
                labels = [{"le": f"{border:g}"} for border in LATENCY_BUCKETS_S] + [{"le": "+Inf"}]
            else:
                labels = [dict.fromkeys(names, f"{idx}") for idx in range(2 if names else 1)]
            series[panel["id"], target["refId"]] = [
                Series(each, [(when, (idx + 1) * (2 + math.sin(when))) for when in times])
                for idx, each in enumerate(labels)
            ]
    return Answers(start_s=START_S, end_s=END_S, step_s=STEP_S, heat_step_s=STEP_S, series=series)


def texts_of(picture: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(picture).iter(f"{SVG}text")]


@pytest.mark.parametrize("name", BOARDS)
def test_picture_is_svg_with_every_panel(name: str) -> None:
    board = BOARDS[name]
    answers = made_up(board)
    texts = texts_of(draw_board(board, answers, {}))
    assert {panel["title"] for panel in panels(board) if "$" not in panel["title"]} <= set(texts)
    assert empty_panels(board, answers) == []
    assert "No data" not in texts


def test_panels_without_data_say_so_and_are_listed() -> None:
    board = BOARDS["slo"]
    nothing = Answers(start_s=START_S, end_s=END_S, step_s=STEP_S, heat_step_s=STEP_S, series={})
    asked = [panel["title"] for panel in panels(board) if panel.get("targets")]
    assert empty_panels(board, nothing) == asked
    assert texts_of(draw_board(board, nothing, {})).count("No data") == len(asked)


def test_everything_lies_within_the_picture() -> None:
    picture = ElementTree.fromstring(draw_board(BOARDS["prefill"], made_up(BOARDS["prefill"]), {}))
    _, _, width, height = (float(number) for number in picture.attrib["viewBox"].split())
    for box in picture.iter(f"{SVG}rect"):
        left, top = float(box.get("x", 0)), float(box.get("y", 0))
        assert min(left, top) >= 0
        assert left + float(box.get("width", 0)) <= width
        assert top + float(box.get("height", 0)) <= height


def test_series_are_named_by_their_legend() -> None:
    panel = {"id": 1, "targets": [{"refId": "A", "expr": "up", "legendFormat": "{{ role }} at {{instance}}"}]}
    found = [Series({"role": "decode", "instance": "d-1"}, [(START_S, 1.0)]), Series({"role": "gone"}, [])]
    answers = Answers(start_s=START_S, end_s=END_S, step_s=1, heat_step_s=1, series={(1, "A"): found})
    assert [name for name, _ in drawn_series(panel, answers)] == ["decode at d-1"]


@pytest.mark.parametrize(
    ("value", "unit", "written"),
    [
        (0.0, "s", "0 s"),
        (0.0123, "s", "12.3 ms"),
        (90.0, "s", "1.5 min"),
        (0.995, "percentunit", "99.5%"),
        (-0.25, "percentunit", "-25%"),
        (1536.0, "bytes", "1.5 KiB"),
        (2e6, "Bps", "2 MB/s"),
        (1234.0, "si:tok/s", "1.23 ktok/s"),
        (12345.0, "short", "12.3 K"),
        (0.5, "reqps", "0.5 req/s"),
        (14.4, "none", "14.4"),
        (math.inf, "s", "∞"),
    ],
)
def test_values_are_written_as_grafana_writes_them(value: float, unit: str, written: str) -> None:
    assert format_value(value, unit) == written


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 0.93), (-0.3, 0.2), (0, 3e8), (0, 1e-5), (5, 5)])
def test_ticks_are_few_equal_steps_around_the_values(low: float, high: float) -> None:
    marks = ticks(low, high, unit="s")
    assert marks[0] <= low
    assert marks[-1] >= high * (1 - 1e-9)
    assert 2 <= len(marks) <= 7
    steps = {round((after - before) / (marks[1] - marks[0]), 6) for before, after in pairwise(marks)}
    assert steps == {1.0}


def test_long_words_are_cut_and_lines_are_whole_words() -> None:
    assert svg.fitted("a" * 50, 57, 10) == "a" * 9 + "…"
    assert svg.wrapped("one two three", 57, 10, lines=2) == ["one two", "three"]
    assert svg.wrapped("", 56, 10, lines=2) == []


@contextmanager
def prometheus(answer: Mapping[str, Any], status: int = 200) -> Iterator[tuple[str, list[str]]]:
    """(url, queries) of a server that answers every query alike."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_draw_asks_every_query_with_its_variables_and_writes_a_picture(tmp_path: Path) -> None:
    matrix = {
        "resultType": "matrix",
        "result": [{"metric": {"le": "1"}, "values": [[START_S, "NaN"], [START_S + 30, "2"]]}],
    }
    with prometheus({"status": "success", "data": matrix}) as (url, asked):
        empty = draw(
            url, tmp_path, minutes=1, end_s=END_S, rate_interval="20s", values={"ttft_slo": "0.5"}, names=["slo"]
        )
    assert empty == {"slo": []}
    assert [path.name for path in tmp_path.iterdir()] == ["slo.svg"]
    queries = [urllib.parse.parse_qs(urllib.parse.urlparse(path).query)["query"][0] for path in asked]
    assert len(queries) == sum(len(panel.get("targets", ())) for panel in panels(BOARDS["slo"]))
    assert not any("$" in query for query in queries)
    assert any('le="0.5"' in query and "[20s]" in query for query in queries)


def test_a_refused_query_and_a_missing_prometheus_are_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refusal = {"status": "error", "error": "no such function"}
    with prometheus(refusal, status=400) as (url, _), pytest.raises(PrometheusError, match="no such function"):
        draw(url, tmp_path, minutes=1)
    assert main(["--prometheus", url, "--out", str(tmp_path)]) == 1
    assert "no Prometheus answers" in capsys.readouterr().err
