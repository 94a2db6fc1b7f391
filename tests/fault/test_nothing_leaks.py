"""Many requests at once, some of which hang up at random moments: afterwards every node holds what it held before, nothing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import aclosing

import httpx

from moontide.client import GenerateOptions, MoontideClient
from moontide.sampling_params import SampledToken
from tests.e2e.oracle import GreedyOracle
from tests.fault.harness import Bench, random_prompt

NUM_REQUESTS = 50
NUM_CANCELLED = 20
AT_ONCE = 8
LONGEST_PROMPT = 900
SHARED_TOKENS = 256
MAX_TOKENS = 12
TOO_MANY_TOKENS = 400
"""Of a request that hangs up: it must not end by itself before."""
DEADLINE_S = 120.0


def test_nothing_is_held_after_fifty_requests_of_which_twenty_hang_up(bench: Bench, oracle: GreedyOracle) -> None:
    rng = random.Random(7)
    cancelled_before = cancelled(bench)
    prompts = make_prompts(rng)
    hang_up = set(rng.sample(range(NUM_REQUESTS), NUM_CANCELLED))
    answers = bench.spawn(ask_all(bench, prompts, hang_up, rng)).result(DEADLINE_S)
    for idx, (prompt, tokens) in enumerate(zip(prompts, answers, strict=True)):
        assert idx in hang_up or len(tokens) == MAX_TOKENS
        oracle.check(prompt, tokens)
    bench.wait_idle()
    # One that hangs up at once may be gone before the conductor has seen it.
    assert NUM_CANCELLED // 2 <= cancelled(bench) - cancelled_before <= NUM_CANCELLED
    assert bench.cluster.metrics("conductor-0")["conductor_active_requests"] == 0


def make_prompts(rng: random.Random) -> list[list[int]]:
    """Of random lengths; some share their first blocks."""
    shared = random_prompt(SHARED_TOKENS, seed=70)
    prompts = []
    for idx in range(NUM_REQUESTS):
        own = random_prompt(rng.randint(1, LONGEST_PROMPT), seed=71 + idx)
        prompts.append([*shared, *own] if rng.random() < 0.3 else own)
    return prompts


async def ask_all(
    bench: Bench, prompts: Sequence[Sequence[int]], hang_up: set[int], rng: random.Random
) -> list[list[SampledToken]]:
    """What each client had received when its answer was complete or when it hung up; every second one that does talks HTTP."""
    places = asyncio.Semaphore(AT_ONCE)
    address = bench.cluster.grpc_address
    moments = {idx: (rng.choice((0, 0, 1, 2, 20)), rng.uniform(0.0, 0.4)) for idx in sorted(hang_up)}
    async with (
        MoontideClient(address) as client,
        httpx.AsyncClient(base_url=f"http://{bench.cluster.http_address}", timeout=DEADLINE_S) as http,
    ):
        model = (await client.status()).model

        async def ask(idx: int) -> list[SampledToken]:
            async with places:
                if idx not in moments:
                    return await answer(client, prompts[idx])
                num_tokens, delay_s = moments[idx]
                if idx % 2:
                    await hang_up_http(http, model, prompts[idx], after_events=num_tokens, delay_s=delay_s)
                    return []
                return await hang_up_grpc(client, prompts[idx], after_tokens=num_tokens, delay_s=delay_s)

        return list(await asyncio.gather(*(ask(idx) for idx in range(len(prompts)))))


async def answer(client: MoontideClient, prompt: Sequence[int]) -> list[SampledToken]:
    params = GenerateOptions(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True, logprobs=0)
    return [token async for chunk in client.generate(prompt, params=params) for token in chunk.tokens]


async def hang_up_grpc(
    client: MoontideClient, prompt: Sequence[int], *, after_tokens: int, delay_s: float
) -> list[SampledToken]:
    """Cancel the call so long after a number of tokens, none of which may have come yet."""
    params = GenerateOptions(max_tokens=TOO_MANY_TOKENS, temperature=0.0, ignore_eos=True, logprobs=0)
    tokens: list[SampledToken] = []
    enough = asyncio.Event()

    async def read() -> None:
        async with aclosing(client.generate(prompt, params=params)) as chunks:
            async for chunk in chunks:
                tokens.extend(chunk.tokens)
                if len(tokens) >= after_tokens:
                    enough.set()

    if not after_tokens:
        enough.set()
    reading = asyncio.create_task(read())
    await enough.wait()
    await asyncio.sleep(delay_s)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert reading.cancelled(), "it ended by itself"
    return tokens


async def hang_up_http(
    http: httpx.AsyncClient, model: str, prompt: Sequence[int], *, after_events: int, delay_s: float
) -> None:
    """Close the connection so long after a number of server-sent events, none of which may have come yet."""
    body = {
        "model": model, "prompt": list(prompt), "max_tokens": TOO_MANY_TOKENS, "temperature": 0,
        "stream": True, "ignore_eos": True,
    }  # fmt: skip
    enough = asyncio.Event()

    async def read() -> None:
        num_events = 0
        async with http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                num_events += line.startswith("data:")
                if num_events >= after_events:
                    enough.set()

    if not after_events:
        enough.set()
    reading = asyncio.create_task(read())
    await enough.wait()
    await asyncio.sleep(delay_s)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert reading.cancelled(), "it ended by itself"


def cancelled(bench: Bench) -> float:
    return bench.cluster.metrics("conductor-0").get('conductor_requests_total{outcome="cancelled"}', 0.0)
