"""Pictures of the dashboards from a Prometheus, without a Grafana.

python -m deploy.grafana.draw --prometheus http://127.0.0.1:9090 --out pictures --minutes 5
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy.grafana.picture import HEATMAP_COLUMNS, Answers, Series, draw_board, empty_panels
from deploy.grafana.queries import default_values, load_dashboards, panels, substitute

POINTS = 90
"""Values of a line over the time shown."""
CALL_TIMEOUT_S = 30.0


class PrometheusError(Exception):
    """It does not answer, or refuses a query; the message is its own."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Draw the dashboards as SVG from the data of a Prometheus.")
    parser.add_argument("--prometheus", required=True, metavar="URL", help="such as http://127.0.0.1:9090")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="where the pictures go")
    parser.add_argument("--minutes", type=float, default=60.0, help="how much of the past is shown")
    parser.add_argument(
        "--rate-interval",
        default="1m",
        help="window of rates, Grafana's $__rate_interval; at least four scrape intervals",
    )
    parser.add_argument(
        "--var", action="append", default=[], metavar="NAME=VALUE", help="value of a variable of the dashboards"
    )
    parser.add_argument("boards", nargs="*", metavar="BOARD", help="such as slo; all when none is named")
    args = parser.parse_args(argv)
    values = dict(value.split("=", 1) for value in args.var)
    try:
        empty = draw(
            args.prometheus,
            args.out,
            minutes=args.minutes,
            rate_interval=args.rate_interval,
            values=values,
            names=args.boards,
        )
    except PrometheusError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for name, titles in empty.items():
        print(f"{args.out / name}.svg" + (f"; no data: {', '.join(titles)}" if titles else ""))
    return 0


def draw(
    url: str,
    out: Path,
    *,
    minutes: float,
    rate_interval: str = "1m",
    values: Mapping[str, str] | None = None,
    names: Sequence[str] = (),
    end_s: float | None = None,
) -> dict[str, list[str]]:
    """Write NAME.svg of every dashboard into `out`; returns for each the titles of the panels without data.

    `end_s`: unix time at which the pictures end, now when left out. Raises: PrometheusError.
    """
    out.mkdir(parents=True, exist_ok=True)
    end_s = time.time() if end_s is None else end_s
    variables = {"__rate_interval": rate_interval, "__range": f"{math.ceil(60 * minutes)}s", **(values or {})}
    empty = {}
    for name, board in load_dashboards().items():
        if not names or name in names:
            answers = ask(url, board, start_s=end_s - 60 * minutes, end_s=end_s, values=variables)
            (out / f"{name}.svg").write_text(draw_board(board, answers, variables))
            empty[name] = empty_panels(board, answers)
    return empty


def ask(url: str, board: Mapping[str, Any], *, start_s: float, end_s: float, values: Mapping[str, str]) -> Answers:
    """Run every query of a dashboard. Raises: PrometheusError."""
    known = default_values(board) | dict(values)
    step_s, heat_step_s = (end_s - start_s) / POINTS, (end_s - start_s) / HEATMAP_COLUMNS
    series: dict[tuple[int, str], list[Series]] = {}
    for panel in panels(board):
        for target in panel.get("targets", ()):
            expr = substitute(target["expr"], known)
            step = heat_step_s if panel["type"] == "heatmap" else step_s
            if target.get("instant"):
                found = _get(url, "query", query=expr, time=end_s)
            else:
                found = _get(url, "query_range", query=expr, start=start_s, end=end_s, step=step)
            series[panel["id"], target["refId"]] = [_series(one) for one in found]
    return Answers(start_s=start_s, end_s=end_s, step_s=step_s, heat_step_s=heat_step_s, series=series)


def _series(found: Mapping[str, Any]) -> Series:
    points = [(float(when), float(value)) for when, value in found.get("values") or [found["value"]]]
    return Series(found["metric"], [(when, value) for when, value in points if math.isfinite(value)])


def _get(url: str, path: str, **parameters: Any) -> list[dict[str, Any]]:
    address = f"{url.rstrip('/')}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    try:
        with urllib.request.urlopen(address, timeout=CALL_TIMEOUT_S) as answer:
            data = json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        raise PrometheusError(f"{parameters['query']}: {error.read().decode(errors='replace')}") from error
    except OSError as error:
        raise PrometheusError(f"no Prometheus answers at {url}: {error}") from error
    if data["resultType"] == "scalar":
        return [{"metric": {}, "value": data["result"]}]
    found: list[dict[str, Any]] = data["result"]
    return found


if __name__ == "__main__":
    sys.exit(main())
