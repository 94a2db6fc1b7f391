"""200 long prompts whose clients hang up before, in and after their chunks: a group of four stages is as before, and right.

Some clients stay: their answers come within their deadlines, whatever the others do.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from benchmarks.paced_models import write_paced_model
from kvstore.access import KvConfig
from model_runner.config import ModelConfig
from model_runner.model_source import describe_model
from model_runner.paced import paced_token
from moontide.client import GenerateOptions, MoontideClient
from moontide.sampling_params import SampledToken
from tests.cluster import running_cluster
from tests.e2e.oracle import GreedyOracle
from tests.fault.harness import BLOCK_TOKENS, SETTINGS, Bench, random_prompt
from tests.fault.test_nothing_leaks import hang_up_grpc, hang_up_http

NUM_STAGES = 4
NUM_STORM = 200
NUM_WITNESSES = 6
AT_ONCE = 24
PROMPT_TOKENS = (1000, 2500)
LATEST_S = 1.0
"""A client hangs up after a random part of it: most prompts are in their chunks then, some wait, some decode."""
NUM_TOKENS = 8
DEADLINE_S = 60.0
"""Of every request."""


@contextmanager
def bench_of(model_dir: Path, settings: Sequence[str]) -> Iterator[Bench]:
    with running_cluster(model=model_dir, stages=NUM_STAGES, settings=settings) as cluster:
        bench = Bench(cluster)
        try:
            yield bench
        finally:
            bench.close()


async def storm(bench: Bench, rng: random.Random, witnesses: Sequence[Sequence[int]]) -> list[list[SampledToken]]:
    """The answers of the witnesses; everybody else has hung up."""
    places = asyncio.Semaphore(AT_ONCE)
    async with (
        MoontideClient(bench.cluster.grpc_address) as client,
        httpx.AsyncClient(base_url=f"http://{bench.cluster.http_address}", timeout=DEADLINE_S) as http,
    ):
        model = (await client.status()).model

        async def hang_up(idx: int) -> None:
            async with places:
                prompt = random_prompt(rng.randint(*PROMPT_TOKENS), seed=idx)
                num_tokens, delay_s = rng.choice((0, 0, 0, 0, 1, 4)), rng.uniform(0.0, LATEST_S)
                if idx % 2:
                    await hang_up_http(http, model, prompt, after_events=num_tokens, delay_s=delay_s)
                else:
                    await hang_up_grpc(client, prompt, after_tokens=num_tokens, delay_s=delay_s)

        async def stay(prompt: Sequence[int], *, after_s: float) -> list[SampledToken]:
            await asyncio.sleep(after_s)
            return await answer(client, prompt)

        async with asyncio.TaskGroup() as tasks:
            staying = [tasks.create_task(stay(prompt, after_s=idx)) for idx, prompt in enumerate(witnesses)]
            for idx in range(NUM_STORM):
                tasks.create_task(hang_up(idx))
        return [task.result() for task in staying]


async def answer(client: MoontideClient, prompt: Sequence[int]) -> list[SampledToken]:
    """Raises: DeadlineExceeded."""
    params = GenerateOptions(
        max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=0, timeout_s=DEADLINE_S
    )
    return [token async for chunk in client.generate(prompt, params=params) for token in chunk.tokens]


async def ask(bench: Bench, prompt: Sequence[int]) -> list[SampledToken]:
    async with MoontideClient(bench.cluster.grpc_address) as client:
        return await answer(client, prompt)


def epochs(bench: Bench) -> list[float]:
    """How often each stage has joined the group."""
    names = [f"prefill-0-stage-{idx}" for idx in range(NUM_STAGES)]
    return [bench.cluster.metrics(name)["prefill_group_epochs_total"] for name in names]


def check_calm(bench: Bench, epochs_before: list[float]) -> None:
    bench.wait_idle()
    assert epochs(bench) == epochs_before, "the group was lost"
    group, conductor = bench.cluster.metrics("prefill-0-stage-0"), bench.cluster.metrics("conductor-0")
    outcomes = {name: value for name, value in group.items() if name.startswith("prefill_requests_total")}
    print(outcomes)
    assert outcomes.keys() == {f'prefill_requests_total{{outcome="{name}"}}' for name in ("Cancelled", "completed")}
    assert conductor['conductor_requests_total{outcome="cancelled"}'] > NUM_STORM * 0.9


@pytest.mark.timeout(240)
def test_after_an_abort_storm_everything_is_as_before(model_dir: Path, oracle: GreedyOracle) -> None:
    witnesses = [random_prompt(300, seed=1000 + idx) for idx in range(NUM_WITNESSES)]
    with bench_of(model_dir, SETTINGS) as bench:
        before = epochs(bench)
        answers = bench.spawn(storm(bench, random.Random(3), witnesses)).result(2 * DEADLINE_S)
        check_calm(bench, before)
        after = random_prompt(PROMPT_TOKENS[1], seed=2000)
        answers.append(bench.run(ask(bench, after)))
        bench.wait_idle()
    for prompt, tokens in zip([*witnesses, after], answers, strict=True):
        assert len(tokens) == NUM_TOKENS
        oracle.check(prompt, tokens)
