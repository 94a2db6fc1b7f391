"""What users of the real store see when a process below them dies."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from kvstore.transfer.base import AttachmentLost, GetItem, GetStatus, PutItem, PutStatus, RemoveStatus, StoreUnavailable
from kvstore.transfer.mooncake import MooncakeTransfer
from moontide.config import free_port
from tests.cluster import wait_for
from tests.store_processes import Master, data_client, master, wait_until

KIB = 1024
LIBRARY_TIMEOUT_S = 30.0
"""So long the library waits for the answer to a call."""


def test_a_killed_data_client_fails_calls_and_is_used_again_after_its_restart() -> None:
    with master() as the_master:
        port = free_port()
        with data_client(the_master, port=port):
            made = MooncakeTransfer(
                client_address=f"127.0.0.1:{port}", master_http=the_master.http, arena_bytes=1 << 20
            )
            arena = made.allocate(64 * KIB)
            key = put_one(made, arena.address)
        try:
            put, get = [PutItem("new/1", arena.address, 100)], [GetItem(key, arena.address, 100)]
            assert made.put(put) == [PutStatus.FAILED]
            assert made.get(get) == [GetStatus.FAILED]
            assert made.remove([key]) == [RemoveStatus.FAILED]
            with data_client(the_master, port=port):
                wait_until(lambda: made.exists([key]) == [False], what="the master's forgetting of the dead segment")
                wait_until(lambda: made.put(put) == [PutStatus.STORED_OR_OPEN], what="the new attachment")
                assert made.get([GetItem("new/1", arena.address + 4096, 100)]) == [GetStatus.HIT]
        finally:
            made.close()


def test_a_dead_master_is_not_healthy_and_exists_raises() -> None:
    with master() as the_master:
        port = free_port()
        with data_client(the_master, port=port):
            made = MooncakeTransfer(
                client_address=f"127.0.0.1:{port}", master_http=the_master.http, arena_bytes=1 << 20
            )
            try:
                arena = made.allocate(64 * KIB)
                key = put_one(made, arena.address)
                the_master.process.kill()
                the_master.process.wait()
                assert not made.healthy()
                with pytest.raises(StoreUnavailable, match=the_master.http):
                    made.exists([key])
                assert made.put([PutItem("new/1", arena.address, 100)]) == [PutStatus.FAILED]
                assert made.get([GetItem(key, arena.address, 100)]) == [GetStatus.FAILED]
            finally:
                made.close()


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_get_that_a_frozen_store_process_may_still_do_ends_with_the_process_that_made_it() -> None:
    """The library gives a call up; the store process does it when it goes on. So the memory has no new owner before that."""
    with a_get_from_a_frozen_store_process() as (frozen, getting):
        wait_until(lambda: getting.done() or is_lost(frozen.made), timeout_s=100.0, what="the end of this attachment")
        assert not getting.done()
        assert getting.result(10.0) == [GetStatus.FAILED]


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_get_that_a_frozen_store_process_takes_to_its_grave_leaves_the_attachment_as_it_was() -> None:
    with a_get_from_a_frozen_store_process() as (frozen, getting):
        with pytest.raises(TimeoutError):
            getting.result(LIBRARY_TIMEOUT_S + 5.0)
        frozen.process.kill()
        frozen.process.wait()
        assert getting.result(10.0) == [GetStatus.FAILED]
        with data_client(frozen.master, port=frozen.port):
            wait_until(frozen.made.healthy, what="the new attachment")


@dataclass(frozen=True)
class Frozen:
    """A store process that stands still, and what is attached to it."""

    master: Master
    port: int
    process: subprocess.Popen[bytes]
    made: MooncakeTransfer


@contextmanager
def a_get_from_a_frozen_store_process() -> Iterator[tuple[Frozen, Future[list[GetStatus]]]]:
    """The second one is the open get of an object that is there."""
    with master() as the_master:
        port = free_port()
        with data_client(the_master, port=port) as store_process:
            made = MooncakeTransfer(
                client_address=f"127.0.0.1:{port}", master_http=the_master.http, arena_bytes=1 << 20
            )
            try:
                arena = made.allocate(64 * KIB)
                key = put_one(made, arena.address)
                store_process.send_signal(signal.SIGSTOP)
                with ThreadPoolExecutor(1) as threads:
                    getting = threads.submit(made.get, [GetItem(key, arena.address, 100)])
                    yield Frozen(the_master, port, store_process, made), getting
            finally:
                store_process.kill()
                made.close()


def is_lost(transfer: MooncakeTransfer) -> bool:
    try:
        transfer.healthy()
    except AttachmentLost:
        return True
    return False


def is_lost_or_healthy(transfer: MooncakeTransfer) -> bool:
    try:
        return transfer.healthy()
    except AttachmentLost:
        return True


def test_store_process_that_came_back_too_soon_to_be_missed_is_noticed() -> None:
    """The library stays connected to it and unknown to it for good, unless it looked just while nobody was there."""
    with master() as the_master:
        port = free_port()
        with data_client(the_master, port=port) as store_process:
            transfer = MooncakeTransfer(
                client_address=f"127.0.0.1:{port}", master_http=the_master.http, arena_bytes=1 << 20
            )
            transfer.allocate(64 * KIB)
            assert transfer.healthy()
            store_process.kill()
            store_process.wait()
        with data_client(the_master, port=port):
            try:
                wait_for(lambda: is_lost_or_healthy(transfer), "it is reached again, or given up", 8.0)
            finally:
                transfer.close()


def test_attaching_where_nothing_listens_names_the_address() -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(StoreUnavailable, match=address):
        MooncakeTransfer(client_address=address, master_http="127.0.0.1:1", arena_bytes=1 << 20)


def put_one(transfer: MooncakeTransfer, address: int) -> str:
    assert transfer.put([PutItem("old/1", address, 100)]) == [PutStatus.STORED_OR_OPEN]
    return "old/1"
