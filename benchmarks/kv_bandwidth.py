"""How many bits a second whole blocks make into the store and back, by four ways that take turns with objects of one size.

client   kvstore.client.StoreClient over MooncakeTransfer: keys, trailers and checksums on both ways
store    the library below it, called directly: the same attachment, sizes and batches
engine   the library's transfer engine between registered memory of two processes: no objects, no master
socket   a plain TCP connection between two processes that copies messages of that size

client and store write to the segment of this host (shared memory) or of another one (TCP); engine and socket always use TCP.
Everything is on the loopback of one machine.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from statistics import median

from harness import CpuWatch
from kv_peers import READ, Engine, peer, receive

from deploy.plan import HOST, service_env
from kvstore.block import BlockHash
from kvstore.client import BlockRef, StoreClient
from kvstore.layout import TRAILER_BYTES, KVLayout
from kvstore.transfer.base import Arena, PutItem, PutStatus, RemoveStatus
from kvstore.transfer.mooncake import MooncakeTransfer
from moontide.config import free_port
from tests.store_processes import data_client, master, wait_until

KIB = 1024
BATCH_BYTES = 48 << 20
"""Payload of one batch, but not more than MOST_OBJECTS."""
MOST_OBJECTS = 256
POOL_BYTES = 1536 << 20
POOL_FILL = 0.85
"""Below the share at which the store's master evicts by itself."""
LARGE_KIB = 192
"""From this size on the client has to reach 0.90 of the store, below 0.85."""


@dataclass(frozen=True)
class Copy:
    """One batch there and back."""

    put_s: float
    get_s: float

    @property
    def total_s(self) -> float:
        return self.put_s + self.get_s


@dataclass(frozen=True)
class SizeResult:
    """Medians of one object size."""

    object_kib: int
    gbits_put: dict[str, float]
    """Gigabits a second by way."""
    gbits_get: dict[str, float]
    gbits: dict[str, float]
    """Put and get together."""
    client_share: float
    """Median over the rounds of the store's time over the client's in the same round."""


@dataclass(frozen=True)
class Bandwidth:
    sizes: list[SizeResult]
    others_share: float
    """Of the machine's CPU."""


Way = Callable[[], Copy]


def measure(object_kib: Sequence[int], *, is_own_host: bool, rounds: int) -> Bandwidth:
    """Every size with every way in turn; one more round before the others is a warm-up."""
    os.environ.update(service_env(1))
    with ExitStack() as stack:
        of = stack.enter_context(master())
        owner_port, lone_port = free_port(HOST), free_port(HOST)
        stack.enter_context(data_client(of, port=owner_port, pool_bytes=POOL_BYTES))
        stack.enter_context(data_client(of, port=lone_port, pool_bytes=0))
        port = owner_port if is_own_host else lone_port
        arena_bytes = 2 * max(_num_objects(kib) * _object_bytes(kib) for kib in object_kib)
        transfer = MooncakeTransfer(client_address=f"{HOST}:{port}", master_http=of.http, arena_bytes=arena_bytes)
        stack.callback(transfer.close)
        arena = transfer.allocate(arena_bytes)
        arena.buffer[:] = os.urandom(arena_bytes)
        _touch_pool(transfer, arena)
        engine_port, remote = stack.enter_context(peer("engine", arena_bytes))
        engine = Engine(arena_bytes)
        (socket_port,) = stack.enter_context(peer("socket", arena_bytes))
        connection = stack.enter_context(socket.create_connection((HOST, int(socket_port))))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        watch = CpuWatch()
        results = []
        for kib in object_kib:
            num_objects, nbytes = _num_objects(kib), _object_bytes(kib)
            store = _Store(transfer, arena, num_objects=num_objects, nbytes=nbytes)
            ways: dict[str, Way] = {
                "client": store.copy_by_client,
                "store": store.copy_by_library,
                "engine": partial(_copy_by_engine, engine, f"{HOST}:{engine_port}", int(remote), num_objects, nbytes),
                "socket": partial(_copy_by_socket, connection, arena, num_objects, nbytes),
            }
            results.append(_take_turns(kib, ways, rounds=rounds))
            store.remove_all()
        return Bandwidth(results, watch.others_share())


def _touch_pool(transfer: MooncakeTransfer, arena: Arena) -> None:
    """Fill the segment once and empty it: new memory comes from the kernel page by page, which takes longer than a copy."""
    nbytes = 4 << 20
    items = [PutItem(f"touch-{idx}", arena.address, nbytes) for idx in range(int(POOL_FILL * POOL_BYTES / nbytes))]
    assert set(transfer.put(items)) == {PutStatus.STORED_OR_OPEN}, "the pool cannot be filled"
    wait_until(
        lambda: set(transfer.remove([item.key for item in items])) == {RemoveStatus.MISSING}, what="an empty pool"
    )


def _take_turns(kib: int, ways: dict[str, Way], *, rounds: int) -> SizeResult:
    copies: dict[str, list[Copy]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name in ways if number % 2 else reversed(ways):
            copy = ways[name]()
            if number:
                copies[name].append(copy)
    bits = 8 * _num_objects(kib) * _object_bytes(kib) / 1e9
    return SizeResult(
        object_kib=kib,
        gbits_put={name: bits / median(each.put_s for each in found) for name, found in copies.items()},
        gbits_get={name: bits / median(each.get_s for each in found) for name, found in copies.items()},
        gbits={name: 2 * bits / median(each.total_s for each in found) for name, found in copies.items()},
        client_share=median(
            theirs.total_s / ours.total_s for ours, theirs in zip(copies["client"], copies["store"], strict=True)
        ),
    )


def _num_objects(kib: int) -> int:
    return min(MOST_OBJECTS, BATCH_BYTES // (kib * KIB))


def _object_bytes(kib: int) -> int:
    return kib * KIB + TRAILER_BYTES


class _Store:
    """Batches of one size over one attachment, each under keys of its own; the first half of the arena goes out, the second comes in."""

    def __init__(self, transfer: MooncakeTransfer, arena: Arena, *, num_objects: int, nbytes: int) -> None:
        self._transfer = transfer
        self._layout = _layout(nbytes - TRAILER_BYTES)
        self._client = StoreClient(transfer, self._layout)
        self._nbytes = nbytes
        self._slots_out = [arena.address + idx * nbytes for idx in range(num_objects)]
        self._slots_in = [address + num_objects * nbytes for address in self._slots_out]
        self._keys: list[str] = []
        self._num_batches = 0

    def copy_by_client(self) -> Copy:
        blocks = self._new_blocks()
        started_s = time.perf_counter()
        stored = self._client.put_group(0, list(zip(blocks, self._slots_out, strict=True)))
        put_s = time.perf_counter()
        arrived = self._client.get_group(0, list(zip(blocks, self._slots_in, strict=True)))
        ended_s = time.perf_counter()
        assert all(status is PutStatus.STORED_OR_OPEN for status in stored), f"puts failed: {set(stored)}"
        assert all(arrived), f"{arrived.count(False)} of {len(arrived)} objects did not come back"
        return Copy(put_s - started_s, ended_s - put_s)

    def copy_by_library(self) -> Copy:
        keys = [block.key(self._layout.digest(), 0) for block in self._new_blocks()]
        sizes = [self._nbytes] * len(keys)
        library = self._transfer._store
        started_s = time.perf_counter()
        stored = library.batch_put_from(keys, self._slots_out, sizes)
        put_s = time.perf_counter()
        arrived = library.batch_get_into(keys, self._slots_in, sizes)
        ended_s = time.perf_counter()
        assert set(stored) == {0}, f"puts failed: {set(stored)}"
        assert set(arrived) == {self._nbytes}, f"gets failed: {set(arrived)}"
        return Copy(put_s - started_s, ended_s - put_s)

    def remove_all(self) -> None:
        """As soon as the reads' leases are over."""

        def all_gone() -> bool:
            statuses = self._transfer.remove(self._keys)
            self._keys = [key for key, s in zip(self._keys, statuses, strict=True) if s is RemoveStatus.LEASED]
            return not self._keys

        wait_until(all_gone, what="the removal of all objects")

    def _new_blocks(self) -> list[BlockRef]:
        self._num_batches += 1
        blocks = [
            BlockRef(BlockHash(hashlib.sha256(b"%d %d" % (self._num_batches, idx)).digest()), "bench", 0)
            for idx in range(len(self._slots_out))
        ]
        self._keys += [block.key(self._layout.digest(), 0) for block in blocks]
        return blocks


def _layout(payload_bytes: int) -> KVLayout:
    """Blocks of 64 tokens whose one layer group has so many bytes, a multiple of 1 KiB."""
    return KVLayout(
        model_fingerprint=f"bench-{payload_bytes}",
        num_layers=1,
        num_planes=2,
        num_kv_heads=4,
        head_dim=payload_bytes // KIB,
        dtype="bfloat16",
        block_tokens=64,
        layer_group=1,
    )


def _copy_by_engine(engine: Engine, session: str, remote: int, num_objects: int, nbytes: int) -> Copy:
    offsets = [idx * nbytes for idx in range(num_objects)]
    batch = [engine.address + o for o in offsets], [remote + o for o in offsets], [nbytes] * num_objects
    started_s = time.perf_counter()
    written = engine.library.batch_transfer_sync_write(session, *batch)
    put_s = time.perf_counter()
    read = engine.library.batch_transfer_sync_read(session, *batch)
    ended_s = time.perf_counter()
    assert (written, read) == (0, 0), f"the engine failed: {written}, {read}"
    return Copy(put_s - started_s, ended_s - put_s)


def _copy_by_socket(connection: socket.socket, arena: Arena, num_objects: int, nbytes: int) -> Copy:
    connection.sendall((num_objects * nbytes).to_bytes(8, "little"))
    started_s = time.perf_counter()
    for idx in range(num_objects):
        connection.sendall(arena.buffer[idx * nbytes : (idx + 1) * nbytes])
    receive(connection, memoryview(bytearray(1)))
    put_s = time.perf_counter()
    connection.sendall(READ)
    for idx in range(num_objects, 2 * num_objects):
        receive(connection, arena.buffer[idx * nbytes : (idx + 1) * nbytes])
    return Copy(put_s - started_s, time.perf_counter() - put_s)
