from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from front import until

from conductor.fair_queue import CREDIT_QUEUES, RELEASE_PERIOD_S, STARVED_S, FairQueue
from conductor.tenants import Tenant
from moontide.clock import MonotonicClock
from moontide.deadline import Deadline
from moontide.errors import DeadlineExceeded, Rejected, RejectReason
from moontide.fair_share import PRIORITY_LABELS
from tests.fakes.clock import FakeClock

A, B = Tenant(name="a"), Tenant(name="b")
BURST = 2 + CREDIT_QUEUES * 4
"""Requests of 1 s that go past one who waits, for groups that get 4 s ahead: half of those, and the credit."""


class Groups:
    """Prefill groups that take so much work, and note what they got."""

    def __init__(self, room_s: float = 0.0, num_groups: int = 1, release_queue_s: float = 0.0) -> None:
        """`release_queue_s` 0: no share of what is ahead is due to anybody."""
        self.room_s = room_s
        self.num_groups = num_groups
        self.got: list[str] = []
        self.attempts: list[str] = []
        self.clock = FakeClock()
        self._ids = itertools.count()
        self.queue = FairQueue(
            lambda: self.room_s,
            lambda: self.num_groups,
            ahead_s=lambda: max(0.0, release_queue_s * self.num_groups - self.room_s),
            release_queue_s=release_queue_s,
            clock=self.clock,
        )

    async def send(
        self,
        tenant: Tenant,
        work_s: float = 1.0,
        *,
        num_tokens: int = 1000,
        priority: int = 0,
        timeout_s: float = 20.0,
        has_begun: bool = False,
    ) -> None:
        deadline = Deadline.after(timeout_s, MonotonicClock())
        attempt_id = str(next(self._ids))
        async with self.queue.turn(
            tenant,
            attempt_id=attempt_id,
            priority=priority,
            num_tokens=num_tokens,
            work_s=work_s,
            busy_s=work_s,
            deadline=deadline,
            has_begun=has_begun,
        ):
            self.got.append(tenant.name)
            self.attempts.append(attempt_id)
            self.room_s -= work_s

    def done(self, *order: int) -> None:
        """First tokens of those that the groups got, by their place in `got`."""
        for idx in order:
            self.queue.prefilled(self.attempts[idx])

    async def waiting(self, *requests: tuple[Tenant, int], work_s: float = 1.0) -> list[asyncio.Task[None]]:
        """Requests (tenant, class) that wait, in the order of their arrival."""
        tasks = []
        for tenant, priority in requests:
            tasks.append(asyncio.create_task(self.send(tenant, work_s, priority=priority)))
            await asyncio.sleep(0)
        return tasks

    async def take(self, num_requests: int, room_s: float) -> str:
        """Names of the next ones that the groups get."""
        known = len(self.got)
        self.room_s = room_s
        await until(lambda: len(self.got) == known + num_requests)
        return "".join(self.got[known:])


async def behind_a_long_one() -> tuple[Groups, asyncio.Task[None]]:
    """A long prompt of 16 s is in the group, with as many short ones as go past, and another long one waits."""
    groups = Groups(room_s=4.0, release_queue_s=4.0)
    await groups.send(A, 16.0, num_tokens=64_000)
    long = asyncio.create_task(groups.send(A, 16.0, num_tokens=64_000))
    await until(lambda: groups.queue.num_waiting == 1)
    for _ in range(4):
        await groups.send(A)
    return groups, long


@pytest_asyncio.fixture
async def groups() -> AsyncIterator[Groups]:
    made = Groups()
    yield made
    made.queue.check_invariants()
    made.queue.close()


async def test_nobody_waits_while_the_groups_take_work(groups: Groups) -> None:
    groups.room_s = 2.5
    for tenant in (A, A, B):
        async with asyncio.timeout(0):
            await groups.send(tenant)
    assert groups.got == ["a", "a", "b"]
    assert groups.queue.num_waiting == 0


async def test_tenants_take_turns_however_many_requests_one_has(groups: Groups) -> None:
    tasks = await groups.waiting(*[(A, 0)] * 6, *[(B, 0)] * 3)
    assert (groups.queue.num_waiting, groups.queue.waiting_s_of("normal")) == (9, 9.0)
    first = await groups.take(6, room_s=5.5)
    assert sorted(first) == list("aaabbb")
    assert await groups.take(3, room_s=2.5) == "aaa"
    await asyncio.gather(*tasks)


async def test_work_counts_and_not_requests(groups: Groups) -> None:
    tasks = [
        *await groups.waiting(*[(A, 0)] * 4, work_s=3.0),
        *await groups.waiting(*[(B, 0)] * 9, work_s=1.0),
    ]
    got = await groups.take(8, room_s=11.5)
    assert got.count("b") == 6
    groups.room_s = 1000.0
    await asyncio.gather(*tasks)


async def test_a_higher_class_goes_first(groups: Groups) -> None:
    tasks = await groups.waiting((A, 0), (A, 0), (B, 1), (B, 1))
    assert [groups.queue.num_waiting_of(label) for label in PRIORITY_LABELS] == [2, 2, 0]
    assert await groups.take(4, room_s=3.5) == "bbaa"
    await asyncio.gather(*tasks)


async def test_who_comes_while_others_wait_waits_too(groups: Groups) -> None:
    tasks = await groups.waiting((A, 0))
    groups.room_s = 5.0
    tasks += await groups.waiting((A, 0))
    assert groups.got == []
    await asyncio.gather(*tasks)


async def test_work_that_is_not_dispatched_yet_leaves_no_room_for_more(groups: Groups) -> None:
    groups.room_s = 1.0
    deadline = Deadline.after(20.0, MonotonicClock())
    async with groups.queue.turn(
        A, attempt_id="a", priority=0, num_tokens=1000, work_s=1.0, busy_s=1.5, deadline=deadline
    ):
        [task] = await groups.waiting((B, 0))
        assert groups.queue.num_waiting == 1
    await task


async def test_a_tenant_beyond_its_bound_is_refused_and_others_are_not(groups: Groups) -> None:
    small = Tenant(name="a", max_queued_s=2.0)
    tasks = await groups.waiting((small, 0), (small, 0), (B, 0))
    with pytest.raises(Rejected, match=r"2\.0 s of work of tenant a") as refused:
        await groups.send(small)
    assert refused.value.reason is RejectReason.TENANT_LIMIT
    assert refused.value.retry_after_s is not None
    assert refused.value.retry_after_s > 0
    tasks += await groups.waiting((B, 0))
    groups.room_s = 1000.0
    await asyncio.gather(*tasks)


async def test_an_answer_that_has_begun_waits_beyond_the_bound_of_its_tenant(groups: Groups) -> None:
    small = Tenant(name="a", max_queued_s=1.0)
    tasks = await groups.waiting((small, 0))
    tasks.append(asyncio.create_task(groups.send(small, has_begun=True)))
    await asyncio.sleep(0)
    assert groups.queue.num_waiting == 2
    assert await groups.take(2, room_s=1.5) == "aa"
    await asyncio.gather(*tasks)


async def test_without_groups_everybody_waits_and_goes_in_turn_when_they_are_back() -> None:
    groups = Groups(room_s=2.0, release_queue_s=4.0)
    tasks = [asyncio.create_task(groups.send(A)) for _ in range(8)]
    await until(lambda: groups.queue.num_waiting > 0)
    known, num_got = groups.queue.num_waiting, len(groups.got)
    groups.room_s, groups.num_groups = 0.0, 0
    tasks += await groups.waiting((B, 0))
    assert groups.queue.num_waiting == known + 1, "its credit is for groups that are there"
    groups.num_groups = 1
    await groups.take(2, room_s=1.5)
    assert "b" in groups.got[num_got:]
    assert groups.queue.num_waiting == known - 1, "not all at once"
    groups.room_s = 1000.0
    await asyncio.gather(*tasks)


async def test_a_request_that_is_cancelled_or_late_leaves_nothing_behind(groups: Groups) -> None:
    tasks = await groups.waiting((A, 0), (A, 0), (B, 0))
    tasks[0].cancel()
    with pytest.raises(DeadlineExceeded, match="larger timeout"):
        await groups.send(B, timeout_s=0.01)
    with pytest.raises(asyncio.CancelledError):
        await tasks[0]
    assert groups.queue.num_waiting == 2
    assert sorted(await groups.take(2, room_s=1.5)) == ["a", "b"]
    await asyncio.gather(*tasks[1:])


async def test_a_request_that_is_cancelled_as_its_turn_comes_costs_nobody_a_turn(groups: Groups) -> None:
    tasks = await groups.waiting((A, 0), (B, 0))
    groups.room_s = 0.5
    groups.queue._release()
    tasks[0].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert groups.got == ["b"]
    tasks = await groups.waiting((A, 0), (B, 0))
    tasks[0].cancel()
    groups.room_s = 0.5
    groups.queue._release()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert groups.got == ["b", "b"]


async def test_expected_wait_counts_what_goes_before(groups: Groups) -> None:
    queue = groups.queue
    assert queue.wait_s(A.share(0), 1000) == 0
    heavy = Tenant(name="heavy", weight=2.0)
    tasks = await groups.waiting(*[(A, 0)] * 2, *[(heavy, 0)] * 10, *[(B, 1)] * 3, *[(B, -1)] * 5)
    assert queue.wait_s(B.share(1), 1000) == 3
    assert queue.wait_s(A.share(0), 1000) == 3 + 2 + 4, "classes above, its own, and twice as much of the heavy tenant"
    assert queue.wait_s(B.share(0), 1000) == 3, "it has nothing that waits in this class, so its turn is next"
    assert queue.wait_s(B.share(-1), 1000) == 3 + 2 + 10 + 5
    groups.room_s = 1000.0
    await asyncio.gather(*tasks)


async def test_groups_share_the_work_that_waits() -> None:
    groups = Groups(num_groups=4)
    tasks = await groups.waiting(*[(A, 0)] * 8)
    assert groups.queue.wait_s(A.share(0), 1000) == 2
    groups.room_s = 1000.0
    await asyncio.gather(*tasks)


async def test_a_tenant_within_its_share_of_what_is_ahead_does_not_wait() -> None:
    groups = Groups(room_s=4.0, release_queue_s=4.0)
    flood = [asyncio.create_task(groups.send(A)) for _ in range(20)]
    await until(lambda: groups.queue.num_waiting > 0)
    assert len(groups.got) == 4, "what the groups take"
    known = groups.queue.num_waiting
    async with asyncio.timeout(0):
        for _ in range(BURST):
            await groups.send(B)
    assert groups.got[4:] == ["b"] * BURST
    assert groups.queue.num_waiting == known
    [late] = await groups.waiting((B, 0))
    assert groups.queue.num_waiting == known + 1, "its share and its credit are used up"
    groups.room_s = 1000.0
    await asyncio.gather(*flood, late)


async def test_a_short_prompt_does_not_wait_for_a_long_one_of_its_own_tenant() -> None:
    groups = Groups(room_s=4.0, release_queue_s=4.0)
    await groups.send(A, 16.0, num_tokens=64_000)
    assert groups.room_s < 0
    assert groups.queue.wait_s(A.share(0), 1000) == 0
    assert groups.queue.queue_share(A.share(0), 1000) == 0, "stage 0 preempts the long one"
    assert groups.queue.queue_share(A.share(0), 64_000) == 1
    long = asyncio.create_task(groups.send(A, 16.0, num_tokens=64_000))
    await until(lambda: groups.queue.num_waiting == 1)
    async with asyncio.timeout(0):
        for _ in range(4):
            await groups.send(A)
    [short, last] = await groups.waiting((A, 0), (A, 0))
    assert groups.queue.num_waiting == 3, "there is enough of its size in the group"
    assert groups.queue.wait_s(A.share(0), 1000) == 2, "those of its size, not the long one"
    groups.room_s += 1.0
    groups.done(1)
    await short
    assert not last.done()
    groups.room_s += 1.0
    groups.done(2)
    await last
    assert not long.done()
    groups.room_s = 1000.0
    await long


async def test_a_long_prompt_that_is_nearly_done_lets_no_more_short_ones_past() -> None:
    groups, long = await behind_a_long_one()
    groups.room_s += 15.5
    [short] = await groups.waiting((A, 0))
    await asyncio.sleep(2 * RELEASE_PERIOD_S)
    assert groups.queue.num_waiting == 2, "of 4.5 s that are left, four are of its size"
    groups.room_s = 1000.0
    await asyncio.gather(long, short)


async def test_groups_that_are_slower_than_predicted_get_no_more_for_it() -> None:
    groups = Groups(room_s=4.0, release_queue_s=4.0)
    for _ in range(4):
        await groups.send(A)
    [waiting] = await groups.waiting((A, 0))
    groups.clock.advance(60.0)
    await asyncio.sleep(2 * RELEASE_PERIOD_S)
    assert not waiting.done(), "by prediction all is done, but the groups report that nothing is"
    [new] = await groups.waiting((A, 0))
    assert groups.queue.num_waiting == 2
    groups.room_s = 2.0
    await asyncio.gather(waiting, new)


async def test_the_oldest_prompt_is_not_passed_any_more_after_a_while() -> None:
    groups = Groups(room_s=4.0, release_queue_s=4.0)
    await groups.send(A, 16.0, num_tokens=64_000)
    old = asyncio.create_task(groups.send(A, 2.0, num_tokens=8_000, timeout_s=60.0))
    await old
    tasks = [asyncio.create_task(groups.send(A, 3.0, num_tokens=8_000, timeout_s=60.0)) for _ in range(2)]
    await until(lambda: groups.queue.num_waiting == 1)
    async with asyncio.timeout(0):
        await groups.send(A, 1.5)
    groups.clock.advance(STARVED_S + 0.1)
    short = asyncio.create_task(groups.send(A))
    await asyncio.sleep(2 * RELEASE_PERIOD_S)
    assert groups.queue.num_waiting == 2
    assert groups.queue.wait_s(A.share(0), 1000) == 3.0 + 1.0
    groups.room_s += 5.0
    groups.done(1, 2)
    await tasks[1]
    assert groups.room_s < 0, "it need not wait for a longer one in the group"
    groups.room_s = 1000.0
    await asyncio.gather(short, *tasks)


async def test_prompts_of_one_size_keep_their_order() -> None:
    groups, long = await behind_a_long_one()
    first = asyncio.create_task(groups.send(A, num_tokens=1001))
    [later] = await groups.waiting((A, 0))
    groups.room_s += 1.0
    groups.done(1)
    await first
    assert not later.done()
    groups.room_s = 1000.0
    await asyncio.gather(long, later)


async def test_rounding_lets_nobody_go(groups: Groups) -> None:
    groups.queue._leaving_s = -1e-16
    [waiting] = await groups.waiting((A, 0))
    await asyncio.sleep(2 * RELEASE_PERIOD_S)
    assert not waiting.done()
    groups.room_s = 1.0
    await waiting


async def test_of_what_is_ahead_of_a_group_only_some_goes_before_a_tenants_request() -> None:
    groups = Groups(room_s=1000.0, release_queue_s=1000.0)
    share_of = groups.queue.queue_share
    heavy = Tenant(name="heavy", weight=2.0)
    assert share_of(A.share(0), 1000) == 1.0, "nothing is known"
    await groups.send(A, 5.0)
    assert share_of(A.share(0), 1000) == 1.0
    assert share_of(B.share(0), 1000) == 0.0, "it has nothing there, so its turn is next"
    await groups.send(B, 1.0)
    await groups.send(heavy, 3.0)
    await groups.send(A, 1.0, priority=1)
    assert share_of(B.share(0), 1000) == pytest.approx((1 + 1 + 2 + 1) / 10), (
        "as much of a, itself, twice of heavy, and the class above"
    )
    assert share_of(A.share(1), 1000) == pytest.approx(1 / 10)
    groups.room_s += 4.0
    assert share_of(B.share(0), 1000) == pytest.approx(5 / 6), "what is done already is not its own, which is short"
    groups.done(3)
    assert share_of(B.share(0), 1000) == pytest.approx(4 / 6)
    groups.room_s -= 100.0
    assert share_of(B.share(0), 1000) == pytest.approx(4 / 9), "the work of other conductors is of the same kind"
    groups.done(0, 1, 2, 3)
    assert share_of(A.share(0), 1000) == 1.0, "nothing is known any more"


async def test_what_is_refused_by_the_groups_counts_for_nobody(groups: Groups) -> None:
    deadline = Deadline.after(20.0, MonotonicClock())
    groups.room_s = 1.0
    with pytest.raises(RuntimeError, match="refused"):
        async with groups.queue.turn(
            A, attempt_id="a", priority=0, num_tokens=1000, work_s=1.0, busy_s=1.0, deadline=deadline
        ):
            raise RuntimeError("refused")
    assert groups.queue.queue_share(B.share(0), 1000) == 1.0


async def test_nobody_goes_before_a_higher_class_that_waits() -> None:
    groups = Groups(release_queue_s=4.0)
    urgent = [asyncio.create_task(groups.send(A, priority=1)) for _ in range(10)]
    await until(lambda: groups.queue.num_waiting > 0)
    known = groups.queue.num_waiting
    [low] = await groups.waiting((B, 0))
    assert groups.queue.num_waiting == known + 1
    groups.room_s = 1000.0
    await asyncio.gather(*urgent, low)
    assert groups.got[-1] == "b"


async def test_a_deadline_that_has_passed_ends_at_once(groups: Groups) -> None:
    clock = FakeClock()
    deadline = Deadline.after(1.0, clock)
    clock.advance(2.0)
    with pytest.raises(DeadlineExceeded):
        async with groups.queue.turn(
            A, attempt_id="a", priority=0, num_tokens=1000, work_s=1.0, busy_s=1.0, deadline=deadline
        ):
            raise AssertionError("its turn came")
