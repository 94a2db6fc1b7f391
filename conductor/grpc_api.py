"""The client's gRPC API: a thin adapter between protobuf and the conductor."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc.aio

from conductor.answer import OutputDelta
from conductor.roles import RoleManager
from conductor.service import Conductor
from conductor.tenants import TenantDirectory
from conductor.tokenizer import ChatMessage
from conductor.validation import (
    ChatPrompt,
    GenerateParams,
    Prompt,
    RequestId,
    Submission,
    TextPrompt,
    TokenPrompt,
    Wishes,
    check_request_id,
)
from moontide.errors import BadRequest, DeadlineExceeded, ModelNotFound
from moontide.rpc import Server, grpc_errors
from moontide.token_ids import unpack_token_ids
from moontide_proto.v1 import common_pb2, moontide_pb2, moontide_pb2_grpc

SERVICE_NAME = moontide_pb2.DESCRIPTOR.services_by_name["Moontide"].full_name

CLIENT_STALL_S = 60.0
"""A client that reads nothing of its answer for so long is dropped, and its request with it."""

Context: TypeAlias = Any
"""grpc.aio.ServicerContext; gRPC ships no types."""


class MoontideServicer(moontide_pb2_grpc.MoontideServicer):
    def __init__(self, conductor: Conductor, tenants: TenantDirectory, roles: RoleManager) -> None:
        self._conductor = conductor
        self._roles = roles
        self._tenants = tenants

    async def Generate(self, request: moontide_pb2.GenerateRequest, context: Context) -> None:
        """Streams through `context.write`, so that a client that does not read can be given a bound."""
        arrival_s = self._conductor.clock.now()
        async with grpc_errors(context, request.request_id):
            tenant = self._tenants.of(_authorization(context))
            wishes = _wishes(request)
            submission = Submission(
                request_id=check_request_id(request.request_id),
                prompt=self._prompt(request),
                params=_params(request.params, context.time_remaining()),
                arrival_s=arrival_s,
                tenant=tenant,
                slo=wishes.slo(tenant),
                priority=wishes.priority_of(tenant),
                idempotency_key=request.idempotency_key,
            )
            async with aclosing(self._conductor.generate(submission)) as deltas:
                async for delta in deltas:
                    await _write(context, _response(submission.request_id, delta))

    async def GetStatus(
        self, _request: moontide_pb2.ClusterStatusRequest, _context: Context
    ) -> moontide_pb2.ClusterStatus:
        conductor = self._conductor
        reason = conductor.not_ready()
        nodes = sorted(conductor.registry.nodes, key=lambda node: (node.record.role, node.record.node_id))
        return moontide_pb2.ClusterStatus(
            model=conductor.model.name,
            nodes=[
                moontide_pb2.NodeStatus(
                    node_id=node.record.node_id,
                    role=node.record.role,
                    address=node.record.address,
                    alive=node.alive,
                    load=node.record.load,
                )
                for node in nodes
            ],
            registry_connected=conductor.registry.connected,
            active_requests=conductor.num_active,
            ready=reason is None,
            not_ready_reason=reason or "",
        )

    async def GetTimeline(self, request: moontide_pb2.TimelineRequest, context: Context) -> moontide_pb2.Timeline:
        timeline = self._conductor.timeline(request.request_id)
        if timeline is None:
            await _abort_unknown(context, request.request_id)
            raise AssertionError("abort returned")
        return timeline.to_proto()

    async def Explain(self, request: moontide_pb2.ExplainRequest, context: Context) -> moontide_pb2.Explanation:
        explanation = self._conductor.explanation(request.request_id)
        if explanation is None:
            await _abort_unknown(context, request.request_id)
            raise AssertionError("abort returned")
        return explanation

    async def SetRole(self, request: moontide_pb2.SetRoleRequest, context: Context) -> moontide_pb2.SetRoleReply:
        async with grpc_errors(context):
            self._tenants.of(_authorization(context))
            node_ids = await self._roles.set_role(list(request.node_ids), request.role)
        return moontide_pb2.SetRoleReply(node_ids=node_ids)

    def _prompt(self, request: moontide_pb2.GenerateRequest) -> Prompt:
        served = self._conductor.model.name
        if request.model and request.model != served:
            raise ModelNotFound(f"model {request.model[:200]!r} is not served here; ask for {served!r}", param="model")
        kind = request.WhichOneof("prompt")
        if kind == "text":
            return TextPrompt(text=request.text)
        if kind == "chat":
            messages = [ChatMessage(role=m.role, content=m.content) for m in request.chat.messages]
            return ChatPrompt(messages=messages)
        if kind == "token_ids":
            try:
                return TokenPrompt(token_ids=unpack_token_ids(request.token_ids.ids))
            except ValueError as error:
                raise BadRequest(str(error), param="token_ids") from error
        raise BadRequest("the request has no prompt; set text, token_ids or chat", param="prompt")


def add_to(server: Server, conductor: Conductor, tenants: TenantDirectory, roles: RoleManager) -> None:
    servicer = MoontideServicer(conductor, tenants, roles)
    server.add(moontide_pb2_grpc.add_MoontideServicer_to_server, servicer, SERVICE_NAME)


def _authorization(context: Context) -> str:
    return next((str(value) for key, value in context.invocation_metadata() or () if key == "authorization"), "")


def _wishes(request: moontide_pb2.GenerateRequest) -> Wishes:
    return Wishes(
        ttft_slo_s=request.ttft_slo_s if request.HasField("ttft_slo_s") else None,
        tbt_slo_s=request.tbt_slo_s if request.HasField("tbt_slo_s") else None,
        priority=request.priority if request.HasField("priority") else None,
    )


async def _abort_unknown(context: Context, request_id: str) -> None:
    message = f"request {request_id!r} is not known here (any more)"
    await context.abort(grpc.StatusCode.NOT_FOUND, message)


async def _write(context: Context, response: moontide_pb2.GenerateResponse) -> None:
    try:
        async with asyncio.timeout(CLIENT_STALL_S):
            await context.write(response)
    except TimeoutError as error:
        raise DeadlineExceeded(f"the client read nothing for {CLIENT_STALL_S} s") from error


def _params(params: moontide_pb2.GenerateParams, call_timeout_s: float | None) -> GenerateParams:
    """Absent fields become defaults; the deadline of the call bounds the request too."""
    timeouts = [
        t for t in (params.timeout_s if params.HasField("timeout_s") else None, call_timeout_s) if t is not None
    ]
    return GenerateParams(
        max_tokens=params.max_tokens if params.HasField("max_tokens") else None,
        temperature=params.temperature if params.HasField("temperature") else 1.0,
        top_p=params.top_p if params.HasField("top_p") else 1.0,
        top_k=params.top_k if params.HasField("top_k") else 0,
        seed=params.seed if params.HasField("seed") else None,
        stop=tuple(params.stop),
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs if params.HasField("logprobs") else None,
        timeout_s=min(timeouts, default=None),
    )


def _response(request_id: RequestId, delta: OutputDelta) -> moontide_pb2.GenerateResponse:
    reason = delta.finish_reason
    usage = moontide_pb2.Usage(
        prompt_tokens=delta.usage.prompt_tokens,
        cached_tokens=delta.usage.cached_tokens,
        completion_tokens=delta.usage.completion_tokens,
    )
    tokens: list[common_pb2.Token] = [out.token.to_proto(out.output_idx) for out in delta.tokens]
    return moontide_pb2.GenerateResponse(
        request_id=request_id,
        text=delta.text,
        tokens=tokens,
        finish_reason=reason.value if reason is not None else "",
        usage=usage if reason is not None else None,
        ttft_parts=delta.ttft_parts.to_proto() if delta.ttft_parts is not None else None,
    )
