"""Do the dashboards follow Grafana's own schema? Its files, with source and licence, lie in tests/deploy/grafana/schema.

Dashboard and panels are checked as such; a panel's `options` and `fieldConfig.defaults.custom` by the schema of its type, its targets by
that of Prometheus, its units by Grafana's list. The schemas take no field that they do not name.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

SCHEMAS = Path(__file__).parents[2] / "tests/deploy/grafana/schema"
CUSTOM_UNITS = ("si:", "suffix:", "prefix:")
"""Grafana makes units of what follows. Source: Grafana's documentation, Configure standard options, Unit."""


class GrafanaSchema:
    """Raises: ImportError without the package jsonschema."""

    def __init__(self) -> None:
        self._jsonschema: Any = importlib.import_module("jsonschema")
        self._schemas: dict[str, dict[str, Any]] = {
            path.name.partition(".")[0]: json.loads(path.read_text()) for path in SCHEMAS.glob("*.jsonschema.json")
        }
        self._units = {unit["const"] for unit in self._schemas["units"]["definitions"].values()}

    def problems(self, board: Mapping[str, Any]) -> list[str]:
        """What Grafana's schema says against a dashboard; empty when nothing."""
        found = list(self._against("dashboard", "Dashboard", {**board, "panels": []}, "dashboard"))
        for panel in board["panels"]:
            found += self._panel_problems(panel)
        return found

    def _panel_problems(self, panel: Mapping[str, Any]) -> Iterator[str]:
        where = f"panel {panel.get('title', '')!r}"
        if panel.get("type") == "row":
            yield from self._against("dashboard", "RowPanel", {**panel, "panels": []}, where)
            for inner in panel.get("panels", ()):
                yield from self._panel_problems(inner)
            return
        yield from self._against("dashboard", "Panel", panel, where)
        kind = str(panel.get("type"))
        if kind not in self._schemas:
            yield f"{where}: no schema for panels of type {kind!r} in {SCHEMAS}"
            return
        yield from self._against(kind, "Options", panel.get("options", {}), f"{where} options")
        defaults = panel.get("fieldConfig", {}).get("defaults", {})
        if "custom" in defaults:
            yield from self._against(kind, "FieldConfig", defaults["custom"], f"{where} fieldConfig.defaults.custom")
        for target in panel.get("targets", ()):
            yield from self._against("prometheus", "Dataquery", target, f"{where} target {target.get('refId')}")
        for unit in (defaults.get("unit"), panel.get("options", {}).get("yAxis", {}).get("unit")):
            if unit is not None and unit not in self._units and not unit.startswith(CUSTOM_UNITS):
                yield f"{where}: Grafana has no unit {unit!r}"

    def _against(self, schema: str, definition: str, value: object, where: str) -> Iterator[str]:
        definitions = self._schemas[schema]["definitions"]
        if definition not in definitions:
            yield f"{where}: the schema of {schema} has no {definition}"
            return
        validator = self._jsonschema.Draft7Validator(
            {"$ref": f"#/definitions/{definition}", "definitions": definitions}
        )
        for error in validator.iter_errors(value):
            deepest = self._jsonschema.exceptions.best_match([error])
            path = ".".join(str(part) for part in deepest.absolute_path)
            yield f"{where}{': ' + path if path else ''}: {deepest.message}"
