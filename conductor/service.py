"""One request from its arrival to its last token. Knows neither HTTP nor the client's gRPC.

validate and tokenise -> hash blocks -> match the prefix index -> choose nodes -> admission -> the tenant's turn -> one Attempt after the
other, until the answer is complete.
A new attempt gets the prompt and every token that the client has, so nothing is repeated, left out or drawn twice.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import grpc.aio
import numpy as np

from conductor.admission import DecodeForecast, Refused, judge, judge_decode, pool_of
from conductor.answer import Answer, OutputDelta, OutputToken, Usage
from conductor.attempt import Accepted, Arrived, Attempt, AttemptEvent, AttemptSpec, Finished, PrefillOver, PrefillParts
from conductor.background import Background
from conductor.config import ConductorConfig
from conductor.cost import Outcome, Slo
from conductor.decode_session import DecodeSessions
from conductor.explain import Explanations
from conductor.fair_queue import FairQueue
from conductor.hot_blocks import HotBlocks
from conductor.idempotency import Answers
from conductor.metrics import ConductorMetrics
from conductor.output_length import Expected, OutputLengths
from conductor.placement import Placement
from conductor.prefix_index import PrefixIndex
from conductor.recovery import AttemptFailed, GiveUp, after_failure, is_refusal
from conductor.registry import NodeRegistry
from conductor.router import Choice, Need
from conductor.store_leases import StoreLeases
from conductor.tenants import Tenant, TenantLimits
from conductor.timelines import RequestRecord, TimelineRing
from conductor.tokenizer import Tokenizer
from conductor.validation import (
    ChatPrompt,
    RequestId,
    ServedModel,
    Submission,
    TextPrompt,
    TokenPrompt,
    check_prompt,
    id_on_nodes,
    resolve_sampling,
)
from conductor.view import ClusterView
from kvstore.block import BlockHash, hash_blocks, root_hash
from moontide.clock import Clock
from moontide.deadline import Deadline
from moontide.errors import (
    BadRequest,
    BlockMissing,
    Declined,
    Internal,
    MoontideError,
    NoCapacity,
    NodeLost,
    Rejected,
    RejectReason,
)
from moontide.fair_share import PRIORITY_LABELS
from moontide.log import get_logger
from moontide.registry import NodeRecord
from moontide.rpc import open_channel
from moontide.sampling_params import FinishReason, SampledToken, SamplingParams
from moontide.timeline import Timeline, TtftParts
from moontide.tls import Tls
from moontide.token_ids import TokenArray
from moontide_proto.v1 import moontide_pb2

if TYPE_CHECKING:
    from conductor.kv_event_sockets import KnownTokens

CLOSE_GRACE_S = 5.0
STALE_S = 0.05
"""A choice that is older is made anew."""
MIN_SLO_S = 1e-3
"""What is left of a bound that has passed already."""
DRAIN_POLL_S = 0.05
MOST_ATTEMPTS_FACTOR = 4
"""No request gets more than so many times conductor.max_attempts, whatever each of them brought: it may be what nodes die of."""
INLINE_HASH_TOKENS = 65_536
"""Longer prompts are hashed in a thread, so that the event loop stands still for no more than a few milliseconds."""

_SHUTTING_DOWN = "the conductor is shutting down"

log = get_logger(__name__)


@dataclass(kw_only=True)
class _Request:
    """One request in work."""

    request_id: RequestId
    node_request_id: str
    prompt: TokenArray
    sampling: SamplingParams
    deadline: Deadline
    record: RequestRecord
    answer: Answer
    tokenized_s: float
    tenant: Tenant
    slo: Slo
    """Counted from the arrival."""
    priority: int
    expected_output: Expected
    cache_salt: str
    cached_tokens: int | None = None
    """Known once a prefill group has accepted the request."""
    most_hit_tokens: int = 0
    """Largest prefix hit of an attempt so far."""
    avoid: set[str] = field(default_factory=set)
    may_prefill_locally: bool
    is_local: bool = False
    """Whether decode prefills in the attempt of this moment."""
    hashes: Sequence[BlockHash] = ()
    """Of the full blocks of the prompt and of what the client has."""
    num_block_misses: int = 0
    """Attempts that failed because K/V was not in the store, or damaged there."""
    last_token_s: float | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the client has a part of the answer. It is not refused the rest, as long as nodes could hold it."""
        return bool(self.answer.token_ids)

    @property
    def token_ids(self) -> TokenArray:
        """The prompt, then every token that the client has."""
        if not self.has_begun:
            return self.prompt
        return np.concatenate([self.prompt, np.asarray(self.answer.token_ids, np.uint32)])

    @property
    def num_known_tokens(self) -> int:
        return len(self.prompt) + len(self.answer.token_ids)

    def attempt_id(self, epoch: int) -> str:
        return f"{self.node_request_id} {epoch}"

    def slo_left(self, now_s: float) -> Slo:
        """Counted from now. Once the first token is out its bound is met or missed."""
        ttft_s = self.slo.ttft_s
        if ttft_s is None or self.has_begun:
            return Slo(tbt_s=self.slo.tbt_s)
        return Slo(ttft_s=max(ttft_s - (now_s - self.record.arrival_s), MIN_SLO_S), tbt_s=self.slo.tbt_s)

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=len(self.prompt),
            cached_tokens=self.cached_tokens or 0,
            completion_tokens=len(self.answer.token_ids),
        )


class Conductor:
    """Serves requests on the nodes that the registry shows."""

    def __init__(
        self,
        config: ConductorConfig,
        *,
        model: ServedModel,
        tokenizer: Tokenizer,
        registry: NodeRegistry,
        index: PrefixIndex,
        answers: Answers,
        known_tokens: KnownTokens | None = None,
        metrics: ConductorMetrics,
        clock: Clock,
        tls: Tls | None = None,
    ) -> None:
        """`known_tokens`: wants the tokens of every prompt. Raises: ConfigError."""
        self.model = model
        self._known_tokens = known_tokens
        self.tokenizer = tokenizer
        self.registry = registry
        self.clock = clock
        self.metrics = metrics
        self._settings = config.conductor
        self._index = index
        self._tls = tls
        self._sessions = DecodeSessions(tls)
        self._channels: dict[str, tuple[str, grpc.aio.Channel]] = {}
        self._leases = StoreLeases(lease_s=config.conductor.lease_s, clock=clock, metrics=metrics, tls=tls)
        self._background = Background()
        self._placement = Placement(config, registry, clock)
        self._turns = FairQueue(
            self._placement.room_s,
            lambda: self._placement.num_groups,
            ahead_s=self._placement.ahead_s,
            release_queue_s=self._settings.release_queue_s,
            clock=clock,
        )
        self._limits = TenantLimits()
        self._lengths = OutputLengths()
        self._forecast = DecodeForecast()
        self._answers = answers
        self._hot_blocks = HotBlocks(
            self._placement.view, index.hit_blocks, clock=clock, metrics=metrics.registry, tls=tls
        )
        self._explanations = Explanations(self._placement.cost, metrics)
        self._timelines = TimelineRing()
        for label in PRIORITY_LABELS:
            metrics.queued_requests.labels(label).set_function(partial(self._turns.num_waiting_of, label))
            metrics.queued_s.labels(label).set_function(partial(self._turns.waiting_s_of, label))
        self._num_active = 0
        self._is_draining = False
        self._has_drained = False

    @property
    def num_active(self) -> int:
        return self._num_active

    @property
    def queued_s(self) -> float:
        """Predicted prefill time of the requests that wait for their turn."""
        return sum(map(self._turns.waiting_s_of, PRIORITY_LABELS))

    def start(self) -> None:
        self._leases.start()
        self._hot_blocks.start()

    def begin_drain(self) -> None:
        """Say that requests belong elsewhere. Clients whose connection is open still send some before they have heard of it."""
        self._is_draining = True

    async def drain(self, timeout_s: float) -> None:
        """Return when no request is running and no answer is read any more, or after `timeout_s`, and take none from then on."""
        self.begin_drain()
        try:
            async with asyncio.timeout(timeout_s):
                while self._num_active or self._answers.num_readers:
                    await asyncio.sleep(DRAIN_POLL_S)
        except TimeoutError:
            log.warning("requests cut off by shutdown", active=self._num_active, readers=self._answers.num_readers)
        self._has_drained = True

    async def close(self) -> None:
        self._turns.close()
        await self._hot_blocks.close()
        await self._background.close(CLOSE_GRACE_S)
        await self._sessions.close()
        await self._leases.close()
        for _, channel in self._channels.values():
            await channel.close()

    def check_invariants(self) -> None:
        """When no request is active, nothing may be held for one."""
        if self._num_active == 0 and self._background.num_running == 0:
            assert self._placement.is_empty, "work is counted for requests that are over"
            assert not len(self._forecast), "requests that are over are expected to decode"
            self._forecast.check_invariants()
            self._turns.check_invariants()
            assert self._leases.num_held == 0, f"{self._leases.num_held} reservations held for requests that are over"

    def not_ready(self) -> str | None:
        """Why a prompt would not be served now, or None."""
        if self._is_draining:
            return _SHUTTING_DOWN
        return self._placement.not_ready()

    def explanation(self, request_id: str) -> moontide_pb2.Explanation | None:
        return self._explanations.get(request_id)

    def timeline(self, request_id: str) -> Timeline | None:
        return self._timelines.get(request_id)

    def generate(self, submission: Submission) -> AsyncGenerator[OutputDelta, None]:
        """Serve one request; the consumer closes the iterator (`aclosing`), which cancels what is still running.

        Raises: MoontideError. Before the first delta nothing has been sent for the client.
        """
        key, tenant = submission.idempotency_key, submission.tenant.name
        if key:
            return self._answers.generate(submission, key=key, tenant=tenant, make=self._make)
        return self._make(submission, ())

    async def _make(self, submission: Submission, known: Sequence[SampledToken]) -> AsyncGenerator[OutputDelta, None]:
        """The answer from after the tokens that are `known`, which are not sent again."""
        record = RequestRecord(submission.request_id, arrival_s=submission.arrival_s, clock=self.clock)
        outcome = "cancelled"
        self._count_active(+1)
        try:
            # Whoever has a part of the answer is not refused the rest.
            with nullcontext() if known else self._limits.active(submission.tenant):
                request = await self._prepare(submission, record, known)
                async with aclosing(self._serve(request)) as deltas:
                    async for delta in deltas:
                        if delta.finish_reason is not None:
                            outcome = delta.finish_reason.value
                        yield delta
                self._note_length(request)
        except MoontideError as error:
            outcome = error.code
            if isinstance(error, Rejected) and error.reason is not None:
                self.metrics.rejected.labels(error.reason.value, submission.tenant.name).inc()
            log.info("request failed", request_id=submission.request_id, error=error.code, reason=str(error))
            raise
        except Exception as error:
            outcome = Internal.__name__
            log.exception("request failed", request_id=submission.request_id)
            raise Internal(f"{type(error).__name__}: {error}") from error
        finally:
            self._count_active(-1)
            record.end(outcome)
            if record.handoff_s:
                self.metrics.handoff.observe(record.handoff_s)
            self.metrics.requests.labels(outcome).inc()

    async def _prepare(self, submission: Submission, record: RequestRecord, known: Sequence[SampledToken]) -> _Request:
        if not known:
            self._check_room()
        self._timelines.put(record)
        params = submission.params
        limit_s = self._settings.default_timeout_s
        timeout_s = min(params.timeout_s or limit_s, limit_s)
        prompt = await self._tokenize(submission)
        check_prompt(prompt, self.model)
        is_chat = isinstance(submission.prompt, ChatPrompt)
        sampling = resolve_sampling(params, prompt_tokens=len(prompt), is_chat=is_chat, model=self.model)
        tokenized_s = self.clock.now()
        record.add("tokenize", submission.arrival_s, tokenized_s, num_tokens=len(prompt))
        self.metrics.prompt_tokens.inc(len(prompt))
        tenant = submission.tenant
        self._explanations.begin(submission.request_id, tenant=tenant.name, prompt_tokens=len(prompt))
        answer = Answer(self.tokenizer, sampling, params.stop)
        for token in known:
            answer.add(token)
        return _Request(
            request_id=submission.request_id,
            node_request_id=id_on_nodes(submission.request_id),
            prompt=prompt,
            sampling=sampling,
            deadline=Deadline(submission.arrival_s + timeout_s, self.clock),
            record=record,
            answer=answer,
            tokenized_s=tokenized_s,
            tenant=tenant,
            slo=submission.slo,
            priority=submission.priority,
            expected_output=self._lengths.expected(tenant.name, sampling.max_tokens),
            cache_salt=tenant.cache_salt,
            may_prefill_locally=self._settings.local_prefill,
        )

    def _check_room(self) -> None:
        if (reason := _SHUTTING_DOWN if self._has_drained else self._placement.not_ready()) is not None:
            raise NoCapacity(f"no request can be served now: {reason}")
        limit = self._settings.max_active_requests
        if self._num_active > limit:
            raise Rejected(
                f"{limit} requests are in work, which is conductor.max_active_requests; try again later",
                reason=RejectReason.QUEUE_FULL,
            )

    async def _tokenize(self, submission: Submission) -> TokenArray:
        match submission.prompt:
            case TextPrompt(text=text):
                if not text:
                    raise BadRequest("the prompt is empty; send some text", param="prompt")
                return await self.tokenizer.encode(text, add_special_tokens=True)
            case TokenPrompt(token_ids=token_ids):
                return token_ids
            case ChatPrompt(messages=messages):
                if not messages:
                    raise BadRequest("messages is empty; send at least one message", param="messages")
                return await self.tokenizer.encode_chat(messages)

    async def _serve(self, request: _Request) -> AsyncGenerator[OutputDelta, None]:
        """Attempts until the answer is complete; epochs count from 1."""
        num_fruitless = num_refused = 0
        try:
            for epoch in itertools.count(1):
                num_tokens, most_hit_tokens = len(request.answer.token_ids), request.most_hit_tokens
                try:
                    async with aclosing(self._attempt(request, epoch)) as deltas:
                        async for delta in deltas:
                            yield delta
                    return
                except AttemptFailed as failure:
                    if request.has_begun and is_refusal(failure):
                        num_refused += 1
                        await self._recover(request, failure, epoch, num_fruitless=num_refused)
                        continue
                    # A long answer may outlive many nodes that leave one after the other, and so may a long prompt that goes on after
                    # ever more sealed blocks. The first token of an attempt comes from prefill, and says nothing about decode.
                    num_new = len(request.answer.token_ids) - num_tokens
                    has_advanced = num_new > 1 or (not num_new and request.most_hit_tokens > most_hit_tokens)
                    num_fruitless = 1 if has_advanced else num_fruitless + 1
                    if epoch - num_refused == self._settings.max_attempts * MOST_ATTEMPTS_FACTOR:
                        num_fruitless = epoch
                    await self._recover(request, failure, epoch, num_fruitless=num_fruitless)
        finally:
            self._forecast.end(request.node_request_id)

    async def _attempt(self, request: _Request, epoch: int) -> AsyncGenerator[OutputDelta, None]:
        """Raises: AttemptFailed; DeadlineExceeded; NoCapacity; Rejected."""
        attempt_id = request.attempt_id(epoch)
        fill_cache = False
        async with self._placed(request, epoch) as attempt:
            try:
                if epoch == 1:
                    request.record.add("route", request.tokenized_s, attempt.started_s)
                while request.answer.finish_reason is None:
                    event = await attempt.next_event()
                    delta = self._on_event(request, event, attempt)
                    if delta is None:
                        continue
                    if delta.finish_reason is not None:
                        # The prompt's KV is worth keeping when the answer ended before prefill could seal it all.
                        fill_cache = isinstance(event, Arrived) and event.parts is not None
                        attempt.close(fill_cache=fill_cache)
                    yield delta
                self._note_decoded(request, attempt)
            finally:
                attempt.close(fill_cache=fill_cache)
                self._placement.ended(attempt_id)
                self._turns.prefilled(attempt_id)

    @asynccontextmanager
    async def _placed(self, request: _Request, epoch: int) -> AsyncIterator[Attempt]:
        """An attempt on the nodes that are best for it, started when it is its tenant's turn."""
        view = await self._nodes(request, may_wait=epoch > 1 or request.has_begun)
        hits = await self._hits(request, view)
        choice = self._choose(request, view, hits)
        if epoch == 1:
            self._admit(request, view, choice)
        if choice.prefill is None:
            yield self._start(request, epoch, view, choice)
            return
        asked_s = self.clock.now()
        async with self._turns.turn(
            request.tenant,
            attempt_id=request.attempt_id(epoch),
            priority=request.priority,
            num_tokens=request.num_known_tokens,
            # Without what was learned from prompts that others held up: it would count their work twice.
            work_s=choice.busy_s / choice.corrections.prefill,
            busy_s=choice.busy_s,
            deadline=request.deadline,
            has_begun=request.has_begun,
        ):
            if self.clock.now() - asked_s > STALE_S:
                view = await self._nodes(request, may_wait=True)
                choice = self._choose(request, view, self._index.hit_blocks(request.hashes))
            attempt = self._start(request, epoch, view, choice)
        self.metrics.tenant_work.labels(request.tenant.name).inc(choice.busy_s)
        yield attempt

    def _on_event(self, request: _Request, event: AttemptEvent, attempt: Attempt) -> OutputDelta | None:
        if isinstance(event, Arrived):  # by far the most frequent
            if event.parts is not None:
                self._on_first_token(request, event, attempt)
            return self._on_tokens(request, event, attempt.started_s)
        match event:
            case Accepted(hit_tokens=hit_tokens):
                request.most_hit_tokens = max(request.most_hit_tokens, hit_tokens)
                if request.cached_tokens is None:
                    request.cached_tokens = min(hit_tokens, len(request.prompt))
                    self.metrics.prefix_hit_tokens.inc(request.cached_tokens)
                return None
            case PrefillOver():
                return None
            case Finished(reason=reason):
                text = request.answer.finish(reason)
                return OutputDelta(
                    text=text, tokens=(), usage=request.usage, finish_reason=request.answer.finish_reason
                )

    def _on_first_token(self, request: _Request, event: Arrived, attempt: Attempt) -> None:
        """Of an attempt. Raises: Rejected by the mode that looks at the bound of decode only now."""
        self._forecast.started(request.node_request_id, self.clock.now())
        self._turns.prefilled(request.attempt_id(attempt.epoch))
        assert event.parts is not None
        parts = event.parts
        outcome = Outcome(
            queue_s=parts.queue_s, fetch_s=parts.fetch_s, prefill_s=parts.compute_s, dispatch_s=attempt.dispatch_s
        )
        self._explanations.happened(request.request_id, attempt.epoch, attempt.choice, outcome)
        if not request.has_begun:
            verdict = judge_decode(self._settings.admission, attempt.choice.prediction.tbt_s, request.slo)
            if isinstance(verdict, Refused):
                self._explanations.refused(request.request_id, verdict.message)
                raise verdict.error()

    def _on_tokens(self, request: _Request, event: Arrived, started_s: float) -> OutputDelta | None:
        answer = request.answer
        texts: list[str] = []
        tokens: list[OutputToken] = []
        for numbered in event.tokens:
            if numbered.output_idx != len(answer.token_ids):
                error = Internal(f"token {numbered.output_idx} came when {len(answer.token_ids)} was due")
                raise AttemptFailed(error, node_id=None)
            text, token = answer.add(numbered.token)
            texts.append(text)
            tokens.append(token)
            if answer.finish_reason is not None:
                break
        if not tokens:
            return None
        self._count_tokens(request, len(tokens), event.arrived_s)
        parts = None
        if tokens[0].output_idx == 0 and event.parts is not None:
            parts = self._ttft_parts(request, event, event.parts, started_s)
        return OutputDelta(
            text="".join(texts),
            tokens=tuple(tokens),
            usage=request.usage,
            finish_reason=answer.finish_reason,
            ttft_parts=parts,
        )

    def _note_decoded(self, request: _Request, attempt: Attempt) -> None:
        """Of an attempt that brought the answer to its end."""
        num_steps = len(request.answer.token_ids) - attempt.output_idx - 1
        decoded_s = (request.last_token_s or 0.0) - attempt.decode_started_s
        if num_steps > 0 and decoded_s > 0:
            outcome = Outcome(handoff_s=request.record.handoff_s or None, tbt_s=decoded_s / num_steps)
            self._explanations.happened(request.request_id, attempt.epoch, attempt.choice, outcome)

    def _note_length(self, request: _Request) -> None:
        answer = request.answer
        is_cut = answer.finish_reason is FinishReason.LENGTH
        self._lengths.observe(request.tenant.name, len(answer.token_ids), is_cut=is_cut)

    def _ttft_parts(self, request: _Request, event: Arrived, stage: PrefillParts, started_s: float) -> TtftParts:
        """The clock is read once more, at the moment the first token leaves."""
        left_s = self.clock.now()
        arrival_s = request.record.arrival_s
        parts = TtftParts(
            tokenize_s=request.tokenized_s - arrival_s,
            route_s=started_s - request.tokenized_s,
            dispatch_s=event.arrived_s - started_s - (stage.queue_s + stage.fetch_s + stage.compute_s),
            queue_s=stage.queue_s,
            fetch_s=stage.fetch_s,
            prefill_s=stage.compute_s,
            detokenize_s=left_s - event.arrived_s,
            ttft_s=left_s - arrival_s,
        )
        request.record.ttft_parts = parts
        self.metrics.ttft.observe(parts.ttft_s)
        return parts

    def _count_tokens(self, request: _Request, num_tokens: int, arrived_s: float) -> None:
        self.metrics.output_tokens.inc(num_tokens)
        if request.last_token_s is not None:
            for _ in range(num_tokens):
                self.metrics.tbt.observe((arrived_s - request.last_token_s) / num_tokens)
        request.last_token_s = arrived_s

    async def _nodes(self, request: _Request, *, may_wait: bool) -> ClusterView:
        """What there is for the next attempt. After a failure it waits for nodes that show a sign of life, until the deadline; a new
        request waits as long as those that went are expected back.

        Raises: NoCapacity for a new request that no node can take; DeadlineExceeded.
        """
        is_waiting = False
        while True:
            view = self._placement.view(trusting=not may_wait)
            if isinstance(view, ClusterView):
                return view
            if not may_wait and ((reason := self._placement.not_ready()) is not None or self._is_late(request)):
                raise NoCapacity(f"no request can be served now: {reason or view.reason}")
            request.deadline.check(f"waiting for nodes to continue on ({view.reason})")
            if not is_waiting:
                log.info("request waits for nodes", request_id=request.request_id, reason=view.reason)
                is_waiting = True
            await self.registry.wait_for_read(request.deadline)

    def _is_late(self, request: _Request) -> bool:
        """Whether a first token now would miss its bound, and requests are held to theirs."""
        bound_s = request.slo.ttft_s
        waited_s = self.clock.now() - request.record.arrival_s
        return self._settings.admission != "off" and bound_s is not None and waited_s > bound_s

    async def _hits(self, request: _Request, view: ClusterView) -> Mapping[str, int]:
        """Leading blocks that each store node holds."""
        token_ids, block_tokens = request.token_ids, view.layout.block_tokens
        root = root_hash(view.layout.digest(), request.cache_salt)
        if len(token_ids) <= INLINE_HASH_TOKENS:
            request.hashes = hash_blocks(token_ids, block_tokens=block_tokens, root=root)
        else:
            request.hashes = await asyncio.to_thread(hash_blocks, token_ids, block_tokens=block_tokens, root=root)
        if self._known_tokens is not None:
            self._known_tokens.note(request.hashes, token_ids, block_tokens=block_tokens)
        hits = self._index.hit_blocks(request.hashes)
        self._hot_blocks.note(root, request.hashes, hits)
        return hits

    def _choose(self, request: _Request, view: ClusterView, hits: Mapping[str, int]) -> Choice:
        return self._placement.choose(view, self._need(request), hits)

    def _need(self, request: _Request) -> Need:
        return Need(
            request_id=request.node_request_id,
            prompt_tokens=request.num_known_tokens,
            expected_output_tokens=round(request.expected_output.mean),
            max_tokens_in_cache=len(request.prompt) + request.sampling.max_tokens,
            slo=request.slo_left(self.clock.now()),
            avoid=request.avoid,
            may_prefill_locally=request.may_prefill_locally,
            queue_share=self._turns.queue_share(request.tenant.share(request.priority), request.num_known_tokens),
        )

    def _admit(self, request: _Request, view: ClusterView, choice: Choice) -> None:
        """Raises: Rejected when the SLO of a request that has not begun would not be met."""
        now_s = self.clock.now()
        share = request.tenant.share(request.priority)
        waits_s = 0.0 if choice.prefill is None else self._turns.wait_s(share, request.num_known_tokens)
        prediction = dataclasses.replace(choice.prediction, queue_s=choice.prediction.queue_s + waits_s)
        verdict = judge(
            "off" if request.has_begun else self._settings.admission,
            prediction,
            request.slo_left(now_s),
            prompt_tokens=len(request.prompt),
            pool=pool_of(view) if request.sampling.max_tokens > 1 else None,
            forecast=self._forecast,
            now_s=now_s,
        )
        if isinstance(verdict, Refused):
            self._explanations.refused(request.request_id, verdict.message)
            raise verdict.error()
        self._forecast.add(
            request.node_request_id,
            starts_s=now_s + verdict.ttft_s,
            decode_s=request.expected_output.mean * verdict.tbt_s,
            overrun_s=request.expected_output.overrun * verdict.tbt_s,
        )

    def _start(self, request: _Request, epoch: int, view: ClusterView, choice: Choice) -> Attempt:
        request.is_local = choice.prefill is None
        spec = self._spec(request, epoch)
        log.info(
            "request dispatched",
            request_id=request.request_id,
            node_request_id=request.node_request_id,
            epoch=epoch,
            prompt_tokens=len(request.prompt),
            hit_blocks=choice.hit_blocks,
            prefill="none: decode does it" if choice.prefill is None else choice.prefill.node_id,
            decode=choice.decode.node_id if spec.has_more_tokens or choice.prefill is None else "none: one token",
            ttft_s=choice.prediction.ttft_s,
        )
        attempt = Attempt(
            spec,
            choice,
            session=self._sessions.get(choice.decode),
            prefill_channel=None if choice.prefill is None else self._channel(choice.prefill),
            leases=self._leases,
            background=self._background,
            record=request.record,
            clock=self.clock,
        )
        attempt.start()
        self._explanations.chosen(request.request_id, epoch, choice)
        sent = choice.sent(
            context_tokens=len(spec.token_ids),
            block_bytes=view.layout.block_bytes,
            needs_decode=spec.has_more_tokens,
            now_s=attempt.started_s,
        )
        self._placement.sent(request.attempt_id(epoch), sent)
        return attempt

    async def _recover(self, request: _Request, failure: AttemptFailed, epoch: int, *, num_fruitless: int) -> None:
        """Return when the next attempt may start. Raises: the error that the client gets.

        Args:
            num_fruitless: attempts in a row of which none but the first brought a token of decode; of an answer that has begun and is
                refused, how often it was.
        """
        failed_node = next((n for n in self.registry.nodes if n.record.node_id == failure.node_id), None)
        num_alternatives = 0
        if failed_node is not None:
            if isinstance(failure.error, NodeLost):
                self._placement.failed.note(failed_node.record.node_id, failed_node.record.boot_id, self.clock.now())
            num_alternatives = sum(
                node.alive and node.record.role == failed_node.record.role and node.record.node_id not in request.avoid
                for node in self.registry.nodes
            ) - (failed_node.alive and failed_node.record.node_id not in request.avoid)
        outwaits_refusals = request.has_begun and self._can_hold(request)
        if isinstance(failure.error, Declined) and request.is_local:
            # Who has no time to prefill may still have it to decode, after a prefill group.
            request.may_prefill_locally = False
            num_alternatives += 1
        elif isinstance(failure.error, Declined) and num_alternatives > 0 and failure.node_id is not None:
            request.avoid.add(failure.node_id)
        elif isinstance(failure.error, Declined) and not outwaits_refusals:
            raise _declined_by_all(failure) from failure
        decision = after_failure(
            failure,
            attempt=num_fruitless,
            max_attempts=self._settings.max_attempts,
            num_alternatives=num_alternatives,
            outwaits_refusals=outwaits_refusals,
        )
        if isinstance(decision, GiveUp):
            raise decision.error from failure
        self.metrics.retries.labels(failure.error.code).inc()
        log.warning(
            "attempt failed, trying again",
            request_id=request.request_id,
            epoch=epoch,
            node=failure.node_id or "unknown",
            error=failure.error.code,
            reason=str(failure.error),
        )
        if is_refusal(failure) and num_alternatives == 0:
            request.avoid.clear()  # after the pause each of them may have room
        elif decision.avoid is not None:
            request.avoid.add(decision.avoid)
        if isinstance(failure.error, BlockMissing):
            request.num_block_misses += 1
            if request.num_block_misses > 1:
                # Computing a lost block again puts it back. A damaged one cannot be replaced by a put: take names of our own.
                request.cache_salt = request.node_request_id
        start_s = self.clock.now()
        await asyncio.sleep(min(decision.pause_s, request.deadline.remaining_s()))
        request.deadline.check(f"recovering from: {failure.error}")
        request.record.add("recover", start_s, self.clock.now())

    def _spec(self, request: _Request, epoch: int) -> AttemptSpec:
        slo = request.slo_left(self.clock.now())
        if request.has_begun or self._settings.admission not in ("early", "predictive"):
            # Nobody looks at the bound again: the mode does not, and an answer that has begun is brought to its end.
            slo = Slo(ttft_s=slo.ttft_s)
        return AttemptSpec(
            request_id=request.node_request_id,
            epoch=epoch,
            token_ids=request.token_ids,
            output_idx=len(request.answer.token_ids),
            sampling=request.sampling,
            cache_salt=request.cache_salt,
            deadline=request.deadline,
            tenant=request.tenant.name,
            tenant_weight=request.tenant.weight,
            priority=request.priority,
            slo=slo,
        )

    def _can_hold(self, request: _Request) -> bool:
        """Whether any nodes are large enough for what is left of the request, or none are there to say."""
        view, need = self._placement.view(), self._need(request)
        return not isinstance(view, ClusterView) or view.can_hold(need.prompt_tokens, need.max_tokens_in_cache)

    def _channel(self, record: NodeRecord) -> grpc.aio.Channel:
        """The channel to a prefill group; one per node, replaced when the node has moved."""
        known = self._channels.get(record.node_id)
        if known is not None and known[0] == record.address:
            return known[1]
        if known is not None:
            self._background.spawn(known[1].close(), f"close channel {record.node_id}")
        for node_id in self._channels.keys() - {node.record.node_id for node in self.registry.nodes}:
            _, gone = self._channels.pop(node_id)
            # A node that drains may still be busy with a request.
            self._background.spawn(gone.close(self._settings.default_timeout_s), f"close channel {node_id}")
        channel = open_channel(record.address, self._tls)
        self._channels[record.node_id] = (record.address, channel)
        return channel

    def _count_active(self, change: int) -> None:
        self._num_active += change
        self.metrics.active.set(self._num_active)


def _declined_by_all(failure: AttemptFailed) -> Rejected:
    return Rejected(
        f"no decode instance keeps the bound on the time between tokens; the last one says: {failure.error}",
        reason=RejectReason.TBT_SLO,
    )
