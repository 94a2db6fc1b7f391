"""The client's gRPC API: same requests, same checks as over HTTP."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc
import pytest
import pytest_asyncio
from front import ANSWER_TEXT, MODEL, PROMPT_TEXT, Front, until
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from moontide.client import ChatTurn, GenerateOptions, MoontideClient
from moontide.errors import BadRequest, MoontideError, NoCapacity
from moontide.rpc import open_channel
from moontide_proto.v1 import moontide_pb2, moontide_pb2_grpc


@pytest_asyncio.fixture
async def client(front: Front) -> AsyncIterator[MoontideClient]:
    async with MoontideClient(front.grpc_address) as opened:
        yield opened


async def test_generate_streams_text_tokens_usage_and_ttft_parts(front: Front, client: MoontideClient) -> None:
    options = GenerateOptions(max_tokens=100, temperature=0.0, logprobs=1)
    chunks = [chunk async for chunk in client.generate(PROMPT_TEXT, params=options, model=MODEL, request_id="g1")]
    assert "".join(chunk.text for chunk in chunks) == ANSWER_TEXT
    ids = [token.token_id for chunk in chunks for token in chunk.tokens]
    assert ids == [*front.answer_ids, *front.conductor.model.eos_token_ids]
    assert chunks[0].tokens[0].logprob == -0.5
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["stop"]
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[0].ttft_parts is not None
    parts = dataclasses.asdict(chunks[0].ttft_parts)
    ttft_s = parts.pop("ttft_s")
    assert sum(parts.values()) == pytest.approx(ttft_s, abs=1e-9)
    await front.settle()
    timeline = await client.timeline("g1")
    assert timeline is not None
    assert (timeline.outcome, timeline.ttft_parts) == ("stop", chunks[0].ttft_parts)
    assert await client.timeline("unknown") is None
    explanation = await client.explain("g1")
    assert explanation is not None
    (attempt,) = explanation.attempts
    assert (explanation.prompt_tokens, attempt.policy) == (chunks[-1].usage.prompt_tokens, "moontide")
    assert attempt.chosen.prefill_node_id
    assert attempt.reason
    assert attempt.ttft_s > 0
    assert await client.explain("unknown") is None


async def test_token_ids_chat_and_stop_strings(front: Front, client: MoontideClient) -> None:
    options = GenerateOptions(max_tokens=100, stop=["fox"])
    by_ids = [chunk async for chunk in client.generate(front.prompt_ids, params=options)]
    assert "".join(chunk.text for chunk in by_ids) == ANSWER_TEXT[: ANSWER_TEXT.index("fox")]
    assert front.cluster.prompts() == [front.prompt_ids]
    by_chat = [chunk async for chunk in client.generate([ChatTurn(role="user", content="hi")])]
    assert "".join(chunk.text for chunk in by_chat) == ANSWER_TEXT


@pytest.mark.parametrize(
    ("request_fields", "message", "status"),
    [
        ({"text": ""}, "prompt is empty", grpc.StatusCode.INVALID_ARGUMENT),
        ({}, "no prompt", grpc.StatusCode.INVALID_ARGUMENT),
        ({"token_ids": {"ids": b"123"}}, "3 bytes", grpc.StatusCode.INVALID_ARGUMENT),
        ({"token_ids": {"ids": b"\xff\xff\xff\xff"}}, "4294967295", grpc.StatusCode.INVALID_ARGUMENT),
        ({"chat": {}}, "messages is empty", grpc.StatusCode.INVALID_ARGUMENT),
        ({"text": "x", "params": {"max_tokens": -1}}, "max_tokens=-1", grpc.StatusCode.INVALID_ARGUMENT),
        ({"text": "x", "params": {"max_tokens": 600}}, "context of 512", grpc.StatusCode.INVALID_ARGUMENT),
        ({"text": "x", "params": {"top_p": 2.0}}, "top_p=2.0", grpc.StatusCode.INVALID_ARGUMENT),
        ({"text": "x", "params": {"timeout_s": -1.0}}, "timeout_s=-1.0", grpc.StatusCode.INVALID_ARGUMENT),
        ({"text": "x", "params": {"stop": [""]}}, "stop string", grpc.StatusCode.INVALID_ARGUMENT),
        ({"text": "x", "request_id": "no spaces"}, "request id", grpc.StatusCode.INVALID_ARGUMENT),
        ({"text": "x", "model": "other"}, "'other' is not served", grpc.StatusCode.NOT_FOUND),
    ],
)
async def test_bad_request_has_the_status_of_its_error(
    front: Front, request_fields: dict[str, Any], message: str, status: grpc.StatusCode
) -> None:
    async with open_channel(front.grpc_address) as channel:
        stub = moontide_pb2_grpc.MoontideStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [response async for response in stub.Generate(moontide_pb2.GenerateRequest(**request_fields), timeout=20)]
    assert caught.value.code() is status
    assert message in (caught.value.details() or "")
    assert front.cluster.prompts() == []


async def test_errors_of_the_client_are_ours(front: Front, client: MoontideClient) -> None:
    with pytest.raises(BadRequest, match="max_tokens=-5"):
        [chunk async for chunk in client.generate("x", params=GenerateOptions(max_tokens=-5))]
    await front.cluster.registry.remove("prefill-0")
    with pytest.raises(NoCapacity, match="no complete prefill group"):
        [chunk async for chunk in client.generate("x")]


async def test_cancelled_call_cancels_the_request(front: Front, client: MoontideClient) -> None:
    front.cluster.decode[0].may_step.clear()
    async with aclosing(client.generate(PROMPT_TEXT, params=GenerateOptions(max_tokens=50))) as chunks:
        await anext(chunks)
        await until(lambda: bool(front.cluster.prefill[0].completed))
    await front.settle()
    assert front.metric("conductor_requests_total", outcome="cancelled") == 1


async def test_deadline_of_the_call_bounds_the_request(front: Front) -> None:
    front.cluster.prefill[0].may_sample.clear()
    async with open_channel(front.grpc_address) as channel:
        stub = moontide_pb2_grpc.MoontideStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [r async for r in stub.Generate(moontide_pb2.GenerateRequest(text="x"), timeout=0.5)]
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await front.settle()


async def test_status_shows_nodes_and_readiness(front: Front, client: MoontideClient) -> None:
    status = await client.status()
    assert (status.model, status.ready, status.not_ready_reason) == (MODEL, True, "")
    assert {(node.role, node.alive) for node in status.nodes} == {
        ("prefill", True),
        ("decode", True),
        ("kvstore", True),
    }
    await front.cluster.registry.remove("decode-0")
    status = await client.status()
    assert (status.ready, status.not_ready_reason) == (False, "no decode instance is alive")


async def test_health_and_reflection(front: Front) -> None:
    async with open_channel(front.grpc_address) as channel:
        health = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service="moontide.v1.Moontide"), timeout=10
        )
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        replies = [reply async for reply in stub.ServerReflectionInfo(asked, timeout=10)]
    names = {service.name for service in replies[0].list_services_response.service}
    assert "moontide.v1.Moontide" in names


async def test_requests_over_both_apis_run_at_once(front: Front, client: MoontideClient) -> None:
    async def one() -> str:
        return "".join([c.text async for c in client.generate(PROMPT_TEXT, params=GenerateOptions(max_tokens=99))])

    assert await asyncio.gather(*(one() for _ in range(5))) == [ANSWER_TEXT] * 5
    await front.settle()


async def test_internal_failure_is_an_internal_status(front: Front, client: MoontideClient, monkeypatch: Any) -> None:
    def broken(*_args: object) -> None:
        raise RuntimeError("surprise")

    monkeypatch.setattr(front.conductor, "_need", broken)
    with pytest.raises(MoontideError, match="surprise"):
        [chunk async for chunk in client.generate("x")]
