"""Greedy float32 tokens of real processes over the real store equal those of one-process transformers.

The built-in model on prompts of real text with every length that meets an edge of blocks and chunks, and two tiny families with K/V that
is unlike it: sliding windows with attention sinks, and latents. Every family and number of stages: tests/e2e/test_same_tokens.py.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from moontide.client import MoontideClient
from tests.cluster import RunningCluster, running_cluster, wait_for
from tests.e2e import test_same_tokens as tiny
from tests.e2e.grpc_answers import ask, ask_all, greedy
from tests.e2e.oracle import GreedyGenerator, GreedyOracle
from tests.e2e.real_text import RealText
from tests.fakes.tiny_models import tiny_model_dir

pytestmark = pytest.mark.processes

BLOCK = 64
CHUNK = 512
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 17)
GENERATED = (3, 7)
"""Lengths, by index, that are also compared with `generate`; one forward over prompt and answer judges them all."""
LONG = 6000
LONG_START = 40_000
OTHER_START = 70_000
NUM_TOKENS = 64
NUM_TOKENS_AGAIN = 16
"""Of answers that are compared with a longer one."""


@pytest.fixture(scope="module")
def text(smollm2_cluster: RunningCluster) -> RealText:
    return RealText(smollm2_cluster.model_dir)


@pytest.fixture(scope="module")
def reference(smollm2_cluster: RunningCluster) -> GreedyGenerator:
    return GreedyGenerator(smollm2_cluster.model_dir)


def hit_tokens(shared: int, length: int) -> int:
    """Tokens of the hit when `shared` leading tokens are cached: full blocks, and never the last token."""
    return min(shared, length - 1) // BLOCK * BLOCK


def with_other_tail(prompt: list[int], text: RealText) -> list[int]:
    """Keep the first half of the prompt's full blocks."""
    kept = len(prompt) // BLOCK // 2 * BLOCK
    return [*prompt[:kept], *text.piece(OTHER_START + len(prompt), len(prompt) - kept)]


@pytest.mark.timeout(600)
async def test_every_length_cold_at_once_then_hit_alone_then_partly_hit(
    smollm2_cluster: RunningCluster, text: RealText, reference: GreedyGenerator
) -> None:
    oracle = GreedyOracle(smollm2_cluster.model_dir)
    prompts = [text.piece(3000 * idx, length) for idx, length in enumerate(LENGTHS)]
    async with MoontideClient(smollm2_cluster.grpc_address) as client:
        cold = await ask_all(client, prompts, greedy(NUM_TOKENS))
        for prompt, answer in zip(prompts, cold, strict=True):
            oracle.check(prompt, answer.tokens)
            assert len(answer.tokens) == NUM_TOKENS
            assert answer.usage.cached_tokens == 0
            assert answer.usage.prompt_tokens == len(prompt)
        for idx in GENERATED:
            assert cold[idx].token_ids == reference.generate(prompts[idx], NUM_TOKENS), f"{LENGTHS[idx]} tokens"

        for prompt, first in zip(prompts, cold, strict=True):
            num_tokens = NUM_TOKENS if len(prompt) == max(LENGTHS) else NUM_TOKENS_AGAIN
            answer = await ask(client, prompt, greedy(num_tokens))
            assert answer.token_ids == first.token_ids[:num_tokens], f"hit alone, {len(prompt)} tokens"
            assert answer.usage.cached_tokens == hit_tokens(len(prompt), len(prompt))

        changed = [with_other_tail(prompt, text) for prompt in prompts if len(prompt) >= 2 * BLOCK]
        for prompt, answer in zip(changed, await ask_all(client, changed, greedy(NUM_TOKENS)), strict=True):
            oracle.check(prompt, answer.tokens)
            assert len(answer.tokens) == NUM_TOKENS
            assert answer.usage.cached_tokens == len(prompt) // BLOCK // 2 * BLOCK


@pytest.mark.timeout(600)
async def test_long_prompt_cold_and_hit(
    smollm2_cluster: RunningCluster, text: RealText, reference: GreedyGenerator
) -> None:
    prompt = text.piece(LONG_START, LONG)
    async with MoontideClient(smollm2_cluster.grpc_address) as client:
        for cached in (0, hit_tokens(LONG, LONG)):
            answer = await ask(client, prompt, greedy(NUM_TOKENS))
            assert answer.token_ids == reference.generate(prompt, NUM_TOKENS)
            assert answer.usage.cached_tokens == cached


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_long_prompt_partly_hit(
    smollm2_cluster: RunningCluster, text: RealText, reference: GreedyGenerator
) -> None:
    prompt = text.piece(LONG_START, LONG)
    changed = with_other_tail(prompt, text)
    async with MoontideClient(smollm2_cluster.grpc_address) as client:
        await ask(client, prompt, greedy(1))
        answer = await ask(client, changed, greedy(NUM_TOKENS))
    assert answer.token_ids == reference.generate(changed, NUM_TOKENS)
    assert answer.usage.cached_tokens == LONG // BLOCK // 2 * BLOCK


@pytest.mark.slow  # in one process: test_same_tokens.py
@pytest.mark.timeout(600)
async def test_long_prompt_on_three_stages(text: RealText, reference: GreedyGenerator) -> None:
    prompt = text.piece(LONG_START, LONG)
    with running_cluster(stages=3) as cluster:
        async with MoontideClient(cluster.grpc_address) as client:
            for cached, num_tokens in ((0, NUM_TOKENS), (hit_tokens(LONG, LONG), NUM_TOKENS_AGAIN)):
                answer = await ask(client, prompt, greedy(num_tokens))
                assert answer.token_ids == reference.generate(prompt, NUM_TOKENS)[:num_tokens]
                assert answer.usage.cached_tokens == cached


async def test_chunks_of_equal_measured_time(tmp_path: Path) -> None:
    """The plan that a cluster has by default; most other tests cut prompts by length, so as to know their chunks."""
    model_dir = tiny_model_dir("llama", tmp_path)
    oracle = GreedyOracle(model_dir)
    most_tokens = CHUNK // 2
    lengths = (4 * most_tokens + 17, most_tokens + 1, BLOCK + 1)
    prompts = [tiny.random_prompt(length, seed=length) for length in lengths]
    settings = (f"kv.block_tokens={tiny.BLOCK}", f"prefill.chunk_tokens={most_tokens}", "kvstore.pool_bytes=67108864")
    with running_cluster(model=model_dir, stages=2, settings=settings) as cluster:
        async with MoontideClient(cluster.grpc_address) as client:
            answers = await ask_all(client, prompts, greedy(NUM_TOKENS_AGAIN))
        metrics = cluster.metrics("prefill-0-stage-0")
    for prompt, answer in zip(prompts, answers, strict=True):
        oracle.check(prompt, answer.tokens)
        assert len(answer.tokens) == NUM_TOKENS_AGAIN
    assert any(name.startswith("prefill_plan_info") and 'chunking="equal-time"' in name for name in metrics)
    num_steps = metrics["prefill_step_tokens_count"]
    assert num_steps >= max(lengths) / most_tokens
    assert metrics["prefill_planned_step_seconds_count"] == num_steps, "every step was planned by measured times"


@pytest.mark.slow  # in one process: test_same_tokens.py
@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3"])
async def test_tiny_family_cold_and_hit_and_next_turn(family: str, tmp_path: Path) -> None:
    model_dir = tiny_model_dir(family, tmp_path)
    oracle = GreedyOracle(model_dir)
    prompts = [tiny.random_prompt(length, seed=length) for length in tiny.LENGTHS]
    settings = (
        f"kv.block_tokens={tiny.BLOCK}",
        "kv.layer_group=1",
        f"prefill.chunk_tokens={tiny.CHUNK}",
        "prefill.chunking=fixed",
        "kvstore.pool_bytes=67108864",
    )
    with running_cluster(model=model_dir, stages=2, settings=settings) as cluster:
        async with MoontideClient(cluster.grpc_address) as client:
            for prompt, answer in zip(prompts, await ask_all(client, prompts, greedy(NUM_TOKENS)), strict=True):
                oracle.check(prompt, answer.tokens)
                assert len(answer.tokens) == NUM_TOKENS
                assert answer.usage.cached_tokens == 0
            for prompt in prompts[-2:]:
                answer = await ask(client, prompt, greedy(NUM_TOKENS))
                oracle.check(prompt, answer.tokens)
                assert answer.usage.cached_tokens == tiny.hit_tokens(len(prompt), len(prompt))

            def is_written_back() -> bool:
                return cluster.metrics("decode-0")["decode_write_back_seconds_count"] == len(prompts) + 2

            await asyncio.to_thread(wait_for, is_written_back, "every answer is written back")
            said = [*prompts[-1], *answer.token_ids]
            next_turn = [*said, *tiny.random_prompt(tiny.BLOCK, seed=1)]
            answer = await ask(client, next_turn, greedy(NUM_TOKENS))
            oracle.check(next_turn, answer.tokens)
            computed = len(said) - 1  # the last token was never fed
            assert answer.usage.cached_tokens == computed // tiny.BLOCK * tiny.BLOCK
