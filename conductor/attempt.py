"""One try at a request on chosen nodes: the Prefill call, the decode instance's part, the reservation.

    accepted -> hold the reservation | sealed -> tell decode | first token -> out | completed -> start decode
    pulled -> release the reservation | tokens -> out | finished -> out
Without a prefill group the decode instance does it all, the reservation included: local prefill done | tokens -> out | finished -> out
Everything that arrives goes through one queue, so that the order of events is the order of arrival.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import grpc
import grpc.aio

from conductor.background import Background
from conductor.cost import Slo
from conductor.decode_session import DecodeMessage, DecodeSession
from conductor.inbox import Inbox
from conductor.recovery import AttemptFailed
from conductor.router import Choice
from conductor.store_leases import StoreLeases
from conductor.timelines import RequestRecord
from moontide.clock import Clock
from moontide.deadline import Deadline
from moontide.errors import DeadlineExceeded, Internal, MoontideError, NodeLost, error_from_code
from moontide.log import get_logger
from moontide.registry import NodeRecord
from moontide.rpc import from_rpc_error, names_error
from moontide.sampling_params import FinishReason, SampledToken, SamplingParams
from moontide.timeline import Span
from moontide.token_ids import TokenArray, pack_token_ids
from moontide_proto.v1 import common_pb2, decode_pb2, prefill_pb2, prefill_pb2_grpc

CACHE_FILL_S = 30.0
"""When the first token ended a request, time that its prefill gets to seal the rest of the prompt for later ones."""
_STATUSES_OF_LOSS = (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class AttemptSpec:
    """What one attempt computes."""

    request_id: str
    epoch: int
    token_ids: TokenArray
    """The prompt, then every token that the client has."""
    output_idx: int
    """Output index of the first token of this attempt."""
    sampling: SamplingParams
    cache_salt: str
    deadline: Deadline
    tenant: str
    tenant_weight: float
    priority: int
    slo: Slo
    """Counted from the start of this attempt."""

    @property
    def has_more_tokens(self) -> bool:
        """Whether tokens may follow the first one of this attempt."""
        return self.output_idx + 1 < self.sampling.max_tokens


@dataclass(frozen=True, kw_only=True)
class PrefillParts:
    """Where the time went until the first token, by the node that computed it; the rest was the way there and back."""

    queue_s: float
    fetch_s: float
    compute_s: float


class NumberedToken(NamedTuple):
    token: SampledToken
    output_idx: int


class Arrived(NamedTuple):
    """Tokens, in order; the first one of an attempt comes with the parts of its time."""

    tokens: Sequence[NumberedToken]
    arrived_s: float
    parts: PrefillParts | None = None


@dataclass(frozen=True, kw_only=True)
class Accepted:
    hit_tokens: int


@dataclass(frozen=True, kw_only=True)
class PrefillOver:
    """All KV of the prompt is sealed; decode takes over."""


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The decode instance says that the request is over, for a reason that the tokens alone do not show."""

    reason: FinishReason


AttemptEvent = Accepted | Arrived | PrefillOver | Finished
_Message = prefill_pb2.PrefillEvent | DecodeMessage


class Attempt:
    def __init__(
        self,
        spec: AttemptSpec,
        choice: Choice,
        *,
        session: DecodeSession,
        prefill_channel: grpc.aio.Channel | None,
        leases: StoreLeases,
        background: Background,
        record: RequestRecord,
        clock: Clock,
    ) -> None:
        """`prefill_channel` is that of the chosen prefill group, if one was chosen."""
        self._spec = spec
        self.choice = choice
        self._session = session
        self._channel = prefill_channel
        self._leases = leases
        self._background = background
        self._record = record
        self._clock = clock
        # Bounded by the request: a prompt has so many blocks and an answer so many tokens.
        self._inbox: Inbox[tuple[_Message, float]] = Inbox(spec.deadline)
        self._prefill: asyncio.Task[None] | None = None
        self._first: common_pb2.Token | None = None
        self._prefill_origin_s = math.inf
        """The request's arrival at stage 0, by this clock: what messages say of it, each late by its way here. The earliest is nearest."""
        self._completed_s: float | None = None
        self._pulled_s: float | None = None
        self.dispatch_s = 0.0
        """To the node that prefills and the first token's way back; known with it."""
        self.decode_started_s = 0.0
        """When the first token after it was due to be computed: the KV was all there."""
        self._local_parts: PrefillParts | None = None
        """Of a local prefill whose first token is still to come."""
        self._store_address: str | None = None if choice.prefill is None else choice.store.address
        """Where the conductor holds a reservation, or will."""
        self._store_node_id = choice.store.node_id
        self._decode_is_open = False
        self._is_closed = False
        self.started_s = clock.now()

    def start(self) -> None:
        """Open the decode side, if it has anything to do, then call prefill."""
        spec, prefill = self._spec, self.choice.prefill
        self.started_s = self._clock.now()
        if prefill is None or spec.has_more_tokens:
            self._open_decode(spec, prefills=prefill is None)
        if prefill is not None:
            self._prefill = self._background.spawn(self._call_prefill(prefill), f"prefill {spec.request_id}")

    def _open_decode(self, spec: AttemptSpec, *, prefills: bool) -> None:
        store = self.choice.store
        opening = decode_pb2.DecodeOpen(
            token_ids=pack_token_ids(spec.token_ids),
            sampling=spec.sampling.to_proto(),
            cache_salt=spec.cache_salt,
            timeout_s=spec.deadline.remaining_s(),
            output_idx=spec.output_idx,
            tbt_slo_s=spec.slo.tbt_s,
            local_prefill=(
                decode_pb2.LocalPrefill(store_node_id=store.node_id, store_address=store.address) if prefills else None
            ),
        )
        self._decode_is_open = True
        self._session.open(self._command(open=opening), self._deliver)

    @property
    def epoch(self) -> int:
        return self._spec.epoch

    @property
    def output_idx(self) -> int:
        """Of the first token."""
        return self._spec.output_idx

    async def next_event(self) -> AttemptEvent:
        """The next thing that matters to the request.

        Raises: AttemptFailed; DeadlineExceeded.
        """
        while True:
            try:
                message, arrived_s = await self._inbox.get()
            except TimeoutError as error:
                doing = "prefill worked" if self._completed_s is None else "decode worked"
                raise DeadlineExceeded(
                    f"deadline passed while {doing} on the request; give it a larger timeout"
                ) from error
            if isinstance(message, AttemptFailed):
                raise message
            if isinstance(message, prefill_pb2.PrefillEvent):
                event = self._on_prefill(message, arrived_s)
            else:
                event = self._on_decode(message, arrived_s)
            if event is not None:
                return event

    def close(self, *, fill_cache: bool = False) -> None:
        """End everything that is still open: the call, decode's part, the reservation. May be called again.

        `fill_cache` lets the prefill seal the rest of the prompt first, because the answer is complete and the KV is worth keeping.
        """
        self._is_closed = True
        self._inbox.close()
        self._session.forget(self._spec.request_id, self._spec.epoch)
        self._send_to_decode(cancel=decode_pb2.DecodeCancel())
        self._decode_is_open = False
        if self._prefill is not None and not fill_cache:
            self._prefill.cancel()
        if self._store_address is not None:
            address, self._store_address = self._store_address, None
            self._background.spawn(self._release(address), f"release {self._spec.request_id}")
        self._record_decode_end()

    async def _call_prefill(self, record: NodeRecord) -> None:
        """Feed the Prefill call's events into the inbox; cancelling this task cancels the call."""
        assert self._channel is not None
        spec = self._spec
        stub = prefill_pb2_grpc.PrefillStub(self._channel)  # type: ignore[no-untyped-call]
        request = prefill_pb2.PrefillRequest(
            request_id=spec.request_id,
            epoch=spec.epoch,
            token_ids=pack_token_ids(spec.token_ids),
            sampling=spec.sampling.to_proto(),
            output_idx=spec.output_idx,
            cache_salt=spec.cache_salt,
            timeout_s=spec.deadline.remaining_s(),
            ttft_slo_s=spec.slo.ttft_s,
            tenant=spec.tenant,
            tenant_weight=spec.tenant_weight,
            priority=spec.priority,
            copy_blocks=self.choice.replicate_blocks,
        )
        call: Any = None
        is_complete = False
        try:
            call = stub.Prefill(request, timeout=spec.deadline.remaining_s())
            async for event in call:
                is_complete = event.WhichOneof("event") == "completed"
                self._deliver(event)
            if not is_complete:
                error = NodeLost(f"prefill group {record.node_id} ended the call before the prompt was done")
                self._deliver(AttemptFailed(error, node_id=record.node_id))
        except grpc.aio.AioRpcError as rpc_error:
            if is_complete:
                log.info("prefill group lost after its part was done", request_id=spec.request_id, node=record.node_id)
                return
            self._deliver(AttemptFailed(_prefill_error(rpc_error, record.node_id), node_id=record.node_id))
        except asyncio.CancelledError:
            if not (is_complete or self._is_closed):
                # Not asked for here: the node has moved, and its old channel was closed under the call.
                error = NodeLost(f"prefill group {record.node_id} has moved to another address")
                self._deliver(AttemptFailed(error, node_id=record.node_id))
            raise
        except Exception as error:
            log.exception("prefill call failed", request_id=spec.request_id)
            self._deliver(AttemptFailed(Internal(f"{type(error).__name__}: {error}"), node_id=record.node_id))
        finally:
            if call is not None:
                call.cancel()

    def _on_prefill(self, message: prefill_pb2.PrefillEvent, arrived_s: float) -> AttemptEvent | None:
        kind = message.WhichOneof("event")
        if kind == "accepted":
            self._store_address = message.accepted.store_address or self.choice.store.address
            self._store_node_id = message.accepted.store_node_id or self.choice.store.node_id
            self._leases.hold(self._store_address, self._spec.request_id, self._spec.epoch)
            return Accepted(hit_tokens=message.accepted.hit_tokens)
        if kind == "sealed":
            self._tell_sealed(message.sealed.num_blocks)
            return None
        if kind == "first_token":
            token = message.first_token.token
            if token.HasField("error"):
                node_id = self.choice.prefill.node_id if self.choice.prefill else None
                raise AttemptFailed(Internal(f"prefill group {node_id}: {token.error}"), node_id=node_id)
            self._first = token
            timings = message.first_token.timings
            self._prefill_origin_s = min(self._prefill_origin_s, arrived_s - timings.total_s)
            self._record.add("prefill call", self.started_s, arrived_s, num_tokens=len(self._spec.token_ids))
            parts = PrefillParts(queue_s=timings.queue_s, fetch_s=timings.fetch_s, compute_s=timings.compute_s)
            return self._first_arrived([_numbered(self._first)], arrived_s, parts)
        if kind == "completed":
            return self._on_completed(message.completed, arrived_s)
        return None  # an event of a newer peer

    def _on_completed(self, completed: prefill_pb2.PrefillCompleted, arrived_s: float) -> AttemptEvent:
        if self._first is None:
            error = Internal("prefill says that it is complete, but no first token came")
            raise AttemptFailed(error, node_id=self.choice.prefill.node_id if self.choice.prefill else None)
        self._completed_s = arrived_s
        # Whatever the events said, decode must know that all full blocks are there before it is started.
        self._tell_sealed(completed.num_blocks)
        self._send_to_decode(
            start=decode_pb2.DecodeStart(first_token=self._first, store_address=self._store_address or "")
        )
        self._add_prefill_spans(completed, arrived_s)
        return PrefillOver()

    def _on_decode(self, message: decode_pb2.DecodeEvent, arrived_s: float) -> AttemptEvent | None:
        kind = message.WhichOneof("event")
        if kind == "pulled":
            self._on_pulled(message.pulled, arrived_s)
            return None
        if kind == "tokens":
            return self._on_tokens(message.tokens, arrived_s)
        if kind == "local_prefill_done":
            done = message.local_prefill_done
            self._local_parts = PrefillParts(queue_s=done.queue_s, fetch_s=done.fetch_s, compute_s=done.compute_s)
            return Accepted(hit_tokens=done.hit_tokens)
        if kind == "finished":
            self._decode_is_open = False
            return Finished(reason=FinishReason.from_proto(message.finished.reason))
        if kind == "failed":
            self._decode_is_open = False
            failed = message.failed
            error = error_from_code(failed.code, f"decode instance {self.choice.decode.node_id}: {failed.message}")
            raise AttemptFailed(error, node_id=self.choice.decode.node_id, is_retriable=failed.retriable)
        return None  # an event of a newer peer

    def _on_tokens(self, message: decode_pb2.DecodeTokens, arrived_s: float) -> Arrived:
        if message.spans:
            self._add_remote(message.spans, arrived_s - message.age_s)
        parts, self._local_parts = self._local_parts, None
        if parts is not None:
            self._record.add("local prefill", self.started_s, arrived_s, num_tokens=len(self._spec.token_ids))
            self._pulled_s = self.decode_started_s = arrived_s
            return self._first_arrived([_numbered(token) for token in message.tokens], arrived_s, parts)
        return Arrived([_numbered(token) for token in message.tokens], arrived_s)

    def _first_arrived(self, tokens: Sequence[NumberedToken], arrived_s: float, parts: PrefillParts) -> Arrived:
        self.dispatch_s = arrived_s - self.started_s - parts.queue_s - parts.fetch_s - parts.compute_s
        return Arrived(tokens=tokens, arrived_s=arrived_s, parts=parts)

    def _on_pulled(self, pulled: decode_pb2.DecodePulled, arrived_s: float) -> None:
        if self._completed_s is not None:
            self._pulled_s = self.decode_started_s = arrived_s
        self._add_remote(pulled.spans, arrived_s - pulled.age_s)
        if self._completed_s is not None:
            self._record.add("handoff", self._completed_s, arrived_s)
            self._record.handoff_s = arrived_s - self._completed_s
        if self._store_address is not None:
            address, self._store_address = self._store_address, None
            self._background.spawn(self._release(address), f"release {self._spec.request_id}")

    async def _release(self, address: str) -> None:
        """After the prefill call is over: a reservation that it makes late would outlive the release."""
        if self._prefill is not None:
            await asyncio.wait({self._prefill}, timeout=CACHE_FILL_S)
            self._prefill.cancel()
        if self._is_closed:
            self._take_late_spans()
        await self._leases.release(address, self._spec.request_id, self._spec.epoch)

    def _take_late_spans(self) -> None:
        """Spans of a prefill that completed after the answer was over."""
        while (item := self._inbox.take()) is not None:
            message, arrived_s = item
            if isinstance(message, prefill_pb2.PrefillEvent) and message.HasField("completed"):
                self._add_prefill_spans(message.completed, arrived_s)

    def _record_decode_end(self) -> None:
        if self._pulled_s is not None:
            pulled_s, self._pulled_s = self._pulled_s, None
            self._record.add("decode", pulled_s, self._clock.now())

    def _add_prefill_spans(self, completed: prefill_pb2.PrefillCompleted, arrived_s: float) -> None:
        self._record.plan = completed.plan
        self._add_remote(completed.spans, min(self._prefill_origin_s, arrived_s - completed.age_s))

    def _add_remote(self, spans: Sequence[common_pb2.Span], origin_s: float) -> None:
        self._record.add_remote((Span.from_proto(span) for span in spans), origin_s=origin_s)

    def _deliver(self, message: _Message) -> None:
        self._inbox.put((message, self._clock.now()))

    def _tell_sealed(self, num_blocks: int) -> None:
        self._send_to_decode(sealed=decode_pb2.DecodeSealed(num_blocks=num_blocks, store_node_id=self._store_node_id))

    def _send_to_decode(
        self,
        *,
        sealed: decode_pb2.DecodeSealed | None = None,
        start: decode_pb2.DecodeStart | None = None,
        cancel: decode_pb2.DecodeCancel | None = None,
    ) -> None:
        """Nothing without an open decode side."""
        if self._decode_is_open:
            self._session.send(self._command(sealed=sealed, start=start, cancel=cancel))

    def _command(
        self,
        *,
        open: decode_pb2.DecodeOpen | None = None,
        sealed: decode_pb2.DecodeSealed | None = None,
        start: decode_pb2.DecodeStart | None = None,
        cancel: decode_pb2.DecodeCancel | None = None,
    ) -> decode_pb2.DecodeCommand:
        spec = self._spec
        return decode_pb2.DecodeCommand(
            request_id=spec.request_id, epoch=spec.epoch, open=open, sealed=sealed, start=start, cancel=cancel
        )


def _numbered(token: common_pb2.Token) -> NumberedToken:
    return NumberedToken(SampledToken.from_proto(token), token.output_idx)


def _prefill_error(rpc_error: grpc.aio.AioRpcError, node_id: str) -> MoontideError:
    """A broken connection shows up under several statuses; one that comes without an error class of ours means a lost node."""
    if not names_error(rpc_error) and rpc_error.code() in _STATUSES_OF_LOSS:
        return NodeLost(f"prefill group {node_id} is lost: {rpc_error.details() or rpc_error.code().name}")
    return from_rpc_error(rpc_error, f"prefill group {node_id}")
