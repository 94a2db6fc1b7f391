"""200 long prompts whose clients hang up before, in and after their chunks: a group of four stages is as before, and right.

Some clients stay: their answers come within their deadlines, whatever the others do.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
from tests.fakes.tiny_models import tiny_model_dir
from tests.fault.harness import SETTINGS, Bench, random_prompt
from tests.fault.test_nothing_leaks import hang_up_grpc, hang_up_http

NUM_STAGES = 4
NUM_STORM = 200
NUM_WITNESSES = 6
AT_ONCE = 24
LATEST_S = 0.5
"""A client hangs up after a random part of it: most prompts wait or are in their chunks then."""
EVENTS = (0,) * 18 + (1, 4)
"""What it waits for before: tokens, or events of a stream."""
NUM_TOKENS = 8
DEADLINE_S = 60.0
"""Of every request that stays."""


@dataclass
class Outcome:
    prompts: list[list[int]]
    answers: list[list[SampledToken]]


@contextmanager
def bench_of(model_dir: Path, settings: Sequence[str]) -> Iterator[Bench]:
    with running_cluster(model=model_dir, stages=NUM_STAGES, settings=settings) as cluster:
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

        async def hang_up(idx: int) -> None:
            async with places:
                prompt = random_prompt(rng.randint(*lengths), seed=idx)
                num_events, delay_s = rng.choice(EVENTS), rng.uniform(0.0, LATEST_S)
                if idx % 2:
                    await hang_up_http(http, model, prompt, after_events=num_events, delay_s=delay_s)
                else:
                    await hang_up_grpc(client, prompt, after_tokens=num_events, delay_s=delay_s)

        async with asyncio.TaskGroup() as tasks:
            storming = [tasks.create_task(hang_up(idx)) for idx in range(NUM_STORM)]
            staying = []
            for number, prompt in enumerate(witnesses):
                await asyncio.wait(storming[: number * NUM_STORM // len(witnesses)] or storming[:1])
                staying.append(tasks.create_task(answer(client, prompt)))
        return [task.result() for task in staying]


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
