"""Where requests wait while every prefill group has work ahead, and in which order they leave: by class, then by tenants' shares.

    arrival -> [ turn ] -> choice of nodes -> dispatch -> stage 0
Groups get only so much work ahead that none of them idles (`conductor.release_queue_s`), so a tenant that floods has its requests here
and not before another's in the groups. A tenant within its share of what the groups have ahead does not wait at all: stage 0, which
divides what several conductors send by the same rule, serves it before the others. Nor, unless other tenants wait, does a prompt that
is shorter than what its tenant has there and here: stage 0 preempts a long one for it. Work is counted in predicted seconds of prefill.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import inf

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
"""While a claim's oldest request has waited for so long here, no shorter one of it goes past."""

_NOTHING_S = 1e-6
"""Less work is an error of rounding."""


@dataclass(eq=False, kw_only=True)
class _Request:
    attempt_id: str
    share: Share
    num_tokens: int
    work_s: float
    busy_s: float
    since_s: float
    released: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def size(self) -> int:
        return _size(self.num_tokens)


class _Claimed:
    """Work of a claim that the groups have got, by size of the prompts."""

    def __init__(self, share: Share) -> None:
        self.share = share
        self._by_size: dict[int, tuple[int, float]] = {}
        """Requests and their work; no class is kept that holds none."""

    def __bool__(self) -> bool:
        return bool(self._by_size)

    def count(self, request: _Request, num: int) -> None:
        """One more, or with -1 one less."""
        num_requests, work_s = self._by_size.pop(request.size, (0, 0.0))
        if num_requests + num:
            self._by_size[request.size] = num_requests + num, work_s + num * request.work_s

    def work_s(self, num_tokens: int | None = None) -> float:
        """Of prompts of about so many tokens and less; by default of all."""
        largest = inf if num_tokens is None else _size(num_tokens)
        return sum(work_s for size, (_, work_s) in self._by_size.items() if size <= largest)


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
            ahead_s: predicted seconds of work that they have ahead together, from all conductors.
        """
        self._room_s = room_s
        self._ahead_s = ahead_s
        self._num_groups = num_groups
        self._release_queue_s = release_queue_s
        self._clock = clock
        self._turns = DeficitRoundRobin(QUANTUM_S, credit_s=CREDIT_QUEUES * release_queue_s)
        self._queues: dict[tuple[int, str], deque[_Request]] = {}
        self._sent: dict[str, _Request] = {}
        """What has left, up to its first token."""
        self._claimed: dict[tuple[int, str], _Claimed] = {}
        """The same by claim."""
        self._leaving_s = 0.0
        """Work that has left and is not dispatched yet, so that neither room_s nor ahead_s knows it."""
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

        Higher classes and the claim's own requests that it does not go past are before it, and of another tenant's as much as its
        weight allows meanwhile.
        """
        if self._goes_past(share, num_tokens):
            return 0.0
        own: Iterable[_Request] = self._queues.get(share.key, ())
        if not self._rivals_weight(share) and not self._is_starved(share):
            own = (each for each in own if each.size <= _size(num_tokens))
        ahead_s = own_s = _work_s(own)
        for key, queue in self._queues.items():
            other = queue[0].share
            if other.priority > share.priority:
                ahead_s += _work_s(queue)
            elif other.priority == share.priority and key != share.key:
                ahead_s += min(_work_s(queue), own_s * other.weight / share.weight)
        return ahead_s / max(1, self._num_groups())

    def queue_share(self, share: Share, num_tokens: int) -> float:
        """Which part of what the groups have ahead goes before a new prompt of so many tokens of the claim, as stage 0 divides steps."""
        claimed = self._claimed.get(share.key)
        before_s = own_s = claimed.work_s(num_tokens) if claimed else 0.0
        total_s = 0.0
        for key, each in self._claimed.items():
            work_s, other = each.work_s(), each.share
            total_s += work_s
            if other.priority > share.priority:
                before_s += work_s
            elif other.priority == share.priority and key != share.key:
                before_s += min(work_s, own_s * other.weight / share.weight)
        # What is done already of prompts without a first token is mostly of long ones, and those are what others go before.
        left_s = min(total_s, self._ahead_s() + self._leaving_s)
        return min(1.0, before_s / left_s) if left_s > _NOTHING_S else 1.0

    @asynccontextmanager
    async def turn(
        self,
        tenant: Tenant,
        *,
        attempt_id: str,
        priority: int,
        num_tokens: int,
        work_s: float,
        busy_s: float,
        deadline: Deadline,
        has_begun: bool = False,
    ) -> AsyncIterator[None]:
        """Wait for the request's turn. The body dispatches it, so that `room_s` counts its work from then on; it waits for nothing.
        Afterwards the work counts for its tenant until `prefilled`.

        Args:
            work_s: of its prefill alone in a group.
            busy_s: what `room_s` will count for it.
        Raises: Rejected beyond the tenant's `max_queued_s`, unless the client has a part of the answer; DeadlineExceeded.
        """
        share = tenant.share(priority)
        request = _Request(
            attempt_id=attempt_id,
            share=share,
            num_tokens=num_tokens,
            work_s=work_s,
            busy_s=busy_s,
            since_s=self._clock.now(),
        )
        if not self._queues and self._has_room():
            self._turns.ranked([share])
            self._leave(request)
        elif self._goes_past(share, num_tokens):
            self._leave(request)
        else:
            if not has_begun:
                self._check_limit(tenant, share, num_tokens)
            await self._wait(request, deadline)
        try:
            yield
        except BaseException:
            self.prefilled(attempt_id)
            raise
        finally:
            self._leaving_s -= busy_s

    def prefilled(self, attempt_id: str) -> None:
        """The attempt has its first token, or is over; asking again changes nothing."""
        if request := self._sent.pop(attempt_id, None):
            claimed = self._claimed[request.share.key]
            claimed.count(request, -1)
            if not claimed:
                del self._claimed[request.share.key]

    def check_invariants(self) -> None:
        """While nobody waits, nothing is kept for anybody."""
        assert all(self._queues.values()), "an empty queue is kept"
        assert self._queues or abs(self._leaving_s) < _NOTHING_S, f"{self._leaving_s} s of work left and never arrived"
        assert bool(self._sent) == bool(self._claimed), (
            f"{len(self._sent)} requests are sent, of {len(self._claimed)} claims"
        )

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def _wait(self, request: _Request, deadline: Deadline) -> None:
        """Afterwards the work is leaving."""
        self._queues.setdefault(request.share.key, deque()).append(request)
        self._look_again()
        try:
            async with asyncio.timeout(deadline.remaining_s()):
                await request.released
        except BaseException as error:
            self._forget(request)
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(
                    f"deadline passed while {self.num_waiting} requests waited for a prefill group; give the request a larger timeout"
                ) from error
            raise

    def _queues_of(self, priority_label: str) -> Iterator[deque[_Request]]:
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

    def _forget(self, request: _Request) -> None:
        queue = self._queues.get(request.share.key, deque())
        if request in queue:
            queue.remove(request)
            self._drop_empty(request.share)
        elif request.attempt_id in self._sent:
            self._leaving_s -= request.busy_s
            self.prefilled(request.attempt_id)

    def _look_again(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(RELEASE_PERIOD_S, self._release)

    def _release(self) -> None:
        """Let requests go while the groups take work."""
        self._timer = None
        while (request := self._next()) is not None:
            self._queues[request.share.key].remove(request)
            self._drop_empty(request.share)
            if request.released.cancelled():
                continue  # its task has not come to forget it yet
            self._leave(request)
            request.released.set_result(None)
        if self._queues:
            self._look_again()

    def _next(self) -> _Request | None:
        """Who may go now: whose turn it is while there is room; without, one for whom the groups preempt others of its claim."""
        if not self._queues:
            return None
        if self._has_room():
            first = self._turns.ranked(queue[0].share for queue in self._queues.values())[0]
            return self._queues[first.key][0]
        highest = max(priority for priority, _ in self._queues)
        queues = [queue for (priority, _), queue in self._queues.items() if priority == highest]
        if len(queues) > 1:
            return None
        [queue] = queues
        is_starved = self._is_starved(queue[0].share)
        request = queue[0] if is_starved else min(queue, key=lambda each: each.size)
        return request if self._is_preempted_for(request.share, request.num_tokens) else None

    def _leave(self, request: _Request) -> None:
        self._turns.charge(request.share, request.work_s)
        self._leaving_s += request.busy_s
        self._sent[request.attempt_id] = request
        self._claimed.setdefault(request.share.key, _Claimed(request.share)).count(request, 1)

    @property
    def _limit_s(self) -> float:
        """What all groups together get ahead."""
        return self._release_queue_s * self._num_groups()

    def _has_room(self) -> bool:
        return self._room_s() - self._leaving_s > _NOTHING_S

    def _goes_past(self, share: Share, num_tokens: int) -> bool:
        """Whether a new prompt needs not wait although others do, or the groups have enough ahead."""
        if not self._num_groups() or any(priority > share.priority for priority, _ in self._queues):
            return False
        own = self._queues.get(share.key)
        if rivals_weight := self._rivals_weight(share):
            # It has got less than is due to it beside them.
            return not own and self._turns.ahead_s(share) < self._limit_s * share.weight / (
                share.weight + rivals_weight
            )
        if own:
            is_shortest = all(each.size > _size(num_tokens) for each in own)
            return is_shortest and not self._is_starved(share) and self._is_preempted_for(share, num_tokens)
        # Credit is for bursts beside others; alone it would only fill the groups.
        claimed = self._claimed.get(share.key)
        return (claimed.work_s(num_tokens) if claimed else 0.0) < self._limit_s

    def _is_preempted_for(self, share: Share, num_tokens: int) -> bool:
        """Whether groups that take no more would, but for prompts that they preempt for one of the claim."""
        before_s = self.queue_share(share, num_tokens) * (self._ahead_s() + self._leaving_s)
        return self._limit_s - before_s > _NOTHING_S

    def _is_starved(self, share: Share) -> bool:
        own = self._queues.get(share.key)
        return own is not None and self._clock.now() - own[0].since_s > STARVED_S

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


def _size(num_tokens: int) -> int:
    """Class k holds prompts of 2^(k-1) to 2^k - 1 tokens."""
    return num_tokens.bit_length()


def _work_s(requests: Iterable[_Request]) -> float:
    return sum(request.work_s for request in requests)
