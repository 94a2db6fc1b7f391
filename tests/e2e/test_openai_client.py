"""The public APIs of a real cluster as clients use them: the openai package, plain HTTP, and gRPC with health and reflection."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from tokenizers import Tokenizer

from moontide.client import GenerateOptions, MoontideClient
from moontide.errors import BadRequest, ModelNotFound, PromptTooLong
from tests.cluster import RunningCluster
from tests.e2e.grpc_answers import ask, greedy
from tests.e2e.real_text import RealText

pytestmark = pytest.mark.processes

MODEL = "smollm2"
PROMPT = "The capital of France is"
CONTEXT = 8192
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def client(smollm2_cluster: RunningCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"http://{smollm2_cluster.http_address}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S
    ) as opened:
        yield opened


@pytest.fixture(scope="module")
def http(smollm2_cluster: RunningCluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{smollm2_cluster.http_address}", timeout=TIMEOUT_S) as opened:
        yield opened


@pytest.fixture(scope="module")
def tokenizer(smollm2_cluster: RunningCluster) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2_cluster.model_dir / "tokenizer.json"))


@pytest.fixture(scope="module")
def text(smollm2_cluster: RunningCluster) -> RealText:
    return RealText(smollm2_cluster.model_dir)


def complete(client: openai.OpenAI, prompt: Any = PROMPT, **fields: Any) -> Any:
    extra = {"ignore_eos": True, **fields.pop("extra_body", {})}
    settings = {"max_tokens": 12, "temperature": 0.0, **fields}
    return client.completions.create(model=MODEL, prompt=prompt, extra_body=extra, **settings)


def test_models_are_listed(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_completion_whole_and_streamed_are_one_text(client: openai.OpenAI) -> None:
    whole = complete(client)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 12
    chunks = list(complete(client, stream=True, stream_options={"include_usage": True}))
    assert len(chunks) > 3, "it streams"
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[-1] == "length"
    assert set(reasons[:-1]) == {None}
    assert chunks[-1].usage.completion_tokens == 12


def test_text_and_its_token_ids_get_one_answer(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    assert complete(client, tokenizer.encode(PROMPT).ids).choices[0].text == complete(client).choices[0].text


async def test_http_text_is_that_of_the_grpc_tokens(
    smollm2_cluster: RunningCluster, client: openai.OpenAI, tokenizer: Tokenizer, text: RealText
) -> None:
    prompt = text.piece(99_000, 150)
    async with MoontideClient(smollm2_cluster.grpc_address) as grpc_client:
        answer = await ask(grpc_client, prompt, greedy(12))
    assert answer.text == tokenizer.decode(answer.token_ids, skip_special_tokens=True)
    assert complete(client, prompt).choices[0].text == answer.text


def test_chat_whole_and_streamed_are_one_text(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Say hello in one short sentence."}],
        "temperature": 0.0,
        "max_completion_tokens": 24,
    }
    whole = client.chat.completions.create(**asked)
    message = whole.choices[0].message
    assert message.role == "assistant"
    assert message.content
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_ends_the_text_before_it(client: openai.OpenAI, stream: bool) -> None:
    free = complete(client, max_tokens=24).choices[0].text
    stop = free[len(free) // 2 : len(free) // 2 + 3]
    expected = free[: free.index(stop)]
    answer = complete(client, max_tokens=24, stop=["never said, for sure", stop], stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == expected
    assert choices[-1].finish_reason == "stop"


async def test_stop_token_id_ends_the_answer(smollm2_cluster: RunningCluster, client: openai.OpenAI) -> None:
    async with MoontideClient(smollm2_cluster.grpc_address) as grpc_client:
        chunks = [chunk async for chunk in grpc_client.generate(PROMPT, params=greedy(12))]
    token_ids = [token.token_id for chunk in chunks for token in chunk.tokens]
    stop = token_ids[6]
    answer = complete(client, extra_body={"stop_token_ids": [stop]})
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == token_ids.index(stop) + 1


def test_max_tokens_of_one(client: openai.OpenAI) -> None:
    answer = complete(client, max_tokens=1)
    assert answer.usage.completion_tokens == 1
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].text == complete(client).choices[0].text[: len(answer.choices[0].text)]


def test_end_of_sequence_ends_a_chat_unless_ignored(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What is 2+2? Answer with the number only."}],
        "temperature": 0.0,
        "max_tokens": 60,
    }
    ended = client.chat.completions.create(**asked)
    assert ended.choices[0].finish_reason == "stop"
    assert ended.usage is not None
    assert ended.usage.completion_tokens < 60
    ignored = client.chat.completions.create(**asked, extra_body={"ignore_eos": True})
    assert ignored.choices[0].finish_reason == "length"
    assert ignored.usage is not None
    assert ignored.usage.completion_tokens == 60


def test_logprobs_of_completion_and_chat(client: openai.OpenAI) -> None:
    plain = complete(client, max_tokens=5, logprobs=3).choices[0]
    assert len(plain.logprobs.tokens) == len(plain.logprobs.token_logprobs) == 5
    assert plain.logprobs.text_offset[0] == 0
    for token, logprob, top in zip(
        plain.logprobs.tokens, plain.logprobs.token_logprobs, plain.logprobs.top_logprobs, strict=True
    ):
        assert logprob == max(top.values()), "greedy takes the most likely"
        assert top[token] == logprob
        assert len(top) == 3
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Hello"}],
        temperature=0.0,
        max_tokens=5,
        logprobs=True,
        top_logprobs=2,
    )
    assert chat.choices[0].logprobs is not None
    for entry in chat.choices[0].logprobs.content or []:
        assert entry.logprob == entry.top_logprobs[0].logprob
        assert len(entry.top_logprobs) == 2


def test_seed_makes_draws_repeatable(client: openai.OpenAI) -> None:
    def drawn(seed: int) -> str:
        text: str = complete(client, temperature=1.0, top_p=0.95, seed=seed, max_tokens=16).choices[0].text
        return text

    assert drawn(7) == drawn(7)
    assert len({drawn(seed) for seed in (7, 8, 9)}) > 1


def test_usage_tells_cached_tokens(client: openai.OpenAI, text: RealText) -> None:
    prompt = text.piece(98_000, 200)
    cached = [complete(client, prompt, max_tokens=2).usage.prompt_tokens_details.cached_tokens for _ in range(2)]
    assert cached == [0, 192]


BAD_BODIES: list[tuple[str, bytes | dict[str, Any], int, tuple[str, ...]]] = [
    ("completions", {"model": MODEL, "prompt": ""}, 400, ("empty", "send")),
    ("completions", {"model": MODEL, "prompt": []}, 400, ("empty", "send")),
    ("completions", {"model": MODEL}, 400, ("prompt", "missing", "send")),
    ("completions", {"model": MODEL, "prompt": [5] * CONTEXT, "max_tokens": 1}, 400, (str(CONTEXT), "exceeds", "shorten")),
    ("completions", {"model": MODEL, "prompt": [5], "max_tokens": CONTEXT}, 400, (str(CONTEXT), "lower max_tokens")),
    ("completions", {"model": "other", "prompt": "x"}, 404, ("other", "not served", MODEL)),
    ("completions", {"model": MODEL, "prompt": "x", "max_tokens": -1}, 400, ("max_tokens=-1", "at least 1")),
    ("completions", {"model": MODEL, "prompt": "x", "n": 2}, 400, ("n is not supported", "leave it out")),
    ("completions", {"model": MODEL, "prompt": "x", "temperature": -1}, 400, ("temperature=-1", "[0, 100]")),
    ("completions", {"model": MODEL, "prompt": "x", "max_tokens": "ten"}, 400, ("max_tokens", "integer")),
    ("completions", {"model": MODEL, "prompt": [2**31]}, 400, (str(2**31), "vocabulary", "below")),
    ("completions", b'{"model": "smollm2", "prompt": ', 400, ("no valid JSON", "column", "send")),
    ("completions", b'{"model": "smollm2", "prompt": "\xff\xfe"}', 400, ("no valid UTF-8", "0xff", "send")),
    ("chat/completions", {"model": MODEL, "messages": []}, 400, ("messages is empty", "send")),
    ("chat/completions", b"\xff", 400, ("no valid UTF-8", "0xff")),
    ("chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "n": 2}, 400, ("n is not",)),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "words"), BAD_BODIES)
def test_bad_request_is_told_what_is_wrong_and_the_service_goes_on(
    http: httpx.Client, path: str, body: bytes | dict[str, Any], status: int, words: tuple[str, ...]
) -> None:
    sent = {"content": body} if isinstance(body, bytes) else {"json": body}
    response = http.post(f"/v1/{path}", headers={"Content-Type": "application/json"}, **sent)  # type: ignore[arg-type]
    assert response.status_code == status, response.text
    message = response.json()["error"]["message"]
    for word in words:
        assert word.lower() in message.lower(), message
    good = http.post("/v1/completions", json={"model": MODEL, "prompt": PROMPT, "max_tokens": 1, "temperature": 0})
    assert good.status_code == 200, good.text


def test_unknown_path_is_not_found(http: httpx.Client) -> None:
    assert http.get("/v1/nothing").status_code == 404
    assert http.get("/v1/completions").status_code == 405


def test_ready_means_a_prompt_would_be_served(http: httpx.Client) -> None:
    assert http.get("/ready").status_code == 200
    assert http.get("/live").status_code == 200
    assert "conductor_requests_total" in http.get("/metrics").text


def test_openai_errors_have_their_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="max_tokens=-1"):
        complete(client, max_tokens=-1)
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.completions.create(model="other", prompt="x")


def test_grpc_health_and_reflection(smollm2_cluster: RunningCluster) -> None:
    with grpc.insecure_channel(smollm2_cluster.grpc_address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "moontide.v1.Moontide"):
            reply = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        database = ProtoReflectionDescriptorDatabase(channel)
        assert {"moontide.v1.Moontide", "grpc.health.v1.Health"} <= set(database.get_services())
        described = database.FindFileContainingSymbol("moontide.v1.Moontide")
        (service,) = described.service
        assert "Generate" in {method.name for method in service.method}


async def test_grpc_generate_streams_and_refuses_by_name(smollm2_cluster: RunningCluster) -> None:
    async with MoontideClient(smollm2_cluster.grpc_address) as client:
        chunks = [chunk async for chunk in client.generate(PROMPT, params=greedy(8))]
        assert len(chunks) > 3
        assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["length"]
        assert chunks[0].ttft_parts is not None
        for prompt, options, model, error, words in (
            ("", None, "", BadRequest, "empty"),
            ([5] * CONTEXT, None, "", PromptTooLong, "exceeds the context"),
            ("x", None, "other", ModelNotFound, "not served here"),
            ("x", GenerateOptions(max_tokens=-1), "", BadRequest, "max_tokens=-1"),
        ):
            with pytest.raises(error, match=words):
                async for _ in client.generate(prompt, params=options, model=model):
                    pass
        assert [chunk async for chunk in client.generate(PROMPT, params=greedy(1))]
