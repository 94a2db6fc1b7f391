"""A working set of three times the pool, and more prompts at once than the pool has room for: they wait, and every answer is right.

Real processes, with a pool of 140 blocks. A cached prefix must never be older than what the pool still has, whatever was evicted meanwhile.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvstore.access import KvConfig
from kvstore.block import hash_blocks, root_hash
from kvstore.layout import KVLayout
from model_runner.config import ModelConfig
from model_runner.model_source import describe_model
from moontide.client import GenerateOptions, MoontideClient, Usage
from moontide.sampling_params import SampledToken
from moontide.token_ids import pack_token_ids, unpack_token_ids
from tests.cluster import running_cluster, wait_for
from tests.e2e.oracle import GreedyOracle
from tests.fakes.tiny_models import tiny_model_dir
from tests.fault.harness import Bench, frozen, random_prompt

POOL_BYTES = 16 << 20
BLOCK = 16
CHUNK = 64
LAYER_GROUP = 3
KV = KvConfig(block_tokens=BLOCK, layer_group=LAYER_GROUP)
SETTINGS = (
    f"kvstore.pool_bytes={POOL_BYTES}",
    f"kv.block_tokens={BLOCK}",
    f"kv.layer_group={LAYER_GROUP}",
    f"prefill.chunk_tokens={CHUNK}",
    "prefill.chunking=fixed",
    "prefill.num_pages=1000",
    "decode.num_pages=1000",
    "deploy.object_lease_s=0.5",
)
NUM_PROMPTS = 52
STEM_BLOCKS = 4
"""What every second prompt begins with."""
LONGEST_BLOCKS = 40
NUM_REQUESTS = 500
AT_ONCE = 32
NUM_TOKENS = 8
DEADLINE_S = 60.0


@dataclass(frozen=True)
class Served:
    prompt_idx: int
    tokens: Sequence[SampledToken]
    usage: Usage
    most_cached_tokens: int
    """Leading tokens that others had asked for before this answer was complete."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Few tokens with much K/V: 96 KiB in a block of 16."""
    return tiny_model_dir("llama", tmp_path_factory.mktemp("models"), head_dim=64)


@pytest.fixture(scope="module")
def layout(model_dir: Path) -> KVLayout:
    return describe_model(ModelConfig(name=str(model_dir), dtype="float32"), KV).layout


@pytest.fixture(scope="module")
def full_bench(model_dir: Path) -> Iterator[Bench]:
    with running_cluster(model=model_dir, stages=2, settings=SETTINGS) as cluster:
        bench = Bench(cluster)
        try:
            yield bench
        finally:
            bench.close()


def make_prompts(rng: random.Random) -> list[list[int]]:
    """A block and a bit more to twelve blocks, and two that fill a quarter of the pool each. Some answers complete their last block."""
    stem = random_prompt(STEM_BLOCKS * BLOCK, seed=600)
    prompts = []
    for idx in range(NUM_PROMPTS):
        num_blocks = LONGEST_BLOCKS if idx < 2 else rng.randint(STEM_BLOCKS, 12)
        own = random_prompt(num_blocks * BLOCK + rng.randrange(BLOCK), seed=601 + idx)
        prompts.append([*stem, *own] if idx % 2 else own)
    return prompts


class Load:
    """Asks for prompts in random order, so many at a time, and notes what could have been in the cache for each."""

    def __init__(self, bench: Bench, prompts: Sequence[Sequence[int]], rng: random.Random) -> None:
        self._bench = bench
        self._prompts = prompts
        self._order = [rng.randrange(len(prompts)) for _ in range(NUM_REQUESTS - len(prompts))]
        self._order += range(len(prompts))
        rng.shuffle(self._order)
        root = root_hash(b"any", "")
        self._blocks = [
            hash_blocks(unpack_token_ids(pack_token_ids(prompt)), block_tokens=BLOCK, root=root) for prompt in prompts
        ]
        self._asked_by: dict[bytes, set[int]] = defaultdict(set)
        self.distinct_blocks = len({block for blocks in self._blocks for block in blocks})

    async def run(self) -> list[Served]:
        """Raises: the first error of a request."""
        places = asyncio.Semaphore(AT_ONCE)
        async with MoontideClient(self._bench.cluster.grpc_address) as client, asyncio.TaskGroup() as tasks:
            asking = [
                tasks.create_task(self._ask(client, places, number, prompt_idx))
                for number, prompt_idx in enumerate(self._order)
            ]
        return [task.result() for task in asking]

    async def _ask(self, client: MoontideClient, places: asyncio.Semaphore, number: int, prompt_idx: int) -> Served:
        params = GenerateOptions(
            max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=0, timeout_s=DEADLINE_S
        )
        tokens: list[SampledToken] = []
        usage = None
        async with places:
            for block in self._blocks[prompt_idx]:
                self._asked_by[block].add(number)
            async for chunk in client.generate(self._prompts[prompt_idx], params=params):
                tokens += chunk.tokens
                usage = chunk.usage or usage
        assert usage is not None
        return Served(prompt_idx, tokens, usage, self._most_cached_tokens(number, prompt_idx))

    def _most_cached_tokens(self, number: int, prompt_idx: int) -> int:
        blocks = self._blocks[prompt_idx]
        known = next((at for at, block in enumerate(blocks) if self._asked_by[block] == {number}), len(blocks))
        return min(known, (len(self._prompts[prompt_idx]) - 1) // BLOCK) * BLOCK


@pytest.mark.timeout(240)
def test_three_times_the_pool(full_bench: Bench, model_dir: Path, layout: KVLayout) -> None:
    bench, rng = full_bench, random.Random(11)
    prompts = make_prompts(rng)
    load = Load(bench, prompts, rng)
    assert load.distinct_blocks * layout.block_bytes >= 3 * bench.store().capacity_bytes

    with frozen(bench.cluster, "decode-0"):
        serving = bench.spawn(load.run())
        wait_for(lambda: waits_for_room(bench), "prompts wait for what decode holds in the store")
        assert not serving.done()
    served = serving.result(3 * DEADLINE_S)

    assert len(served) == NUM_REQUESTS
    check_tokens(GreedyOracle(model_dir), prompts, served)
    for each in served:
        assert each.usage.cached_tokens <= each.most_cached_tokens
    assert sum(each.usage.cached_tokens for each in served) > 0, "nothing was ever cached"
    bench.wait_books_agree(layout)
    assert bench.retries() == 0
    group, store = bench.cluster.metrics("prefill-0-stage-0"), bench.cluster.metrics("kvstore-0")
    assert store["kvstore_evicted_blocks_total"] > 0
    assert group["prefill_rewinds_total"] == 0, "a hit that the store had promised was not there"


def waits_for_room(bench: Bench) -> bool:
    """Nothing is computed and no prompt holds pages, and yet some wait: for the room that others hold in the store."""
    status = bench.prefill()
    return status.waiting > 0 and status.running == 0 and bench.store().reservations > 0


def check_tokens(oracle: GreedyOracle, prompts: Sequence[Sequence[int]], served: Sequence[Served]) -> None:
    """Every answer is the greedy one."""
    judged: dict[int, list[int]] = {}
    for each in served:
        assert len(each.tokens) == NUM_TOKENS
        if each.prompt_idx not in judged:
            oracle.check(prompts[each.prompt_idx], each.tokens)
            judged[each.prompt_idx] = [token.token_id for token in each.tokens]
        assert [token.token_id for token in each.tokens] == judged[each.prompt_idx]
    assert len(judged) == len(prompts)
