"""How live checks of queries decide."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("promql_parser")

from tests.deploy.live.prometheus import Sample
from tests.deploy.live.promql import Verdict, selectors, unfiltered, verdict_on


def judge(expr: str, known: dict[str, float]) -> Verdict:
    """With a Prometheus that answers what is `known`, and nothing to anything else."""
    return verdict_on(expr, lambda asked: [Sample({}, known[asked])] if asked in known else [], over_s=9)


def test_selectors_come_with_each_value_that_they_name() -> None:
    assert selectors('sum by (a) (rate(x_total{b=~"q|r",c!="z"}[5m])) / max_over_time(y[15m]) > 0 and absent(z)') == [
        'x_total{b=~"q|r",c!="z"}', 'x_total{b="q"}', 'x_total{b="r"}', 'x_total{c="z"}', "y", "z",
    ]  # fmt: skip
    assert selectors('rate(x_total{namespace=~".*"}[1m])') == ['x_total{namespace=~".*"}']


def test_filters_become_comparisons() -> None:
    assert unfiltered('a{b!="<"} > 1 and c == 0 or d <= bool 2') == 'a{b!="<"} > bool 1 and c == bool 0 or d <= bool 2'


def test_what_returns_a_number_is_data() -> None:
    assert judge("x", {"x": 0.5, "count(x)": 1.0}).kind == "data"
    assert judge("x", {"x": 0.0, "count(x)": 1.0}).kind == "zero"
    assert judge("x", {"x": 0.0, "count(x)": 1.0, "max_over_time((x)[9s:1s])": 2.0}).kind == "data"


@pytest.mark.parametrize("expr", ["x", "x > 1", "absent(x)"])
def test_a_selector_without_series_is_wrong_whatever_comes_back(expr: str) -> None:
    assert judge(expr, {expr: 1.0, "x > bool 1": 0.0}) == Verdict(kind="wrong", why="no series: x")


def test_a_value_that_a_label_never_has_is_wrong() -> None:
    expr = 'x{l=~"a|b"} > 1'
    known = {"count(" + selector + ")": 1.0 for selector in ('x{l=~"a|b"}', 'x{l="a"}')}
    assert judge(expr, known).why == 'no series: x{l="b"}'


def test_a_comparison_may_leave_nothing() -> None:
    assert judge("x > 1", {"count(x)": 1.0, "x > bool 1": 0.0}).kind == "zero"


def test_nothing_without_a_comparison_is_wrong() -> None:
    assert judge("x and y", {"count(x)": 1.0, "count(y)": 1.0}).kind == "wrong"
    assert judge("x and y > 1", {"count(x)": 1.0, "count(y)": 1.0}).kind == "wrong"


def test_a_ratio_of_nothing_is_zero() -> None:
    assert judge("x / y", {"x / y": math.nan, "count(x)": 1.0, "count(y)": 1.0}).kind == "zero"
