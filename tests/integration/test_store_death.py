"""What users of the real store see when a process below them dies."""

from __future__ import annotations

import pytest

from kvstore.transfer.base import GetItem, GetStatus, PutItem, PutStatus, RemoveStatus, StoreUnavailable
from kvstore.transfer.mooncake import MooncakeTransfer
from moontide.config import free_port
from tests.store_processes import data_client, master, wait_until

KIB = 1024


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


def test_attaching_where_nothing_listens_names_the_address() -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(StoreUnavailable, match=address):
        MooncakeTransfer(client_address=address, master_http="127.0.0.1:1", arena_bytes=1 << 20)


def put_one(transfer: MooncakeTransfer, address: int) -> str:
    assert transfer.put([PutItem("old/1", address, 100)]) == [PutStatus.STORED_OR_OPEN]
    return "old/1"
