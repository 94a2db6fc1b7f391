"""The queries of the checked-in dashboards as Prometheus takes them: whoever checks them needs no Grafana.

python -m deploy.grafana.queries                 # prints one query a line: dashboard, panel, expression
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DASHBOARDS = Path(__file__).parent / "dashboards"
_BUILT_IN = {"__rate_interval": "1m", "__range": "15m"}
"""Variables that Grafana fills in; here with what suits a scrape interval of at most 15 s."""


@dataclass(frozen=True, kw_only=True)
class PanelQuery:
    dashboard: str
    """Its file, without the suffix."""
    panel: str
    ref_id: str
    template: str
    """As in the file, with variables."""
    expr: str
    """With every variable replaced."""


def load_dashboards() -> dict[str, dict[str, Any]]:
    """File name without suffix -> dashboard."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(DASHBOARDS.glob("*.json"))}


def panels(dashboard: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """All of them, rows and what is folded into rows included."""
    for panel in dashboard["panels"]:
        yield panel
        yield from panel.get("panels", ())


def panel_queries(name: str, dashboard: Mapping[str, Any], values: Mapping[str, str] | None = None) -> list[PanelQuery]:
    """Every query of a dashboard, with `values` in place of its variables and their defaults for those that are not named."""
    known = default_values(dashboard) | dict(values or {})
    return [
        PanelQuery(
            dashboard=name,
            panel=panel["title"],
            ref_id=target["refId"],
            template=target["expr"],
            expr=substitute(target["expr"], known),
        )
        for panel in panels(dashboard)
        for target in panel.get("targets", ())
    ]


def default_values(dashboard: Mapping[str, Any]) -> dict[str, str]:
    """What each variable stands for when nobody chose anything."""
    values = dict(_BUILT_IN)
    for variable in dashboard["templating"]["list"]:
        current = variable.get("current", {}).get("value", "")
        values[variable["name"]] = variable["allValue"] if current == "$__all" else str(current)
    return values


def substitute(expr: str, values: Mapping[str, str]) -> str:
    """`expr` with $name replaced. Longer names first: $__range must not eat the beginning of $__range_s."""
    for name in sorted(values, key=len, reverse=True):
        expr = expr.replace(f"${name}", values[name])
    return expr


def main() -> int:
    for name, dashboard in load_dashboards().items():
        for query in panel_queries(name, dashboard):
            print(name, query.panel, query.expr, sep="\t")
    return 0


if __name__ == "__main__":
    sys.exit(main())
