"""KVPusher: what goes together in a call, what is repeated, what is given up, what is reported."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kvstore.block import BlockHash
from kvstore.client import BlockRef
from kvstore.pool import RequestKey
from kvstore.transfer.base import PutStatus
from prefill_node.kv_push import KVPusher, PushBlock, PushResult, StepPush
from prefill_node.metrics import StageMetrics
from tests.fakes.clock import FakeClock

A, B = RequestKey("a", 1), RequestKey("b", 1)
OK, NO_SPACE, FAILED = PutStatus.STORED_OR_OPEN, PutStatus.NO_SPACE, PutStatus.FAILED
OBJECT_BYTES = 100


def block(key: RequestKey, page: int) -> PushBlock:
    return PushBlock(BlockRef(BlockHash(page.to_bytes(32, "big")), key.request_id, key.epoch), page)


class FakeClient:
    """Answers puts from a script, one list of statuses per call, and with success after its end."""

    def __init__(self, puts: Sequence[Any] = ()) -> None:
        self.puts = list(puts)
        self.calls: list[list[tuple[int, int]]] = []
        """(layer group, page) of the objects of each call."""
        self.segments: set[str] = set()
        self.during_put: Callable[[], object] = lambda: None
        """Called in every call."""

    def put(self, objects: Sequence[tuple[BlockRef, int, int]], *, segment: str) -> list[PutStatus]:
        self.calls.append([(group_idx, address) for _, group_idx, address in objects])
        self.segments.add(segment)
        self.during_put()
        answer = self.puts.pop(0) if self.puts else [OK] * len(objects)
        if isinstance(answer, Exception):
            raise answer
        return list(answer)


class FakePages:
    def __init__(self, num_groups: int) -> None:
        self.groups = range(num_groups)
        self.num_marks = 0
        self.copied: list[tuple[int, list[int], int]] = []
        """Layer group, pages, and the mark that was waited for."""

    def last_mark(self, _group_idx: int) -> int:
        self.num_marks += 1
        return self.num_marks

    def copy_out(self, group_idx: int, pages: list[int], *, written: int) -> None:
        self.copied.append((group_idx, pages, written))

    def slot_address(self, _group_idx: int, page: int) -> int:
        return page

    def slot_bytes(self, _group_idx: int) -> int:
        return OBJECT_BYTES


class HeldThread:
    """A put thread whose jobs run when the test says so."""

    def __init__(self) -> None:
        self._jobs: list[Callable[[], None]] = []

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.append(job)

    def run(self) -> None:
        while self._jobs:
            self._jobs.pop(0)()


class Rig:
    """A pusher and everything around it."""

    def __init__(
        self,
        client: FakeClient | None = None,
        *,
        num_groups: int = 1,
        mode: str = "layer-wise",
        max_call_bytes: int = 1 << 20,
        epoch_over: bool = False,
    ) -> None:
        self.client = client or FakeClient()
        self.pages = FakePages(num_groups)
        self.thread = HeldThread()
        self.clock = FakeClock()
        self.registry = CollectorRegistry()
        self.ended: set[RequestKey] = set()
        self.results: list[PushResult] = []
        self.pusher = KVPusher(
            client=self.client,  # type: ignore[arg-type]
            kv=self.pages,  # type: ignore[arg-type]
            put_thread=self.thread,  # type: ignore[arg-type]
            clock=self.clock,
            metrics=StageMetrics(self.registry),
            mode=mode,
            max_call_bytes=max_call_bytes,
            skip=self.ended.__contains__,
            on_done=self.results.append,
            retry_wait=lambda _: epoch_over,
            segment="here",
        )
        self._num_steps = 0

    def plan(self, *blocks: PushBlock, finished: Iterable[RequestKey] = (), step_s: float | None = None) -> StepPush:
        self._num_steps += 1
        return self.pusher.plan(
            self._num_steps,
            blocks,
            requests=list(dict.fromkeys(block.key for block in blocks)),
            finished=list(finished),
            step_s=step_s,
        )

    def compute(self, step: StepPush) -> None:
        """All groups, while the put thread stands still."""
        for group_idx in self.pages.groups:
            self.pusher.group_done(step, group_idx)

    def compute_and_put(self, step: StepPush) -> PushResult:
        """Each group is put before the next is computed."""
        for group_idx in self.pages.groups:
            self.pusher.group_done(step, group_idx)
            self.thread.run()
        return self.results[-1]

    def end(self, key: RequestKey) -> None:
        self.ended.add(key)
        self.pusher.end_request(key)

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"prefill_{name}", labels) or 0.0


def test_reports_once_after_the_last_group() -> None:
    rig = Rig(num_groups=3)
    result = rig.compute_and_put(rig.plan(block(A, 7), block(B, 8)))
    assert (result.seq, result.failed, list(result.requests)) == (1, 0, [A, B])
    assert rig.client.calls == [[(0, 7), (0, 8)], [(1, 7), (1, 8)], [(2, 7), (2, 8)]]
    assert len(rig.results) == 1
    assert rig.client.segments == {"here"}


def test_repeats_only_what_failed() -> None:
    rig = Rig(FakeClient(puts=[[OK, NO_SPACE, FAILED], [FAILED, OK], [OK]]))
    result = rig.compute_and_put(rig.plan(block(A, 1), block(A, 2), block(B, 3)))
    assert result.failed == 0
    assert rig.client.calls == [[(0, 1), (0, 2), (0, 3)], [(0, 2), (0, 3)], [(0, 2)]]


def test_gives_up_after_some_attempts_and_says_how_many_objects_failed() -> None:
    rig = Rig(FakeClient(puts=[[FAILED, FAILED]] * 10))
    assert rig.compute_and_put(rig.plan(block(A, 1), block(B, 2))).failed == 2
    assert 1 < len(rig.client.calls) < 10


def test_ended_epoch_repeats_nothing() -> None:
    rig = Rig(FakeClient(puts=[[FAILED]] * 10), epoch_over=True)
    rig.compute_and_put(rig.plan(block(A, 1)))
    assert len(rig.client.calls) == 1


def test_blocks_of_ended_requests_are_left_out() -> None:
    rig = Rig()
    rig.end(A)
    assert rig.compute_and_put(rig.plan(block(A, 1), block(B, 2))).failed == 0
    assert rig.client.calls == [[(0, 2)]]


def test_request_that_ends_between_two_attempts_is_not_put_again() -> None:
    rig = Rig(FakeClient(puts=[[FAILED, FAILED]]))
    rig.client.during_put = lambda: rig.end(A)
    assert rig.compute_and_put(rig.plan(block(A, 1), block(B, 2))).failed == 0
    assert rig.client.calls == [[(0, 1), (0, 2)], [(0, 2)]]


def test_put_that_raises_counts_as_failed_and_the_next_group_goes_on() -> None:
    rig = Rig(FakeClient(puts=[RuntimeError("broken")]), num_groups=2)
    assert rig.compute_and_put(rig.plan(block(A, 1), block(B, 2))).failed == 2
    assert len(rig.client.calls) == 2


def test_all_that_waits_for_a_call_goes_with_the_next_one() -> None:
    rig = Rig(num_groups=3)
    first, second = rig.plan(block(A, 1)), rig.plan(block(A, 2))

    def compute_more() -> None:
        if len(rig.client.calls) == 1:
            for step, group_idx in ((first, 1), (first, 2), (second, 0)):
                rig.pusher.group_done(step, group_idx)

    rig.client.during_put = compute_more
    rig.pusher.group_done(first, 0)
    rig.thread.run()
    assert rig.client.calls == [[(0, 1)], [(1, 1), (2, 1), (0, 2)]]
    assert [result.seq for result in rig.results] == [1]
    rig.pusher.group_done(second, 1)
    rig.pusher.group_done(second, 2)
    rig.thread.run()
    assert rig.client.calls[2:] == [[(1, 2), (2, 2)]]
    assert [result.seq for result in rig.results] == [1, 2]


def test_failures_of_a_shared_call_are_told_to_the_steps_they_belong_to() -> None:
    rig = Rig(FakeClient(puts=[[OK, FAILED, FAILED]]), epoch_over=True)
    rig.compute(rig.plan(block(A, 1)))
    rig.compute(rig.plan(block(B, 2), block(B, 3)))
    rig.thread.run()
    assert [(result.seq, result.failed) for result in rig.results] == [(1, 0), (2, 2)]


def test_no_call_takes_more_than_the_bound_and_a_larger_object_goes_alone() -> None:
    rig = Rig(num_groups=2, max_call_bytes=3 * OBJECT_BYTES)
    rig.compute(rig.plan(block(A, 1), block(A, 2)))
    rig.compute(rig.plan(block(A, 3), block(A, 4)))
    rig.thread.run()
    assert [len(call) for call in rig.client.calls] == [3, 3, 2]
    narrow = Rig(max_call_bytes=OBJECT_BYTES - 1)
    narrow.compute(narrow.plan(block(A, 1), block(A, 2)))
    narrow.thread.run()
    assert [len(call) for call in narrow.client.calls] == [1, 1]


def test_compute_goes_on_while_puts_stand_still_and_what_waits_is_seen() -> None:
    rig = Rig(num_groups=2, max_call_bytes=2 * OBJECT_BYTES)
    rig.client.during_put = lambda: rig.clock.advance(3)
    rig.compute(rig.plan(block(A, 1)))
    rig.clock.advance(1)
    rig.compute(rig.plan(block(A, 2)))
    assert rig.client.calls == []
    assert rig.metric("put_waiting_bytes") == 4 * OBJECT_BYTES
    rig.thread.run()
    assert rig.metric("put_waiting_bytes") == 0
    assert rig.metric("put_seconds_total") == 3 + 3
    assert rig.metric("put_wait_seconds_total") == 1 + 3
    assert rig.metric("put_bytes_total") == 4 * OBJECT_BYTES
    assert (rig.metric("put_batch_objects_count"), rig.metric("put_batch_objects_sum")) == (2, 4)
    assert [result.put_s for result in rig.results] == [3, 3]


def test_copy_to_the_host_waits_for_the_writes_of_its_own_step_only() -> None:
    rig = Rig(num_groups=2)
    rig.compute(rig.plan(block(A, 1), block(A, 2)))
    rig.compute(rig.plan(block(A, 3)))
    rig.thread.run()
    assert rig.pages.copied == [(0, [1, 2], 1), (1, [1, 2], 2), (0, [3], 3), (1, [3], 4)]


def test_put_at_the_end_of_the_step_is_one_call() -> None:
    rig = Rig(num_groups=3, mode="at-end")
    step = rig.plan(block(A, 1))
    rig.pusher.group_done(step, 0)
    rig.pusher.group_done(step, 1)
    rig.thread.run()
    assert rig.client.calls == []
    rig.pusher.group_done(step, 2)
    rig.thread.run()
    assert rig.client.calls == [[(0, 1), (1, 1), (2, 1)]]
    assert len(rig.results) == 1
    assert rig.metric("pushes_total", mode="at-end") == 1


def test_put_after_prefill_waits_for_the_last_step_of_the_prompt() -> None:
    rig = Rig(mode="after-prefill", num_groups=2)
    rig.compute(rig.plan(block(A, 1), block(B, 2), finished=[B]))
    rig.thread.run()
    assert rig.client.calls == [[(0, 2), (1, 2)]]
    assert rig.results == []
    assert rig.metric("put_waiting_bytes") == 2 * OBJECT_BYTES
    rig.compute(rig.plan(block(A, 3), finished=[A]))
    rig.thread.run()
    assert rig.client.calls[1:] == [[(0, 1), (1, 1), (0, 3), (1, 3)]]
    assert [result.seq for result in rig.results] == [1, 2]
    assert rig.metric("put_waiting_bytes") == 0


@pytest.mark.parametrize("ended", [None, A, B])
def test_steps_of_two_prompts_that_end_together_are_reported_in_their_order(ended: RequestKey | None) -> None:
    rig = Rig(mode="after-prefill")
    rig.compute(rig.plan(block(A, 1)))
    rig.compute(rig.plan(block(B, 2)))
    if ended is not None:
        rig.ended.add(ended)  # its end is in the log, and has not been told yet
    rig.compute(rig.plan(block(A, 3), block(B, 4), finished=[A, B]))
    rig.thread.run()
    assert [result.seq for result in rig.results] == [1, 2, 3]


@pytest.mark.parametrize("ends_first", [True, False])
def test_what_is_held_of_a_request_that_ends_is_over_without_a_put(*, ends_first: bool) -> None:
    rig = Rig(mode="after-prefill")
    step = rig.plan(block(A, 1))
    if ends_first:
        rig.end(A)
    rig.compute(step)
    if not ends_first:
        rig.end(A)
    rig.thread.run()
    assert rig.client.calls == []
    assert [(result.seq, result.failed) for result in rig.results] == [(1, 0)]
    assert rig.metric("put_waiting_bytes") == 0


def test_auto_puts_layer_wise_until_calls_are_known_to_cost_more_than_they_hide() -> None:
    """A call takes 1 s and 0.01 s per object; a short step of 2 s would wait for four of them."""
    rig = Rig(num_groups=4, mode="auto")
    rig.client.during_put = lambda: rig.clock.advance(1.0 + 0.01 * len(rig.client.calls[-1]))
    short = [block(A, 1)]
    long = [block(A, page) for page in range(1000)]
    assert rig.plan(*short, step_s=2.0).is_layer_wise
    for num_blocks in (1, 4, 16) * 3:
        rig.compute_and_put(rig.plan(*long[:num_blocks]))
    assert not rig.plan(*short, step_s=2.0).is_layer_wise
    assert rig.plan(*long, step_s=40.0).is_layer_wise
    assert rig.plan(*short).is_layer_wise, "nobody knows how long the step takes"
    assert rig.metric("pushes_total", mode="at-end") == 1
