from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from front import until
from prometheus_client import CollectorRegistry

from conductor.metrics import ConductorMetrics
from conductor.prefix_index import IndexFollower, PrefixIndex
from kvstore.block import BlockHash
from kvstore.index import KvEvent, Removed, Reset, Stored

ROOT, A, B, C = (BlockHash(bytes([i]) * 32) for i in range(4))


def index_of(*events: KvEvent) -> PrefixIndex:
    index = PrefixIndex()
    for event in events:
        index.apply(event)
    return index


def test_hit_is_the_longest_run_from_the_start() -> None:
    index = index_of(Stored("x", ROOT, (A, B)), Stored("y", ROOT, (A, B, C)), Stored("z", B, (C,)))
    assert index.hit_blocks([A, B, C]) == {"x": 2, "y": 3}
    assert index.hit_blocks([C]) == {"y": 1, "z": 1}
    assert index.hit_blocks([]) == {}
    assert index.num_blocks == 6


def test_removed_and_reset() -> None:
    index = index_of(Stored("x", ROOT, (A, B, C)), Removed("x", (B,)), Removed("x", (B,)), Removed("new", (A,)))
    assert index.hit_blocks([A, B, C]) == {"x": 1}
    index.apply(Reset("x"))
    assert index.hit_blocks([A, B, C]) == {}
    index.apply(Stored("x", ROOT, (A,)))
    assert index.hit_blocks([A, B, C]) == {"x": 1}
    assert index.num_blocks == 1


class ScriptedSource:
    def __init__(self) -> None:
        self.closed = False

    async def follow(self) -> AsyncIterator[KvEvent]:
        yield Stored("x", ROOT, (A, B))
        await asyncio.Event().wait()

    async def close(self) -> None:
        self.closed = True


async def test_follower_applies_the_stream_and_counts_blocks() -> None:
    registry, index, source = CollectorRegistry(), PrefixIndex(), ScriptedSource()
    follower = IndexFollower(index, source, ConductorMetrics(registry))
    follower.start()
    await until(lambda: index.num_blocks == 2)
    assert registry.get_sample_value("conductor_indexed_blocks") == 2
    await follower.close()
    assert source.closed
