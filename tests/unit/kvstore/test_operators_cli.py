from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvstore import cli
from kvstore.block import BlockHash, root_hash
from kvstore.client import BlockRef, StoreClient
from kvstore.keys import parse_key
from kvstore.layout import KVLayout
from kvstore.node import LocalStoreNode
from kvstore.pool import PoolState, StoredRun
from kvstore.service import KvStoreService
from kvstore.transfer.base import GetStatus
from kvstore.transfer.memory import MemoryStore, MemoryTransfer
from moontide.config import free_port
from moontide.errors import BadRequest, DeadlineExceeded, MoontideError, NodeLost
from moontide.rpc import Server
from moontide_proto.v1 import kvstore_pb2_grpc
from tests.fakes.clock import FakeClock

LAYOUT = KVLayout(
    model_fingerprint="f",
    num_layers=3,
    num_planes=2,
    num_kv_heads=1,
    head_dim=4,
    dtype="float32",
    block_tokens=4,
    layer_group=2,
)
ROOT = root_hash(LAYOUT.digest(), "")


class Events:
    """Notes what was published as removed, and how many objects the store had then."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.removals: list[tuple[set[BlockHash], int]] = []

    async def stored(self, runs: list[StoredRun]) -> None: ...

    async def removed(self, hashes: list[BlockHash]) -> None:
        self.removals.append((set(hashes), len(self._store.objects)))

    async def heal(self) -> None: ...


class World:
    """A store process behind gRPC, with memory for Mooncake."""

    def __init__(self, *, layout: KVLayout = LAYOUT) -> None:
        self.layout = layout
        self.clock = FakeClock()
        self.store = MemoryStore(1 << 30, clock=self.clock)
        self.transfer = MemoryTransfer(self.store)
        self.client = StoreClient(self.transfer, layout)
        self.arena = self.transfer.allocate(layout.object_bytes(0))
        self.events = Events(self.store)
        self.pool = PoolState(capacity_bytes=20 * layout.block_bytes, clock=self.clock)
        self.node = LocalStoreNode(self.pool, self.transfer, events=self.events)
        self.server = Server()
        self.address = ""

    async def start(self) -> None:
        await self.node.register_layout(self.layout)
        service = KvStoreService(self.node, node_id="store-0", boot_id="boot-0")
        self.server.add(kvstore_pb2_grpc.add_KvStoreServicer_to_server, service, "moontide.v1.KvStore")
        self.address = f"127.0.0.1:{await self.server.start('127.0.0.1', 0)}"

    async def reserve(self, request_id: str, *names: str) -> None:
        await self.node.reserve(
            request_id=request_id,
            epoch=1,
            layout_digest=self.layout.digest(),
            parent_hash=ROOT,
            block_hashes=[block(name) for name in names],
            has_partial=False,
            lease_s=10,
        )

    async def cache(self, request_id: str, *names: str) -> None:
        await self.reserve(request_id, *names)
        for name in names:
            for group_idx in range(self.layout.num_groups):
                self.client.put_group(group_idx, [(BlockRef(block(name), request_id, 1), self.arena.address)])
        await self.node.seal(request_id=request_id, epoch=1, first_block=0, num_blocks=len(names))
        await self.node.release(request_id=request_id, epoch=1)

    async def ask(self, *argv: str) -> cli.Answer:
        return await cli.ask(cli.parser().parse_args([*argv, "--address", self.address]))

    def key_of(self, name: str, group_idx: int) -> str:
        (key,) = (
            key
            for key in self.store.objects
            if (parsed := parse_key(key)) is not None
            and (parsed.block_hash, parsed.group_idx) == (block(name), group_idx)
        )
        return key

    def damage(self, name: str) -> None:
        key = self.key_of(name, 1)
        self.store.objects[key] = bytes([self.store.objects[key][0] ^ 1]) + self.store.objects[key][1:]


def block(name: str) -> BlockHash:
    return BlockHash(name.encode().ljust(32, b"."))


def names(hashes: list[str]) -> set[str]:
    return {bytes.fromhex(block_hash).rstrip(b".").decode() for block_hash in hashes}


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    await made.start()
    yield made
    await made.node.close()
    await made.server.close()
    made.pool.check_invariants()


async def test_stats_shows_pool_and_pins(world: World) -> None:
    await world.cache("a", "1", "2", "3")
    await world.reserve("b", "1", "x")
    answer = await world.ask("stats")
    assert answer.data["node_id"] == "store-0"
    assert (answer.data["sealed_blocks"], answer.data["pinned_blocks"], answer.data["reservations"]) == (3, 2, 1)
    assert answer.data["used_bytes"] == 4 * LAYOUT.block_bytes
    assert "(20%)" in answer.text
    assert "2 by 1 reservations" in answer.text
    assert json.loads(json.dumps(answer.data)) == answer.data


async def test_ls_shows_blocks_with_state_and_use(world: World) -> None:
    await world.cache("a", "1", "2")
    world.clock.advance(7)
    await world.reserve("b", "1", "x")
    answer = await world.ask("ls")
    by_name = {names([one["hash"]]).pop(): one for one in answer.data["blocks"]}
    assert by_name.keys() == {"1", "2", "x"}
    assert by_name["2"] == {
        "hash": block("2").hex(),
        "parent_hash": block("1").hex(),
        "num_bytes": LAYOUT.block_bytes,
        "tier": "dram",
        "is_sealed": True,
        "references": 0,
        "uses": 1,
        "idle_s": 7.0,
    }
    assert (by_name["1"]["references"], by_name["1"]["uses"], by_name["1"]["idle_s"]) == (1, 2, 0.0)
    assert not by_name["x"]["is_sealed"]
    assert [line.split()[0] for line in answer.text.splitlines()[1:]] == [block(name).hex() for name in ("1", "2", "x")]
    limited = await world.ask("ls", "--limit", "1")
    assert names([one["hash"] for one in limited.data["blocks"]]) == {"1"}


async def test_ls_of_an_empty_store(world: World) -> None:
    assert (await world.ask("ls")).text == "no blocks"


async def test_evict_drops_a_block_and_what_follows_and_publishes_first(world: World) -> None:
    await world.cache("a", "1", "2", "3")
    answer = await world.ask("evict", "--block", block("2").hex())
    assert answer.data == {"num_blocks": 2, "num_bytes": 2 * LAYOUT.block_bytes, "num_pinned": 0}
    assert world.events.removals == [({block("2"), block("3")}, 3 * LAYOUT.num_groups)]
    assert len(world.store.objects) == LAYOUT.num_groups


async def test_evict_takes_the_coldest_and_leaves_what_is_in_use(world: World) -> None:
    await world.cache("a", "1", "2")
    await world.cache("b", "p")
    assert (await world.ask("evict", "--bytes", "1")).data["num_blocks"] == 1
    assert world.events.removals[0][0] == {block("2")}
    await world.reserve("c", "1", "x")
    answer = await world.ask("evict", "--block", block("1").hex())
    assert answer.data == {"num_blocks": 0, "num_bytes": 0, "num_pinned": 2}
    assert "2 stay because requests use them" in answer.text
    assert (await world.ask("evict", "--bytes", str(1 << 40))).data["num_blocks"] == 1


async def test_evict_of_nothing_is_refused(world: World) -> None:
    with pytest.raises(BadRequest, match="num_bytes=0"):
        await world.ask("evict", "--bytes", "0")


async def test_verify_finds_damaged_and_missing_blocks(world: World) -> None:
    await world.cache("a", "1", "2", "3")
    await world.cache("b", "p", "q")
    await world.reserve("c", "open")
    assert (await world.ask("verify")).data == {
        "num_blocks": 5,
        "num_missing": 0,
        "num_damaged": 0,
        "num_unread": 0,
        "bad_hashes": [],
    }
    world.damage("2")
    del world.store.objects[world.key_of("q", 1)]
    answer = await world.ask("verify")
    assert (answer.data["num_blocks"], answer.data["num_missing"], answer.data["num_damaged"]) == (5, 1, 1)
    assert names(answer.data["bad_hashes"]) == {"2", "q"}
    assert answer.is_bad
    assert "5 blocks read, 1 missing, 1 damaged, 0 not readable" in answer.text
    assert world.events.removals == [], "nothing is dropped unless asked for"
    assert (await world.ask("verify", "--limit", "1")).data["num_blocks"] == 1


async def test_verify_drops_bad_blocks_with_what_follows_and_publishes_first(world: World) -> None:
    await world.cache("a", "1", "2", "3")
    world.damage("2")
    num_objects = len(world.store.objects)
    assert (await world.ask("verify", "--drop-damaged")).is_bad
    assert world.events.removals == [({block("2"), block("3")}, num_objects)]
    again = await world.ask("verify", "--drop-damaged")
    assert (again.data["num_blocks"], again.is_bad) == (1, False)


async def test_verify_keeps_bad_blocks_that_are_in_use(world: World) -> None:
    await world.cache("a", "1", "2")
    world.damage("2")
    await world.reserve("b", "1", "2")
    assert (await world.ask("verify", "--drop-damaged")).is_bad
    assert world.events.removals == []


async def test_verify_judges_nothing_while_the_store_is_away(world: World) -> None:
    await world.cache("a", "1")
    world.store.available = False
    with pytest.raises(MoontideError, match="stopped serving"):
        await world.ask("verify", "--drop-damaged")
    world.store.available = True
    assert (await world.ask("verify")).data["num_blocks"] == 1


async def test_verify_reads_blocks_that_are_larger_than_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.node.VERIFY_BYTES", LAYOUT.object_bytes(0) + 1)
    world = World()
    await world.node.register_layout(LAYOUT)
    await world.cache("a", "1", "2")
    world.damage("2")
    result = await world.node.verify()
    assert (result.num_blocks, result.missing, result.damaged) == (2, [], [block("2")])


async def test_verify_does_not_count_what_leaves_meanwhile(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.cache("a", "1", "2")
    real_get = world.transfer.get

    def get(items: Any) -> Any:
        world.pool.evict_chains([block("2")])
        del world.store.objects[world.key_of("2", 0)]
        monkeypatch.setattr(world.transfer, "get", real_get)
        return real_get(items)

    monkeypatch.setattr(world.transfer, "get", get)
    result = await world.node.verify()
    assert (result.num_blocks, result.missing, result.damaged) == (1, [], [])


async def test_verify_condemns_no_block_that_left_and_came_back_meanwhile(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.cache("a", "1", "2")
    real_get = world.transfer.get

    def get(items: Any) -> Any:
        monkeypatch.setattr(world.transfer, "get", real_get)
        objects = {key: world.store.objects.pop(key) for key in (world.key_of("2", 0), world.key_of("2", 1))}
        statuses = real_get(items)
        world.store.objects.update(objects)
        return statuses

    monkeypatch.setattr(world.transfer, "get", get)
    answer = await world.ask("verify", "--drop-damaged")
    assert (answer.data["num_blocks"], answer.data["num_missing"], answer.is_bad) == (2, 0, False)
    assert world.events.removals == []


@pytest.mark.parametrize("num_failures", [1, 2])
async def test_verify_counts_failed_reads_apart_and_drops_nothing_for_them(
    world: World, monkeypatch: pytest.MonkeyPatch, num_failures: int
) -> None:
    await world.cache("a", "1", "2", "3")
    world.damage("3")
    real_get = world.transfer.get
    num_failed = 0

    def get(items: Any) -> Any:
        nonlocal num_failed
        statuses = real_get(items)
        failing = [idx for idx, item in enumerate(items) if item.key == world.key_of("1", 0)]
        if num_failed < num_failures:
            num_failed += 1
            for idx in failing:
                statuses[idx] = GetStatus.FAILED
        return statuses

    monkeypatch.setattr(world.transfer, "get", get)
    answer = await world.ask("verify", "--drop-damaged")
    is_unread = num_failures == 2
    assert (answer.data["num_blocks"], answer.data["num_damaged"], answer.data["num_unread"]) == (3, 1, int(is_unread))
    assert names(answer.data["bad_hashes"]) == ({"1", "3"} if is_unread else {"3"})
    assert answer.is_bad
    assert [hashes for hashes, _ in world.events.removals] == [{block("3")}]


async def test_a_server_that_is_not_there_is_named_with_a_way_out() -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(NodeLost, match=f"{address} is not reachable.*moontide status"):
        await cli.ask(cli.parser().parse_args(["stats", "--address", address]))


async def test_a_wait_ends(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.cache("a", "1")
    gate = threading.Event()
    real_get = world.transfer.get

    def get(items: Any) -> Any:
        assert gate.wait(10)
        return real_get(items)

    monkeypatch.setattr(world.transfer, "get", get)
    with pytest.raises(DeadlineExceeded, match=world.address):
        await world.ask("verify", "--timeout", "0.05")
    gate.set()


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["stats", "--address", "127.0.0.1:1"], 1, "error: kvstore 127.0.0.1:1 is not reachable"),
        (["stats", "--address", "nowhere"], 2, "--address='nowhere' is no address; write host:port"),
    ],
)
def test_exit_codes(argv: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == code
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.out == ""


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["ls", "--limit", "-1"], "'-1' is no number of 0 or more"),
        (["evict"], "--bytes"),
        (["stats", "--timeout", "0"], "'0' is no time; give seconds above 0"),
        (["evict", "--block", "abc"], "'abc' is no block; give all 64 hex digits"),
    ],
)
def test_wrong_options_are_named(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([*argv, "--address", "127.0.0.1:1"])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err
