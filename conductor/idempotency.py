"""Requests with an idempotency key: the same key and request get the same answer again, finished or running, from any conductor.

    nobody has a claim            -> claim it in Redis, make the answer here, keep it
    made or kept in this process  -> read it from its start
    another conductor's claim     -> read it there; when that conductor is lost, take the claim over and continue after the tokens that
                                     the client has, drawn with the same seed
    Redis is away                 -> make it here; the claim is entered when Redis is back

An answer under a key goes on without its client for a while, so that a client that lost its connection finds it. A conductor that is
thought lost and is not costs work done twice, never a wrong answer. Nothing of prompts or answers goes through Redis.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Protocol, TypeAlias
from weakref import WeakValueDictionary

from prometheus_client import CollectorRegistry, Counter, Gauge

from conductor.answer import OutputDelta
from conductor.claims import Claim, ClaimBook, ClaimName, RegistryAway, attach_token, claim_name, fingerprint
from conductor.config import ConductorConfig
from conductor.peers import PeerLost, attach
from conductor.recording import Position, Recording
from conductor.registry import Node
from conductor.validation import Submission
from moontide.clock import Clock
from moontide.deadline import Deadline
from moontide.errors import BadRequest, Cancelled, Internal, KeyReused, MoontideError
from moontide.log import get_logger
from moontide.metrics import start_at_zero
from moontide.sampling_params import SampledToken
from moontide.tls import Tls

MAX_KEY_CHARS = 255

Make: TypeAlias = Callable[[Submission, Sequence[SampledToken]], AsyncGenerator[OutputDelta, None]]
"""Makes the answer to a request, from after the given tokens of it on; these are not sent again."""

log = get_logger(__name__)


class NodeView(Protocol):
    """What is known of the other conductors; conductor.registry.NodeRegistry in production."""

    @property
    def nodes(self) -> list[Node]: ...

    @property
    def connected(self) -> bool: ...


class AnswerMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "conductor_keyed_requests_total",
            "Requests with an idempotency key: made, kept (read from this process), followed (read from another conductor), "
            "taken_over (of a lost conductor), unclaimed (made while Redis was away), refused (another request had the key).",
            ["how"],
            registry=registry,
        )
        start_at_zero(self.requests, "made", "kept", "followed", "taken_over", "unclaimed", "refused")
        self.kept_bytes = Gauge(
            "conductor_kept_answers_bytes", "Memory of the answers kept under idempotency keys.", registry=registry
        )


@dataclass(kw_only=True, eq=False)
class _Kept:
    """An answer of this process."""

    name: ClaimName
    claim: Claim
    recording: Recording
    task: asyncio.Task[None] | None = None
    over_s: float | None = None
    """When it was complete; None while it is made."""
    leaving: asyncio.TimerHandle | None = None
    """Ends the work when no reader comes back."""


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """A request with a key."""

    name: ClaimName
    token: bytes
    fingerprint: str
    submission: Submission
    deadline: Deadline


class Answers:
    """The answers that this conductor makes and keeps under idempotency keys, and the way to those of the others."""

    def __init__(
        self,
        config: ConductorConfig,
        *,
        registry: NodeView,
        metrics: CollectorRegistry,
        clock: Clock,
        boot_id: str,
        tls: Tls | None = None,
    ) -> None:
        self.num_readers = 0
        """Clients that read an answer here, wherever it is made, and other conductors that read one for theirs."""
        self._tls = tls
        settings = config.conductor
        self._node_id = config.node.node_id
        self._boot_id = boot_id
        self._address = ""
        self._heartbeat_s = config.registry.heartbeat_s
        self._default_timeout_s = settings.default_timeout_s
        self._kept_s = settings.answers_kept_s
        self._max_kept_bytes = settings.answers_kept_bytes
        self._unread_s = settings.unread_answer_s
        self._registry = registry
        self._clock = clock
        self._book = ClaimBook(config.registry, claim_s=settings.default_timeout_s + settings.answers_kept_s)
        self._kept: OrderedDict[ClaimName, _Kept] = OrderedDict()
        """Complete ones in the order in which they became so."""
        self._complete_bytes = 0
        self._locks: WeakValueDictionary[ClaimName, asyncio.Lock] = WeakValueDictionary()
        self._redis_run_id: str | None = None
        self._upkeep: asyncio.Task[None] | None = None
        self._metrics = AnswerMetrics(metrics)
        self._metrics.kept_bytes.set_function(lambda: float(self._complete_bytes))

    def start(self, address: str) -> None:
        """`address`: host:port under which other conductors reach this one's gRPC service."""
        self._address = address
        self._upkeep = asyncio.create_task(self._run(), name="kept answers")

    async def close(self) -> None:
        """End what is still made. Call it after the servers are closed: readers elsewhere then take over."""
        tasks = [kept.task for kept in self._kept.values() if kept.task is not None]
        if self._upkeep is not None:
            tasks.append(self._upkeep)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._book.close()

    def generate(
        self, submission: Submission, *, key: str, tenant: str, make: Make
    ) -> AsyncGenerator[OutputDelta, None]:
        """The answer to a request with a key, from its start.

        Raises: MoontideError; KeyReused when the key came with another request of this tenant before.
        """
        return self._counted(self._generate(submission, key, tenant, make))

    async def _generate(
        self, submission: Submission, key: str, tenant: str, make: Make
    ) -> AsyncGenerator[OutputDelta, None]:
        asked = self._ask(submission, key, tenant)
        received: list[OutputDelta] = []
        lost: Claim | None = None
        while True:
            found = await self._find(asked, received, lost, make)
            position = _position(received)
            if isinstance(found, _Kept):
                async with aclosing(self._read(found, position, asked.deadline)) as deltas:
                    async for delta in deltas:
                        yield delta
                return
            try:
                async with aclosing(self._follow(found, asked, position)) as deltas:
                    async for delta in deltas:
                        received.append(delta)
                        yield delta
                return
            except PeerLost as error:
                lost = found
                log.warning(
                    "answer of a lost conductor is taken over",
                    request_id=submission.request_id,
                    conductor=found.node_id,
                    num_tokens=_position(received).num_tokens,
                    reason=str(error),
                )

    def attached(self, token: bytes, position: Position) -> AsyncGenerator[OutputDelta, None] | None:
        """The rest of an answer kept here, for another conductor's client."""
        kept = self._kept.get(claim_name(token))
        if kept is None:
            return None
        return self._counted(self._read(kept, position, Deadline.after(self._default_timeout_s, self._clock)))

    async def _counted(self, deltas: AsyncGenerator[OutputDelta, None]) -> AsyncGenerator[OutputDelta, None]:
        self.num_readers += 1
        try:
            async with aclosing(deltas):
                async for delta in deltas:
                    yield delta
        finally:
            self.num_readers -= 1

    def check_invariants(self) -> None:
        """Only answers that are complete, or that somebody makes, are kept."""
        for kept in self._kept.values():
            assert (kept.over_s is not None) == kept.recording.is_complete
            assert kept.over_s is not None or (kept.task is not None and not kept.task.done())

    def _ask(self, submission: Submission, key: str, tenant: str) -> _Asked:
        if len(key) > MAX_KEY_CHARS:
            raise BadRequest(
                f"the idempotency key has {len(key)} characters; the limit is {MAX_KEY_CHARS}", param="idempotency_key"
            )
        token = attach_token(key, tenant)
        timeout_s = min(submission.params.timeout_s or self._default_timeout_s, self._default_timeout_s)
        return _Asked(
            name=claim_name(token),
            token=token,
            fingerprint=fingerprint(key, submission.prompt, submission.params),
            submission=submission,
            deadline=Deadline(submission.arrival_s + timeout_s, self._clock),
        )

    async def _find(
        self, asked: _Asked, received: Sequence[OutputDelta], lost: Claim | None, make: Make
    ) -> _Kept | Claim:
        """Where the answer is: here, where it now begins if need be, or with another conductor that is not `lost`.

        Raises: KeyReused.
        """
        lock = self._locks.setdefault(asked.name, asyncio.Lock())
        async with lock:
            kept = self._kept.get(asked.name)
            if kept is not None:
                self._check_same(kept.claim, asked)
                self._count("kept", asked, kept.claim)
                return kept
            claim = self._new_claim(asked)
            how = "made"
            try:
                if not self._registry.connected:
                    raise RegistryAway("the node registry is not connected")
                while (held := await self._book.take(asked.name, claim)) is not None:
                    self._check_same(held, asked)
                    if not held.is_of(claim) and held != lost and not self._is_gone(held):
                        self._count("followed", asked, held)
                        return held
                    claim = dataclasses.replace(claim, seed=held.seed)
                    if await self._book.replace(asked.name, held, claim):
                        how = "made" if held.is_of(claim) else "taken_over"
                        break
            except RegistryAway as error:
                how = "unclaimed"
                self._redis_run_id = None
                if lost is not None:
                    claim = dataclasses.replace(claim, seed=lost.seed)
                log.warning(
                    "no claim for an idempotency key", request_id=asked.submission.request_id, reason=str(error)
                )
            self._count(how, asked, claim)
            return self._begin(asked, claim, received, make)

    def _new_claim(self, asked: _Asked) -> Claim:
        params = asked.submission.params
        return Claim(
            node_id=self._node_id,
            boot_id=self._boot_id,
            address=self._address,
            request_id=asked.submission.request_id,
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            fingerprint=asked.fingerprint,
        )

    def _check_same(self, claim: Claim, asked: _Asked) -> None:
        if claim.fingerprint != asked.fingerprint:
            self._metrics.requests.labels("refused").inc()
            raise KeyReused(
                f"the idempotency key came with another request before ({claim.request_id}); use a new key for a new request",
                param="idempotency_key",
            )

    def _is_gone(self, claim: Claim) -> bool:
        """Whether the registry says that the process of this claim is over. A conductor it does not know yet may be new."""
        for node in self._registry.nodes:
            if node.record.node_id == claim.node_id:
                return not node.alive or node.record.boot_id != claim.boot_id
        return False

    def _begin(self, asked: _Asked, claim: Claim, received: Sequence[OutputDelta], make: Make) -> _Kept:
        submission = asked.submission
        # Whoever asked first may have less time than those who join; each reader keeps its own deadline.
        params = dataclasses.replace(submission.params, seed=claim.seed, timeout_s=None)
        kept = _Kept(name=asked.name, claim=claim, recording=Recording(received))
        deltas = make(dataclasses.replace(submission, params=params), kept.recording.tokens)
        self._kept[asked.name] = kept
        kept.task = asyncio.create_task(self._make(kept, deltas), name=f"answer {asked.submission.request_id}")
        return kept

    async def _make(self, kept: _Kept, deltas: AsyncGenerator[OutputDelta, None]) -> None:
        """Record the answer to its end. One that fails or is cancelled is forgotten."""
        error: MoontideError = Cancelled("the work on the answer was ended; ask again with the same key")
        try:
            async with aclosing(deltas):
                async for delta in deltas:
                    kept.recording.add(delta)
            kept.over_s = self._clock.now()
            self._kept.move_to_end(kept.name)
            self._complete_bytes += kept.recording.num_bytes
            self._forget_old()
            return
        except MoontideError as raised:
            error = raised
        except Exception as raised:
            log.exception("answer failed", request_id=kept.claim.request_id)
            error = Internal(f"{type(raised).__name__}: {raised}")
        finally:
            if kept.over_s is None:
                self._forget_unfinished(kept)
                kept.recording.fail(error)
        if kept.recording.is_empty:
            # Nothing of it is known: the key is free for any request, such as a corrected one.
            with suppress(RegistryAway):
                await self._book.drop(kept.name, kept.claim)

    async def _read(self, kept: _Kept, position: Position, deadline: Deadline) -> AsyncGenerator[OutputDelta, None]:
        if kept.leaving is not None:
            kept.leaving.cancel()
            kept.leaving = None
        try:
            async with aclosing(kept.recording.read(position, deadline)) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            if kept.recording.num_readers == 0 and kept.over_s is None:
                kept.leaving = asyncio.get_running_loop().call_later(self._unread_s, self._abandon, kept)

    def _abandon(self, kept: _Kept) -> None:
        """Nobody came back for it. Whoever asks from now on has it made again."""
        if kept.over_s is None and kept.task is not None:
            self._forget_unfinished(kept)
            kept.task.cancel()

    def _forget_unfinished(self, kept: _Kept) -> None:
        if self._kept.get(kept.name) is kept:
            del self._kept[kept.name]

    async def _follow(self, claim: Claim, asked: _Asked, position: Position) -> AsyncGenerator[OutputDelta, None]:
        """Raises: PeerLost; what `attach` raises."""
        deltas = attach(
            claim.address,
            asked.token,
            position,
            deadline=asked.deadline,
            is_alive=lambda: not self._is_gone(claim),
            look_s=self._heartbeat_s,
            tls=self._tls,
        )
        async with aclosing(deltas):
            async for delta in deltas:
                yield delta
                if delta.finish_reason is not None:
                    return
        raise PeerLost(f"conductor {claim.node_id} ended the stream before the answer was complete")

    def _count(self, how: str, asked: _Asked, claim: Claim) -> None:
        self._metrics.requests.labels(how).inc()
        log.info(
            "idempotency key",
            request_id=asked.submission.request_id,
            how=how,
            conductor=claim.node_id,
            first_request_id=claim.request_id,
        )

    async def _run(self) -> None:
        while True:
            self._forget_old()
            await self._mind_redis()
            await asyncio.sleep(self._heartbeat_s)

    async def _mind_redis(self) -> None:
        """Enter the claims of this process again when Redis was restarted or away."""
        try:
            run_id = await self._book.run_id()
            if run_id != self._redis_run_id:
                await self._book.put_back({name: kept.claim for name, kept in self._kept.items()})
                self._redis_run_id = run_id
        except RegistryAway:
            self._redis_run_id = None

    def _forget_old(self) -> None:
        """Complete answers go when their time is over, the oldest first also when they are too large together."""
        now_s = self._clock.now()
        for name, kept in list(self._kept.items()):
            if kept.over_s is None:
                continue
            if now_s - kept.over_s < self._kept_s and self._complete_bytes <= self._max_kept_bytes:
                break
            self._complete_bytes -= kept.recording.num_bytes
            del self._kept[name]


def _position(deltas: Sequence[OutputDelta]) -> Position:
    position = Position()
    for delta in deltas:
        position = position.after(delta)
    return position
