"""KV events over a real Valkey: order, restarts of either side, and what a late follower sees."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
import redis

from kvstore.block import BlockHash
from kvstore.index import STREAM_KEY, KvEvent, KvEvents, KvEventWriter, Removed, Reset, Stored
from kvstore.pool import StoredRun
from moontide.config import RegistryConfig, free_port
from tests.store_processes import valkey

ROOT = BlockHash(b"R" * 32)
A, B, C = (BlockHash(letter * 32) for letter in (b"a", b"b", b"c"))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with valkey() as address:
        yield address


@pytest.fixture
def config(url: str) -> RegistryConfig:
    redis.Redis.from_url(url).flushall()
    return RegistryConfig(url=url)


@asynccontextmanager
async def writer(
    config: RegistryConfig, *, boot_id: str = "boot-1", node_id: str = "n", held: list[StoredRun] | None = None
) -> AsyncIterator[KvEventWriter]:
    made = KvEventWriter(config, node_id=node_id, boot_id=boot_id, snapshot=lambda: list(held or []))
    await made.heal()
    try:
        yield made
    finally:
        await made.close()


async def read(config: RegistryConfig, num: int) -> list[KvEvent]:
    """The first events of the stream, as a new conductor sees them."""
    reader = KvEvents(config)
    events: list[KvEvent] = []
    try:
        async with asyncio.timeout(20):
            async for event in reader.follow():
                events.append(event)
                if len(events) == num:
                    break
    finally:
        await reader.close()
    return events


async def test_a_follower_reads_from_the_start_and_then_the_tail(config: RegistryConfig) -> None:
    reader = KvEvents(config)
    follow = reader.follow()
    async with writer(config) as out, asyncio.timeout(20):
        await out.stored([StoredRun(ROOT, (A, B))])
        assert [await anext(follow), await anext(follow)] == [Reset("n"), Stored("n", ROOT, (A, B))]
        pending = asyncio.ensure_future(anext(follow))
        await out.removed([B])
        assert await pending == Removed("n", (B,))
    await reader.close()


async def test_a_new_boot_clears_the_node_and_late_words_of_the_old_one_are_left_out(config: RegistryConfig) -> None:
    async with writer(config) as old, writer(config, node_id="other") as other:
        await old.stored([StoredRun(ROOT, (A,))])
        async with writer(config, boot_id="boot-2") as new:
            await old.stored([StoredRun(A, (B,))])
            await new.stored([StoredRun(ROOT, (C,))])
            await other.stored([StoredRun(ROOT, (A,))])
    assert await read(config, 6) == [
        Reset("n"),
        Reset("other"),
        Stored("n", ROOT, (A,)),
        Reset("n"),
        Stored("n", ROOT, (C,)),
        Stored("other", ROOT, (A,)),
    ]


async def test_a_boot_whose_reset_was_trimmed_still_resets(config: RegistryConfig) -> None:
    async with writer(config) as old:
        await old.stored([StoredRun(ROOT, (A,))])
    async with writer(config, boot_id="boot-2") as new:
        await new.stored([StoredRun(ROOT, (B,))])
    client = redis.Redis.from_url(config.url)
    entries = client.xrange(STREAM_KEY)
    client.xdel(STREAM_KEY, entries[2][0])
    assert await read(config, 4) == [Reset("n"), Stored("n", ROOT, (A,)), Reset("n"), Stored("n", ROOT, (B,))]


async def test_an_unreadable_entry_is_left_out(config: RegistryConfig) -> None:
    async with writer(config) as out:
        redis.Redis.from_url(config.url).xadd(
            STREAM_KEY, {"t": "stored", "n": "n", "b": "boot-1", "p": ROOT, "h": "short"}
        )
        await out.stored([StoredRun(ROOT, (A,))])
    assert await read(config, 2) == [Reset("n"), Stored("n", ROOT, (A,))]


async def test_valkey_that_lost_its_data_is_told_everything_again() -> None:
    port = free_port()
    config = RegistryConfig(url=f"redis://127.0.0.1:{port}/0")
    held = [StoredRun(ROOT, (A, B)), StoredRun(A, (C,))]
    made = KvEventWriter(config, node_id="n", boot_id="boot-1", snapshot=lambda: held)
    await made.stored([StoredRun(ROOT, (A,))])
    assert not made.in_sync
    await made.heal()
    assert not made.in_sync, "nothing listens yet"
    with valkey(port=port):
        await made.heal()
        assert made.in_sync
    await made.stored([StoredRun(A, (B,))])
    assert not made.in_sync
    with valkey(port=port):
        await made.heal()
        assert await read(config, 3) == [Reset("n"), Stored("n", ROOT, (A, B)), Stored("n", A, (C,))]
        redis.Redis.from_url(config.url).flushall()
        await made.heal()
        assert await read(config, 3) == [Reset("n"), Stored("n", ROOT, (A, B)), Stored("n", A, (C,))]
    await made.close()


async def test_a_follower_survives_a_valkey_restart() -> None:
    port = free_port()
    config = RegistryConfig(url=f"redis://127.0.0.1:{port}/0")
    reader = KvEvents(config)
    follow = reader.follow()
    async with asyncio.timeout(30):
        with valkey(port=port):
            async with writer(config):
                assert await anext(follow) == Reset("n")
                pending = asyncio.ensure_future(anext(follow))
        with valkey(port=port):
            async with writer(config, boot_id="boot-2"):
                assert await pending == Reset("n")
    await reader.close()


async def test_a_follower_ends_when_it_is_cancelled(config: RegistryConfig) -> None:
    async def follow() -> None:
        reader = KvEvents(config)
        try:
            async for _ in reader.follow():
                pass
        finally:
            await reader.close()

    tasks = [asyncio.create_task(follow()) for _ in range(20)]
    async with writer(config) as out:
        for number, task in enumerate(tasks):
            await out.stored([StoredRun(ROOT, (A,))])
            await asyncio.sleep(0.0003 * number)
            task.cancel()
        _, pending = await asyncio.wait(tasks, timeout=10)
    assert not pending
