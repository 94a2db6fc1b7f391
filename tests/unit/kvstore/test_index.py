"""KvEventWriter without a Valkey: nobody who seals or evicts waits for one that is away."""

from __future__ import annotations

import asyncio
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError

from kvstore.block import BlockHash
from kvstore.index import KvEventWriter
from kvstore.pool import StoredRun
from moontide.config import RegistryConfig

RUN = StoredRun(BlockHash(b"r" * 32), (BlockHash(b"a" * 32),))


class SilentRedis:
    """Takes a command and answers nothing until it is told to break."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.breaks = asyncio.Event()

    async def get(self, _name: str) -> bytes:
        self.asked.set()
        await self.breaks.wait()
        raise RedisConnectionError("gone")

    async def aclose(self) -> None:
        pass


async def test_events_do_not_wait_behind_a_heal_that_gets_no_answer() -> None:
    writer = KvEventWriter(RegistryConfig(url="redis://127.0.0.1:1/0"), node_id="n", boot_id="b")
    await writer.close()
    silent: Any = SilentRedis()
    writer._redis = silent
    healing = asyncio.create_task(writer.heal())
    await silent.asked.wait()
    async with asyncio.timeout(10):
        await writer.stored([RUN])
        await writer.removed(RUN.hashes)
    assert not healing.done()
    silent.breaks.set()
    await healing
    assert not writer.in_sync
    assert writer.number == 2, "what could not be written counts too, so that followers see a gap"
