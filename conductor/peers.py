"""Answers read from one conductor by another: both sides of moontide.v1.Peer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Protocol, TypeAlias

import grpc.aio

from conductor.answer import OutputDelta, OutputToken, Usage
from conductor.recording import Position
from moontide.deadline import Deadline
from moontide.errors import DeadlineExceeded
from moontide.rpc import Server, from_rpc_error, grpc_errors, names_error, open_channel
from moontide.sampling_params import FinishReason, SampledToken
from moontide.timeline import TtftParts
from moontide.tls import Tls
from moontide_proto.v1 import moontide_pb2, peer_pb2, peer_pb2_grpc

SERVICE_NAME = peer_pb2.DESCRIPTOR.services_by_name["Peer"].full_name
HEADER_TIMEOUT_S = 2.0
"""A conductor that lives takes the call within this time."""

Context: TypeAlias = Any
"""grpc.aio.ServicerContext; gRPC ships no types."""


class PeerLost(Exception):
    """The other conductor does not serve the answer (any more)."""


class KeptAnswers(Protocol):
    def attached(self, token: bytes, position: Position) -> AsyncGenerator[OutputDelta, None] | None:
        """The rest of the answer that belongs to `token`; None when it is not kept here. Read it without a pause in between."""


class PeerServicer(peer_pb2_grpc.PeerServicer):
    def __init__(self, answers: KeptAnswers) -> None:
        self._answers = answers

    async def Attach(self, request: peer_pb2.AttachRequest, context: Context) -> None:
        await context.send_initial_metadata(())
        position = Position(num_tokens=request.num_tokens, num_chars=request.num_chars)
        deltas = self._answers.attached(request.token, position)
        if deltas is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no answer is kept here for this token")
            raise AssertionError("abort returned")
        async with grpc_errors(context), aclosing(deltas):
            async for delta in deltas:
                await context.write(_to_proto(delta))


def add_to(server: Server, answers: KeptAnswers) -> None:
    server.add(peer_pb2_grpc.add_PeerServicer_to_server, PeerServicer(answers), SERVICE_NAME)


async def attach(
    address: str,
    token: bytes,
    position: Position,
    *,
    deadline: Deadline,
    is_alive: Callable[[], bool],
    look_s: float,
    tls: Tls | None = None,
) -> AsyncGenerator[OutputDelta, None]:
    """The rest of an answer from the conductor at `address`. While it is silent, `is_alive` is asked every `look_s`.

    Raises: PeerLost; DeadlineExceeded; the error with which the answer ended there.
    """
    async with open_channel(address, tls) as channel:
        stub = peer_pb2_grpc.PeerStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Attach(
            peer_pb2.AttachRequest(token=token, num_tokens=position.num_tokens, num_chars=position.num_chars)
        )
        try:
            async with asyncio.timeout(HEADER_TIMEOUT_S):
                await call.initial_metadata()
            while (message := await _read(call, deadline, is_alive, look_s)) is not None:
                yield _from_proto(message)
        except grpc.aio.AioRpcError as error:
            if names_error(error):
                raise from_rpc_error(error, f"conductor {address}") from error
            raise PeerLost(f"conductor {address}: {error.code().name}: {error.details()}") from error
        except TimeoutError as error:
            raise PeerLost(f"conductor {address} did not answer within {HEADER_TIMEOUT_S} s") from error
        finally:
            call.cancel()


async def _read(
    call: Any, deadline: Deadline, is_alive: Callable[[], bool], look_s: float
) -> peer_pb2.AnswerDelta | None:
    """The next message; None at the end. Raises: PeerLost, DeadlineExceeded, AioRpcError."""
    reading = asyncio.ensure_future(call.read())
    try:
        while True:
            done, _ = await asyncio.wait({reading}, timeout=min(look_s, deadline.remaining_s()))
            if done:
                message = reading.result()
                return None if message is grpc.aio.EOF else message
            if deadline.expired:
                raise DeadlineExceeded("the answer was not complete in time; ask again with the same key")
            if not is_alive():
                raise PeerLost("the lease of the conductor that makes the answer is over")
    finally:
        reading.cancel()


def _to_proto(delta: OutputDelta) -> peer_pb2.AnswerDelta:
    return peer_pb2.AnswerDelta(
        text=delta.text,
        tokens=[out.token.to_proto(out.output_idx) for out in delta.tokens],
        text_offsets=[out.text_offset for out in delta.tokens],
        usage=moontide_pb2.Usage(
            prompt_tokens=delta.usage.prompt_tokens,
            cached_tokens=delta.usage.cached_tokens,
            completion_tokens=delta.usage.completion_tokens,
        ),
        finish_reason="" if delta.finish_reason is None else delta.finish_reason.value,
        ttft_parts=None if delta.ttft_parts is None else delta.ttft_parts.to_proto(),
    )


def _from_proto(message: peer_pb2.AnswerDelta) -> OutputDelta:
    return OutputDelta(
        text=message.text,
        tokens=tuple(
            OutputToken(token=SampledToken.from_proto(token), output_idx=token.output_idx, text_offset=text_offset)
            for token, text_offset in zip(message.tokens, message.text_offsets, strict=True)
        ),
        usage=Usage(
            prompt_tokens=message.usage.prompt_tokens,
            cached_tokens=message.usage.cached_tokens,
            completion_tokens=message.usage.completion_tokens,
        ),
        finish_reason=FinishReason(message.finish_reason) if message.finish_reason else None,
        ttft_parts=TtftParts.from_proto(message.ttft_parts) if message.HasField("ttft_parts") else None,
    )
