"""Turns: tenants share a group by the time that it works for them, higher classes go first; a flood delays nobody else."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvstore.pool import RequestKey
from moontide.fair_share import Share
from moontide.perf_model import StepModel, StepShape
from prefill_node.chunking import ChunkPlanner
from prefill_node.policy import Candidate
from prefill_node.prompt import Prompt
from prefill_node.turns import Turns
from tests.unit.prefill_node.session_world import MODEL, World

A, B = Share(tenant="a"), Share(tenant="b")


def make_turns() -> Turns:
    return Turns(policy="fcfs", starvation_s=1e9, quantum_s=1.0)


def candidate(turns: Turns, name: str, share: Share, *, order: int = 0) -> Candidate:
    key = RequestKey(name, 1)
    turns.enter(key, share)
    return Candidate(key=key, order=order, deadline_s=0.0, work_s=1.0, work_left_s=1.0, served_s=0.0, share=share)


def serve(turns: Turns, candidates: list[Candidate], steps: int, *, step_s: float = 0.5) -> list[str]:
    """Whose steps the next ones are."""
    served = []
    for _ in range(steps):
        first = turns.ranked(candidates, now_s=0.0)[0]
        turns.charge(first.share, step_s)
        served.append(first.share.tenant)
    return served


def test_tenants_take_turns_of_a_quantum() -> None:
    turns = make_turns()
    line = [candidate(turns, f"a{order}", A, order=order) for order in range(9)] + [candidate(turns, "b", B, order=9)]
    assert serve(turns, line, 8) == ["a", "a", "b", "b"] * 2


def test_a_tenant_that_comes_now_and_then_gets_several_turns_in_a_row() -> None:
    turns = make_turns()
    line = [candidate(turns, "a", A)]
    serve(turns, line, 200)
    line.append(candidate(turns, "b", B))
    assert "".join(serve(turns, line, 42)).startswith("b" * 40)
    assert Counter(serve(turns, line, 40)) == {"a": 20, "b": 20}, "its credit has an end"


def test_a_weight_is_a_larger_part() -> None:
    turns = make_turns()
    line = [candidate(turns, "a", Share(tenant="a", weight=3.0)), candidate(turns, "b", B)]
    assert Counter(serve(turns, line, 80)) == {"a": 60, "b": 20}


def test_a_higher_class_goes_first_whatever_it_has_used() -> None:
    turns = make_turns()
    line = [candidate(turns, "low", A), candidate(turns, "high", Share(tenant="b", priority=1))]
    assert serve(turns, line, 10) == ["b"] * 10


def test_who_waits_for_pages_keeps_its_turn_while_others_get_steps() -> None:
    turns = make_turns()
    with_pages, without = candidate(turns, "a", A), candidate(turns, "b", B)
    assert serve(turns, [with_pages], 2) == ["a", "a"]
    assert turns.ranked([with_pages, without], now_s=0.0)[0] is without
    assert serve(turns, [with_pages], 2) == ["a", "a"], "nobody else could use the steps"
    assert turns.ranked([with_pages, without], now_s=0.0)[0] is without
    turns.leave(without.key)
    assert serve(turns, [with_pages], 1) == ["a"]


def test_without_predictions_a_step_counts_by_its_tokens() -> None:
    unknown = ChunkPlanner(chunking="equal-time", chunk_tokens=64, block_tokens=16, max_step_s=0.5)
    assert unknown.charged_s(StepShape.of_chunk(64, 0)) == 2 * unknown.charged_s(StepShape.of_chunk(32, 999)) == 0.5
    unknown.set_stages([StepModel(overhead_s=0.0, token_s=1.0, pair_s=0.0)])
    assert unknown.charged_s(StepShape.of_chunk(64, 0)) == 64


TOKENS = 64
PROMPT_S = 2 * MODEL.time_s(StepShape.of_chunk(32, 0))
"""What the group works for one of these prompts."""
MOST_OPEN = 12
"""Of one tenant, at a time: further ones are turned away."""


async def ttfts(loads: dict[str, float], *, tenants: bool, num_seconds: float = 400.0) -> list[float]:
    """Times to first token of tenant b on a group of one stage, when each tenant asks for that part of its time. In virtual time."""
    world = World(num_pages=1024, policy="lars", model=MODEL, chunk_tokens=32)
    rng = random.Random(5)
    arrivals = []
    for tenant, load in loads.items():
        at_s = rng.expovariate(load / PROMPT_S)
        while at_s < num_seconds:
            arrivals.append((at_s, tenant))
            at_s += rng.expovariate(load / PROMPT_S)
    arrivals.sort(reverse=True)
    is_open: Counter[str] = Counter()
    running: dict[str, tuple[str, Prompt]] = {}
    waited: list[float] = []
    start_s = world.clock.now()
    while arrivals or running:
        if not running:
            world.clock.advance(max(0.0, arrivals[-1][0] + start_s - world.clock.now()))
        while arrivals and arrivals[-1][0] + start_s <= world.clock.now():
            at_s, tenant = arrivals.pop()
            if is_open[tenant] == MOST_OPEN:
                continue
            is_open[tenant] += 1
            name = f"{tenant}-{len(arrivals)}"
            share = Share(tenant=tenant if tenants else "")
            prompt = world.waiting(name, TOKENS, seed=len(arrivals) + 1, share=share)
            prompt.arrived_s = at_s + start_s
            world.session.take_pages(prompt, hit_blocks=0)
            world.session.compute(prompt, cursor=0)
            running[name] = tenant, prompt
        done = world.step()
        for name in done:
            tenant, prompt = running.pop(name)
            is_open[tenant] -= 1
            world.session.finish(prompt)
            if tenant == "b":
                waited.append(world.clock.now() - prompt.arrived_s)
    return waited


def p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * len(values))]


@pytest.mark.parametrize("load", [0.1, 0.3, 0.45])
async def test_a_tenant_at_ten_times_its_share_does_not_delay_another(load: float) -> None:
    fair = p99(await ttfts({"a": 0.5, "b": load}, tenants=True))
    flooded = p99(await ttfts({"a": 5.0, "b": load}, tenants=True))
    assert flooded <= 1.2 * fair


async def test_without_tenants_it_would() -> None:
    fair = p99(await ttfts({"a": 0.5, "b": 0.3}, tenants=False))
    assert p99(await ttfts({"a": 5.0, "b": 0.3}, tenants=False)) > 1.4 * fair
