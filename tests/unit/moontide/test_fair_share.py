from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moontide.fair_share import DeficitRoundRobin, Share

A, B = Share(tenant="a"), Share(tenant="b")


def serve(turns: DeficitRoundRobin, waiting: list[Share], work_s: float) -> str:
    first = turns.ranked(waiting)[0]
    turns.charge(first, work_s)
    return first.tenant


def test_tenants_with_equal_work_take_turns() -> None:
    turns = DeficitRoundRobin(1.0)
    assert "".join(serve(turns, [A, B], 1.0) for _ in range(6)) == "ababab"


def test_a_turn_lasts_as_long_as_its_quantum() -> None:
    turns = DeficitRoundRobin(1.0)
    assert "".join(serve(turns, [A, B], 0.5) for _ in range(8)) == "aabbaabb"


def test_asking_twice_changes_nothing() -> None:
    turns = DeficitRoundRobin(1.0)
    turns.charge(A, 0.3)
    assert turns.ranked([A, B]) == turns.ranked([A, B]) == [B, A]


def test_several_pieces_of_one_tenant_are_one_claim() -> None:
    assert DeficitRoundRobin(1.0).ranked([A, A, B, A]) == [A, B]


def test_a_higher_class_goes_first_however_much_it_used() -> None:
    turns = DeficitRoundRobin(1.0)
    urgent = Share(tenant="z", priority=1)
    turns.charge(urgent, 1000.0)
    assert turns.ranked([A, urgent, B]) == [urgent, A, B]


def test_use_in_one_class_costs_nothing_in_another() -> None:
    turns = DeficitRoundRobin(1.0)
    turns.charge(Share(tenant="a", priority=1), 1000.0)
    assert turns.ranked([A, B]) == [A, B]


def test_a_tenant_that_was_away_gets_no_credit_for_it() -> None:
    turns = DeficitRoundRobin(1.0)
    for _ in range(100):
        serve(turns, [A], 1.0)
    assert "".join(serve(turns, [A, B], 1.0) for _ in range(6)).count("b") == 3


def test_a_tenant_that_was_away_makes_up_for_its_credit_and_no_more() -> None:
    turns = DeficitRoundRobin(1.0, credit_s=3.0)
    for _ in range(100):
        serve(turns, [A], 1.0)
    assert "".join(serve(turns, [A, B], 1.0) for _ in range(9))[:3] == "bbb"
    assert "".join(serve(turns, [A, B], 1.0) for _ in range(10)).count("b") == 5


def test_who_has_credit_goes_first_even_within_the_turn_of_another() -> None:
    turns = DeficitRoundRobin(1.0, credit_s=3.0)
    for _ in range(11):
        serve(turns, [A], 0.3)
    assert turns.ranked([A])[0] == A
    assert [serve(turns, [A, B], 0.3) for _ in range(3)] == ["b"] * 3


def test_nobody_gets_credit_for_what_another_used_of_idle_time() -> None:
    turns = DeficitRoundRobin(1.0, credit_s=3.0)
    for _ in range(100):
        serve(turns, [A], 1.0)
        turns.ranked([])
    assert "".join(serve(turns, [A, B], 1.0) for _ in range(6)).count("b") == 3


def test_a_tenant_that_comes_waits_for_one_turn_at_most() -> None:
    turns = DeficitRoundRobin(1.0)
    for _ in range(100):
        serve(turns, [A], 0.4)
    served = [serve(turns, [A, B], 0.4) for _ in range(4)]
    assert "b" in served[:3]


def test_an_overrun_is_owed_even_while_nothing_waits() -> None:
    turns = DeficitRoundRobin(1.0)
    assert serve(turns, [A, B], 10.0) == "a"
    for _ in range(5):
        assert serve(turns, [B], 1.0) == "b"
    assert [serve(turns, [A, B], 1.0) for _ in range(4)] == ["b"] * 4


def test_work_beside_another_turn_is_charged_and_leaves_the_turn() -> None:
    turns = DeficitRoundRobin(1.0)
    assert turns.ranked([A, B])[0] == A
    turns.charge(A, 0.5)
    turns.charge(B, 3.0)
    assert [serve(turns, [A, B], 0.5) for _ in range(5)] == ["a"] * 5


def test_ahead_is_what_a_claim_got_beyond_the_last_turn_of_its_class() -> None:
    turns = DeficitRoundRobin(0.1)
    heavy = Share(tenant="h", weight=4.0)
    assert turns.ahead_s(heavy) == 0
    turns.charge(heavy, 2.0)
    assert turns.ahead_s(heavy) == pytest.approx(2.0)
    for _ in range(3):
        serve(turns, [A], 0.2)
    assert turns.ahead_s(heavy) == pytest.approx(2.0 - 4 * 0.4), (
        "the last turn of the other began after two of its pieces"
    )
    for _ in range(3):
        serve(turns, [A], 0.2)
    assert turns.ahead_s(heavy) == 0


@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 5.0]), min_size=2, max_size=5),
    largest_s=st.sampled_from([0.1, 1.0, 20.0]),
    seed=st.integers(0, 2**32),
)
def test_backlogged_tenants_get_work_by_weight(weights: list[float], largest_s: float, seed: int) -> None:
    """Between any two moments the shares differ by no more than a turn and the last piece of work on either side."""
    turns, draw = DeficitRoundRobin(1.0), random.Random(seed)
    shares = [Share(tenant=str(idx), weight=weight) for idx, weight in enumerate(weights)]
    done = dict.fromkeys((share.tenant for share in shares), 0.0)
    for _ in range(400):
        first = turns.ranked(shares)[0]
        work_s = draw.uniform(0.01, largest_s)
        turns.charge(first, work_s)
        done[first.tenant] += work_s
        rounds = [done[share.tenant] / share.weight for share in shares]
        assert max(rounds) - min(rounds) <= 1.0 + largest_s / min(weights) + 1e-9


def test_a_new_tenant_is_served_before_one_that_floods() -> None:
    turns = DeficitRoundRobin(0.1)
    waits = []
    for round_idx in range(50):
        for _ in range(10 + round_idx % 7):
            serve(turns, [A], 0.3)
        waits.append(next(n for n in range(100) if serve(turns, [A, B], 0.3) == "b"))
    assert max(waits) <= 1


def test_a_quantum_of_nothing_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        DeficitRoundRobin(0.0)
