"""Writes the Grafana dashboards: `python -m deploy.grafana.build`. Their JSON is checked in; equal code makes equal files.

`--check` writes nothing and prints a line per dashboard. Code 1: a file is not what this code makes, or breaks Grafana's schema.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence

from deploy.grafana import decode_board, kvstore_board, prefill_board, request_board, slo_board
from deploy.grafana.queries import DASHBOARDS, panel_queries, panels
from deploy.grafana.schema import GrafanaSchema
from deploy.grafana.style import render


def rendered() -> dict[str, str]:
    """File name -> content of every dashboard."""
    boards = [module.board() for module in (slo_board, prefill_board, kvstore_board, decode_board, request_board)]
    return {f"{board.name}.json": render(board) for board in boards}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the Grafana dashboards.")
    parser.add_argument("--check", action="store_true", help="only check the files that are there")
    args = parser.parse_args(argv)
    wanted = rendered()
    there = {path.name: path.read_text() for path in DASHBOARDS.glob("*.json")}
    if args.check:
        return _check(wanted, there)
    stale = sorted(name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name))
    for name in stale:
        if name in wanted:
            (DASHBOARDS / name).write_text(wanted[name])
        else:
            (DASHBOARDS / name).unlink()
    print(f"{len(wanted)} dashboards in {DASHBOARDS}, {len(stale)} of them changed")
    return 0


def _check(wanted: Mapping[str, str], there: Mapping[str, str]) -> int:
    schema = GrafanaSchema()
    num_failed = 0
    for name in sorted(wanted.keys() | there.keys()):
        problems = list(_problems(wanted.get(name), there.get(name), schema))
        num_failed += bool(problems)
        for problem in problems:
            print(f"FAILED  {name}: {problem}")
        if not problems:
            board = json.loads(there[name])
            num_panels = sum(panel["type"] != "row" for panel in panels(board))
            num_queries = len(panel_queries(name, board))
            print(
                f"ok      {name}: is what the code makes; {num_panels} panels and {num_queries} queries follow Grafana's schema"
            )
    print(f"dashboards: {len(wanted.keys() | there.keys()) - num_failed} passed, {num_failed} failed")
    return 1 if num_failed else 0


def _problems(wanted: str | None, there: str | None, schema: GrafanaSchema) -> Iterator[str]:
    if wanted != there:
        yield "is not what deploy/grafana makes; run `make dashboards`"
    if there is not None:
        yield from schema.problems(json.loads(there))


if __name__ == "__main__":
    sys.exit(main())
