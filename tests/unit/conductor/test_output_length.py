from __future__ import annotations

import random

import pytest

from conductor.output_length import ENOUGH, PRIOR_TOKENS, WINDOW, OutputLengths


def learned(*lengths: int, tenant: str = "a", is_cut: bool = False) -> OutputLengths:
    known = OutputLengths()
    for length in lengths:
        known.observe(tenant, length, is_cut=is_cut)
    return known


def test_before_anything_is_known_a_prior_counts_and_never_more_than_the_limit() -> None:
    assert OutputLengths().expected("a", 1_000_000).mean == PRIOR_TOKENS
    assert OutputLengths().expected("a", 7).mean == 7
    assert learned(*[5] * (ENOUGH - 1)).expected("a", 1000).mean == PRIOR_TOKENS


def test_expected_is_the_mean_of_the_answers_up_to_the_limit() -> None:
    known = learned(*[10, 30] * ENOUGH)
    assert known.expected("a", 1000).mean == pytest.approx(20)
    assert known.expected("a", 20).mean == pytest.approx(15)
    assert known.expected("a", 5).mean == pytest.approx(5)


def test_tenants_are_told_apart_once_enough_of_their_answers_are_seen() -> None:
    known = learned(*[10] * ENOUGH, tenant="short")
    for _ in range(ENOUGH):
        known.observe("long", 200, is_cut=False)
    assert known.expected("short", 1000).mean == pytest.approx(10)
    assert known.expected("long", 1000).mean == pytest.approx(200)
    assert known.expected("new", 1000).mean == pytest.approx(105)


def test_only_the_last_answers_count() -> None:
    known = learned(*[1000] * WINDOW, *[10] * WINDOW)
    assert known.expected("a", 5000).mean == pytest.approx(10)


def test_an_answer_that_its_limit_cut_does_not_count_as_a_short_one() -> None:
    """Exponential lengths of mean 100, half of them cut at 16 tokens: the plain mean would say about 57."""
    draw, known = random.Random(1), OutputLengths()
    for idx in range(WINDOW):
        length, limit = max(1, round(draw.expovariate(1 / 100))), 16 if idx % 2 else 10_000
        known.observe("a", min(length, limit), is_cut=length > limit)
    assert known.expected("a", 10_000).mean == pytest.approx(100, rel=0.25)
    assert known.expected("a", 16).mean == pytest.approx(14.8, rel=0.1)


def test_answers_that_were_all_cut_are_expected_to_be_as_long_as_the_longest() -> None:
    assert learned(*[16] * ENOUGH, is_cut=True).expected("a", 1000).mean == pytest.approx(16)


def test_an_answer_has_a_token_at_least() -> None:
    assert learned(*[0] * ENOUGH).expected("a", 10).mean == 1


def test_an_answer_longer_than_expected_goes_on_as_those_before_it_did() -> None:
    assert learned(*[10, 30] * ENOUGH).expected("a", 1000).overrun == pytest.approx(10), (
        "of those beyond 20 tokens all have 30"
    )
    assert learned(*[10, 30] * ENOUGH).expected("a", 25).overrun == pytest.approx(25 - 17.5)
    draw, known = random.Random(2), OutputLengths()
    for _ in range(WINDOW):
        known.observe("a", round(draw.expovariate(1 / 100)), is_cut=False)
    assert known.expected("a", 10_000).overrun == pytest.approx(100, rel=0.25), "exponential lengths have no memory"
    assert OutputLengths().expected("a", 10).overrun == 0
