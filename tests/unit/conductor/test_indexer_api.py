from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgpack
import numpy as np
import pytest
import zmq
import zmq.asyncio
from front import until

from conductor.indexer_api import IndexerApi
from conductor.kv_event_formats import parse_batch, standard_hashes
from conductor.kv_event_sockets import EventEndpoint, EventPublisher, ForeignEvents, KnownTokens
from conductor.prefix_index import PrefixIndex
from kvstore.block import hash_blocks, root_hash
from kvstore.index import KvEntry, Stored
from moontide.errors import ConfigError
from tests.fakes.layouts import TINY_LAYOUT as LAYOUT

PROMPT = list(range(1, 11))
IDS = np.array(PROMPT, np.uint32)


@dataclass
class Indexer:
    index: PrefixIndex
    foreign: PrefixIndex
    http: aiohttp.ClientSession

    async def ask(self, path: str, status: int = 200, **body: Any) -> Any:
        async with self.http.post(path, json={"model": "m"} | body) as reply:
            assert reply.status == status, await reply.text()
            return await reply.json()


@pytest.fixture
async def indexer() -> AsyncIterator[Indexer]:
    index, foreign = PrefixIndex(), PrefixIndex()
    api = IndexerApi(index, foreign, model_name="m", layout=lambda: LAYOUT, max_body_bytes=1 << 20)
    port = await api.start("127.0.0.1", 0)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
        yield Indexer(index, foreign, http)
    await api.close()


def hashes(salt: str = "") -> list[Any]:
    return hash_blocks(IDS, block_tokens=4, root=root_hash(LAYOUT.digest(), salt))


async def test_query_tells_what_our_stores_and_other_engines_hold(indexer: Indexer) -> None:
    indexer.index.apply("store-0", Stored(hashes()[0], hashes()[0]))
    indexer.index.apply("store-1", Stored(hashes("t")[0], b"".join(hashes("t"))))
    indexer.foreign.apply("vllm-0", Stored(hashes()[0], b"".join(standard_hashes(IDS, block_tokens=4))))
    own = {"longest_matched": 4, "GPU": 0, "CPU": 4, "DISK": 0, "DP": {}}
    other = {"longest_matched": 8, "GPU": 8, "CPU": 0, "DISK": 0, "DP": {"0": 8}}
    asked = {"token_ids": PROMPT, "block_size": 4}
    assert await indexer.ask("/query", **asked) == {"default": {"store-0": own, "vllm-0": other}}
    assert await indexer.ask("/query", token_ids=PROMPT) == {"default": {"store-0": own, "vllm-0": other}}
    assert await indexer.ask("/query", **asked, tenant_id="a", instance_id="vllm-0") == {"a": {"vllm-0": other}}
    salted = await indexer.ask("/query", **asked, cache_salt="t", instance_id="store-1")
    assert salted["default"]["store-1"]["longest_matched"] == 8
    assert await indexer.ask("/query", token_ids=PROMPT, block_size=2) == {"default": {}}
    by_hash = [int.from_bytes(hashes()[0][:8], "little")]
    assert await indexer.ask("/query_by_hash", seq_hashes=by_hash, block_size=4) == {"default": {"store-0": own}}


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ({"token_ids": [1], "model": "other"}, 404, "'other' is not served"),
        ({"token_ids": [-1]}, 400, "outside of uint32"),
        ({"token_ids": [2**32]}, 400, "outside of uint32"),
        ({"token_ids": "text"}, 400, "token_ids is missing or no list"),
        ({"token_ids": [True]}, 400, "token_ids is missing or no list"),
        ({}, 400, "token_ids is missing or no list"),
        ({"token_ids": [1], "block_size": 0}, 400, "block_size=0"),
    ],
)
async def test_a_wrong_query_is_refused_by_name(
    indexer: Indexer, body: dict[str, Any], status: int, reason: str
) -> None:
    assert reason in (await indexer.ask("/query", status, **body))["error"]


@pytest.mark.parametrize(
    "impossible",
    [
        ["BlockStored", [3], 1, [-1] * 4, 4, None],
        ["BlockStored", [3], [], PROMPT[:4], 4, None],
        ["BlockStored", ["three"], 1, [], 4, None],
        ["BlockRemoved", [[3]]],
    ],
)
async def test_events_of_another_engine_are_followed_and_a_gap_clears_them(impossible: list[Any]) -> None:
    index = PrefixIndex()
    with zmq.asyncio.Context() as context, context.socket(zmq.XPUB) as engine:
        engine.bind("tcp://127.0.0.1:*")
        address = engine.getsockopt_string(zmq.LAST_ENDPOINT)
        foreign = ForeignEvents(index, [EventEndpoint.parse(f"vllm-0={address}")])
        foreign.start()
        await asyncio.wait_for(engine.recv(), 10)

        async def tell(number: int, *events: Any) -> None:
            await engine.send_multipart([b"kv", number.to_bytes(8, "big"), msgpack.packb([1.0, events, 0])])

        def hit() -> int:
            return index.hit_blocks(standard_hashes(IDS, block_tokens=4)).get("vllm-0", 0)

        await tell(7, ["BlockStored", [1], None, PROMPT[:4], 4, None])
        await engine.send_multipart([b"kv", b"no batch"])
        await tell(8, ["BlockStored", [2], 1, PROMPT[4:8], 4, None])
        await until(lambda: hit() == 2)
        await tell(10, ["BlockStored", [2], 1, PROMPT[4:8], 4, None])
        await until(lambda: hit() == 0)
        await tell(11, ["BlockStored", [1], None, PROMPT[:4], 4, None])
        await until(lambda: hit() == 1)
        await tell(12, impossible)
        await tell(13, ["BlockStored", [2], 1, PROMPT[4:8], 4, None])
        await until(lambda: hit() == 0)
        await tell(14, ["BlockStored", [1], None, PROMPT[:4], 4, None])
        await until(lambda: hit() == 1)
        await foreign.close()


async def test_our_events_are_told_with_token_ids_only_where_that_is_on() -> None:
    tokens = KnownTokens(max_blocks=2)
    tokens.note(hashes(), IDS, block_tokens=4)
    told = []
    with zmq.asyncio.Context() as context:
        for known in (None, tokens):
            publisher = EventPublisher("tcp://127.0.0.1:*", model_name="m", layout=lambda: LAYOUT, tokens=known)
            with context.socket(zmq.SUB) as reader:
                reader.setsockopt(zmq.SUBSCRIBE, b"")
                reader.connect(publisher.address)
                entry = KvEntry("store-0", "b", 1, Stored(root_hash(LAYOUT.digest(), ""), b"".join(hashes())))
                async with asyncio.timeout(10):
                    while not await reader.poll(20):
                        await publisher.tell(entry)
                    _, number, payload = await reader.recv_multipart()
                told.append(msgpack.unpackb(payload)[1][0]["token_ids"])
                assert parse_batch(payload)
                assert len(number) == 8
            publisher.close()
    assert told == [None, PROMPT[:8]]
    tokens.note([hashes("other")[0]], IDS, block_tokens=4)
    assert tokens.of(hashes()) is None, "the oldest block is forgotten"
    assert tokens.of(hashes()[1:]) == PROMPT[4:8]


def test_wrong_endpoints_are_named() -> None:
    with pytest.raises(ConfigError, match="'vllm-0' names no publisher"):
        EventEndpoint.parse("vllm-0")
    with pytest.raises(ConfigError, match="cannot be bound"):
        EventPublisher("tcp://192.0.2.1:5557", model_name="m", layout=lambda: LAYOUT, tokens=None)
