"""PullThread: order of jobs, what it reports and when, also when the store fails in an unforeseen way."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import pytest

from decode_node.kv_pull import PullArriving, PullDone, PullJob, PullThread, blocks_per_job
from kvstore.client import BlockRef, StoreClient
from kvstore.pool import RequestKey
from kvstore.transfer.memory import MemoryStore
from moontide.clock import MonotonicClock
from moontide.sampling_params import SamplingParams
from tests.unit.decode_node.decode_rig import TIMEOUT_S, GatedTransfer, Prefill, load_runner

pytestmark = pytest.mark.usefixtures("group_per_get")

Reports = queue.Queue[PullArriving | PullDone]


@pytest.fixture
def transfer(store: MemoryStore) -> GatedTransfer:
    return GatedTransfer(store)


@pytest.fixture
def reports() -> Reports:
    return queue.Queue()


@pytest.fixture
def pulls(prefill: Prefill, transfer: GatedTransfer, reports: Reports) -> Iterator[PullThread]:
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


def next_done(reports: Reports) -> PullDone:
    done = reports.get(timeout=TIMEOUT_S)
    assert isinstance(done, PullDone)
    return done


def test_urgent_jobs_go_first_and_others_in_order(pulls: PullThread, transfer: GatedTransfer, reports: Reports) -> None:
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
    pulls: PullThread, transfer: GatedTransfer, reports: Reports
) -> None:
    pulls.submit(job("a"))
    done = next_done(reports)
    assert (done.missing, done.error) == ([0], None)
    assert transfer.num_gets == 1


def test_cancelled_job_reads_no_further_group_and_is_still_reported(
    pulls: PullThread, prefill: Prefill, transfer: GatedTransfer, reports: Reports
) -> None:
    assert prefill.layout.num_groups > 1
    cancelled = job("a")
    cancelled.cancelled.set()
    pulls.submit(cancelled)
    assert reports.get(timeout=TIMEOUT_S).job is cancelled
    assert transfer.num_gets == 0


def test_first_group_is_reported_and_the_gate_opens_to_the_last_only_after_the_report(
    prefill: Prefill, transfer: GatedTransfer
) -> None:
    prefill.run("a", [1, 2, 3], SamplingParams(max_tokens=1))
    num_groups = prefill.layout.num_groups
    assert num_groups == 3
    pulled = job("a")
    reports: queue.Queue[tuple[PullArriving | PullDone, bool]] = queue.Queue()
    pulls = PullThread(
        StoreClient(transfer, prefill.layout),
        load_runner(prefill, transfer, 4).kv,
        clock=MonotonicClock(),
        report=lambda report: reports.put((report, pulled.gate.wait(num_groups, timeout_s=0))),
    )
    transfer.free_gets = 1
    transfer.gate.clear()
    pulls.start()
    pulls.submit(pulled)
    arriving, is_open = reports.get(timeout=TIMEOUT_S)
    assert isinstance(arriving, PullArriving)
    assert arriving.job is pulled
    assert arriving.rest_s >= 0
    assert not is_open
    assert pulled.gate.wait(1, timeout_s=0)
    assert not pulled.gate.wait(2, timeout_s=0)
    transfer.gate.set()
    done, is_open = reports.get(timeout=TIMEOUT_S)
    assert isinstance(done, PullDone)
    assert done.missing == []
    assert not is_open, "the report comes before that of a step that waits for the last group"
    assert pulled.gate.wait(num_groups, timeout_s=TIMEOUT_S)
    pulls.close()


def test_pull_that_misses_a_later_group_ends_the_wait_at_its_gate(
    pulls: PullThread, prefill: Prefill, store: MemoryStore, reports: Reports
) -> None:
    prompt = prefill.run("a", [1, 2, 3], SamplingParams(max_tokens=1))
    del store.objects[prompt.object_keys[1]]
    pulled = job("a")
    pulls.submit(pulled)
    assert not pulled.gate.wait(2, timeout_s=TIMEOUT_S)
    assert pulled.gate.wait(1, timeout_s=0)
    assert isinstance(reports.get(timeout=TIMEOUT_S), PullArriving)
    assert next_done(reports).missing == [0]


def test_unforeseen_error_is_reported_and_the_thread_goes_on(
    pulls: PullThread, transfer: GatedTransfer, reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(transfer, "get", None)
        pulls.submit(job("a"))
        done = next_done(reports)
    assert done.missing == [0]
    assert done.error is not None
    assert done.error.code == "Internal"
    pulls.submit(job("b"))
    assert next_done(reports).error is None


def test_a_job_is_bounded_in_bytes(prefill: Prefill) -> None:
    blocks = blocks_per_job(prefill.layout)
    assert blocks * prefill.layout.block_bytes <= 32 << 20 < (blocks + 1) * prefill.layout.block_bytes
