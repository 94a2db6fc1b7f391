from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvstore.block import BlockHash
from kvstore.client import BlockRef, StoreClient, StoreNodeClient
from kvstore.layout import TRAILER_BYTES, KVLayout
from kvstore.transfer.base import Arena, PutStatus, StoreUnavailable
from kvstore.transfer.memory import MemoryStore, MemoryTransfer
from moontide.errors import NodeLost
from moontide.rpc import Server
from moontide_proto.v1 import kvstore_pb2, kvstore_pb2_grpc

LAYOUT = KVLayout(
    model_fingerprint="f",
    num_layers=5,
    num_planes=2,
    num_kv_heads=2,
    head_dim=4,
    dtype="float32",
    block_tokens=4,
    layer_group=2,
)
SLOT = LAYOUT.object_bytes(0)
A, B = (BlockRef(BlockHash(bytes([i]) * 32), "req", 1) for i in (1, 2))
PARTIAL = BlockRef(None, "req", 1)
KEY_A, KEY_B = (ref.key(LAYOUT.digest(), 0) for ref in (A, B))


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(1 << 20)


@pytest.fixture
def transfer(store: MemoryStore) -> MemoryTransfer:
    return MemoryTransfer(store)


@pytest.fixture
def client(transfer: MemoryTransfer) -> StoreClient:
    return StoreClient(transfer, LAYOUT)


@pytest.fixture
def arena(transfer: MemoryTransfer) -> Arena:
    return transfer.allocate(8 * SLOT)


def slot(arena: Arena, idx: int) -> memoryview:
    return arena.buffer[idx * SLOT : (idx + 1) * SLOT]


def at(arena: Arena, idx: int) -> int:
    return arena.address + idx * SLOT


def payload(seed: int) -> bytes:
    return bytes((seed + i) % 251 for i in range(LAYOUT.payload_bytes(0)))


def put(client: StoreClient, arena: Arena, *blocks: BlockRef) -> None:
    for idx, _ in enumerate(blocks):
        slot(arena, idx)[:-TRAILER_BYTES] = payload(idx)
    statuses = client.put_group(0, [(block, at(arena, idx)) for idx, block in enumerate(blocks)])
    assert statuses == [PutStatus.STORED_OR_OPEN] * len(blocks)


def result_count(client: StoreClient, result: str) -> float:
    return float(client.metrics.gets.labels(result)._value.get())


def test_full_and_partial_blocks_come_back_with_their_bytes(client: StoreClient, arena: Arena) -> None:
    put(client, arena, A, B, PARTIAL)
    assert client.get_group(0, [(PARTIAL, at(arena, 4)), (A, at(arena, 5)), (B, at(arena, 6))]) == [True] * 3
    assert [bytes(slot(arena, idx)[:-TRAILER_BYTES]) for idx in (5, 6, 4)] == [payload(0), payload(1), payload(2)]
    assert result_count(client, "hit") == 3


def test_a_short_last_group_has_its_own_length(client: StoreClient, arena: Arena, store: MemoryStore) -> None:
    assert client.put_group(2, [(A, at(arena, 0))]) == [PutStatus.STORED_OR_OPEN]
    assert len(store.objects[A.key(LAYOUT.digest(), 2)]) == LAYOUT.object_bytes(2) < SLOT
    assert client.get_group(2, [(A, at(arena, 1))]) == [True]


def flipped(bit: int) -> Callable[[bytes], bytes]:
    def flip(value: bytes) -> bytes:
        changed = bytearray(value)
        changed[bit // 8 % len(value)] ^= 1 << bit % 8
        return bytes(changed)

    return flip


PAYLOAD_BITS = LAYOUT.payload_bytes(0) * 8
TRAILER_BITS = [PAYLOAD_BITS + 8 * byte + byte % 8 for byte in range(TRAILER_BYTES)]


@pytest.mark.parametrize("bit", [0, 1, PAYLOAD_BITS // 2, PAYLOAD_BITS - 1, *TRAILER_BITS])
def test_a_flipped_bit_is_a_miss(client: StoreClient, arena: Arena, store: MemoryStore, bit: int) -> None:
    put(client, arena, A, B)
    store.objects[KEY_A] = flipped(bit)(store.objects[KEY_A])
    assert client.get_group(0, [(A, at(arena, 4)), (B, at(arena, 5))]) == [False, True]
    assert result_count(client, "corrupt") == 1


def test_another_objects_bytes_are_a_miss(client: StoreClient, arena: Arena, store: MemoryStore) -> None:
    put(client, arena, A, B)
    store.objects[KEY_A], store.objects[KEY_B] = store.objects[KEY_B], store.objects[KEY_A]
    assert client.get_group(0, [(A, at(arena, 4)), (B, at(arena, 5))]) == [False, False]
    assert result_count(client, "corrupt") == 2


def test_another_groups_bytes_are_a_miss(client: StoreClient, arena: Arena, store: MemoryStore) -> None:
    put(client, arena, A)
    store.objects[A.key(LAYOUT.digest(), 1)] = store.objects[KEY_A]
    assert client.get_group(1, [(A, at(arena, 4))]) == [False]


@pytest.mark.parametrize("cut", [-1, 1])
def test_another_length_is_a_miss(client: StoreClient, arena: Arena, store: MemoryStore, cut: int) -> None:
    put(client, arena, A)
    value = store.objects[KEY_A]
    store.objects[KEY_A] = value[:-1] if cut < 0 else value + b"x"
    assert client.get_group(0, [(A, at(arena, 4))]) == [False]
    assert result_count(client, "failed") == 1


def test_an_object_without_a_trailer_is_a_miss(client: StoreClient, arena: Arena, store: MemoryStore) -> None:
    store.objects[KEY_A] = bytes(SLOT)
    assert client.get_group(0, [(A, at(arena, 4))]) == [False]


def test_another_layouts_bytes_under_the_same_partial_key_are_a_miss(
    client: StoreClient, transfer: MemoryTransfer, arena: Arena
) -> None:
    other = StoreClient(transfer, replace(LAYOUT, model_fingerprint="other weights"))
    put(other, arena, PARTIAL)
    assert other.get_group(0, [(PARTIAL, at(arena, 4))]) == [True]
    assert client.get_group(0, [(PARTIAL, at(arena, 4))]) == [False]


def test_missing_names_position_and_group(client: StoreClient, arena: Arena) -> None:
    put(client, arena, A)
    assert client.missing([B, A]) == {(0, 0), (0, 1), (0, 2), (1, 1), (1, 2)}
    assert client.missing([B, A], groups=[0]) == {(0, 0)}
    assert client.missing([]) == set()


def test_epochs_do_not_share_partial_blocks(client: StoreClient, arena: Arena) -> None:
    put(client, arena, PARTIAL)
    assert client.get_group(0, [(replace(PARTIAL, epoch=2), at(arena, 4))]) == [False]


def test_a_store_that_is_down_is_a_miss_for_get_and_an_error_for_missing(
    client: StoreClient, arena: Arena, store: MemoryStore
) -> None:
    put(client, arena, A)
    store.available = False
    assert client.put_group(0, [(B, at(arena, 0))]) == [PutStatus.FAILED]
    assert client.get_group(0, [(A, at(arena, 4))]) == [False]
    with pytest.raises(StoreUnavailable):
        client.missing([A])


class StuckService(kvstore_pb2_grpc.KvStoreServicer):
    """Takes calls and never answers."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def GetStats(self, _request: kvstore_pb2.KvStoreStatsRequest, _context: Any) -> kvstore_pb2.KvStoreStats:
        self.asked.set()
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


@pytest.mark.parametrize("end", ["silence", "shutdown"])
async def test_a_store_process_that_does_not_answer_is_lost_and_no_deadline_of_a_request(end: str) -> None:
    server, service = Server(), StuckService()
    server.add(kvstore_pb2_grpc.add_KvStoreServicer_to_server, service, "moontide.v1.KvStore")
    port = await server.start("127.0.0.1", 0)
    node = StoreNodeClient(f"127.0.0.1:{port}", timeout_s=0.2 if end == "silence" else 20.0)
    try:
        asking = asyncio.create_task(node.stats())
        await service.asked.wait()
        if end == "shutdown":
            await server.close()
        with pytest.raises(NodeLost, match="kvstore 127"):
            await asking
    finally:
        await node.close()
        await server.close()
