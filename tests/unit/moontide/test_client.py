"""MoontideClient against a scripted gRPC server; the conductor's side has its own tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, cast

import grpc
import numpy as np
import pytest
import pytest_asyncio

from moontide.client import ChatTurn, GenerateOptions, MoontideClient
from moontide.errors import BadRequest, NodeLost
from moontide.rpc import Server, abort
from moontide.timeline import Span, Timeline, TtftParts
from moontide.token_ids import unpack_token_ids
from moontide_proto.v1 import common_pb2, moontide_pb2, moontide_pb2_grpc

PARTS = TtftParts(tokenize_s=1, route_s=2, dispatch_s=3, queue_s=4, fetch_s=5, prefill_s=6, detokenize_s=7, ttft_s=28)
TIMELINE = Timeline(
    request_id="r1",
    spans=(Span(name="chunk", track="stage 0", start_s=1.0, duration_s=0.5, first_token=64, num_tokens=64),),
    duration_s=2.0,
    outcome="stop",
    ttft_parts=PARTS,
    handoff_s=0.25,
)


class ScriptedConductor(moontide_pb2_grpc.MoontideServicer):
    def __init__(self) -> None:
        self.requests: list[moontide_pb2.GenerateRequest] = []
        self.cancelled = asyncio.Event()

    async def Generate(
        self, request: moontide_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[moontide_pb2.GenerateResponse]:
        self.requests.append(request)
        if request.text == "bad":
            await abort(context, BadRequest("top_p=7 must lie in (0, 1]", param="top_p"))
        tokens = [common_pb2.Token(token_id=7, output_idx=0, logprob=-1.5)]
        yield moontide_pb2.GenerateResponse(request_id="r1", text="Hel", tokens=tokens, ttft_parts=PARTS.to_proto())
        if request.text == "hang":
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()
        usage = moontide_pb2.Usage(prompt_tokens=3, cached_tokens=2, completion_tokens=1)
        yield moontide_pb2.GenerateResponse(request_id="r1", text="lo", finish_reason="stop", usage=usage)

    async def GetStatus(self, _request: object, _context: Any) -> moontide_pb2.ClusterStatus:
        node = moontide_pb2.NodeStatus(node_id="d", role="decode", address="a:1", alive=True, load={"running": 2.0})
        return moontide_pb2.ClusterStatus(model="m", nodes=[node], registry_connected=True, not_ready_reason="why")

    async def GetTimeline(self, request: moontide_pb2.TimelineRequest, context: Any) -> moontide_pb2.Timeline:
        if request.request_id != "r1":
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown")
        return TIMELINE.to_proto()


@pytest_asyncio.fixture
async def conductor() -> AsyncIterator[tuple[ScriptedConductor, MoontideClient]]:
    servicer, server = ScriptedConductor(), Server()
    server.add(moontide_pb2_grpc.add_MoontideServicer_to_server, servicer, "moontide.v1.Moontide")
    port = await server.start("127.0.0.1", 0)
    async with MoontideClient(f"127.0.0.1:{port}") as client:
        yield servicer, client
    await server.close()


Pair = tuple[ScriptedConductor, MoontideClient]


async def test_chunks_carry_text_tokens_usage_and_parts(conductor: Pair) -> None:
    servicer, client = conductor
    options = GenerateOptions(max_tokens=5, temperature=0.0, stop=["x"])
    chunks = [chunk async for chunk in client.generate("hi", params=options, request_id="r1")]
    assert [chunk.text for chunk in chunks] == ["Hel", "lo"]
    assert chunks[0].tokens[0].logprob == -1.5
    assert chunks[0].ttft_parts == PARTS
    assert chunks[1].usage is not None
    assert chunks[1].usage.cached_tokens == 2
    assert chunks[1].finish_reason == "stop"
    params = servicer.requests[0].params
    assert params.HasField("temperature"), "0 is not the same as absent"
    assert not params.HasField("top_p")
    assert list(params.stop) == ["x"]


async def test_prompt_kinds(conductor: Pair) -> None:
    servicer, client = conductor
    for prompt in ([1, 2, 3], [ChatTurn(role="user", content="hi")], [1, np.int64(2), np.uint32(3)]):
        assert [chunk async for chunk in client.generate(prompt)]
    assert unpack_token_ids(servicer.requests[0].token_ids.ids).tolist() == [1, 2, 3]
    assert servicer.requests[1].chat.messages[0].content == "hi"
    assert servicer.requests[2].token_ids.ids == servicer.requests[0].token_ids.ids, "numpy's integers count too"


async def test_prompt_of_something_else_is_refused_and_not_sent_in_part(conductor: Pair) -> None:
    servicer, client = conductor
    for prompt in ([{"role": "user", "content": "hi"}], [1, "two"]):
        with pytest.raises((TypeError, ValueError)):
            [chunk async for chunk in client.generate(cast(Any, prompt))]
    assert servicer.requests == []


async def test_errors_are_ours(conductor: Pair) -> None:
    _, client = conductor
    with pytest.raises(BadRequest, match="top_p=7"):
        [chunk async for chunk in client.generate("bad")]
    async with MoontideClient("127.0.0.1:1") as lonely:
        with pytest.raises(NodeLost, match="not reachable"):
            await lonely.status()


async def test_closing_the_iterator_cancels_the_call(conductor: Pair) -> None:
    servicer, client = conductor
    async with aclosing(client.generate("hang")) as chunks:
        await anext(chunks)
    await asyncio.wait_for(servicer.cancelled.wait(), 10.0)


async def test_status_and_timeline(conductor: Pair) -> None:
    _, client = conductor
    status = await client.status()
    assert (status.model, status.ready, status.not_ready_reason) == ("m", False, "why")
    assert status.nodes[0].load == {"running": 2.0}
    assert await client.timeline("r1") == TIMELINE
    assert await client.timeline("other") is None
