from __future__ import annotations

import threading

from kvstore.transfer.mooncake import _MAX_BATCH, _InFlight
from tests.store_processes import wait_until


def test_entries_of_all_threads_together_stay_within_the_bound() -> None:
    in_flight = _InFlight()
    release, highest, now = threading.Event(), 0, 0
    lock = threading.Lock()

    def call(entries: int) -> None:
        nonlocal highest, now
        with in_flight.of(entries):
            with lock:
                now += entries
                highest = max(highest, now)
            assert release.wait(10)
            with lock:
                now -= entries

    threads = [threading.Thread(target=call, args=(_MAX_BATCH // 4,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    wait_until(lambda: now == _MAX_BATCH, what="a full bound", timeout_s=10)
    release.set()
    for thread in threads:
        thread.join(10)
    assert highest == _MAX_BATCH
    with in_flight.of(_MAX_BATCH):
        assert now == 0
