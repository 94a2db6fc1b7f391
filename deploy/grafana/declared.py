"""Which metrics our services declare, read from their source without importing it.

A metric is a call of prometheus_client (or of a helper around it) whose first argument is a name with the prefix of its service, or an
entry of a table of gauges.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("moontide", "kvstore", "model_runner", "prefill_node", "decode_node", "conductor")
_NAME = re.compile(r"(conductor|prefill|decode|kvstore)_[a-z0-9_]+")
_KINDS = ("counter", "gauge", "histogram", "info")
_SAMPLES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count"), "info": ("_info",)}
_INFO_LABELS = {"prefill_plan": frozenset({"mode", "policy", "chunking", "attention"})}
"""Labels of infos are given at run time."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    name: str
    """Without the suffix that its kind adds on the wire."""
    kind: str
    """counter | gauge | histogram | info"""
    labels: frozenset[str] = frozenset()
    """Its own ones; `le` and what a scrape adds are not among them."""

    @property
    def samples(self) -> tuple[str, ...]:
        """Names under which Prometheus stores it."""
        return tuple(self.name + suffix for suffix in _SAMPLES[self.kind])


def declared_metrics(root: Path) -> dict[str, Metric]:
    """Sample name -> metric, for every service in the source tree `root`."""
    found: dict[str, Metric] = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            for metric in _metrics_of(ast.parse(path.read_text())):
                found.update(dict.fromkeys(metric.samples, metric))
    return found


def _metrics_of(tree: ast.Module) -> Iterator[Metric]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            kind = _kind(node.func)
            name = _constant(node.args[0])
            if kind and name and _NAME.fullmatch(name):
                bare = name.removesuffix("_total") if kind == "counter" else name
                yield Metric(name=bare, kind=kind, labels=_INFO_LABELS.get(name, _labels(node)))
        elif isinstance(node, ast.Dict) and all(isinstance(value, ast.Tuple) for value in node.values):
            names = [_constant(key) for key in node.keys]
            for name in names:
                if name and _NAME.fullmatch(name):
                    yield Metric(name=name, kind="gauge")


def _kind(function: ast.expr) -> str:
    """What a call declares; empty when it is something else."""
    name = function.id if isinstance(function, ast.Name) else ""
    return name.lower() if name.lower() in _KINDS else ""


def _labels(call: ast.Call) -> frozenset[str]:
    lists = [argument for argument in call.args[2:] if isinstance(argument, (ast.List, ast.Tuple))]
    lists += [
        keyword.value
        for keyword in call.keywords
        if keyword.arg == "labelnames" and isinstance(keyword.value, (ast.List, ast.Tuple))
    ]
    names = [_constant(item) for items in lists for item in items.elts]
    return frozenset(name for name in names if name)


def _constant(node: ast.expr | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
