"""Which store node holds which blocks, from the stream of KV events. May lag behind the truth: what a reservation says counts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from conductor.metrics import ConductorMetrics
from kvstore.block import BlockHash
from kvstore.index import KvEvent, Removed, Reset, Stored


class EventSource(Protocol):
    """Where events come from; kvstore.index.KvEvents in production."""

    def follow(self) -> AsyncIterator[KvEvent]: ...

    async def close(self) -> None: ...


class PrefixIndex:
    def __init__(self) -> None:
        self._blocks: dict[str, set[BlockHash]] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks over all nodes; one that two nodes hold counts twice."""
        return sum(len(blocks) for blocks in self._blocks.values())

    def apply(self, event: KvEvent) -> None:
        match event:
            case Stored():
                self._blocks.setdefault(event.node_id, set()).update(event.hashes)
            case Removed():
                self._blocks.get(event.node_id, set()).difference_update(event.hashes)
            case Reset():
                self._blocks.pop(event.node_id, None)

    def hit_blocks(self, hashes: Sequence[BlockHash]) -> dict[str, int]:
        """Per store node, how many leading blocks of the chain it holds; nodes that hold none are left out."""
        hits = {}
        for node_id, blocks in self._blocks.items():
            num = next((i for i, block in enumerate(hashes) if block not in blocks), len(hashes))
            if num:
                hits[node_id] = num
        return hits


class IndexFollower:
    """Applies the stream to an index in the background."""

    def __init__(self, index: PrefixIndex, source: EventSource, metrics: ConductorMetrics) -> None:
        self._index = index
        self._source = source
        self._task: asyncio.Task[None] | None = None
        metrics.indexed_blocks.set_function(lambda: float(index.num_blocks))

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="kv events")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._source.close()

    async def _run(self) -> None:
        async for event in self._source.follow():
            self._index.apply(event)
