"""StepLog: order, acknowledgements and the page fence, also under random interleavings."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.pool import RequestKey
from moontide_proto.v1 import stage_pb2
from prefill_node.step_log import LogViolation, StepLog

A, B = RequestKey("a", 1), RequestKey("b", 1)


def make_chunk(key: RequestKey, first_token: int = 0, num_tokens: int = 8) -> stage_pb2.Chunk:
    return stage_pb2.Chunk(
        request_id=key.request_id, request_epoch=key.epoch, first_token=first_token, num_tokens=num_tokens
    )


def test_entries_are_numbered_without_gaps_and_carry_the_epoch() -> None:
    log = StepLog(epoch=7, num_stages=1)
    entries = [
        log.append_fetch(A, block_hashes=b"", pages=[1], first_block=0),
        log.append_compute([make_chunk(B)]),
        log.append_end(B),
    ]
    assert [(entry.epoch, entry.seq) for entry in entries] == [(7, 1), (7, 2), (7, 3)]


def test_step_is_in_flight_until_every_stage_has_computed_it() -> None:
    log = StepLog(epoch=1, num_stages=2)
    log.append_compute([make_chunk(A)])
    log.step_done(0, 1)
    assert log.in_flight_steps == 1
    log.step_done(1, 1)
    assert (log.in_flight_steps, log.open_puts) == (0, 1)


def test_each_stage_has_its_own_steps_to_compute() -> None:
    log = StepLog(epoch=1, num_stages=2)
    first, second = [make_chunk(A), make_chunk(B)], [make_chunk(A, 8)]
    log.append_compute(first)
    log.append_compute(second)
    log.step_done(0, 1)
    assert log.uncomputed(0) == [tuple(second)]
    assert log.uncomputed(1) == [tuple(first), tuple(second)]


def test_puts_are_done_when_the_last_stage_says_so() -> None:
    log = StepLog(epoch=1, num_stages=2)
    log.append_compute([make_chunk(A)])
    assert log.puts_done(1, 1, failed=2) is None
    outcome = log.puts_done(0, 1, failed=1)
    assert outcome is not None
    assert outcome.failed == 3
    assert [chunk.request_id for chunk in outcome.chunks] == ["a"]


def test_fetch_reaches_as_far_as_the_stage_that_got_least() -> None:
    log = StepLog(epoch=1, num_stages=3)
    log.append_fetch(A, block_hashes=b"", pages=[0, 1, 2], first_block=0)
    assert log.fetch_done(0, A, 3) is None
    assert log.fetch_done(2, A, 1) is None
    assert log.fetch_done(1, A, 2) == 1


def test_pages_are_free_when_every_stage_has_acknowledged_the_end() -> None:
    log = StepLog(epoch=1, num_stages=2)
    log.append_compute([make_chunk(A)])
    log.append_end(A)
    for stage_idx in (0, 1):
        log.step_done(stage_idx, 1)
        log.puts_done(stage_idx, 1, failed=0)
    assert not log.end_done(1, A)
    assert log.end_done(0, A)
    assert not log.has_open_work
    assert not log.knows(A)


def test_end_with_open_work_is_a_violation() -> None:
    log = StepLog(epoch=1, num_stages=1)
    log.append_compute([make_chunk(A)])
    log.append_end(A)
    log.step_done(0, 1)
    with pytest.raises(LogViolation, match="work of it open"):
        log.end_done(0, A)


@pytest.mark.parametrize(
    "report",
    [
        lambda log: log.step_done(0, 9),
        lambda log: (log.step_done(0, 2), log.step_done(0, 1)),
        lambda log: (log.step_done(0, 1), log.step_done(0, 1)),
        lambda log: (log.puts_done(0, 1, failed=0), log.puts_done(0, 1, failed=0)),
        lambda log: log.fetch_done(0, A, 1),
        lambda log: log.end_done(0, A),
    ],
    ids=["unknown step", "older step", "step twice", "puts twice", "fetch that is not open", "end that is not open"],
)
def test_reports_that_cannot_be_are_violations(report: Callable[[StepLog], object]) -> None:
    log = StepLog(epoch=1, num_stages=2)
    log.append_compute([make_chunk(A)])
    log.append_compute([make_chunk(A, 8)])
    with pytest.raises(LogViolation):
        report(log)


class _FakeStage:
    """Applies the log in order; its compute, puts and fetches end whenever the test says."""

    def __init__(self) -> None:
        self.entries: deque[stage_pb2.LogEntry] = deque()
        self.putting: list[stage_pb2.LogEntry] = []
        self.fetching: list[RequestKey] = []
        self.ended: list[RequestKey] = []

    def holds(self, key: RequestKey) -> bool:
        names = [
            chunk.request_id
            for entry in [*self.entries, *self.putting]
            if entry.HasField("compute")
            for chunk in entry.compute.chunks
        ]
        return key.request_id in names or key in self.fetching


class FenceMachine(RuleBasedStateMachine):
    """Random requests, cancels and reports: a page is never free with work open on any stage."""

    def __init__(self) -> None:
        super().__init__()
        self.log = StepLog(epoch=1, num_stages=3)
        self.stages = [_FakeStage() for _ in range(3)]
        self.live: list[RequestKey] = []
        self.cursor: dict[RequestKey, int] = {}
        self.freed: set[RequestKey] = set()
        self.fetched: set[RequestKey] = set()
        self.count = 0

    def _send(self, entry: stage_pb2.LogEntry) -> None:
        for stage in self.stages:
            if entry.HasField("fetch"):
                stage.fetching.append(RequestKey(entry.fetch.request_id, entry.fetch.request_epoch))
            elif entry.HasField("end"):
                stage.ended.append(RequestKey(entry.end.request_id, entry.end.request_epoch))
            else:
                stage.entries.append(entry)

    @rule(with_fetch=st.booleans())
    def arrive(self, with_fetch: bool) -> None:
        key = RequestKey(f"r{self.count}", 1)
        self.count += 1
        self.cursor[key] = 0
        if with_fetch:
            self._send(self.log.append_fetch(key, block_hashes=b"", pages=[0, 1], first_block=0))
        else:
            self.fetched.add(key)
        self.live.append(key)

    @precondition(lambda self: any(key in self.fetched for key in self.live))
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        ready = [key for key in self.live if key in self.fetched]
        keys = data.draw(st.lists(st.sampled_from(ready), min_size=1, max_size=2, unique=True))
        self._send(self.log.append_compute([make_chunk(key, self.cursor[key]) for key in keys]))
        for key in keys:
            self.cursor[key] += 8

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.live))
        self.live.remove(key)
        if self.log.knows(key):
            self._send(self.log.append_end(key))
        else:
            self.freed.add(key)

    @rule(stage_idx=st.integers(0, 2))
    def finish_compute(self, stage_idx: int) -> None:
        stage = self.stages[stage_idx]
        if stage.entries:
            entry = stage.entries.popleft()
            stage.putting.append(entry)
            self.log.step_done(stage_idx, entry.seq)

    @rule(stage_idx=st.integers(0, 2))
    def finish_puts(self, stage_idx: int) -> None:
        stage = self.stages[stage_idx]
        if stage.putting:
            self.log.puts_done(stage_idx, stage.putting.pop(0).seq, failed=0)

    @rule(stage_idx=st.integers(0, 2), num_blocks=st.integers(0, 2))
    def finish_fetch(self, stage_idx: int, num_blocks: int) -> None:
        stage = self.stages[stage_idx]
        if stage.fetching:
            key = stage.fetching.pop(0)
            if self.log.fetch_done(stage_idx, key, num_blocks) is not None:
                self.fetched.add(key)

    @rule(stage_idx=st.integers(0, 2))
    def acknowledge_ends(self, stage_idx: int) -> None:
        stage = self.stages[stage_idx]
        for key in [key for key in stage.ended if not stage.holds(key)]:
            stage.ended.remove(key)
            if self.log.end_done(stage_idx, key):
                self.freed.add(key)

    @invariant()
    def no_page_is_free_with_open_work(self) -> None:
        for key in self.freed:
            assert not any(stage.holds(key) or key in stage.ended for stage in self.stages)

    @invariant()
    def books_agree(self) -> None:
        self.log.check_invariants()
        open_steps = {entry.seq for stage in self.stages for entry in stage.entries}
        assert self.log.in_flight_steps == len(open_steps)

    def teardown(self) -> None:
        """Everything ends: then nothing is open and everything is free."""
        for key in list(self.live):
            self.live.remove(key)
            if self.log.knows(key):
                self._send(self.log.append_end(key))
            else:
                self.freed.add(key)
        for stage_idx, stage in enumerate(self.stages):
            while stage.fetching:
                self.finish_fetch(stage_idx, 1)
            while stage.entries:
                self.finish_compute(stage_idx)
            while stage.putting:
                self.finish_puts(stage_idx)
            self.acknowledge_ends(stage_idx)
        assert not self.log.has_open_work
        assert self.freed == set(self.cursor)


TestFence = FenceMachine.TestCase
TestFence.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
