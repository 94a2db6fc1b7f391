"""The Python client of the gRPC API.

async with MoontideClient("127.0.0.1:9000") as client:
    async for chunk in client.generate("Once upon a time", params=GenerateOptions(max_tokens=32)):
        print(chunk.text, end="")
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, cast

import grpc.aio

from moontide import rpc
from moontide.config import TlsConfig
from moontide.sampling_params import SampledToken
from moontide.timeline import Timeline, TtftParts
from moontide.tls import Tls
from moontide.token_ids import pack_token_ids
from moontide_proto.v1 import moontide_pb2, moontide_pb2_grpc

CALL_TIMEOUT_S = 10.0
SET_ROLE_TIMEOUT_S = 120.0
"""The nodes answer one after the other, once they know that the model fits."""


@dataclass(frozen=True, kw_only=True)
class ChatTurn:
    role: str
    content: str


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """None: the server's default."""

    max_tokens: int | None = None
    temperature: float | None = None
    """0 is greedy."""
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """Alternatives per token."""
    timeout_s: float | None = None

    def to_proto(self) -> moontide_pb2.GenerateParams:
        return moontide_pb2.GenerateParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            logprobs=self.logprobs,
            timeout_s=self.timeout_s,
        )


@dataclass(frozen=True, kw_only=True)
class Usage:
    prompt_tokens: int
    cached_tokens: int
    """Leading tokens whose KV came from the store."""
    completion_tokens: int


@dataclass(frozen=True, kw_only=True)
class GeneratedChunk:
    """What became final with one message."""

    request_id: str
    text: str
    tokens: tuple[SampledToken, ...]
    finish_reason: str
    """"stop" or "length" on the last chunk, else empty."""
    usage: Usage | None
    """On the last chunk."""
    ttft_parts: TtftParts | None
    """On the chunk with the first token."""


@dataclass(frozen=True, kw_only=True)
class NodeInfo:
    node_id: str
    role: str
    address: str
    alive: bool
    load: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class ClusterInfo:
    model: str
    nodes: tuple[NodeInfo, ...]
    registry_connected: bool
    active_requests: int
    ready: bool
    not_ready_reason: str


class MoontideClient:
    """One connection to a conductor. Failed calls raise the errors of moontide/errors.py."""

    def __init__(self, address: str, *, api_key: str = "", tls: TlsConfig | None = None) -> None:
        """`tls`: with `ca_file` the connection is encrypted. Raises: ConfigError for files that cannot be used."""
        self._address = address
        self._metadata = [("authorization", f"Bearer {api_key}")] if api_key else []
        self._channel = rpc.open_channel(address, Tls.load(tls, serves=False) if tls is not None else None)
        self._stub = moontide_pb2_grpc.MoontideStub(self._channel)  # type: ignore[no-untyped-call]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    async def connect(self) -> None:
        """Open the connection now instead of with the first call, and see that a conductor answers. Raises: NodeLost."""
        await self.status()

    async def generate(
        self,
        prompt: str | Sequence[int] | Sequence[ChatTurn],
        *,
        params: GenerateOptions | None = None,
        model: str = "",
        request_id: str = "",
        idempotency_key: str = "",
        ttft_slo_s: float | None = None,
        tbt_slo_s: float | None = None,
        priority: int | None = None,
    ) -> AsyncGenerator[GeneratedChunk, None]:
        """Stream the answer to a text, to token ids or to a conversation. Closing the iterator cancels the request everywhere.

        With an idempotency key the same call, to any conductor, gets the same answer from its start, also after a lost connection.
        """
        request = moontide_pb2.GenerateRequest(
            request_id=request_id,
            model=model,
            params=(params or GenerateOptions()).to_proto(),
            idempotency_key=idempotency_key,
            ttft_slo_s=ttft_slo_s,
            tbt_slo_s=tbt_slo_s,
            priority=priority,
        )
        _set_prompt(request, prompt)
        call = self._stub.Generate(request, metadata=self._metadata)
        try:
            async for response in call:
                yield _chunk(response)
        except grpc.aio.AioRpcError as error:
            raise rpc.from_rpc_error(error, f"conductor {self._address}") from error
        finally:
            call.cancel()

    async def status(self) -> ClusterInfo:
        reply: moontide_pb2.ClusterStatus = await rpc.call(
            self._stub.GetStatus,
            moontide_pb2.ClusterStatusRequest(),
            timeout_s=CALL_TIMEOUT_S,
            peer=f"conductor {self._address}",
        )
        return ClusterInfo(
            model=reply.model,
            nodes=tuple(
                NodeInfo(node_id=n.node_id, role=n.role, address=n.address, alive=n.alive, load=dict(n.load))
                for n in reply.nodes
            ),
            registry_connected=reply.registry_connected,
            active_requests=reply.active_requests,
            ready=reply.ready,
            not_ready_reason=reply.not_ready_reason,
        )

    async def timeline(self, request_id: str) -> Timeline | None:
        """None when the conductor does not know the request (any more)."""
        reply = await self._unless_unknown(self._stub.GetTimeline, moontide_pb2.TimelineRequest(request_id=request_id))
        return None if reply is None else Timeline.from_proto(reply)

    async def explain(self, request_id: str) -> moontide_pb2.Explanation | None:
        """Why the request went where it went; None as above."""
        return cast(
            moontide_pb2.Explanation | None,
            await self._unless_unknown(self._stub.Explain, moontide_pb2.ExplainRequest(request_id=request_id)),
        )

    async def set_role(self, node_ids: Sequence[str], role: str) -> list[str]:
        """Have nodes serve in the other role; returns the ids under which they announce themselves once they have drained.

        Raises: RoleRefused.
        """
        reply: moontide_pb2.SetRoleReply = await rpc.call(
            self._stub.SetRole,
            moontide_pb2.SetRoleRequest(node_ids=node_ids, role=role),
            timeout_s=SET_ROLE_TIMEOUT_S,
            peer=f"conductor {self._address}",
            metadata=self._metadata,
        )
        return list(reply.node_ids)

    async def _unless_unknown(self, method: Callable[..., Any], request: object) -> Any:
        """The reply; None if it is NOT_FOUND."""
        try:
            return await method(request, timeout=CALL_TIMEOUT_S, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return None
            raise rpc.from_rpc_error(error, f"conductor {self._address}") from error


def _set_prompt(request: moontide_pb2.GenerateRequest, prompt: str | Sequence[int] | Sequence[ChatTurn]) -> None:
    if isinstance(prompt, str):
        request.text = prompt
        return
    if len(prompt) and isinstance(prompt[0], ChatTurn):
        turns = cast(Sequence[ChatTurn], prompt)
        request.chat.messages.extend(moontide_pb2.ChatMessage(role=t.role, content=t.content) for t in turns)
    else:
        request.token_ids.ids = pack_token_ids(cast(Sequence[int], prompt))


def _chunk(response: moontide_pb2.GenerateResponse) -> GeneratedChunk:
    usage = None
    if response.HasField("usage"):
        usage = Usage(
            prompt_tokens=response.usage.prompt_tokens,
            cached_tokens=response.usage.cached_tokens,
            completion_tokens=response.usage.completion_tokens,
        )
    return GeneratedChunk(
        request_id=response.request_id,
        text=response.text,
        tokens=tuple(SampledToken.from_proto(token) for token in response.tokens),
        finish_reason=response.finish_reason,
        usage=usage,
        ttft_parts=TtftParts.from_proto(response.ttft_parts) if response.HasField("ttft_parts") else None,
    )
