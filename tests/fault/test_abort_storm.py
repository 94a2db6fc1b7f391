"""200 long prompts whose clients hang up before, in and after their chunks: a group of four stages is as before, and right.

Some clients stay: their answers come within their deadlines, whatever the others do. Stage 0's log tells how far each prompt came.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import httpx
import pytest

from benchmarks.paced_models import write_paced_model
from conductor.openai_api import REQUEST_ID_HEADER
from kvstore.access import KvConfig
from model_runner.config import ModelConfig
from model_runner.model_source import describe_model
from model_runner.paced import paced_token
from moontide.client import GenerateOptions, MoontideClient
from moontide.sampling_params import SampledToken
from tests.cluster import running_cluster, wait_for
from tests.e2e.oracle import GreedyOracle
from tests.fakes.tiny_models import tiny_model_dir
from tests.fault.harness import SETTINGS, Bench, random_prompt

NUM_STAGES = 4
NUM_STORM = 200
NUM_WITNESSES = 6
AT_ONCE = 24
LATEST_S = 0.5
"""A client hangs up after a random part of it, if it waits for nothing else: most prompts wait then."""
POLL_S = 0.02
TOO_MANY_TOKENS = 400
"""Of a request that hangs up: it must not end by itself before."""
NUM_TOKENS = 8
DEADLINE_S = 60.0
"""Of every request, and of every wait of a client that hangs up."""


class Moment(Enum):
    """When a client hangs up."""

    AT_RANDOM = "so long after it has asked"
    DISPATCHED = "when the group has its prompt, which waits for pages there"
    ACCEPTED = "when its prompt has pages: its chunks come next"
    FIRST_TOKEN = "when it has a token"
    MORE_TOKENS = "when it has four"


MOMENTS = [Moment.AT_RANDOM] * 12 + [Moment.DISPATCHED, Moment.ACCEPTED] * 3 + [Moment.FIRST_TOKEN, Moment.MORE_TOKENS]
"""They come in turn, shuffled."""


@dataclass
class Outcome:
    prompts: list[list[int]]
    answers: list[list[SampledToken]]


@contextmanager
def bench_of(model_dir: Path, settings: Sequence[str]) -> Iterator[Bench]:
    deadline = f"conductor.default_timeout_s={DEADLINE_S}"
    with running_cluster(model=model_dir, stages=NUM_STAGES, settings=[*settings, deadline]) as cluster:
        bench = Bench(cluster)
        try:
            yield bench
        finally:
            bench.close()


def weather(bench: Bench, lengths: tuple[int, int]) -> Outcome:
    """The storm, then the calm with one more prompt: those who stayed, and it. Nothing is held afterwards."""
    rng = random.Random(3)
    before = epochs(bench)
    prompts = [random_prompt(lengths[0] // 5, seed=1000 + idx) for idx in range(NUM_WITNESSES)]
    answers = bench.spawn(storm(bench, rng, lengths, prompts)).result(2 * DEADLINE_S)
    bench.wait_idle()
    assert epochs(bench) == before, "the group was lost"
    group, conductor = bench.cluster.metrics("prefill-0-stage-0"), bench.cluster.metrics("conductor-0")
    outcomes = {name for name, value in group.items() if name.startswith("prefill_requests_total") and value}
    assert outcomes == {f'prefill_requests_total{{outcome="{name}"}}' for name in ("Cancelled", "completed")}
    # One that hangs up at once may be gone before the conductor has seen it.
    assert conductor['conductor_requests_total{outcome="cancelled"}'] > NUM_STORM // 2
    ends = ends_of_storm(bench)
    print(ends)
    assert all(ends.values()), ends
    wait_for(lambda: not left_on_stages(bench), "every stage is done with what it was given")
    prompts.append(random_prompt(lengths[1], seed=2000))
    answers.append(bench.run(ask(bench, prompts[-1])))
    bench.wait_idle()
    return Outcome(prompts, answers)


async def storm(
    bench: Bench, rng: random.Random, lengths: tuple[int, int], witnesses: Sequence[Sequence[int]]
) -> list[list[SampledToken]]:
    """The answers of the witnesses; everybody else hangs up, every second one over HTTP."""
    places = asyncio.Semaphore(AT_ONCE)
    async with (
        MoontideClient(bench.cluster.grpc_address) as client,
        httpx.AsyncClient(base_url=f"http://{bench.cluster.http_address}", timeout=DEADLINE_S) as http,
    ):
        model = (await client.status()).model

        moments = MOMENTS * (NUM_STORM // len(MOMENTS))
        rng.shuffle(moments)

        async def storm_one(idx: int) -> None:
            prompt, name, moment = random_prompt(rng.randint(*lengths), seed=idx), f"storm-{idx}", moments[idx]
            latest_s = rng.uniform(0.0, LATEST_S)

            async def has_come(num_tokens: int, waited_s: float) -> bool:
                if moment is Moment.DISPATCHED:
                    explanation = await client.explain(name)
                    return explanation is not None and bool(explanation.attempts)
                return {
                    Moment.AT_RANDOM: waited_s >= latest_s,
                    Moment.ACCEPTED: name in accepted,
                    Moment.FIRST_TOKEN: num_tokens >= 1,
                    Moment.MORE_TOKENS: num_tokens >= 4,
                }[moment]

            async with places, asyncio.timeout(DEADLINE_S):
                tokens = http_tokens(http, model, name, prompt) if idx % 2 else grpc_tokens(client, name, prompt)
                await hang_up(tokens, has_come)

        async def follow() -> None:
            while True:
                accepted.update(seen(bench, "request accepted"))
                await asyncio.sleep(POLL_S)

        accepted: set[str] = set()
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(follow())
            storming = [tasks.create_task(storm_one(idx)) for idx in range(NUM_STORM)]
            staying = []
            for number, prompt in enumerate(witnesses):
                await asyncio.wait(storming[: number * NUM_STORM // len(witnesses)] or storming[:1])
                staying.append(tasks.create_task(answer(client, prompt)))
            await asyncio.wait([*storming, *staying])
            following.cancel()
        return [task.result() for task in staying]


async def hang_up(tokens: AsyncGenerator[int, None], has_come: Callable[[int, float], Awaitable[bool]]) -> None:
    """Listen until the moment has come, by tokens and time so far, then close the call. Raises: AssertionError when it ends by itself."""
    num_tokens, began_s = 0, time.monotonic()

    async def read() -> None:
        nonlocal num_tokens
        async with aclosing(tokens):
            async for num_new in tokens:
                num_tokens += num_new

    reading = asyncio.create_task(read())
    try:
        while not reading.done() and not await has_come(num_tokens, time.monotonic() - began_s):
            await asyncio.sleep(POLL_S)
    finally:
        reading.cancel()
        await asyncio.wait([reading])
    assert reading.cancelled(), f"it ended by itself: {reading.exception()!r}"


async def grpc_tokens(client: MoontideClient, name: str, prompt: Sequence[int]) -> AsyncGenerator[int, None]:
    """How many tokens each message brings."""
    params = GenerateOptions(max_tokens=TOO_MANY_TOKENS, temperature=0.0, ignore_eos=True, timeout_s=DEADLINE_S)
    async with aclosing(client.generate(prompt, params=params, request_id=name)) as chunks:
        async for chunk in chunks:
            yield len(chunk.tokens)


async def http_tokens(
    http: httpx.AsyncClient, model: str, name: str, prompt: Sequence[int]
) -> AsyncGenerator[int, None]:
    """1 for each event of the stream. The request's deadline is `conductor.default_timeout_s`."""
    body = {
        "model": model, "prompt": list(prompt), "max_tokens": TOO_MANY_TOKENS, "temperature": 0,
        "stream": True, "ignore_eos": True,
    }  # fmt: skip
    headers = {REQUEST_ID_HEADER: name}
    async with http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data:"):
                yield 1


def seen(bench: Bench, event: str) -> set[str]:
    """The clients of the storm whose requests have this event in the log of stage 0. Nodes see ids with something random behind a dot."""
    return set(re.findall(rf" {event} request_id=(storm-\d+)\.", bench.cluster.log("prefill-0-stage-0")))


def ends_of_storm(bench: Bench) -> dict[str, int]:
    """How many hung up in which phase of their prompt; those that stage 0 never saw are in none."""
    cancelled, completed = seen(bench, "request cancelled"), seen(bench, "request completed")
    accepted, answered = seen(bench, "request accepted"), seen(bench, "first token")
    return {
        "waiting for pages": len(cancelled - accepted),
        "in the chunks": len(cancelled & accepted - answered),
        "after the last chunk": len(cancelled & answered | completed),
    }


def left_on_stages(bench: Bench) -> list[str]:
    """K/V that was not put, and steps that have not come through, in words.

    A stage has no gauge for steps in its log and tensors on its link; what the first stage ran and another one did not lies there.
    """
    stages = [bench.cluster.metrics(f"prefill-0-stage-{idx}") for idx in range(NUM_STAGES)]
    left = [f"stage {idx} waits to put" for idx, each in enumerate(stages) if each["prefill_put_waiting_bytes"]]
    for name in ("prefill_stage_steps_total", "prefill_chunk_tokens_total"):
        values = [each[name] for each in stages]
        assert values[0] > 0
        left += [f"{name}: {values}"] * (len(set(values)) > 1)
    return left


async def answer(client: MoontideClient, prompt: Sequence[int]) -> list[SampledToken]:
    """Raises: DeadlineExceeded."""
    params = GenerateOptions(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=0, timeout_s=DEADLINE_S)
    return [token async for chunk in client.generate(prompt, params=params) for token in chunk.tokens]


async def ask(bench: Bench, prompt: Sequence[int]) -> list[SampledToken]:
    async with MoontideClient(bench.cluster.grpc_address) as client:
        return await answer(client, prompt)


def epochs(bench: Bench) -> list[float]:
    """How often each stage has joined the group."""
    names = [f"prefill-0-stage-{idx}" for idx in range(NUM_STAGES)]
    return [bench.cluster.metrics(name)["prefill_group_epochs_total"] for name in names]


@pytest.mark.timeout(240)
def test_after_an_abort_storm_everything_is_as_before(tmp_path: Path) -> None:
    model_dir = tiny_model_dir("llama", tmp_path)
    oracle = GreedyOracle(model_dir)
    with bench_of(model_dir, SETTINGS) as bench:
        outcome = weather(bench, (1500, 4000))
    for prompt, tokens in zip(outcome.prompts, outcome.answers, strict=True):
        assert len(tokens) == NUM_TOKENS
        oracle.check(prompt, tokens)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_after_an_abort_storm_of_far_longer_prompts_everything_is_as_before(tmp_path: Path) -> None:
    """The steps are paced."""
    steps = {"overhead_s": 1e-3, "token_s": 2e-5, "pair_s": 1e-11, "decode_step_s": 0.02}
    model = write_paced_model(tmp_path, max_context=100_000, **steps)
    info = describe_model(
        ModelConfig(name=str(model.directory), load_format="paced", profile=str(model.profile)), KvConfig()
    ).info
    sizes = ("kv.block_tokens=256", "prefill.chunk_tokens=4096", "prefill.num_pages=400", "decode.num_pages=400")
    with bench_of(model.directory, [*SETTINGS, *model.settings, *sizes]) as bench:
        outcome = weather(bench, (20_000, 60_000))
    for prompt, tokens in zip(outcome.prompts, outcome.answers, strict=True):
        positions = range(len(prompt), len(prompt) + NUM_TOKENS)
        assert [token.token_id for token in tokens] == [paced_token(position, info) for position in positions]
