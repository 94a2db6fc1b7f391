"""Idempotency keys through both APIs, and an answer that continues after tokens which its client has already."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import httpx
import pytest
from front import ANSWER_TEXT, MODEL, PROMPT_TEXT, Front, text_of, tokens_of

from conductor.cost import Slo
from moontide.client import GenerateOptions, MoontideClient
from moontide.errors import KeyReused, Rejected
from moontide.sampling_params import SampledToken


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": PROMPT_TEXT, "max_tokens": 100, "temperature": 0, **fields}


async def test_over_http_the_same_key_and_request_get_the_same_answer(front: Front) -> None:
    headers = {"Idempotency-Key": "k1"}
    async with httpx.AsyncClient(base_url=front.http_url, timeout=30.0) as http:
        first = (await http.post("/v1/completions", json=completion(), headers=headers)).json()
        again = (await http.post("/v1/completions", json=completion(), headers=headers)).json()
        streamed = await http.post("/v1/completions", json=completion(stream=True), headers=headers)
        other = await http.post("/v1/completions", json=completion(max_tokens=3), headers=headers)
        await http.post("/v1/completions", json=completion(), headers={"Idempotency-Key": "k2"})
    assert first["choices"] == again["choices"]
    assert (first["usage"], first["choices"][0]["text"]) == (again["usage"], ANSWER_TEXT)
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert "".join(choice["text"] for event in events for choice in event["choices"]) == ANSWER_TEXT
    assert (other.status_code, other.json()["error"]["type"]) == (409, "KeyReused")
    assert len(front.cluster.prompts()) == 2, "one for each key"
    await front.settle()


async def test_over_grpc_a_client_that_lost_its_connection_finds_the_running_answer(front: Front) -> None:
    params = GenerateOptions(max_tokens=100, temperature=0.0)
    async with MoontideClient(front.grpc_address) as client:
        lost = client.generate(PROMPT_TEXT, params=params, idempotency_key="k1")
        await anext(lost)
        await lost.aclose()
        chunks = [chunk async for chunk in client.generate(PROMPT_TEXT, params=params, idempotency_key="k1")]
        assert "".join(chunk.text for chunk in chunks) == ANSWER_TEXT
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == len(front.answer_ids) + 1
        with pytest.raises(KeyReused):
            async for _ in client.generate("another prompt", params=params, idempotency_key="k1"):
                pass
    assert len(front.cluster.prompts()) == 1
    await front.settle()


async def test_answer_that_has_tokens_is_not_refused_for_its_slo(front: Front) -> None:
    record = front.cluster.registry.records["decode-0"]
    await front.cluster.registry.set(dataclasses.replace(record, load={**record.load, "step_overhead_s": 1.0}))
    submission = dataclasses.replace(front.submission(), slo=Slo(tbt_s=0.1))
    with pytest.raises(Rejected, match="slower than their SLO"):
        [delta async for delta in front.conductor._make(submission, [])]
    known = [SampledToken(token_id=token_id) for token_id in front.answer_ids[:3]]
    rest = [delta async for delta in front.conductor._make(submission, known)]
    assert tokens_of(rest)[:2] == front.answer_ids[3:5]
    await front.settle()


@pytest.mark.parametrize("num_known", [1, 5])
async def test_answer_continues_after_the_tokens_that_are_known(front: Front, num_known: int) -> None:
    whole = await front.generate()
    known = [SampledToken(token_id=token_id) for token_id in front.answer_ids[:num_known]]
    rest = [delta async for delta in front.conductor._make(front.submission(request_id="r2"), known)]
    assert tokens_of(rest) == tokens_of(whole)[num_known:]
    assert rest[0].tokens[0].output_idx == num_known
    assert text_of(whole).endswith(text_of(rest))
    assert rest[-1].usage.completion_tokens == whole[-1].usage.completion_tokens
    assert rest[-1].usage.prompt_tokens == whole[-1].usage.prompt_tokens
    await front.settle()
