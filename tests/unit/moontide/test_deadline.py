import pytest

from moontide.deadline import Deadline
from moontide.errors import DeadlineExceeded
from tests.fakes.clock import FakeClock


def test_deadline_runs_out_with_its_clock_and_is_never_reset() -> None:
    clock = FakeClock()
    deadline = Deadline.after(2.0, clock)
    clock.advance(1.5)
    assert deadline.remaining_s() == pytest.approx(0.5)
    deadline.check("waiting for pages")
    clock.advance(0.5)
    assert deadline.expired
    assert deadline.remaining_s() == 0.0
    with pytest.raises(DeadlineExceeded, match="waiting for pages"):
        deadline.check("waiting for pages")
