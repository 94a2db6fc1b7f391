"""One request from its arrival to its last token. Knows neither HTTP nor the client's gRPC.

validate and tokenise -> hash blocks -> match the prefix index -> choose nodes -> one Attempt after the other, until the answer is complete.
A new attempt gets the prompt and every token that the client has, so nothing is repeated, left out or drawn twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from functools import lru_cache

import grpc.aio
import numpy as np

from conductor.answer import Answer, OutputDelta, OutputToken, Usage
from conductor.attempt import Accepted, Arrived, Attempt, AttemptEvent, AttemptSpec, Finished, PrefillOver, PrefillParts
from conductor.background import Background
from conductor.config import ConductorConfig
from conductor.cost import Slo
from conductor.decode_session import DecodeSessions
from conductor.in_flight import InFlight
from conductor.metrics import ConductorMetrics
from conductor.prefix_index import PrefixIndex
from conductor.recovery import AttemptFailed, FailedNodes, GiveUp, after_failure
from conductor.registry import NodeRegistry
from conductor.router import Capable, Choice, Need, NoChoice, capable_nodes, choose
from conductor.store_leases import StoreLeases
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
from kvstore.block import BlockHash, hash_blocks, root_hash
from kvstore.layout import KVLayout
from moontide.clock import Clock
from moontide.deadline import Deadline
from moontide.errors import (
    BadRequest,
    BlockMissing,
    Internal,
    MoontideError,
    NoCapacity,
    NodeLost,
    Rejected,
    RejectReason,
)
from moontide.log import get_logger
from moontide.registry import NodeRecord
from moontide.rpc import open_channel
from moontide.sampling_params import SamplingParams
from moontide.timeline import Timeline, TtftParts
from moontide.token_ids import TokenArray

CACHE_SALT = ""
"""All requests share the cache: there is one tenant."""
CLOSE_GRACE_S = 5.0

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
    cached_tokens: int | None = None
    """Known once a prefill group has accepted the request."""
    avoid: set[str]
    cache_salt: str = CACHE_SALT
    num_block_misses: int = 0
    """Attempts that failed because K/V was not in the store, or damaged there."""
    last_token_s: float | None = None

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
        metrics: ConductorMetrics,
        clock: Clock,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.registry = registry
        self.clock = clock
        self.metrics = metrics
        self._settings = config.conductor
        self._index = index
        self._sessions = DecodeSessions()
        self._channels: dict[str, tuple[str, grpc.aio.Channel]] = {}
        self._leases = StoreLeases(lease_s=config.conductor.lease_s, clock=clock, metrics=metrics)
        self._background = Background()
        self._in_flight = InFlight(config.registry.heartbeat_s)
        self._failed = FailedNodes(config.registry.lease_s)
        self._timelines = TimelineRing()
        self._num_active = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_draining = False

    @property
    def num_active(self) -> int:
        return self._num_active

    def start(self) -> None:
        self._leases.start()

    async def drain(self, timeout_s: float) -> None:
        """Take no more requests; return when the running ones are over, or after `timeout_s`."""
        self._is_draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            log.warning("requests cut off by shutdown", active=self._num_active)

    async def close(self) -> None:
        await self._background.close(CLOSE_GRACE_S)
        await self._sessions.close()
        await self._leases.close()
        for _, channel in self._channels.values():
            await channel.close()

    def check_invariants(self) -> None:
        """When no request is active, nothing may be held for one."""
        if self._num_active == 0 and self._background.num_running == 0:
            assert self._in_flight.is_empty, "work is counted for requests that are over"
            assert self._leases.num_held == 0, f"{self._leases.num_held} reservations held for requests that are over"

    def not_ready(self) -> str | None:
        """Why a prompt would not be served now, or None."""
        if self._is_draining:
            return "the conductor is shutting down"
        capable = capable_nodes(self.registry.nodes, model_id=self._settings.model_id)
        return capable.reason if isinstance(capable, NoChoice) else None

    def timeline(self, request_id: str) -> Timeline | None:
        return self._timelines.get(request_id)

    async def generate(self, submission: Submission) -> AsyncGenerator[OutputDelta, None]:
        """Serve one request; the consumer closes the iterator (`aclosing`), which cancels what is still running.

        Raises: MoontideError. Before the first delta nothing has been sent for the client.
        """
        record = RequestRecord(submission.request_id, arrival_s=submission.arrival_s, clock=self.clock)
        outcome = "cancelled"
        self._count_active(+1)
        try:
            request = await self._prepare(submission, record)
            async with aclosing(self._serve(request)) as deltas:
                async for delta in deltas:
                    if delta.finish_reason is not None:
                        outcome = delta.finish_reason.value
                    yield delta
        except MoontideError as error:
            outcome = error.code
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

    async def _prepare(self, submission: Submission, record: RequestRecord) -> _Request:
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
        return _Request(
            request_id=submission.request_id,
            node_request_id=id_on_nodes(submission.request_id),
            prompt=prompt,
            sampling=sampling,
            deadline=Deadline(submission.arrival_s + timeout_s, self.clock),
            record=record,
            answer=Answer(self.tokenizer, sampling, params.stop),
            tokenized_s=tokenized_s,
            avoid=set(),
        )

    def _check_room(self) -> None:
        if (reason := self.not_ready()) is not None:
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
        for epoch in range(1, self._settings.max_attempts + 1):
            try:
                async with aclosing(self._attempt(request, epoch)) as deltas:
                    async for delta in deltas:
                        yield delta
                return
            except AttemptFailed as failure:
                await self._recover(request, failure, epoch)

    async def _attempt(self, request: _Request, epoch: int) -> AsyncGenerator[OutputDelta, None]:
        """Raises: AttemptFailed; DeadlineExceeded; NoCapacity."""
        choice = await self._choose(request, may_wait=epoch > 1)
        spec = _attempt_spec(request, epoch)
        attempt = self._new_attempt(request, spec, choice)
        attempt_id = f"{request.node_request_id} {epoch}"
        self._in_flight.begin(
            attempt_id,
            prefill_node=choice.prefill.node_id,
            tokens=max(1, len(request.prompt) - choice.hit_blocks * _layout(choice.prefill.layout_json).block_tokens),
            decode_node=choice.decode.node_id if spec.has_more_tokens else None,
            now_s=self.clock.now(),
        )
        fill_cache = False
        try:
            attempt.start()
            if epoch == 1:
                request.record.add("route", request.tokenized_s, attempt.started_s)
            while request.answer.finish_reason is None:
                event = await attempt.next_event()
                if isinstance(event, Arrived):
                    self._in_flight.prefill_done(attempt_id)
                delta = self._on_event(request, event, attempt.started_s)
                if delta is None:
                    continue
                if delta.finish_reason is not None:
                    # The prompt's KV is worth keeping when the answer ended before prefill could seal it all.
                    fill_cache = isinstance(event, Arrived) and event.parts is not None
                    attempt.close(fill_cache=fill_cache)
                yield delta
        finally:
            attempt.close(fill_cache=fill_cache)
            self._in_flight.end(attempt_id)

    def _on_event(self, request: _Request, event: AttemptEvent, started_s: float) -> OutputDelta | None:
        match event:
            case Accepted(hit_tokens=hit_tokens):
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
            case Arrived():
                return self._on_tokens(request, event, started_s)

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

    async def _choose(self, request: _Request, *, may_wait: bool) -> Choice:
        """Nodes for the next attempt. After a failure it waits for nodes that show a sign of life, until the deadline.

        Raises: NoCapacity for a new request that no node can take; DeadlineExceeded.
        """
        while True:
            nodes = self.registry.nodes
            failed = self._failed.current(nodes, self.clock.now())
            trusted = [node for node in nodes if node.record.node_id not in failed]
            capable = capable_nodes(trusted, model_id=self._settings.model_id)
            if isinstance(capable, NoChoice) and not may_wait:
                capable = capable_nodes(nodes, model_id=self._settings.model_id)
                if isinstance(capable, NoChoice):
                    raise NoCapacity(f"no request can be served now: {capable.reason}")
            if isinstance(capable, Capable):
                return self._choose_among(capable, request)
            request.deadline.check(f"waiting for nodes to continue on ({capable.reason})")
            await self.registry.wait_for_read(request.deadline)

    def _choose_among(self, capable: Capable, request: _Request) -> Choice:
        layout = _layout(capable.layout_json)
        token_ids = np.concatenate([request.prompt, np.asarray(request.answer.token_ids, np.uint32)])
        root = root_hash(_digest(capable.layout_json), request.cache_salt)
        hashes: list[BlockHash] = hash_blocks(token_ids, block_tokens=layout.block_tokens, root=root)
        need = Need(
            request_id=request.node_request_id,
            max_tokens_in_cache=len(request.prompt) + request.sampling.max_tokens,
            avoid=request.avoid,
        )
        read_s = {node.record.node_id: node.read_s for node in self.registry.nodes}
        return choose(
            capable,
            need,
            hit_blocks=self._index.hit_blocks(hashes),
            own=self._in_flight.unreported(read_s),
            block_tokens=layout.block_tokens,
        )

    def _new_attempt(self, request: _Request, spec: AttemptSpec, choice: Choice) -> Attempt:
        log.info(
            "request dispatched",
            request_id=request.request_id,
            node_request_id=request.node_request_id,
            epoch=spec.epoch,
            prompt_tokens=len(request.prompt),
            hit_blocks=choice.hit_blocks,
            prefill=choice.prefill.node_id,
            decode=choice.decode.node_id if spec.has_more_tokens else "none: one token",
        )
        return Attempt(
            spec,
            choice,
            session=self._sessions.get(choice.decode),
            prefill_channel=self._channel(choice.prefill),
            leases=self._leases,
            background=self._background,
            record=request.record,
            clock=self.clock,
        )

    async def _recover(self, request: _Request, failure: AttemptFailed, epoch: int) -> None:
        """Return when the next attempt may start. Raises: the error that the client gets."""
        failed_node = next((n for n in self.registry.nodes if n.record.node_id == failure.node_id), None)
        num_alternatives = 0
        if failed_node is not None:
            if isinstance(failure.error, NodeLost):
                self._failed.note(failed_node.record.node_id, failed_node.record.boot_id, self.clock.now())
            num_alternatives = sum(
                node.alive and node.record.role == failed_node.record.role and node.record.node_id not in request.avoid
                for node in self.registry.nodes
            ) - (failed_node.alive and failed_node.record.node_id not in request.avoid)
        decision = after_failure(
            failure, attempt=epoch, max_attempts=self._settings.max_attempts, num_alternatives=num_alternatives
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
        if decision.avoid is not None:
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

    def _channel(self, record: NodeRecord) -> grpc.aio.Channel:
        """The channel to a prefill group; one per node, replaced when the node has moved."""
        known = self._channels.get(record.node_id)
        if known is not None and known[0] == record.address:
            return known[1]
        if known is not None:
            self._background.spawn(known[1].close(), f"close channel {record.node_id}")
        channel = open_channel(record.address)
        self._channels[record.node_id] = (record.address, channel)
        return channel

    def _count_active(self, change: int) -> None:
        self._num_active += change
        self.metrics.active.set(self._num_active)
        if self._num_active:
            self._idle.clear()
        else:
            self._idle.set()


def _attempt_spec(request: _Request, epoch: int) -> AttemptSpec:
    sent = request.answer.token_ids
    return AttemptSpec(
        request_id=request.node_request_id,
        epoch=epoch,
        token_ids=np.concatenate([request.prompt, np.asarray(sent, np.uint32)]),
        output_idx=len(sent),
        sampling=request.sampling,
        cache_salt=request.cache_salt,
        deadline=request.deadline,
        tenant="",
        tenant_weight=1.0,
        priority=0,
        slo=Slo(),
    )


@lru_cache(maxsize=16)
def _layout(layout_json: str) -> KVLayout:
    return KVLayout.from_json(layout_json)


@lru_cache(maxsize=16)
def _digest(layout_json: str) -> bytes:
    return _layout(layout_json).digest()
