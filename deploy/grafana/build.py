"""Writes the Grafana dashboards: `python -m deploy.grafana.build`. Their JSON is checked in; equal code makes equal files.

`--check` writes nothing and ends with code 1 when a file is not what this code makes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from deploy.grafana import decode_board, kvstore_board, prefill_board, request_board, slo_board
from deploy.grafana.queries import DASHBOARDS
from deploy.grafana.style import render


def rendered() -> dict[str, str]:
    """File name -> content of every dashboard."""
    boards = [module.board() for module in (slo_board, prefill_board, kvstore_board, decode_board, request_board)]
    return {f"{board.name}.json": render(board) for board in boards}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the Grafana dashboards.")
    parser.add_argument("--check", action="store_true", help="only compare with the files that are there")
    args = parser.parse_args(argv)
    wanted = rendered()
    there = {path.name: path.read_text() for path in DASHBOARDS.glob("*.json")}
    stale = sorted(name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name))
    if args.check:
        for name in stale:
            print(f"{DASHBOARDS / name} is not what deploy/grafana makes; run `make dashboards`")
        return 1 if stale else 0
    for name in stale:
        if name in wanted:
            (DASHBOARDS / name).write_text(wanted[name])
        else:
            (DASHBOARDS / name).unlink()
    print(f"{len(wanted)} dashboards in {DASHBOARDS}, {len(stale)} of them changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
