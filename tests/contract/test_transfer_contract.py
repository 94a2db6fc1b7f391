"""What a Transfer promises, shown for the real store and for its in-process twin."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import TypeVar

import pytest

from kvstore.transfer.base import (
    Arena,
    GetItem,
    GetStatus,
    PutItem,
    PutStatus,
    RemoveStatus,
    StoreUnavailable,
    Transfer,
)
from kvstore.transfer.memory import MemoryStore, MemoryTransfer
from kvstore.transfer.mooncake import MooncakeTransfer
from moontide.config import free_port
from moontide.errors import ConfigError
from tests.store_processes import READ_LEASE_S, data_client, master, wait_until

POOL_BYTES = 64 << 20
ARENA_BYTES = 64 << 20
KIB = 1024
_numbers = count()
Item = TypeVar("Item")


class World:
    """One store and ways to look at it from several processes' places."""

    def attach(self) -> Transfer:
        raise NotImplementedError


class MemoryWorld(World):
    def __init__(self) -> None:
        self._store = MemoryStore(POOL_BYTES, lease_s=READ_LEASE_S)

    def attach(self) -> Transfer:
        return MemoryTransfer(self._store, arena_bytes=ARENA_BYTES)


class MooncakeWorld(World):
    def __init__(self, client_address: str, master_http: str) -> None:
        self._addresses = client_address, master_http

    def attach(self) -> Transfer:
        client_address, master_http = self._addresses
        return MooncakeTransfer(client_address=client_address, master_http=master_http, arena_bytes=ARENA_BYTES)


@contextmanager
def mooncake_world() -> Iterator[World]:
    with master() as the_master:
        port = free_port()
        with data_client(the_master, port=port, pool_bytes=POOL_BYTES):
            yield MooncakeWorld(f"127.0.0.1:{port}", the_master.http)


@pytest.fixture(scope="module", params=["memory", "mooncake"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    if request.param == "memory":
        yield MemoryWorld()
        return
    with mooncake_world() as made:
        yield made


@pytest.fixture(scope="module")
def transfer(world: World) -> Iterator[Transfer]:
    made = world.attach()
    yield made
    made.close()


@pytest.fixture(scope="module")
def arena(transfer: Transfer) -> Arena:
    return transfer.allocate(4 << 20)


def new_key() -> str:
    return f"b/0123456789abcdef/{next(_numbers)}/{'ab' * 32}"


def fill(arena: Arena, offset: int, data: bytes) -> int:
    """Returns the address of the bytes."""
    arena.buffer[offset : offset + len(data)] = data
    return arena.address + offset


def stored(transfer: Transfer, arena: Arena, data: bytes, key: str | None = None) -> str:
    key = key or new_key()
    assert transfer.put([PutItem(key, fill(arena, 0, data), len(data))]) == [PutStatus.STORED_OR_OPEN]
    return key


def test_arena_is_zeroed_and_its_address_names_its_buffer(transfer: Transfer) -> None:
    arena = transfer.allocate(64 * KIB)
    assert arena.nbytes == len(arena.buffer) == 64 * KIB
    assert bytes(arena.buffer) == bytes(64 * KIB)


def test_arenas_beyond_what_was_asked_for_are_refused(world: World) -> None:
    transfer = world.attach()
    try:
        transfer.allocate(ARENA_BYTES - KIB)
        with pytest.raises(ConfigError, match=f"arena_bytes >= {ARENA_BYTES + KIB}"):
            transfer.allocate(2 * KIB)
        transfer.allocate(KIB)
    finally:
        transfer.close()


def test_put_then_get_returns_the_bytes(transfer: Transfer, arena: Arena) -> None:
    data = os.urandom(240 * KIB + 64)
    key = stored(transfer, arena, data)
    assert transfer.get([GetItem(key, arena.address + (1 << 20), len(data))]) == [GetStatus.HIT]
    assert bytes(arena.buffer[1 << 20 : (1 << 20) + len(data)]) == data


def test_another_process_place_reads_what_was_put(world: World, transfer: Transfer, arena: Arena) -> None:
    data = os.urandom(100 * KIB)
    key = stored(transfer, arena, data)
    other = world.attach()
    try:
        room = other.allocate(len(data))
        assert other.get([GetItem(key, room.address, len(data))]) == [GetStatus.HIT]
        assert bytes(room.buffer) == data
    finally:
        other.close()


def test_a_key_is_written_once(transfer: Transfer, arena: Arena) -> None:
    key = stored(transfer, arena, b"a" * 1000)
    assert transfer.put([PutItem(key, fill(arena, 0, b"b" * 1000), 1000)]) == [PutStatus.STORED_OR_OPEN]
    assert transfer.get([GetItem(key, arena.address + 4096, 1000)]) == [GetStatus.HIT]
    assert bytes(arena.buffer[4096:5096]) == b"a" * 1000


def test_statuses_are_in_the_order_of_the_items(transfer: Transfer, arena: Arena) -> None:
    here = stored(transfer, arena, b"x" * 500)
    items = [GetItem(key, arena.address + 8192, 500) for key in (new_key(), here, new_key())]
    assert transfer.get(items) == [GetStatus.MISS, GetStatus.HIT, GetStatus.MISS]


@pytest.mark.parametrize("asked", [999, 1001])
def test_an_object_of_another_length_is_no_hit(transfer: Transfer, arena: Arena, asked: int) -> None:
    key = stored(transfer, arena, b"y" * 1000)
    assert transfer.get([GetItem(key, arena.address + 4096, asked)]) == [GetStatus.FAILED]


def test_more_items_than_one_batch_holds(transfer: Transfer, arena: Arena) -> None:
    num = 600
    data = [i.to_bytes(4, "little") * 64 for i in range(num)]
    keys = [new_key() for _ in range(num)]
    puts = [PutItem(keys[i], fill(arena, 256 * i, data[i]), 256) for i in range(num)]
    assert transfer.put(puts) == [PutStatus.STORED_OR_OPEN] * num
    assert transfer.exists([*keys, new_key()]) == [True] * num + [False]
    start = 1 << 20
    gets = [GetItem(keys[i], arena.address + start + 256 * i, 256) for i in range(num)]
    assert transfer.get(gets) == [GetStatus.HIT] * num
    assert [bytes(arena.buffer[start + 256 * i : start + 256 * (i + 1)]) for i in range(num)] == data


def test_nothing_asked_is_nothing_answered(transfer: Transfer) -> None:
    assert transfer.put([]) == []
    assert transfer.get([]) == []
    assert transfer.exists([]) == []
    assert transfer.remove([]) == []


def test_removed_object_is_missing_and_may_be_put_anew(transfer: Transfer, arena: Arena) -> None:
    key = stored(transfer, arena, b"old" * 100)
    assert transfer.remove([key, new_key()]) == [RemoveStatus.REMOVED, RemoveStatus.MISSING]
    assert transfer.exists([key]) == [False]
    assert transfer.get([GetItem(key, arena.address, 300)]) == [GetStatus.MISS]
    stored(transfer, arena, b"new" * 100, key)
    assert transfer.get([GetItem(key, arena.address + 4096, 300)]) == [GetStatus.HIT]
    assert bytes(arena.buffer[4096:4396]) == b"new" * 100


def test_a_read_blocks_removal_until_its_lease_ends(transfer: Transfer, arena: Arena) -> None:
    key = stored(transfer, arena, b"z" * 200)
    assert transfer.get([GetItem(key, arena.address + 4096, 200)]) == [GetStatus.HIT]
    assert transfer.remove([key]) == [RemoveStatus.LEASED]
    wait_until(lambda: transfer.remove([key]) == [RemoveStatus.REMOVED], what="the end of the read lease")


def test_exists_grants_no_lease(transfer: Transfer, arena: Arena) -> None:
    key = stored(transfer, arena, b"q" * 200)
    assert transfer.exists([key]) == [True]
    assert transfer.remove([key]) == [RemoveStatus.REMOVED]


def test_a_full_pool_says_no_space_and_takes_objects_again_after_a_removal(transfer: Transfer, arena: Arena) -> None:
    size = 4 << 20
    keys = [f"full/{i}" for i in range(POOL_BYTES // size + 1)]
    statuses = transfer.put([PutItem(key, arena.address, size) for key in keys])
    assert PutStatus.NO_SPACE in statuses
    assert set(statuses) == {PutStatus.STORED_OR_OPEN, PutStatus.NO_SPACE}
    removed = [key for key, status in zip(keys, statuses, strict=True) if status is PutStatus.STORED_OR_OPEN]
    assert RemoveStatus.FAILED not in transfer.remove(removed)
    assert transfer.put([PutItem("full/again", arena.address, size)]) == [PutStatus.STORED_OR_OPEN]
    assert transfer.remove(["full/again"]) == [RemoveStatus.REMOVED]


def test_one_batch_may_fail_in_part(transfer: Transfer, arena: Arena) -> None:
    small = stored(transfer, arena, b"so that large objects leave a rest")
    large = [PutItem(new_key(), arena.address, arena.nbytes) for _ in range(POOL_BYTES // arena.nbytes)]
    statuses = transfer.put(large)
    assert statuses[-1] is PutStatus.NO_SPACE
    first, last = (PutItem(new_key(), arena.address, 1000) for _ in range(2))
    assert transfer.put([first, large[-1], last]) == [
        PutStatus.STORED_OR_OPEN,
        PutStatus.NO_SPACE,
        PutStatus.STORED_OR_OPEN,
    ]
    assert transfer.exists([first.key, large[-1].key, last.key]) == [True, False, True]
    here = [item.key for item, status in zip(large, statuses, strict=True) if status is PutStatus.STORED_OR_OPEN]
    assert set(transfer.remove([*here, first.key, last.key, small])) == {RemoveStatus.REMOVED}


def test_objects_lie_in_the_segment_that_was_asked_for(transfer: Transfer, arena: Arena) -> None:
    items = [PutItem(new_key(), fill(arena, 0, b"s" * 500), 500) for _ in range(3)]
    assert transfer.put(items, segment=transfer.segment) == [PutStatus.STORED_OR_OPEN] * 3
    keys = [item.key for item in items]
    assert transfer.misplaced([*keys, new_key()]) == []
    assert transfer.remove(keys) == [RemoveStatus.REMOVED] * 3, "the look-up granted no lease"


def test_a_segment_that_nobody_has_does_not_lose_objects(transfer: Transfer, arena: Arena) -> None:
    item = PutItem(new_key(), fill(arena, 0, b"s" * 500), 500)
    assert transfer.put([item], segment="192.0.2.1:1") == [PutStatus.STORED_OR_OPEN]
    assert transfer.exists([item.key]) == [True]


def test_threads_may_call_at_once(transfer: Transfer) -> None:
    failures: list[str] = []

    def work(name: str) -> None:
        arena = transfer.allocate(256 * KIB)
        for i in range(20):
            data = f"{name} {i} ".encode() * 1000
            key = stored(transfer, arena, data)
            if transfer.get([GetItem(key, arena.address + 128 * KIB, len(data))]) != [GetStatus.HIT]:
                failures.append(key)
            if bytes(arena.buffer[128 * KIB : 128 * KIB + len(data)]) != data:
                failures.append(key)

    threads = [threading.Thread(target=work, args=(f"t{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_store_that_answers_is_healthy(transfer: Transfer) -> None:
    assert transfer.healthy()


def test_close_is_idempotent(world: World) -> None:
    transfer = world.attach()
    transfer.allocate(KIB)
    transfer.close()
    transfer.close()


def test_a_twin_that_is_switched_off_fails_every_call() -> None:
    store = MemoryStore(POOL_BYTES)
    transfer = MemoryTransfer(store)
    arena = transfer.allocate(KIB)
    key = stored(transfer, arena, b"k" * 100)
    store.available = False
    assert_all_fail(transfer, arena, key)
    assert not transfer.healthy()
    store.available = True
    assert transfer.exists([key]) == [True]


def assert_all_fail(transfer: Transfer, arena: Arena, key: str) -> None:
    assert transfer.put([PutItem(new_key(), arena.address, 100)]) == [PutStatus.FAILED]
    assert transfer.get([GetItem(key, arena.address, 100)]) == [GetStatus.FAILED]
    assert transfer.remove([key]) == [RemoveStatus.FAILED]
    with pytest.raises(StoreUnavailable):
        transfer.exists([key])
    with pytest.raises(StoreUnavailable):
        transfer.misplaced([key])
