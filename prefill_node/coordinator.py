"""Requests of a prefill group from arrival to the last seal; lives on stage 0.

    wait for a turn, pages and room in the store | await the copy | fetch the prefix hit | accepted | chunks | first token
    copy what another host has of the prefix ----------------->                         seal blocks as they are put | completed

One coroutine per request, run by its gRPC call: cancelling the call cancels the request in whatever phase it is. The
reservation in the store belongs to the conductor from `accepted` on; until then it is renewed and, if need be, released here.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from kvstore.client import StoreClient
from kvstore.layout import KVLayout
from kvstore.node import StoreNode
from kvstore.pool import RequestKey, ReserveResult
from kvstore.seal import wait_until_stored
from model_runner.model_source import ModelInfo
from moontide.clock import Clock
from moontide.errors import (
    BadRequest,
    DeadlineExceeded,
    Internal,
    MoontideError,
    NodeLost,
    Rejected,
    RejectReason,
    TransferFailed,
)
from moontide.fair_share import PRIORITY_LABELS
from moontide.log import get_logger
from moontide_proto.v1 import prefill_pb2
from prefill_node.admission import AdmissionQueue
from prefill_node.config import PrefillConfig
from prefill_node.interrupt import Interrupt
from prefill_node.load import RecentMedian, RecentSpeed
from prefill_node.metrics import GroupMetrics
from prefill_node.prefix_copy import Copier, PrefixCopies
from prefill_node.prompt import Prompt, read_prompt
from prefill_node.session import GroupSession

Emit = Callable[[prefill_pb2.PrefillEvent], Awaitable[None]]

_RESERVE_RETRY_S = 0.1
_RELEASE_TIMEOUT_S = 5.0

log = get_logger(__name__)


class _OpenRequest:
    """A request that its call still waits for."""

    def __init__(self, prompt: Prompt, session: GroupSession) -> None:
        self.prompt = prompt
        self.session = session
        self.interrupt = Interrupt()
        self.events: asyncio.Queue[prefill_pb2.PrefillEvent | MoontideError] = asyncio.Queue()
        """At most one event per chunk, and three more."""
        self.is_admitted = False
        self.may_hold_reservation = False
        self.is_accepted = False
        self.hit_blocks = 0
        """Leading blocks that need not be computed."""
        self.fetch_started_s = 0.0
        self.fetch_ended_s = 0.0


class Coordinator:
    """Owner of the open requests of a group."""

    def __init__(
        self,
        *,
        config: PrefillConfig,
        info: ModelInfo,
        layout: KVLayout,
        client: StoreClient,
        store_node: StoreNode,
        store_node_id: str,
        store_address: str,
        copier: Copier | None,
        clock: Clock,
        metrics: GroupMetrics,
    ) -> None:
        self._config = config
        self._info = info
        self._layout = layout
        self._client = client
        self._store_node = store_node
        self._store_node_id = store_node_id
        self._store_address = store_address
        self._clock = clock
        self._metrics = metrics
        self._copies = PrefixCopies(copier, layout, metrics)
        self._fetch_speed = RecentSpeed()
        self._tail = RecentMedian()
        self._orders = itertools.count()
        self._admission = AdmissionQueue(self._choose)
        self._open: dict[RequestKey, _OpenRequest] = {}
        self._room_is_for: RequestKey | None = None
        """A request that has waited so long for room in the store that nobody else gets any before it."""
        self.session: GroupSession | None = None
        """None while the group is not complete."""

    @property
    def num_waiting(self) -> int:
        return sum(not request.is_admitted for request in self._open.values())

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_running(self) -> int:
        """Requests that hold pages, and ended ones that still wait for the fence."""
        if self.session is None:
            return 0
        return self.session.num_prompts

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that no micro-batch has taken."""
        unplanned = (each.prompt for each in self._open.values() if not (each.is_accepted and each.is_admitted))
        waiting = sum(prompt.num_tokens - prompt.put_tokens for prompt in unplanned)
        return waiting + (self.session.queued_tokens if self.session else 0)

    @property
    def num_reservations(self) -> int:
        return sum(request.may_hold_reservation for request in self._open.values())

    def load(self, session: GroupSession) -> dict[str, float]:
        """What conductors decide by, see docs/operations.md; what is not known is left out."""
        prefill, model = self._config, session.slowest_stage
        known: dict[str, float | None] = {
            "waiting": self.num_waiting,
            "running": self.num_running,
            "queued_tokens": self.queued_tokens,
            "free_pages": session.pages.num_free,
            "num_pages": session.pages.num_pages,
            "num_stages": prefill.num_stages,
            "chunk_tokens": prefill.chunk_tokens,
            "max_step_s": None if prefill.chunking == "fixed" else prefill.max_step_s,
            "queued_s": session.queued_s if model else None,
            "step_overhead_s": model.overhead_s if model else None,
            "step_token_s": model.token_s if model else None,
            "step_pair_s": model.pair_s if model else None,
            "step_knee_tokens": model.knee_tokens if model else None,
            "fetch_bytes_per_s": self._fetch_speed.bytes_per_s,
            "copy_bytes_per_s": self._copies.speed.bytes_per_s,
            "tail_s": self._tail.value,
        }
        return {name: value for name, value in known.items() if value is not None}

    def open_session(self, session: GroupSession) -> None:
        """The group is complete."""
        self.session = session
        session.on_pages_changed = self._update_admission
        self._metrics.num_pages.set(session.pages.num_pages)

    def close_session(self, reason: str) -> None:
        """The group is lost, and with it everything that its stages hold: every open request ends, retriable."""
        if self.session is not None:
            self.session.close()
        self.session = None
        for request in self._open.values():
            request.interrupt.fire(NodeLost(f"prefill group {self._config.group_id} was lost: {reason}"))

    def lose_store(self) -> None:
        """The store process was started again: what it held for open requests is gone, so these end, retriable."""
        for request in self._open.values():
            if request.may_hold_reservation:
                request.interrupt.fire(
                    TransferFailed("the store process was restarted meanwhile; the prompt has to be computed again")
                )

    async def run(self, message: prefill_pb2.PrefillRequest, emit: Emit) -> None:
        """Serve one request; returns after `completed`.

        Raises: BadRequest, Rejected, DeadlineExceeded, NodeLost, TransferFailed. The request holds nothing here
            afterwards, apart from pages that wait for the fence.
        """
        session = self._require_session()
        prompt = self._admissible(message, session)
        request = _OpenRequest(prompt, session)
        self._open[prompt.key] = request
        outcome = "Cancelled"
        try:
            await self._run_until_deadline(request, emit, timeout_s=message.timeout_s)
            outcome = "completed"
        except MoontideError as error:
            outcome = error.code
            log.warning("request failed", request_id=prompt.key.request_id, epoch=prompt.key.epoch, error=str(error))
            raise
        except Exception:
            outcome = Internal.__name__
            raise
        finally:
            self._metrics.requests.labels(outcome).inc()
            session.finish(prompt)
            del self._open[prompt.key]
            if outcome == "Cancelled":
                log.info("request cancelled", request_id=prompt.key.request_id, epoch=prompt.key.epoch)
            if request.may_hold_reservation and not request.is_accepted:
                await asyncio.shield(self._release(prompt.key))

    def update_gauges(self) -> None:
        waiting = Counter(each.prompt.share.priority_label for each in self._open.values() if not each.is_admitted)
        for label in PRIORITY_LABELS:
            self._metrics.waiting.labels(label).set(waiting[label])
        self._metrics.running.set(self.num_running)
        self._metrics.queued_tokens.set(self.queued_tokens)
        session = self.session
        self._metrics.queued_seconds.set(session.queued_s if session else 0)
        self._metrics.free_pages.set(session.pages.num_free if session else 0)
        self._metrics.in_flight_steps.set(session.log.in_flight_steps if session else 0)
        self._metrics.open_puts.set(session.log.open_puts if session else 0)

    def _require_session(self) -> GroupSession:
        if self.session is None:
            raise NodeLost(f"prefill group {self._config.group_id} is not complete; try another group, or again later")
        return self.session

    def _admissible(self, message: prefill_pb2.PrefillRequest, session: GroupSession) -> Prompt:
        """The request as a prompt of this group. Raises: BadRequest, PromptTooLong, Rejected."""
        key = RequestKey(message.request_id, message.epoch)
        if key in self._open or session.knows(key):
            raise BadRequest(f"request {key.request_id} epoch {key.epoch} is running already; count the epoch up")
        prompt = read_prompt(
            message, info=self._info, layout=self._layout, order=next(self._orders), arrived_s=self._clock.now()
        )
        if prompt.num_pages > session.pages.num_pages:
            raise Rejected(
                f"the prompt of {prompt.num_tokens} tokens needs {prompt.num_pages} pages of {prompt.block_tokens} tokens; "
                f"prefill group {self._config.group_id} has {session.pages.num_pages} (prefill.num_pages)",
                reason=RejectReason.PROMPT_EXCEEDS_PREFILL_PAGES,
            )
        self._check_queue(prompt)
        session.arrive(prompt)
        return prompt

    def _check_queue(self, prompt: Prompt) -> None:
        """A full queue still takes prompts of a tenant that has less than an even part of it. Raises: Rejected."""
        if self.num_waiting < self._config.max_queue:
            return
        tenants = [each.prompt.share.tenant for each in self._open.values() if not each.is_admitted]
        num_own, num_tenants = tenants.count(prompt.share.tenant), len({*tenants, prompt.share.tenant})
        if num_own * num_tenants >= self._config.max_queue:
            raise Rejected(
                f"{len(tenants)} requests wait at prefill group {self._config.group_id}, {num_own} of them of this tenant; the "
                f"limit is {self._config.max_queue} (prefill.max_queue), shared by {num_tenants} tenants; try again later",
                reason=RejectReason.QUEUE_FULL,
            )

    async def _run_until_deadline(self, request: _OpenRequest, emit: Emit, *, timeout_s: float) -> None:
        phase = "waiting for pages and room in the store"
        try:
            async with asyncio.timeout(timeout_s), request.interrupt:
                copy_timeout_s = min(timeout_s, self._copy_timeout_s(request))
                async with self._copies.copying(request.prompt, timeout_s=copy_timeout_s) as copying:
                    await self._admit(request)
                    phase = "fetching the cached prefix"
                    request.fetch_started_s = request.fetch_ended_s = self._clock.now()
                    cursor = await self._fetch_while_reserved(request, copying)
                request.session.expect(request.prompt, cursor)
                phase = "computing and sealing the prompt"
                await emit(self._accepted(cursor))
                request.is_accepted = True
                await self._compute(request, emit, cursor)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"deadline passed after {timeout_s} s while {phase}; give the request a larger timeout"
            ) from error

    async def _admit(self, request: _OpenRequest) -> None:
        """Reserve room in the store, then take pages, when it is the request's turn.

        In this order, also for a prompt that has lost its pages and kept its room: whoever has pages can finish.
        """
        key = request.prompt.key
        try:
            while True:
                async with self._admission.turn(key):
                    hit_blocks = await self._reserve(request)
                    if hit_blocks is not None:
                        self._take_pages(request, hit_blocks)
                        return
                    request.may_hold_reservation = False
                if self._room_is_for is None and request.session.is_starved(request.prompt):
                    self._room_is_for = key
                await asyncio.sleep(_RESERVE_RETRY_S * random.uniform(0.5, 1.5))
        finally:
            if self._room_is_for == key:
                self._room_is_for = None
                self._admission.update()

    def _take_pages(self, request: _OpenRequest, hit_blocks: int) -> None:
        request.hit_blocks = hit_blocks
        request.session.take_pages(request.prompt, hit_blocks=hit_blocks)
        request.is_admitted = True

    async def _reserve(self, request: _OpenRequest) -> int | None:
        """Reserve room in the store; returns the blocks of the prefix hit, or None while the store is full. Raises: Rejected."""
        prompt = request.prompt
        request.may_hold_reservation = True
        reply = await self._store_node.reserve(
            request_id=prompt.key.request_id,
            epoch=prompt.key.epoch,
            layout_digest=self._layout.digest(),
            parent_hash=prompt.root,
            block_hashes=prompt.block_hashes,
            has_partial=prompt.has_partial,
            lease_s=self._config.lease_s,
        )
        if reply.result is ReserveResult.TOO_LARGE:
            raise Rejected(
                f"the KV of the prompt of {prompt.num_tokens} tokens needs {reply.needed_bytes} bytes; the store "
                f"has {reply.capacity_bytes} (kvstore.pool_bytes)",
                reason=RejectReason.PROMPT_EXCEEDS_POOL,
            )
        if reply.result is not ReserveResult.RESERVED:
            return None
        return min(reply.hit_blocks, self._most_hit_blocks(prompt))

    def _update_admission(self) -> None:
        # Later: whoever frees pages may be in the middle of choosing who gets them.
        asyncio.get_running_loop().call_soon(self._admission.update)

    def _choose(self, waiting: Sequence[RequestKey]) -> RequestKey | None:
        if self.session is None:
            return None
        requests = [self._open[key] for key in waiting]
        if self._room_is_for is not None:
            # Who has room and only lost its pages goes on: the room that is waited for may have to come from it.
            room_for = self._open[self._room_is_for].prompt
            requests = [
                each
                for each in requests
                if each.is_accepted or each.prompt is room_for or each.prompt.share.priority > room_for.share.priority
            ]
        chosen = self.session.choose([each.prompt for each in requests])
        return chosen.key if chosen else None

    def _copy_timeout_s(self, request: _OpenRequest) -> float:
        """For how long it is of use to copy what the conductor wants from another host; 0 when nothing is, or can be predicted."""
        num_blocks = min(request.prompt.copy_blocks, self._most_hit_blocks(request.prompt))
        if num_blocks <= request.hit_blocks:
            return 0.0
        now_s, then_s = (
            request.session.predict_s(blocks * request.prompt.block_tokens, request.prompt.num_tokens)
            for blocks in (request.hit_blocks, num_blocks)
        )
        return request.session.ahead_s(request.prompt) + now_s - then_s if now_s > then_s else 0.0

    def _most_hit_blocks(self, prompt: Prompt) -> int:
        """The last token is always computed: it gives the first output token."""
        return (prompt.num_tokens - 1) // prompt.block_tokens

    async def _fetch_while_reserved(self, request: _OpenRequest, copying: asyncio.Task[None] | None) -> int:
        """The first fetch of a request: nobody else renews its reservation yet."""
        if not request.hit_blocks and copying is None:
            return 0
        renewing = asyncio.create_task(self._keep_reserved(request.prompt.key), name="renewal of a reservation")
        try:
            if copying is not None:
                await self._await_copy(request, copying)
            cursor = await self._fetch(request) if request.hit_blocks else 0
        finally:
            renewing.cancel()
            await asyncio.wait([renewing])
        if cursor:
            self._metrics.page_hit_tokens.inc(request.prompt.held_blocks * self._layout.block_tokens)
        request.fetch_ended_s = self._clock.now()
        return cursor

    async def _await_copy(self, request: _OpenRequest, copying: asyncio.Task[None]) -> None:
        """Wait for the copy while others are computed, and then for as long as it saves; what has arrived counts as a hit."""
        timeout_s = self._copy_timeout_s(request)
        if not timeout_s:
            return
        started_s = self._clock.now()
        await asyncio.wait([copying], timeout=timeout_s)
        self._metrics.copy_wait_seconds.inc(self._clock.now() - started_s)
        request.hit_blocks = await self._reserve(request) or request.hit_blocks

    async def _fetch(self, request: _OpenRequest) -> int:
        """Have the prefix hit on every stage; returns the tokens that they really hold: the cursor's start."""
        started_s = self._clock.now()
        request.session.fetch(request.prompt, request.hit_blocks)
        fetched_blocks = await request.prompt.fetched
        num_new = fetched_blocks - request.prompt.held_blocks
        self._fetch_speed.add(num_new * self._layout.block_bytes, self._clock.now() - started_s)
        if fetched_blocks < request.hit_blocks:
            self._metrics.rewinds.inc()
            log.warning(
                "prefix hit is shorter than promised",
                request_id=request.prompt.key.request_id,
                promised_blocks=request.hit_blocks,
                fetched_blocks=fetched_blocks,
            )
        request.hit_blocks = fetched_blocks
        return fetched_blocks * self._layout.block_tokens

    async def _keep_reserved(self, key: RequestKey) -> None:
        while True:
            await asyncio.sleep(self._config.lease_s / 3)
            try:
                await self._store_node.renew([key.request_id], lease_s=self._config.lease_s)
            except MoontideError as error:
                log.warning("reservation not renewed", request_id=key.request_id, error=str(error))

    def _accepted(self, cursor: int) -> prefill_pb2.PrefillEvent:
        return prefill_pb2.PrefillEvent(
            accepted=prefill_pb2.PrefillAccepted(
                store_node_id=self._store_node_id, store_address=self._store_address, hit_tokens=cursor
            )
        )

    async def _compute(self, request: _OpenRequest, emit: Emit, cursor: int) -> None:
        prompt = request.prompt
        log.info(
            "request accepted",
            request_id=prompt.key.request_id,
            epoch=prompt.key.epoch,
            tokens=prompt.num_tokens,
            hit_tokens=cursor,
        )
        self._metrics.hit_tokens.inc(cursor)
        request.session.compute(prompt, cursor=cursor)
        async with asyncio.TaskGroup() as tasks:
            announcing = tasks.create_task(self._announce_first_token(request))
            resuming = tasks.create_task(self._resume_when_dropped(request))
            sealing = tasks.create_task(self._seal(request, after=announcing))
            event = await request.events.get()
            while isinstance(event, prefill_pb2.PrefillEvent):
                await emit(event)
                if event.HasField("completed"):
                    break
                event = await request.events.get()
            for task in (announcing, resuming, sealing):
                task.cancel()
        if isinstance(event, MoontideError):
            raise event

    async def _resume_when_dropped(self, request: _OpenRequest) -> None:
        """Whenever the prompt has lost its pages, take some again and go on after the last block in the store."""
        prompt = request.prompt
        while True:
            await prompt.dropped.wait()
            prompt.dropped.clear()
            request.is_admitted = False
            log.info("pages taken away", request_id=prompt.key.request_id, computed_tokens=prompt.put_tokens)
            async with self._admission.turn(prompt.key):
                self._take_pages(request, prompt.put_tokens // prompt.block_tokens)
            request.session.compute(prompt, cursor=await self._fetch(request))

    async def _announce_first_token(self, request: _OpenRequest) -> None:
        token = await request.prompt.first_token
        timings = self._timings(request)
        self._metrics.ttft_seconds.observe(timings.total_s)
        if timings.predicted_s:
            self._metrics.prompt_prediction_error.observe(timings.predicted_s / timings.compute_s - 1)
        request.events.put_nowait(
            prefill_pb2.PrefillEvent(first_token=prefill_pb2.FirstToken(token=token, timings=timings))
        )
        log.info(
            "first token",
            request_id=request.prompt.key.request_id,
            epoch=request.prompt.key.epoch,
            total_s=timings.total_s,
            queue_s=timings.queue_s,
            fetch_s=timings.fetch_s,
            compute_s=timings.compute_s,
        )

    def _timings(self, request: _OpenRequest) -> prefill_pb2.PrefillTimings:
        """arrival ..queue.. fetch start ..fetch.. fetch end ..queue.. first chunk starts ..compute.. first token"""
        prompt = request.prompt
        assert prompt.compute_started_s is not None, "stage 0 reports a step before the last stage can finish it"
        assert prompt.first_token_s is not None
        fetch_s = request.fetch_ended_s - request.fetch_started_s
        compute_s = prompt.first_token_s - prompt.compute_started_s
        queue_s = prompt.compute_started_s - prompt.arrived_s - fetch_s
        return prefill_pb2.PrefillTimings(
            queue_s=queue_s,
            fetch_s=fetch_s,
            compute_s=compute_s,
            total_s=queue_s + fetch_s + compute_s,
            predicted_s=prompt.predicted_s,
        )

    async def _seal(self, request: _OpenRequest, *, after: asyncio.Task[None]) -> None:
        """Seal blocks as they are put; the last event, after the first token, is `completed` or an error."""
        prompt = request.prompt
        num_sealed = request.hit_blocks
        try:
            if num_sealed:
                request.events.put_nowait(_sealed(num_sealed))
            while prompt.put_tokens < prompt.num_tokens or num_sealed < len(prompt.block_hashes):
                num_sealed = await self._seal_next(request, num_sealed)
            if prompt.has_partial:
                partial = len(prompt.block_hashes)
                await self._wait_until_stored(prompt, partial, partial + 1)
            await asyncio.wait([after])
            self._note_tail(prompt)
            request.events.put_nowait(self._completed(prompt))
        except MoontideError as error:
            request.events.put_nowait(error)
            return
        log.info(
            "request completed",
            request_id=prompt.key.request_id,
            epoch=prompt.key.epoch,
            blocks=len(prompt.block_hashes),
        )

    def _note_tail(self, prompt: Prompt) -> None:
        assert prompt.first_token_s is not None, "it was announced"
        tail_s = self._clock.now() - prompt.first_token_s
        self._tail.add(tail_s)
        self._metrics.tail_seconds.observe(tail_s)

    async def _seal_next(self, request: _OpenRequest, num_sealed: int) -> int:
        """Wait for more blocks and seal them; returns how many are sealed then."""
        prompt = request.prompt
        await prompt.puts_changed.wait()
        prompt.puts_changed.clear()
        num_put = prompt.put_tokens // prompt.block_tokens
        if num_put <= num_sealed:
            return num_sealed
        await self._wait_until_stored(prompt, num_sealed, num_put)
        await self._store_node.seal(
            request_id=prompt.key.request_id,
            epoch=prompt.key.epoch,
            first_block=num_sealed,
            num_blocks=num_put - num_sealed,
        )
        request.events.put_nowait(_sealed(num_put))
        return num_put

    async def _wait_until_stored(self, prompt: Prompt, first_block: int, end_block: int) -> None:
        await wait_until_stored(
            self._client,
            prompt.block_refs(first_block, end_block, holder=self._store_node_id),
            timeout_s=self._config.seal_timeout_s,
            failed=prompt.failed_puts,
        )

    def _completed(self, prompt: Prompt) -> prefill_pb2.PrefillEvent:
        plan = self._config
        return prefill_pb2.PrefillEvent(
            completed=prefill_pb2.PrefillCompleted(
                num_blocks=len(prompt.block_hashes),
                has_partial=prompt.has_partial,
                spans=prompt.spans,
                age_s=self._clock.now() - prompt.arrived_s,
                plan=f"mode {plan.mode}, policy {plan.policy}, chunking {plan.chunking}",
            )
        )

    async def _release(self, key: RequestKey) -> None:
        try:
            async with asyncio.timeout(_RELEASE_TIMEOUT_S):
                await self._store_node.release(request_id=key.request_id, epoch=key.epoch)
        except (MoontideError, TimeoutError) as error:
            log.warning("reservation not released; its lease ends it", request_id=key.request_id, error=str(error))


def _sealed(num_blocks: int) -> prefill_pb2.PrefillEvent:
    return prefill_pb2.PrefillEvent(sealed=prefill_pb2.BlocksSealed(num_blocks=num_blocks))
