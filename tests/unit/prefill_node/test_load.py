"""load: what a group says about its recent speed."""

from __future__ import annotations

from prefill_node.load import RecentMedian, RecentSpeed


def test_speed_is_that_of_all_recent_transfers_together() -> None:
    speed = RecentSpeed()
    assert speed.bytes_per_s is None
    speed.add(100, 1.0)
    speed.add(900, 1.0)
    assert speed.bytes_per_s == 500
    speed.add(0, 5.0)
    speed.add(7, 0.0)
    speed.add(-7, 1.0)
    assert speed.bytes_per_s == 500, "transfers of nothing tell nothing"
    for _ in range(32):
        speed.add(10, 1.0)
    assert speed.bytes_per_s == 10, "old ones are forgotten"


def test_median_of_the_last_values() -> None:
    median = RecentMedian()
    assert median.value is None
    for value in (1.0, 100.0, 2.0):
        median.add(value)
    assert median.value == 2.0
    for _ in range(32):
        median.add(7.0)
    assert median.value == 7.0
