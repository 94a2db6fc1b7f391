"""What a put call costs, and which steps are put layer group by layer group."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from prefill_node.push_plan import PutCost, PutSample, fit_put_cost, pushes_layer_wise

MIB = 1 << 20
GROUPS = 15


def samples(cost: PutCost, sizes: Sequence[int], *, slow_every: int = 0) -> list[PutSample]:
    """Calls of these sizes with 5 % noise; every so often one is ten times as slow."""
    rng = random.Random(1)
    return [
        PutSample(
            size, cost.time_s(size) * rng.uniform(0.95, 1.05) * (10 if slow_every and idx % slow_every == 0 else 1)
        )
        for idx, size in enumerate(sizes)
    ]


def decide(cost: PutCost, *, step_s: float, group_bytes: float, groups: int = GROUPS, bound: int = 1 << 30) -> bool:
    return pushes_layer_wise(cost, num_groups=groups, group_bytes=group_bytes, step_s=step_s, max_call_bytes=bound)


@pytest.mark.parametrize("slow_every", [0, 7])
def test_fit_finds_both_parts_of_a_call_and_slow_moments_hardly_move_it(slow_every: int) -> None:
    cost = PutCost(call_s=2e-3, byte_s=1e-9)
    found = fit_put_cost(samples(cost, [MIB, 2 * MIB, 4 * MIB, 8 * MIB] * 16, slow_every=slow_every))
    assert found is not None
    assert found.call_s == pytest.approx(cost.call_s, rel=0.3)
    assert found.byte_s == pytest.approx(cost.byte_s, rel=0.2)


def test_calls_of_one_size_and_few_calls_say_nothing() -> None:
    cost = PutCost(call_s=2e-3, byte_s=1e-9)
    assert fit_put_cost(samples(cost, [MIB] * 64)) is None
    assert fit_put_cost(samples(cost, [MIB, 8 * MIB] * 4)) is None


def test_no_part_is_negative() -> None:
    larger_is_faster = [PutSample(MIB, 2.0), PutSample(8 * MIB, 1.0)] * 16
    found = fit_put_cost(larger_is_faster)
    assert found is not None
    assert found.byte_s == 0
    free_calls = fit_put_cost([PutSample(size, size * 1e-9 - 1e-4) for size in (MIB, 8 * MIB)] * 16)
    assert free_calls is not None
    assert free_calls.call_s == 0


def test_slow_bytes_are_hidden_behind_compute() -> None:
    assert decide(PutCost(call_s=1e-3, byte_s=0.6 / (GROUPS * MIB)), step_s=1.0, group_bytes=MIB)


def test_step_that_is_shorter_than_a_call_is_put_at_its_end() -> None:
    assert not decide(PutCost(call_s=25e-3, byte_s=1e-9), step_s=10e-3, group_bytes=MIB)


def test_calls_that_take_longer_than_the_bytes_they_hide_are_not_worth_it() -> None:
    assert not decide(PutCost(call_s=1e-3, byte_s=0.5e-3 / MIB), step_s=1.0, group_bytes=MIB)
    assert decide(PutCost(call_s=1e-3, byte_s=2e-3 / MIB), step_s=1.0, group_bytes=MIB)


def test_one_layer_group_and_calls_that_cost_nothing_are_always_put_at_once() -> None:
    assert decide(PutCost(call_s=1.0, byte_s=1e-9), step_s=1e-3, group_bytes=MIB, groups=1)
    assert decide(PutCost(call_s=0.0, byte_s=1e-9), step_s=1e-3, group_bytes=MIB)


def test_short_steps_are_put_at_their_end_and_long_ones_layer_wise() -> None:
    """Bytes and compute grow with the tokens; the cost of a call does not."""
    cost = PutCost(call_s=2e-3, byte_s=1e-9)
    decisions = [
        decide(cost, step_s=tokens * 100e-6, group_bytes=tokens * 16_384)
        for tokens in (16, 32, 64, 128, 256, 512, 4096)
    ]
    assert decisions == sorted(decisions)
    assert decisions[0] is False
    assert decisions[-1] is True


def test_groups_that_are_ready_together_share_a_call() -> None:
    """Were every group a call of its own, puts would end 15 * 45 - 467 = 208 ms after compute, not within 100."""
    slow_link = PutCost(call_s=25e-3, byte_s=20e-3 / MIB)
    assert decide(slow_link, step_s=0.5, group_bytes=MIB)


def test_end_of_step_that_takes_many_calls_anyway_loses_its_advantage() -> None:
    cost = PutCost(call_s=1e-3, byte_s=0.5e-3 / MIB)
    assert not decide(cost, step_s=1.0, group_bytes=MIB)
    assert decide(cost, step_s=1.0, group_bytes=MIB, bound=MIB)
