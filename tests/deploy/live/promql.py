"""What an expression of PromQL looks at, and whether it is empty because of a comparison alone.

A query that returns nothing is fine when nothing is wrong in the cluster, and useless when it looks at series that nobody has. `verdict_on`
tells them apart: it asks a Prometheus for every selector of the expression, for each value that a matcher names, and for the expression
with its filters turned into comparisons that return 0 or 1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import promql_parser

from tests.deploy.live.prometheus import Sample

Ask = Callable[[str], Sequence[Sample]]
"""Instant query at one moment, the same for all."""

_BRACES = re.compile(r"(\{[^}]*\})")
_FILTER = re.compile(r"(==|!=|>=|<=|>(?!=)|<(?!=))(?!\s*bool\b)")
_VALUES = re.compile(r"[\w.\- |]+")
"""Of a matcher: one value, or several with | between them. Anything else is a pattern."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    kind: Literal["data", "zero", "wrong"]
    why: str = ""


def verdict_on(expr: str, ask: Ask, *, over_s: int) -> Verdict:
    """data: it returns more than 0, or did within the last `over_s` | zero: everything that it looks at is there, and nothing happened
    that it shows | wrong: see `why`.
    """
    try:
        found = ask(expr)
    except AssertionError as error:
        return Verdict(kind="wrong", why=str(error))
    missing = [selector for selector in selectors(expr) if not ask(f"count({selector})")]
    if missing:
        return Verdict(kind="wrong", why=f"no series: {', '.join(missing)}")
    finite = [sample.value for sample in found if math.isfinite(sample.value)]
    if any(finite) or any(sample.value > 0 for sample in ask(at_times(expr, over_s))):
        return Verdict(kind="data")
    if finite:
        return Verdict(kind="zero", why="it is 0")
    if found:
        return Verdict(kind="zero", why="a ratio or quantile of nothing")
    if expr.startswith("absent("):
        return Verdict(kind="zero", why="it is there")
    if unfiltered(expr) != expr and ask(unfiltered(expr)):
        return Verdict(kind="zero", why="its comparisons leave nothing")
    return Verdict(kind="wrong", why="empty, though every selector has series and without any comparison")


def at_times(expr: str, over_s: int) -> str:
    """The most that `expr` was within the last `over_s`."""
    return f"max_over_time(({expr})[{over_s}s:1s])"


def unfiltered(expr: str) -> str:
    """`expr` with comparisons that return 0 or 1 instead of leaving series out."""
    parts = _BRACES.split(expr)
    return "".join(part if part.startswith("{") else _FILTER.sub(r"\1 bool", part) for part in parts)


def selectors(expr: str) -> list[str]:
    """Every selector, without its range; where a matcher names values, one selector for each of them."""
    found = (one for selector in _selectors(promql_parser.parse(expr)) for one in _for_each_value(selector))
    return list(dict.fromkeys(found))


def _selectors(node: Any) -> Iterator[Any]:
    if isinstance(node, promql_parser.VectorSelector):
        yield node
        return
    for name in ("lhs", "rhs", "expr", "args", "vector_selector"):
        below = getattr(node, name, None)
        for child in below if isinstance(below, list) else [below] if below is not None else []:
            yield from _selectors(child)


def _for_each_value(selector: Any) -> Iterator[str]:
    """With all matchers, and then with each value that one of them names alone: `reason!~"a|b"` is about a and b too."""
    matchers = [
        (matcher.name, str(matcher).removeprefix(matcher.name), matcher.value) for matcher in selector.matchers.matchers
    ]
    yield _written(selector.name, [f"{name}{rest}" for name, rest, _ in matchers])
    for name, _, value in matchers:
        if _VALUES.fullmatch(value):
            for one in value.split("|"):
                yield _written(selector.name, [f'{name}="{one}"'])


def _written(metric: str, matchers: Sequence[str]) -> str:
    return f"{metric}{{{','.join(matchers)}}}" if matchers else metric
