"""PullThread: order of jobs, and what it reports when the store fails in an unforeseen way."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import pytest

from decode_node.kv_pull import PullDone, PullJob, PullThread, blocks_per_job
from kvstore.client import BlockRef, StoreClient
from kvstore.pool import RequestKey
from kvstore.transfer.memory import MemoryStore
from moontide.clock import MonotonicClock
from tests.unit.decode_node.decode_rig import TIMEOUT_S, GatedTransfer, Prefill, load_runner


@pytest.fixture
def transfer(store: MemoryStore) -> GatedTransfer:
    return GatedTransfer(store)


@pytest.fixture
def reports() -> queue.Queue[PullDone]:
    return queue.Queue()


@pytest.fixture
def pulls(prefill: Prefill, transfer: GatedTransfer, reports: queue.Queue[PullDone]) -> Iterator[PullThread]:
    runner = load_runner(prefill, transfer, 4)
    client = StoreClient(transfer, prefill.layout)
    thread = PullThread(client, runner.kv, clock=MonotonicClock(), report=reports.put)
    thread.start()
    yield thread
    transfer.gate.set()
    thread.close()
    assert not thread.is_alive


def job(name: str, *, is_urgent: bool = False) -> PullJob:
    """One block that the store does not have."""
    return PullJob(key=RequestKey(name, 1), blocks=[0], refs=[BlockRef(None, name, 1)], pages=[0], is_urgent=is_urgent)


def test_urgent_jobs_go_first_and_others_in_order(
    pulls: PullThread, transfer: GatedTransfer, reports: queue.Queue[PullDone]
) -> None:
    transfer.gate.clear()
    pulls.submit(job("running"))
    assert transfer.get_open.wait(TIMEOUT_S)
    for name in ("a", "b"):
        pulls.submit(job(name))
    pulls.submit(job("urgent", is_urgent=True))
    transfer.gate.set()
    order = [reports.get(timeout=TIMEOUT_S).job.key.request_id for _ in range(4)]
    assert order == ["running", "urgent", "a", "b"]


def test_block_that_misses_a_group_is_not_asked_for_the_next(
    pulls: PullThread, transfer: GatedTransfer, reports: queue.Queue[PullDone]
) -> None:
    pulls.submit(job("a"))
    done = reports.get(timeout=TIMEOUT_S)
    assert (done.missing, done.error) == ([0], None)
    assert transfer.num_gets == 1


def test_cancelled_job_reads_no_further_group_and_is_still_reported(
    pulls: PullThread, prefill: Prefill, transfer: GatedTransfer, reports: queue.Queue[PullDone]
) -> None:
    assert prefill.layout.num_groups > 1
    cancelled = job("a")
    cancelled.cancelled.set()
    pulls.submit(cancelled)
    assert reports.get(timeout=TIMEOUT_S).job is cancelled
    assert transfer.num_gets == 0


def test_unforeseen_error_is_reported_and_the_thread_goes_on(
    pulls: PullThread, transfer: GatedTransfer, reports: queue.Queue[PullDone], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(transfer, "get", None)
        pulls.submit(job("a"))
        done = reports.get(timeout=TIMEOUT_S)
    assert done.missing == [0]
    assert done.error is not None
    assert done.error.code == "Internal"
    pulls.submit(job("b"))
    assert reports.get(timeout=TIMEOUT_S).error is None


def test_a_job_is_bounded_in_bytes(prefill: Prefill) -> None:
    blocks = blocks_per_job(prefill.layout)
    assert blocks * prefill.layout.block_bytes <= 32 << 20 < (blocks + 1) * prefill.layout.block_bytes
