"""The matrix turns every switch of the chart, and every refusal of a template has its case."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from deploy.check_chart import CHART, DATA, Case, read_cases
from moontide.config import read_yaml

DRESS = ("nameOverride",)
"""Names, which `fullnameOverride` stands for."""


def leaves(
    value: Any, schema: Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    if isinstance(value, dict) and value:
        for key, below in value.items():
            known = schema.get("properties", {})
            yield from leaves(below, known.get(key, schema.get("additionalProperties", {})), (*path, key))
    else:
        yield path, value, schema


def at(values: Mapping[str, Any], path: tuple[str, ...], default: Any) -> Any:
    node: Any = values
    for key in path:
        if not isinstance(node, dict) or key not in node:
            return default
        node = node[key]
    return node


DEFAULTS = read_yaml(CHART / "values.yaml")
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
LEAVES = [(path, default, schema) for path, default, schema in leaves(DEFAULTS, SCHEMA) if path[0] not in DRESS]
SWITCHES = {
    ".".join(path): (path, default, schema.get("enum") or ([True, False] if isinstance(default, bool) else None))
    for path, default, schema in LEAVES
    if "enum" in schema or isinstance(default, bool) or default in ("", [], {})
}


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return read_cases(DATA / "matrix.yaml")


def test_every_value_is_in_the_schema() -> None:
    assert [".".join(path) for path, _, schema in LEAVES if not schema] == []


@pytest.mark.parametrize("name", SWITCHES)
def test_every_position_of_a_switch_is_rendered(name: str, cases: list[Case]) -> None:
    path, default, positions = SWITCHES[name]
    seen = [at(case.values, path, default) for case in cases if not case.refused]
    if positions:
        assert [position for position in positions if position not in seen] == []
    else:
        assert any(value not in ("", [], {}) for value in seen), f"no case sets {name}"


def test_every_refusal_has_its_case(cases: list[Case]) -> None:
    templates = "\n".join(path.read_text() for path in (CHART / "templates").rglob("*.*"))
    messages = re.findall(r'(?:fail|required) (?:\(printf )?"([^"]+)"', templates)
    refused = [case.refused for case in cases if case.refused]
    assert [message for message in messages if not any(part in message for part in refused)] == []
