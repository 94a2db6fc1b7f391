from __future__ import annotations

import pytest

from conductor.timelines import RequestRecord, TimelineRing
from moontide.timeline import Span
from tests.fakes.clock import FakeClock


def test_spans_of_other_hosts_are_moved_to_the_arrival_at_the_conductor() -> None:
    clock = FakeClock(100.0)
    record = RequestRecord("r", arrival_s=100.0, clock=clock)
    # A stage sent its message 2 s after its own arrival moment; it came here at 103.
    record.add_remote([Span(name="chunk", track="stage 0", start_s=0.5, duration_s=1.0)], origin_s=103.0 - 2.0)
    record.add("tokenize", 100.0, 100.5)
    clock.advance(4.0)
    assert record.timeline().outcome == ""
    assert record.timeline().duration_s == 4.0
    record.end("stop")
    clock.advance(9.0)
    timeline = record.timeline()
    assert [(s.name, s.start_s, s.end_s) for s in timeline.spans] == [("tokenize", 0.0, 0.5), ("chunk", 1.5, 2.5)]
    assert timeline.duration_s == 4.0
    assert timeline.outcome == "stop"


def test_a_request_ends_once() -> None:
    record = RequestRecord("r", arrival_s=0.0, clock=FakeClock())
    record.end("stop")
    with pytest.raises(AssertionError, match="ended twice"):
        record.end("cancelled")


def test_ring_forgets_the_oldest_and_keeps_the_latest_of_equal_ids() -> None:
    ring = TimelineRing(max_remembered=2)
    for name in ("a", "b", "a", "c"):
        ring.put(RequestRecord(name, arrival_s=0.0, clock=FakeClock()))
    assert ring.get("b") is None
    assert ring.get("a") is not None
    assert ring.get("c") is not None
