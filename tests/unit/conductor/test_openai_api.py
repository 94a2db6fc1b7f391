"""The HTTP API, through the real `openai` client and through raw requests."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from front import ANSWER_TEXT, MODEL, PROMPT_TEXT, WAIT_S, Front, open_front, until
from pydantic import ValidationError

from conductor.answer import OutputDelta
from conductor.openai_schema import Body, ChatBody, CompletionBody
from conductor.validation import Submission
from tests.fakes.text_model import MAX_CONTEXT


@pytest_asyncio.fixture
async def client(front: Front) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{front.http_url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


@pytest_asyncio.fixture
async def http(front: Front) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=front.http_url, timeout=30.0) as opened:
        yield opened


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": PROMPT_TEXT, "max_tokens": 100, "temperature": 0, **fields}


def chat(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hello"}]
    return {"model": MODEL, "messages": messages, "max_tokens": 100, "temperature": 0, **fields}


async def test_completion_through_the_openai_client(front: Front, client: openai.AsyncOpenAI) -> None:
    front.cluster.prefill[0].hit_tokens = 16
    answer = await client.completions.create(model=MODEL, prompt=PROMPT_TEXT, max_tokens=100, temperature=0)
    assert answer.choices[0].text == ANSWER_TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "text_completion"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(front.prompt_ids)
    assert answer.usage.completion_tokens == len(front.answer_ids) + 1
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 16
    await front.settle()


async def test_completion_stream_with_usage(front: Front, client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(
        model=MODEL, prompt=PROMPT_TEXT, max_tokens=100, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == ANSWER_TEXT
    assert [c.choices[0].finish_reason for c in chunks[:-1]].count("stop") == 1
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(front.answer_ids) + 1
    assert len({chunk.id for chunk in chunks}) == 1
    await front.settle()


async def test_chat_whole_and_streamed(front: Front, client: openai.AsyncOpenAI) -> None:
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}]
    whole = await client.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=100)
    assert whole.choices[0].message.content == ANSWER_TEXT
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason == "stop"
    stream = await client.chat.completions.create(model=MODEL, messages=messages, stream=True)
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER_TEXT
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["stop"]
    assert all(chunk.usage is None for chunk in chunks)
    prompts = front.cluster.prompts()
    assert prompts[0] == prompts[1]
    assert "hel\nlo" in front.decoded(prompts[0])
    await front.settle()


async def test_chat_without_max_tokens_may_use_the_whole_context(front: Front, client: openai.AsyncOpenAI) -> None:
    await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hello"}])
    call = front.cluster.prefill[0].calls[0]
    assert call.sampling.max_tokens == MAX_CONTEXT - len(front.cluster.prompts()[0])


async def test_completion_logprobs(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model=MODEL, prompt=PROMPT_TEXT, max_tokens=6, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == answer.choices[0].text
    assert logprobs.token_logprobs == [-0.5] * 6
    offsets = logprobs.text_offset or []
    for offset, token in zip(offsets, logprobs.tokens or [], strict=True):
        assert answer.choices[0].text[offset:].startswith(token)
    for token, top in zip(logprobs.tokens or [], logprobs.top_logprobs or [], strict=True):
        assert top[token] == -0.5
        assert 1 <= len(top) <= 2


async def test_chat_logprobs_have_bytes_that_make_the_text(client: openai.AsyncOpenAI) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    whole = await client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=100, logprobs=True, top_logprobs=3
    )
    assert whole.choices[0].logprobs is not None
    content = whole.choices[0].logprobs.content or []
    joined = b"".join(bytes(entry.bytes or []) for entry in content)
    assert joined.decode() == ANSWER_TEXT + "<|im_end|>"
    assert all(len(entry.top_logprobs) == 3 for entry in content)
    stream = await client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=100, logprobs=True, stream=True
    )
    streamed = [e async for c in stream if c.choices[0].logprobs for e in c.choices[0].logprobs.content or []]
    assert [entry.token for entry in streamed] == [entry.token for entry in content]
    assert all(entry.top_logprobs == [] for entry in streamed)


@pytest.mark.parametrize("nested", [False, True])
async def test_prompt_of_token_ids(front: Front, client: openai.AsyncOpenAI, nested: bool) -> None:
    ids = [5, 6, 7, 300]
    await client.completions.create(model=MODEL, prompt=[ids] if nested else ids, max_tokens=1)
    assert front.cluster.prompts() == [ids]


async def test_prompt_list_with_one_text(front: Front, client: openai.AsyncOpenAI) -> None:
    await client.completions.create(model=MODEL, prompt=[PROMPT_TEXT], max_tokens=1)
    assert front.cluster.prompts() == [front.prompt_ids]


async def test_sampling_fields_reach_the_nodes(front: Front, http: httpx.AsyncClient) -> None:
    body = completion(
        temperature=0.7, top_p=0.9, top_k=5, seed=-1, ignore_eos=True, stop_token_ids=[3], max_tokens=2, stop=None, n=1,
        presence_penalty=0.0, logit_bias={}, user="me", unknown_field={"a": 1},
    )  # fmt: skip
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    sampling = front.cluster.prefill[0].calls[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.7, 0.9, 5)
    assert (sampling.seed, sampling.ignore_eos, list(sampling.stop_token_ids)) == (2**64 - 1, True, [3])
    assert (sampling.max_tokens, list(sampling.eos_token_ids), sampling.HasField("logprobs")) == (2, [], False)


async def test_top_k_beyond_the_vocabulary_cuts_nothing(front: Front, http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/completions", json=completion(top_k=2**31))
    assert response.status_code == 200, response.text
    assert front.cluster.prefill[0].calls[0].sampling.top_k == front.conductor.model.vocab_size


async def test_lines_of_a_stream_end_where_events_end_for_every_reader(model_dir: Path) -> None:
    text = "one\u2028two\u0085three"
    async with (
        open_front(model_dir, answer_text=text) as front,
        httpx.AsyncClient(base_url=front.http_url) as http,
        http.stream("POST", "/v1/completions", json=completion(stream=True)) as response,
    ):
        events = [json.loads(line[6:]) async for line in response.aiter_lines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == text


async def test_stop_string_over_http(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/completions", json=completion(stop=["lazy", "fox"]))
    assert response.json()["choices"][0]["text"] == ANSWER_TEXT[: ANSWER_TEXT.index("fox")]
    assert response.json()["choices"][0]["finish_reason"] == "stop"


async def test_stream_ends_with_done_and_request_id_is_echoed(front: Front, http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/completions", json=completion(stream=True), headers={"X-Request-Id": "my-id.1"})
    assert response.headers["X-Request-Id"] == "my-id.1"
    assert response.headers["Content-Type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[0].removeprefix("data: "))["id"] == "cmpl-my-id.1"
    await front.settle()
    timeline = (await http.get("/v1/timelines/my-id.1")).json()
    assert timeline["outcome"] == "stop"
    assert timeline["spans"]
    assert (await http.get("/v1/timelines/cmpl-my-id.1")).json() == timeline
    assert (await http.get("/v1/timelines/other")).status_code == 404


async def test_continuous_usage(front: Front, http: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = await http.post("/v1/completions", json=completion(stream=True, stream_options=options))
    events = [json.loads(line[6:]) for line in response.text.split("\n") if line.startswith("data: {")]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == len(front.answer_ids) + 1


async def test_error_after_the_first_token_is_an_event_of_the_stream(model_dir: Path) -> None:
    async with open_front(model_dir, max_attempts=1) as front, httpx.AsyncClient(base_url=front.http_url) as http:
        front.cluster.decode[0].faults.append("lost 2")
        response = await http.post("/v1/completions", json=completion(stream=True))
        assert response.status_code == 200
        events = [json.loads(line[6:]) for line in response.text.split("\n") if line.startswith("data: {")]
        assert events[-1]["error"]["type"] == "NodeLost"
        assert all(event["choices"][0]["finish_reason"] is None for event in events[:-1])
        front.cluster.prefill[0].faults.append("lost")
        response = await http.post("/v1/completions", json=completion(stream=True))
        assert response.status_code == 503, "before the first token the status line still says it"
        await front.settle()


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_goes_away_cancels_the_request(front: Front, stream: bool) -> None:
    front.cluster.decode[0].may_step.clear()
    async with httpx.AsyncClient(base_url=front.http_url) as http:
        posting = asyncio.create_task(http.post("/v1/completions", json=completion(stream=stream)))
        await until(lambda: bool(front.cluster.prefill[0].completed))
        posting.cancel()
        await asyncio.gather(posting, return_exceptions=True)
    await front.settle()
    assert front.metric("conductor_requests_total", outcome="cancelled") == 1
    assert len(front.cluster.decode[0].cancelled) == 1


async def test_client_that_reads_nothing_is_dropped(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("conductor.openai_api.CLIENT_STALL_S", 0.1)
    async with open_front(model_dir) as front:
        front.cluster.answer[:] = [front.answer_ids[0]] * 10_000
        front.conductor.model = dataclasses.replace(front.conductor.model, max_context=20_000)
        body = json.dumps(completion(max_tokens=9_000, logprobs=20, stream=True)).encode()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", int(front.http_url.rsplit(":", 1)[1])))
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            await until(lambda: front.metric("conductor_requests_total", outcome="cancelled") == 1)
            await front.settle()
    assert "Traceback" not in caplog.text


BAD_COMPLETIONS: list[tuple[dict[str, Any], int, str]] = [
    ({"prompt": ""}, 400, "prompt is empty"),
    ({"prompt": []}, 400, "prompt is empty"),
    ({"prompt": None}, 400, "prompt is missing"),
    ({"prompt": 5}, 400, "prompt must be"),
    ({"prompt": ["a", "b"]}, 400, "2 prompts"),
    ({"prompt": [[1], [2]]}, 400, "2 prompts"),
    ({"prompt": [1, "a"]}, 400, "integers only"),
    ({"prompt": [1, True]}, 400, "integers only"),
    ({"prompt": [1, -1]}, 400, "-1"),
    ({"prompt": [2**40]}, 400, str(2**40)),
    ({"prompt": [100_000]}, 400, "token id 100000 is not in the vocabulary"),
    ({"prompt": [1] * 600}, 400, "600 tokens + max_tokens=100 exceeds the context of 512"),
    ({"max_tokens": 500}, 400, "max_tokens=500 exceeds the context of 512"),
    ({"max_tokens": -3}, 400, "max_tokens=-3"),
    ({"max_tokens": 0}, 400, "max_tokens=0"),
    ({"max_tokens": "five"}, 400, "max_tokens"),
    ({"max_tokens": 1.5}, 400, "max_tokens"),
    ({"model": "gpt-9"}, 404, "'gpt-9' is not served"),
    ({"temperature": -1}, 400, "temperature=-1"),
    ({"temperature": True}, 400, "temperature"),
    ({"top_p": 0}, 400, "top_p=0"),
    ({"top_k": -5}, 400, "top_k=-5"),
    ({"seed": 2**64}, 400, "seed"),
    ({"logprobs": 21}, 400, "logprobs"),
    ({"stop": [""]}, 400, "stop string has 0"),
    ({"stop": ["a"] * 17}, 400, "17 strings"),
    ({"stop": ["a" * 2000]}, 400, "2000 characters"),
    ({"stop": 5}, 400, "stop"),
    ({"stop_token_ids": [10**6]}, 400, "1000000"),
    ({"stop_token_ids": [-1]}, 400, "-1"),
    ({"stream_options": {"include_usage": True}}, 400, "needs stream=true"),
    ({"n": 2}, 400, "n is not supported (found 2)"),
    ({"best_of": 2}, 400, "best_of is not supported"),
    ({"echo": True}, 400, "echo is not supported"),
    ({"suffix": "x"}, 400, "suffix is not supported"),
    ({"presence_penalty": 0.5}, 400, "presence_penalty is not supported"),
    ({"frequency_penalty": -1}, 400, "frequency_penalty is not supported"),
    ({"repetition_penalty": 1.1}, 400, "repetition_penalty is not supported"),
    ({"logit_bias": {"5": 1}}, 400, "logit_bias is not supported"),
    ({"min_p": 0.1}, 400, "min_p is not supported"),
    ({"min_tokens": 3}, 400, "min_tokens is not supported"),
    ({"prompt_logprobs": 1}, 400, "prompt_logprobs is not supported"),
    ({"skip_special_tokens": False}, 400, "skip_special_tokens is not supported"),
    ({"cache_salt": "tenant"}, 400, "cache_salt is not supported"),
]


@pytest.mark.parametrize(("fields", "status", "message"), BAD_COMPLETIONS)
async def test_bad_completion_is_refused_by_name(
    front: Front, http: httpx.AsyncClient, fields: dict[str, Any], status: int, message: str
) -> None:
    response = await http.post("/v1/completions", json=completion(**fields))
    error = response.json()["error"]
    assert response.status_code == status, error
    assert message in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] in (next(iter(fields)), "prompt", "max_tokens")
    assert front.cluster.prompts() == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "user"}]}, "no content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "'image_url' is not supported"),
        ({"messages": [{"role": "forbidden", "content": "x"}]}, "no such role"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "tool_calls is not supported"),
        ({"messages": "hello"}, "messages"),
        ({"tools": [{"type": "function"}]}, "tools is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format is not supported"),
        ({"top_logprobs": 3}, "top_logprobs needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"n": 2}, "n is not supported"),
        ({"max_completion_tokens": -1}, "max_tokens=-1"),
    ],
)
async def test_bad_chat_is_refused_by_name(http: httpx.AsyncClient, fields: dict[str, Any], message: str) -> None:
    response = await http.post("/v1/chat/completions", json=chat(**fields))
    assert response.status_code == 400, response.text
    assert message in response.json()["error"]["message"]


async def test_neutral_values_of_unsupported_fields_are_accepted(http: httpx.AsyncClient) -> None:
    body = chat(
        n=1, tools=None, tool_choice="none", response_format={"type": "text"}, min_p=0, logit_bias=None, logprobs=False,
        top_logprobs=0,
    )  # fmt: skip
    assert (await http.post("/v1/chat/completions", json=body)).status_code == 200


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"null", b'{"prompt": "\xff\xfe"}', b'{"prompt": "\\ud800"}', b'{"prompt": "x", "temperature": NaN}',
     b"[" * 100_000],
)  # fmt: skip
async def test_broken_body_is_a_400(front: Front, http: httpx.AsyncClient, data: bytes) -> None:
    response = await http.post("/v1/completions", content=data)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "BadRequest"
    assert front.cluster.prompts() == []


@pytest.mark.parametrize(
    ("kind", "fields"),
    [(CompletionBody, {"stop": [1]}), (CompletionBody, {"stop_token_ids": ["a"]}), (ChatBody, {"messages": [1]}),
     (ChatBody, {"messages": [{"role": "user", "content": [1]}]})],
)  # fmt: skip
def test_long_list_of_wrong_items_is_given_up_at_the_first(kind: type[Body], fields: dict[str, Any]) -> None:
    """Millions of them fit into one body, and a report on each would stop the event loop for minutes."""
    data = json.dumps(fields).replace("[1]", f"[{','.join(['1'] * 1000)}]").replace('["a"]', json.dumps(["a"] * 1000))
    with pytest.raises(ValidationError) as caught:
        kind.model_validate_json(data)
    assert caught.value.error_count() <= 2, "one per way to read the field"


async def test_body_that_is_not_what_its_encoding_says_is_a_400(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/completions", content=b"plain", headers={"Content-Encoding": "gzip"})
    assert response.status_code == 400, response.text
    assert "Content-Encoding" in response.json()["error"]["message"]


async def test_body_too_large_is_a_413_and_the_service_goes_on(model_dir: Path) -> None:
    async with open_front(model_dir, max_body_bytes=2000) as front, httpx.AsyncClient(base_url=front.http_url) as http:
        response = await http.post("/v1/completions", json=completion(prompt="x" * 5000))
        assert response.status_code == 413
        assert "2000 bytes" in response.json()["error"]["message"]
        assert (await http.post("/v1/completions", json=completion())).status_code == 200


class Upload:
    """A request of which the client sends half of the body."""

    def __init__(self, front: Front) -> None:
        self._body = json.dumps(completion(max_tokens=1)).encode()
        self._port = int(front.http_url.rsplit(":", 1)[1])

    async def begin(self) -> asyncio.StreamReader:
        reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(self._body)}\r\n\r\n"
        self._writer.write(head.encode() + self._body[:20])
        return reader

    def finish(self) -> None:
        self._writer.write(self._body[20:])

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


async def test_client_that_stalls_within_its_body_is_told_so(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conductor.openai_api.CLIENT_STALL_S", 0.1)
    upload = Upload(front)
    reader = await upload.begin()
    async with asyncio.timeout(WAIT_S):
        head, length = await reader.readuntil(b"\r\n\r\n"), b"Content-Length: "
        error = json.loads(await reader.readexactly(int(head[head.index(length) + len(length) :].split()[0])))["error"]
    assert head.startswith(b"HTTP/1.1 408 ")
    assert (error["code"], "nothing more of the body came for 0.1 s" in error["message"]) == (408, True)
    await upload.close()


async def test_a_request_arrives_when_its_body_is_there(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    arrivals = []
    generate = front.conductor.generate

    def noted(submission: Submission) -> AsyncGenerator[OutputDelta, None]:
        arrivals.append(submission.arrival_s)
        return generate(submission)

    monkeypatch.setattr(front.conductor, "generate", noted)
    upload = Upload(front)
    reader = await upload.begin()
    await until(lambda: front.api.num_connections == 1)
    await asyncio.sleep(0.05)  # the handler begins; without it the test would pass whatever the handler does
    sent_s = front.conductor.clock.now()
    upload.finish()
    async with asyncio.timeout(WAIT_S):
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
    assert arrivals[0] >= sent_s
    await upload.close()
    await front.settle()


@pytest.mark.parametrize("header", ["Authorization", "Idempotency-Key", "X-Request-Id", "X-Moontide-Priority"])
async def test_headers_of_any_bytes_are_no_internal_error(
    http: httpx.AsyncClient, header: str, caplog: pytest.LogCaptureFixture
) -> None:
    response = await http.post("/v1/completions", json=completion(), headers={header: b"\xff\xfe"})
    expected = 200 if header in ("Authorization", "Idempotency-Key") else 400
    assert response.status_code == expected, response.text
    assert "Traceback" not in caplog.text


async def test_bad_request_id_and_unknown_paths(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/completions", json=completion(), headers={"X-Request-Id": "no spaces"})
    assert response.status_code == 400
    assert "request id" in response.json()["error"]["message"]
    response = await http.post("/v1/completions", json=completion(n=2), headers={"X-Request-Id": "x1"})
    assert (response.status_code, response.headers["X-Request-Id"]) == (400, "x1")
    response = await http.get("/v1/nothing")
    assert (response.status_code, response.json()["error"]["type"]) == (404, "NotFoundError")
    assert (await http.get("/v1/completions")).status_code == 405


async def test_models(client: openai.AsyncOpenAI, http: httpx.AsyncClient) -> None:
    models = [model async for model in client.models.list()]
    assert [model.id for model in models] == [MODEL]
    card = (await http.get(f"/v1/models/{MODEL}")).json()
    assert card["max_model_len"] == MAX_CONTEXT
    assert (await http.get("/v1/models/other")).status_code == 404


async def test_readiness_follows_the_nodes(model_dir: Path) -> None:
    async with open_front(model_dir) as front, httpx.AsyncClient(base_url=front.http_url) as http:
        for path in ("/ready", "/health", "/live"):
            assert (await http.get(path)).status_code == 200
        await front.cluster.registry.remove("decode-0")
        for path in ("/ready", "/health"):
            response = await http.get(path)
            assert response.status_code == 503
            assert "no decode instance is alive" in response.text
        assert (await http.get("/live")).status_code == 200
        response = await http.post("/v1/completions", json=completion())
        assert response.status_code == 503
        assert response.headers["Retry-After"] == "1"
        assert "no decode instance is alive" in response.json()["error"]["message"]


async def test_conductor_that_leaves_serves_what_comes_on_open_connections_and_closes_them(
    front: Front, http: httpx.AsyncClient
) -> None:
    async with httpx.AsyncClient(base_url=front.http_url) as idle:
        for client in (http, idle):
            assert "Connection" not in (await client.post("/v1/completions", json=completion())).headers
        leaving = asyncio.create_task(front.api.leave(10.0))
        await until(lambda: front.api.num_connections == 2)
        for client in (http, idle):
            assert not leaving.done()
            response = await client.post("/v1/completions", json=completion())
            assert (response.status_code, response.headers["Connection"]) == (200, "close")
        await leaving
        with pytest.raises(httpx.ConnectError):
            await idle.get("/live")


async def test_conductor_that_leaves_waits_a_while_for_idle_connections(front: Front, http: httpx.AsyncClient) -> None:
    await http.get("/live")
    await front.api.leave(0.05)
    assert front.api.num_connections == 1


async def test_metrics_and_version(http: httpx.AsyncClient) -> None:
    await http.post("/v1/completions", json=completion())
    text = (await http.get("/metrics")).text
    assert 'conductor_requests_total{outcome="stop"} 1.0' in text
    assert "conductor_ttft_seconds_count 1.0" in text
    assert "conductor_tbt_seconds_count" in text
    assert set((await http.get("/version")).json()) == {"version"}
