"""Where requests wait while every prefill group has work ahead, and in which order they leave: by class, then by tenants' shares.

    arrival -> [ turn ] -> choice of nodes -> dispatch -> stage 0
Groups get only so much work ahead that none of them idles (`conductor.release_queue_s`), so a tenant that floods has its requests here
and not before another's in the groups. A tenant within its share of what the groups have ahead does not wait at all: stage 0, which
divides what several conductors send by the same rule, serves it before the others. Nor does a prompt that is shorter than what its
tenant has there and here: stage 0 preempts a long one for it. Work is counted in predicted seconds of prefill.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from conductor.tenants import Tenant
from moontide.clock import Clock
from moontide.deadline import Deadline
from moontide.errors import DeadlineExceeded, Rejected, RejectReason
from moontide.fair_share import DeficitRoundRobin, Share

RELEASE_PERIOD_S = 0.02
"""How often it is looked whether the groups take more, while anybody waits; far below what they have ahead."""
CREDIT_QUEUES = 3
"""So many times what a group gets ahead a tenant may make up for that asked for less than its share: such a burst goes past a flood.
Stage 0 allows about as much."""
QUANTUM_S = 0.1
"""Work of a tenant's turn. Requests are not divided, so that of a long prompt is owed in the turns to come."""

STARVED_S = 30.0
"""While a tenant's oldest request has waited for so long, no shorter one of it goes past."""

_NOTHING_S = 1e-6
"""Less work is an error of rounding."""


@dataclass(eq=False, kw_only=True)
class _Waiting:
    share: Share
    num_tokens: int
    work_s: float
    since_s: float
    released: asyncio.Future[None]


class _Claimed:
    """Work of one claim, by the size of its prompts: class k holds those of 2^(k-1) tokens and more."""

    def __init__(self, share: Share) -> None:
        self.share = share
        self._by_size = [0.0] * 64

    def add(self, num_tokens: int, work_s: float) -> None:
        self._by_size[num_tokens.bit_length()] += work_s

    def work_s(self, num_tokens: int | None = None) -> float:
        """Of prompts of about so many tokens and less; by default of all."""
        return sum(self._by_size if num_tokens is None else self._by_size[: num_tokens.bit_length() + 1])

    def drain(self, done_s: float) -> None:
        """Short prompts go first."""
        for size, work_s in enumerate(self._by_size):
            taken_s = min(work_s, done_s)
            self._by_size[size] -= taken_s
            done_s -= taken_s


class _Ahead:
    """What the groups still have to do, by claim: a fluid that they drain as stage 0 divides its steps, by class and then by weight."""

    def __init__(self) -> None:
        self._at_s = 0.0
        self.by_claim: dict[tuple[int, str], _Claimed] = {}

    @property
    def total_s(self) -> float:
        return sum(claimed.work_s() for claimed in self.by_claim.values())

    def add(self, share: Share, num_tokens: int, work_s: float) -> None:
        self.by_claim.setdefault(share.key, _Claimed(share)).add(num_tokens, work_s)

    def of(self, share: Share, num_tokens: int) -> float:
        """What goes before a prompt of so many tokens of the claim."""
        claimed = self.by_claim.get(share.key)
        return claimed.work_s(num_tokens) if claimed else 0.0

    def longer_s(self, share: Share, num_tokens: int) -> float:
        """Of the claim, what a prompt of so many tokens goes before."""
        claimed = self.by_claim.get(share.key)
        return claimed.work_s() - claimed.work_s(num_tokens) if claimed else 0.0

    def drain(self, now_s: float, num_groups: int) -> None:
        """Work of as many seconds as have passed, by each group."""
        left_s, self._at_s = (now_s - self._at_s) * num_groups, now_s
        while self.by_claim and left_s > _NOTHING_S:
            highest = max(priority for priority, _ in self.by_claim)
            served = [each for each in self.by_claim.values() if each.share.priority == highest]
            weights = sum(each.share.weight for each in served)
            done_s = min(left_s, *(each.work_s() / each.share.weight * weights for each in served))
            for each in served:
                each.drain(done_s * each.share.weight / weights)
                if each.work_s() <= _NOTHING_S:
                    del self.by_claim[each.share.key]
            left_s -= done_s


class FairQueue:
    def __init__(
        self,
        room_s: Callable[[], float],
        num_groups: Callable[[], int],
        *,
        ahead_s: Callable[[], float],
        release_queue_s: float,
        clock: Clock,
    ) -> None:
        """
        Args:
            release_queue_s: how much work each group gets ahead.
            room_s: predicted seconds of work until each prefill group has so much ahead as it may; 0 while there is none; infinite while
                nothing is predicted.
            num_groups: prefill groups that share the work.
            ahead_s: predicted seconds of work that they have ahead together.
        """
        self._room_s = room_s
        self._ahead_s = ahead_s
        self._num_groups = num_groups
        self._release_queue_s = release_queue_s
        self._clock = clock
        self._turns = DeficitRoundRobin(QUANTUM_S, credit_s=CREDIT_QUEUES * release_queue_s)
        self._ahead = _Ahead()
        self._queues: dict[tuple[int, str], deque[_Waiting]] = {}
        self._leaving_s = 0.0
        """Work that has left and is not dispatched yet, so that room_s does not know it."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._queues.values()))

    def num_waiting_of(self, priority_label: str) -> int:
        return sum(map(len, self._queues_of(priority_label)))

    def waiting_s_of(self, priority_label: str) -> float:
        return sum(map(_work_s, self._queues_of(priority_label)))

    def wait_s(self, share: Share, num_tokens: int) -> float:
        """How long a new request of the claim is expected to wait here; 0 while the groups take it at once.

        Higher classes and the claim's own requests go before it, and of another tenant's as much as its weight allows meanwhile.
        """
        if self._goes_past(share, num_tokens):
            return 0.0
        own_s = _work_s(self._queues.get(share.key, ()))
        ahead_s = own_s
        for key, queue in self._queues.items():
            other = queue[0].share
            if other.priority > share.priority:
                ahead_s += _work_s(queue)
            elif other.priority == share.priority and key != share.key:
                ahead_s += min(_work_s(queue), own_s * other.weight / share.weight)
        return ahead_s / max(1, self._num_groups())

    def queue_share(self, share: Share, num_tokens: int) -> float:
        """Which part of what a group has ahead goes before a new prompt of so many tokens of the claim, as stage 0 divides its steps."""
        ahead = self._ahead
        ahead.drain(self._clock.now(), self._num_groups())
        if not ahead.by_claim:
            return 1.0
        before_s = own_s = ahead.of(share, num_tokens)
        for key, claimed in ahead.by_claim.items():
            other = claimed.share
            if other.priority > share.priority:
                before_s += claimed.work_s()
            elif other.priority == share.priority and key != share.key:
                before_s += min(claimed.work_s(), own_s * other.weight / share.weight)
        return min(1.0, before_s / ahead.total_s)

    @asynccontextmanager
    async def turn(
        self,
        tenant: Tenant,
        *,
        priority: int,
        num_tokens: int,
        work_s: float,
        deadline: Deadline,
        has_begun: bool = False,
    ) -> AsyncIterator[None]:
        """Wait for the request's turn. The body dispatches it, so that `room_s` counts its work from then on; it waits for nothing.

        Raises: Rejected beyond the tenant's `max_queued_s`, unless the client has a part of the answer; DeadlineExceeded.
        """
        share = tenant.share(priority)
        if not self._queues and self._has_room():
            self._turns.ranked([share])
            self._leave(share, num_tokens, work_s)
        elif self._goes_past(share, num_tokens):
            self._leave(share, num_tokens, work_s)
        else:
            if not has_begun:
                self._check_limit(tenant, share, num_tokens)
            await self._wait(share, num_tokens, work_s, deadline)
        try:
            yield
        finally:
            self._leaving_s -= work_s

    def check_invariants(self) -> None:
        """While nobody waits, nothing is kept for anybody."""
        assert all(self._queues.values()), "an empty queue is kept"
        assert self._queues or abs(self._leaving_s) < 1e-6, f"{self._leaving_s} s of work left and never arrived"

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def _wait(self, share: Share, num_tokens: int, work_s: float, deadline: Deadline) -> None:
        """Afterwards the work is leaving."""
        waiting = _Waiting(
            share=share,
            num_tokens=num_tokens,
            work_s=work_s,
            since_s=self._clock.now(),
            released=asyncio.get_running_loop().create_future(),
        )
        self._queues.setdefault(share.key, deque()).append(waiting)
        self._look_again()
        try:
            async with asyncio.timeout(deadline.remaining_s()):
                await waiting.released
        except BaseException as error:
            self._forget(waiting)
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(
                    f"deadline passed while {self.num_waiting} requests waited for a prefill group; give the request a larger timeout"
                ) from error
            raise

    def _queues_of(self, priority_label: str) -> Iterator[deque[_Waiting]]:
        return (queue for queue in self._queues.values() if queue[0].share.priority_label == priority_label)

    def _check_limit(self, tenant: Tenant, share: Share, num_tokens: int) -> None:
        limit_s = tenant.max_queued_s
        queued_s = sum(_work_s(queue) for (_, name), queue in self._queues.items() if name == tenant.name)
        if limit_s is not None and queued_s >= limit_s:
            raise Rejected(
                f"{queued_s:.1f} s of work of tenant {tenant.name} are waiting; its max_queued_s is {limit_s:g}: try again later",
                reason=RejectReason.TENANT_LIMIT,
                retry_after_s=self.wait_s(share, num_tokens) * (queued_s - limit_s) / queued_s + RELEASE_PERIOD_S,
            )

    def _forget(self, waiting: _Waiting) -> None:
        queue = self._queues.get(waiting.share.key, deque())
        if waiting in queue:
            queue.remove(waiting)
            self._drop_empty(waiting.share)
        elif not waiting.released.cancelled():
            self._leaving_s -= waiting.work_s

    def _look_again(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(RELEASE_PERIOD_S, self._release)

    def _release(self) -> None:
        """Let requests go while the groups take work."""
        self._timer = None
        while (waiting := self._next()) is not None:
            self._queues[waiting.share.key].remove(waiting)
            self._drop_empty(waiting.share)
            if waiting.released.cancelled():
                continue  # its task has not come to forget it yet
            self._leave(waiting.share, waiting.num_tokens, waiting.work_s)
            waiting.released.set_result(None)
        if self._queues:
            self._look_again()

    def _next(self) -> _Waiting | None:
        """Who may go now."""
        if self._queues and self._has_room():
            first = self._turns.ranked(queue[0].share for queue in self._queues.values())[0]
            return self._queues[first.key][0]
        for queue in self._queues.values():
            shortest = min(queue, key=lambda each: each.num_tokens)
            if self._is_preempted_for(shortest.share, shortest.num_tokens):
                return shortest
        return None

    def _leave(self, share: Share, num_tokens: int, work_s: float) -> None:
        self._turns.charge(share, work_s)
        self._leaving_s += work_s
        self._ahead.drain(self._clock.now(), self._num_groups())
        self._ahead.add(share, num_tokens, work_s)

    def _has_room(self) -> bool:
        return self._room_s() > self._leaving_s

    def _goes_past(self, share: Share, num_tokens: int) -> bool:
        """Whether a new prompt needs not wait: of what is due to the claim beside those of its class that wait, it has got less ahead."""
        if own := self._queues.get(share.key):
            is_shortest = all(each.num_tokens > num_tokens for each in own)
            return is_shortest and self._is_preempted_for(share, num_tokens)
        if not self._num_groups() or self._is_outranked(share):
            return False
        rivals_weight = self._rivals_weight(share)
        due_s = self._release_queue_s * self._num_groups() * share.weight / (share.weight + rivals_weight)
        if rivals_weight:
            return self._turns.ahead_s(share) < due_s
        # Credit is for bursts beside others; alone it would only fill the groups.
        self._ahead.drain(self._clock.now(), self._num_groups())
        return self._ahead.of(share, num_tokens) < due_s

    def _is_preempted_for(self, share: Share, num_tokens: int) -> bool:
        """Whether groups that take no more would, but for longer prompts of the claim: they preempt these for a shorter one.

        Not for ever: the oldest that waits is passed by no shorter one any more after a while.
        """
        own = self._queues.get(share.key)
        waited_s = self._clock.now() - own[0].since_s if own and own[0].num_tokens > num_tokens else 0.0
        if waited_s > STARVED_S or self._is_outranked(share) or self._rivals_weight(share):
            return False
        self._ahead.drain(self._clock.now(), self._num_groups())
        before_s = self._ahead_s() + self._leaving_s
        if longer_s := self._ahead.longer_s(share, num_tokens):
            total_s = self._ahead.total_s
            before_s *= (total_s - longer_s) / total_s
        return before_s < self._release_queue_s * self._num_groups()

    def _is_outranked(self, share: Share) -> bool:
        return any(priority > share.priority for priority, _ in self._queues)

    def _rivals_weight(self, share: Share) -> float:
        """Of the other claims of its class that wait."""
        return sum(
            queue[0].share.weight
            for key, queue in self._queues.items()
            if key[0] == share.priority and key != share.key
        )

    def _drop_empty(self, share: Share) -> None:
        if not self._queues[share.key]:
            del self._queues[share.key]


def _work_s(queue: Iterable[_Waiting]) -> float:
    return sum(waiting.work_s for waiting in queue)
