"""Arrows between packages point down only; the table is the one of docs/architecture.md."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = {
    "moontide_proto": set(),
    "moontide": {"moontide_proto"},
    "kvstore": {"moontide", "moontide_proto"},
    "model_runner": {"kvstore", "moontide"},
    "prefill_node": {"model_runner", "kvstore", "moontide", "moontide_proto"},
    "decode_node": {"model_runner", "kvstore", "moontide", "moontide_proto"},
    "conductor": {"kvstore", "moontide", "moontide_proto"},
    "deploy": {
        "conductor", "decode_node", "prefill_node", "model_runner", "kvstore", "moontide", "moontide_proto"
    },
}  # fmt: skip
ONLY_IN_DEPLOY = {"ray"}
NO_TORCH = ("moontide", "kvstore", "conductor")


def imported_packages(package: str) -> dict[str, set[str]]:
    """Top-level name -> files of `package` that import it, also inside functions."""
    directory = ROOT / "proto" / package if package == "moontide_proto" else ROOT / package
    found: dict[str, set[str]] = {}
    for path in directory.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [node.module]
            for name in names:
                found.setdefault(name.partition(".")[0], set()).add(str(path.relative_to(ROOT)))
    return found


@pytest.mark.parametrize("package", ALLOWED)
def test_package_imports_only_what_the_table_allows(package: str) -> None:
    imports = imported_packages(package)
    assert imports, f"no file of {package} was read"
    forbidden = (ALLOWED.keys() | {"tests", "benchmarks"}) - ALLOWED[package] - {package}
    assert {name: files for name, files in imports.items() if name in forbidden} == {}


@pytest.mark.parametrize("package", [name for name in ALLOWED if name != "deploy"])
def test_only_deploy_imports_ray(package: str) -> None:
    assert ONLY_IN_DEPLOY & imported_packages(package).keys() == set()


@pytest.mark.parametrize("package", NO_TORCH)
def test_package_does_without_torch(package: str) -> None:
    assert {"torch", "transformers"} & imported_packages(package).keys() == set()


def test_table_is_that_of_the_architecture_document() -> None:
    rows: dict[str, set[str]] = {}
    for line in (ROOT / "docs" / "architecture.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 2 and cells[0].split(", ")[0] in ALLOWED:
            allowed = cells[1].partition(" (")[0]
            for package in cells[0].split(", "):
                if package in ALLOWED and allowed != "everything":
                    rows[package] = set(allowed.split(", "))
    assert rows == {name: allowed for name, allowed in ALLOWED.items() if name in rows}
    assert rows.keys() == ALLOWED.keys() - {"moontide_proto", "deploy"}
