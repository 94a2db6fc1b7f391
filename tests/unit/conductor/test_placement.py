from __future__ import annotations

import dataclasses
from math import inf

from front import Front


async def test_groups_that_are_away_take_nothing_and_those_without_times_all(front: Front) -> None:
    registry, placement = front.cluster.registry, front.conductor._placement
    record = registry.records["prefill-0"]
    assert placement.room_s() == inf
    await registry.remove("prefill-0")
    assert placement.room_s() == 0
    await registry.set(dataclasses.replace(record, load={"step_token_s": 0.001}))
    assert placement.room_s() == front.conductor._settings.release_queue_s
