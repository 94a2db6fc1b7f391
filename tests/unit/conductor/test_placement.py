from __future__ import annotations

import dataclasses
from math import inf
from typing import Any

import pytest
from front import Front

from conductor.cost import Corrections
from conductor.tenants import Tenant


async def test_groups_that_are_away_take_nothing_and_those_without_times_all(front: Front) -> None:
    registry, placement = front.cluster.registry, front.conductor._placement
    record = registry.records["prefill-0"]
    assert placement.room_s() == inf
    await registry.remove("prefill-0")
    assert placement.room_s() == 0
    await registry.set(dataclasses.replace(record, load={"step_token_s": 0.001}))
    assert placement.room_s() == front.conductor._settings.release_queue_s


async def test_work_in_the_queue_counts_without_what_was_learned_of_others_work(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prompt beside short ones makes them take several times as long; theirs is no more work for that."""
    registry, placement = front.cluster.registry, front.conductor._placement
    timed = dataclasses.replace(
        registry.records["prefill-0"], load={"step_token_s": 0.001, "num_stages": 1.0, "chunk_tokens": 512.0}
    )
    counted: list[float] = []
    turn = front.conductor._turns.turn

    def counting(tenant: Tenant, *, work_s: float, **given: Any) -> Any:
        counted.append(work_s)
        return turn(tenant, work_s=work_s, **given)

    monkeypatch.setattr(front.conductor._turns, "turn", counting)
    for factor in (1.0, 4.0):
        monkeypatch.setattr(placement.cost, "corrections", lambda _, prefill=factor: Corrections(prefill=prefill))
        await registry.set(timed)
        await front.generate(request_id=f"r{factor}")
    assert counted[0] > 0
    assert counted[1] == pytest.approx(counted[0])
