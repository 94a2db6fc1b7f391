"""Blocks that decode completes end up in the store with the right bytes and names, or nowhere; requests and pages never suffer from it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from decode_node.metrics import DecodeMetrics
from decode_node.session import Finished, Tokens
from decode_node.stores import StoreNodes
from decode_node.write_back import WriteBacks, WriteJob
from kvstore.block import BlockHash, hash_blocks, root_hash
from kvstore.client import BlockRef, StoreNodeClient
from kvstore.keys import LOCAL_NODE_ID
from kvstore.node import LocalStoreNode
from kvstore.pool import PoolState, RequestKey, ReserveReply, ReserveResult
from kvstore.service import KvStoreService
from kvstore.transfer.memory import MemoryStore, MemoryTransfer
from model_runner.runner import Segment
from moontide.clock import MonotonicClock
from moontide.rpc import Server
from moontide.sampling_params import FinishReason, SamplingParams
from moontide_proto.v1 import kvstore_pb2_grpc
from tests.unit.decode_node.decode_rig import (
    BLOCK_TOKENS,
    Answer,
    DecodeRig,
    Prefill,
    Prefilled,
    decode_rig,
    local_store,
    wait_for,
)
from tests.unit.decode_node.test_decode_requests import MAX_TOKENS, PARTIAL_LENGTH, prompt_ids

PROMPT_BLOCKS = PARTIAL_LENGTH // BLOCK_TOKENS
CHAIN_BLOCKS = (PARTIAL_LENGTH + MAX_TOKENS - 1) // BLOCK_TOKENS
"""Of prompt and answer but for the last token: the answer fills up the prompt's partial block and, to its last place, one more."""
SAMPLED = SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, seed=3, ignore_eos=True)
"""Greedy answers of a tiny model are often one token over and over, which would hide a shift."""
ENDLESS = SamplingParams(max_tokens=400, temperature=1.0, seed=3, ignore_eos=True)
assert (PARTIAL_LENGTH + MAX_TOKENS - 1) % BLOCK_TOKENS == 0, "off by one would go unseen"


def chain(prefill: Prefill, token_ids: Sequence[int], *, salt: str = "") -> list[BlockHash]:
    root = root_hash(prefill.layout.digest(), salt)
    return hash_blocks(np.array(token_ids, dtype=np.uint32), block_tokens=BLOCK_TOKENS, root=root)


def check_stored_bytes(prefill: Prefill, tokens: Sequence[int]) -> None:
    """The stored blocks of the chain are what prefill computes for these tokens."""
    kv, pages = prefill.runner.kv, list(range(CHAIN_BLOCKS))
    copies = [page + CHAIN_BLOCKS for page in pages]
    computed = CHAIN_BLOCKS * BLOCK_TOKENS
    prefill.runner.forward(
        [Segment(start=0, num_tokens=computed, pages=pages, wants_logits=True)],
        token_ids_T=torch.tensor(tokens[:computed]),
    )
    refs = [BlockRef(block_hash, "", 0) for block_hash in chain(prefill, tokens)]
    for group_idx in kv.groups:
        slots = [(ref, kv.slot_address(group_idx, page)) for ref, page in zip(refs, copies, strict=True)]
        assert prefill.client.get_group(group_idx, slots) == [True] * CHAIN_BLOCKS
    for layer in range(prefill.info.num_layers):
        torch.testing.assert_close(kv.layer(layer)[copies], kv.layer(layer)[pages], atol=1e-5, rtol=0)


async def reserve(
    node: LocalStoreNode | StoreNodeClient,
    prefill: Prefill,
    token_ids: Sequence[int],
    *,
    name: str = "next",
    salt: str = "",
) -> ReserveReply:
    """As the prefill of these tokens does."""
    await node.register_layout(prefill.layout)
    return await node.reserve(
        request_id=name,
        epoch=1,
        layout_digest=prefill.layout.digest(),
        parent_hash=root_hash(prefill.layout.digest(), salt),
        block_hashes=chain(prefill, token_ids, salt=salt),
        has_partial=False,
        lease_s=60.0,
    )


async def hit_blocks(node: LocalStoreNode, prefill: Prefill, token_ids: Sequence[int], *, salt: str = "") -> int:
    """Length of the prefix hit of a prompt."""
    reply = await reserve(node, prefill, token_ids, salt=salt)
    await node.release(request_id="next", epoch=1)
    return reply.hit_blocks


async def prefilled(
    node: LocalStoreNode | StoreNodeClient,
    prefill: Prefill,
    *,
    name: str = "r",
    seed: int = 0,
    length: int = PARTIAL_LENGTH,
    sampling: SamplingParams = SAMPLED,
    salt: str = "",
) -> Prefilled:
    """A prompt whose blocks are in the store and sealed."""
    prompt = prefill.run(name, prompt_ids(length, seed), sampling, salt=salt)
    reply = await reserve(node, prefill, prompt.token_ids, name=name, salt=salt)
    assert reply.result is ReserveResult.RESERVED
    await node.seal(request_id=name, epoch=1, first_block=0, num_blocks=prompt.num_full_blocks)
    await node.release(request_id=name, epoch=1)
    return prompt


async def answered(rig: DecodeRig, prompt: Prefilled, **open_args: str) -> list[int]:
    """Decode a prompt to its end; returns prompt and answer."""
    rig.open(prompt, **open_args)  # type: ignore[arg-type]
    rig.seal_all(prompt)
    rig.start(prompt)
    answer = await rig.answer(prompt)
    assert isinstance(answer.end, Finished)
    return conversation(prompt, answer)


def conversation(prompt: Prefilled, answer: Answer) -> list[int]:
    return [*prompt.token_ids, prompt.first_token.token_id, *answer.token_ids]


async def nothing_is_held(rig: DecodeRig, node: LocalStoreNode) -> None:
    await rig.until_idle()
    await wait_for(lambda: node.pool.stats().reservations == 0)
    assert node.pool.stats().pinned_blocks == 0
    node.pool.check_invariants()


def objects_of(prefill: Prefill, token_ids: Sequence[int], blocks: range) -> set[str]:
    hashes = chain(prefill, token_ids)
    digest = prefill.layout.digest()
    return {
        BlockRef(hashes[block], "", 0).key(digest, group_idx)
        for block in blocks
        for group_idx in range(prefill.layout.num_groups)
    }


async def test_next_turn_hits_the_answer_and_finds_the_bytes_that_prefill_would_make(
    prefill: Prefill, store: MemoryStore
) -> None:
    node = local_store(store)
    prompt = await prefilled(node, prefill)
    async with decode_rig(prefill, store, store_node=node) as rig:
        tokens = await answered(rig, prompt)
        await nothing_is_held(rig, node)
        assert rig.written_back("written") == 1
        assert await hit_blocks(node, prefill, [*tokens, 5, 6, 7]) == CHAIN_BLOCKS
        written = range(PROMPT_BLOCKS, CHAIN_BLOCKS)
        assert set(rig.transfer.put_keys) == objects_of(prefill, tokens, written), (
            "blocks that are hits are not put again"
        )

    check_stored_bytes(prefill, tokens)


async def test_hit_ratio_of_the_store_counts_prompts_only(prefill: Prefill, store: MemoryStore) -> None:
    node = local_store(store)
    prompt = await prefilled(node, prefill)
    async with decode_rig(prefill, store, store_node=node) as rig:
        await answered(rig, prompt)
        await nothing_is_held(rig, node)
        assert rig.written_back("written") == 1
    asked, hit = (
        counter.collect()[0].samples[0].value for counter in (node.metrics.asked_blocks, node.metrics.hit_blocks)
    )
    assert (asked, hit) == (PROMPT_BLOCKS, 0)


@pytest.mark.parametrize(
    ("length", "max_tokens", "num_blocks"),
    [
        (PARTIAL_LENGTH, MAX_TOKENS - 1, CHAIN_BLOCKS - 1),
        (BLOCK_TOKENS - 1, 3, 1),
        (BLOCK_TOKENS - 1, 2, 1),
        (1, MAX_TOKENS, 1),
        (2 * BLOCK_TOKENS, BLOCK_TOKENS + 1, 3),
    ],
)
async def test_only_blocks_whose_last_token_was_fed_are_written(
    prefill: Prefill, store: MemoryStore, length: int, max_tokens: int, num_blocks: int
) -> None:
    node = local_store(store)
    sampling = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=3, ignore_eos=True)
    prompt = await prefilled(node, prefill, length=length, sampling=sampling)
    async with decode_rig(prefill, store, store_node=node) as rig:
        tokens = await answered(rig, prompt)
        await nothing_is_held(rig, node)
        assert await hit_blocks(node, prefill, [*tokens, *range(3, 3 + 2 * BLOCK_TOKENS)]) == num_blocks


@pytest.mark.parametrize(("length", "max_tokens"), [(BLOCK_TOKENS, BLOCK_TOKENS), (PARTIAL_LENGTH, 3)])
async def test_answer_that_completes_no_block_is_not_written(
    prefill: Prefill, store: MemoryStore, length: int, max_tokens: int
) -> None:
    node = local_store(store)
    sampling = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=3, ignore_eos=True)
    prompt = await prefilled(node, prefill, length=length, sampling=sampling)
    async with decode_rig(prefill, store, store_node=node) as rig:
        await answered(rig, prompt)
        await nothing_is_held(rig, node)
        assert rig.transfer.put_keys == []


async def test_later_turns_hit_all_earlier_ones(prefill: Prefill, store: MemoryStore) -> None:
    node = local_store(store)
    tokens = prompt_ids(PARTIAL_LENGTH)
    async with decode_rig(prefill, store, store_node=node) as rig:
        for turn in range(3):
            assert await hit_blocks(node, prefill, tokens) == (len(tokens) - 7) // BLOCK_TOKENS * bool(turn)
            prompt = prefill.run(f"turn{turn}", tokens, SAMPLED)
            tokens = [*await answered(rig, prompt), *prompt_ids(6, turn)]
            await nothing_is_held(rig, node)


async def test_stop_token_keeps_the_answer_before_it(prefill: Prefill, store: MemoryStore) -> None:
    node = local_store(store)
    first = await prefilled(node, prefill, name="first")
    async with decode_rig(prefill, store, store_node=node, write_back=False) as rig:
        tokens = await answered(rig, first)
    stop = tokens[PARTIAL_LENGTH + 5]
    assert stop not in tokens[PARTIAL_LENGTH : PARTIAL_LENGTH + 5], "take another prompt"
    sampling = SamplingParams(max_tokens=100, temperature=1.0, seed=3, ignore_eos=True, stop_token_ids=(stop,))
    prompt = await prefilled(node, prefill, name="second", sampling=sampling)
    async with decode_rig(prefill, store, store_node=node) as rig:
        tokens = await answered(rig, prompt)
        answer = await rig.answer(prompt)
        assert isinstance(answer.end, Finished)
        assert answer.end.reason is FinishReason.STOP
        assert tokens[-1] == stop
        await nothing_is_held(rig, node)
        assert await hit_blocks(node, prefill, tokens) == PROMPT_BLOCKS + 1


async def test_salt_separates_what_is_written(prefill: Prefill, store: MemoryStore) -> None:
    node = local_store(store)
    prompt = await prefilled(node, prefill, salt="tenant")
    async with decode_rig(prefill, store, store_node=node) as rig:
        tokens = await answered(rig, prompt, salt="tenant")
        await nothing_is_held(rig, node)
        assert await hit_blocks(node, prefill, tokens, salt="tenant") == CHAIN_BLOCKS
        assert await hit_blocks(node, prefill, tokens) == 0


async def test_prompt_that_was_evicted_meanwhile_is_written_too(prefill: Prefill, store: MemoryStore) -> None:
    node = local_store(store)
    prompt = prefill.run("r", prompt_ids(PARTIAL_LENGTH), SAMPLED)
    async with decode_rig(prefill, store, store_node=node) as rig:
        tokens = await answered(rig, prompt)
        await nothing_is_held(rig, node)
        assert set(rig.transfer.put_keys) == objects_of(prefill, tokens, range(CHAIN_BLOCKS))
        assert await hit_blocks(node, prefill, tokens) == CHAIN_BLOCKS


async def test_answer_that_is_there_already_is_not_put_again(prefill: Prefill, store: MemoryStore) -> None:
    node = local_store(store)
    first, second = [await prefilled(node, prefill, name=name) for name in ("first", "second")]
    async with decode_rig(prefill, store, store_node=node) as rig:
        await answered(rig, first)
        await nothing_is_held(rig, node)
        rig.transfer.put_keys.clear()
        await answered(rig, second)
        await nothing_is_held(rig, node)
        assert rig.transfer.put_keys == []
        assert rig.written_back("cached") == 1


async def test_switched_off_writes_nothing(prefill: Prefill, store: MemoryStore) -> None:
    node = local_store(store)
    prompt = await prefilled(node, prefill)
    async with decode_rig(prefill, store, store_node=node, write_back=False) as rig:
        await answered(rig, prompt)
        await nothing_is_held(rig, node)
        assert rig.transfer.put_keys == []


async def test_cancelled_request_is_not_written(prefill: Prefill, store: MemoryStore) -> None:
    node = local_store(store)
    prompt = await prefilled(node, prefill, sampling=ENDLESS)
    async with decode_rig(prefill, store, store_node=node) as rig:
        rig.open_and_start(prompt)
        num_tokens = 0
        while num_tokens < 3 * BLOCK_TOKENS:
            num_tokens += isinstance(await rig.next_event(), Tokens)
        rig.requests.cancel(rig.session, prompt.key)
        await nothing_is_held(rig, node)
        assert rig.transfer.put_keys == []
        assert node.pool.stats().sealed_blocks == PROMPT_BLOCKS


async def test_full_pool_means_not_cached(prefill: Prefill, store: MemoryStore) -> None:
    node = local_store(store, capacity_bytes=CHAIN_BLOCKS * prefill.layout.block_bytes)
    prompt = await prefilled(node, prefill)
    other = await reserve(node, prefill, prompt_ids(2 * BLOCK_TOKENS, seed=9), name="other")
    assert other.result is ReserveResult.RESERVED
    async with decode_rig(prefill, store, store_node=node) as rig:
        await answered(rig, prompt)
        await rig.until_idle()
        await wait_for(lambda: rig.written_back("full") == 1)
        assert rig.transfer.put_keys == []
        assert node.pool.stats().reservations == 1
        assert node.pool.stats().sealed_blocks == PROMPT_BLOCKS, "it evicted its own prompt"
        await node.release(request_id="other", epoch=1)
        await nothing_is_held(rig, node)


async def test_chain_that_is_larger_than_the_pool_is_not_cached(prefill: Prefill, store: MemoryStore) -> None:
    node = local_store(store, capacity_bytes=(CHAIN_BLOCKS - 1) * prefill.layout.block_bytes)
    prompt = await prefilled(node, prefill)
    async with decode_rig(prefill, store, store_node=node) as rig:
        await answered(rig, prompt)
        await nothing_is_held(rig, node)
        assert rig.written_back("too_large") == 1


async def test_store_without_answer_disturbs_nobody(prefill: Prefill, store: MemoryStore) -> None:
    node = local_store(store)
    prompts = [await prefilled(node, prefill, name=f"r{idx}", seed=idx) for idx in range(2)]
    async with decode_rig(prefill, store, store_node=node) as rig:
        for prompt in prompts:
            rig.open(prompt)
            rig.start(prompt, store_address="127.0.0.1:1")
            assert isinstance((await rig.answer(prompt)).end, Finished)
        await wait_for(lambda: rig.written_back("NodeLost") == 2)
        await nothing_is_held(rig, node)


async def test_puts_that_fail_mean_not_cached(prefill: Prefill, store: MemoryStore) -> None:
    node = local_store(store)
    prompt = await prefilled(node, prefill)
    async with decode_rig(prefill, store, store_node=node) as rig:
        store.capacity_bytes = store.used_bytes + prefill.layout.object_bytes(0)
        tokens = await answered(rig, prompt)
        await wait_for(lambda: rig.written_back("TransferFailed") == 1)
        await nothing_is_held(rig, node)
        assert await hit_blocks(node, prefill, tokens) == PROMPT_BLOCKS
        await node.tidy()
        left = objects_of(prefill, tokens, range(PROMPT_BLOCKS, CHAIN_BLOCKS)) & store.objects.keys()
        assert not left, "what was put of a block that is not cached has to go"


async def test_pages_stay_until_their_puts_are_over(prefill: Prefill, store: MemoryStore) -> None:
    node = local_store(store)
    prompt = await prefilled(node, prefill)
    async with decode_rig(prefill, store, store_node=node) as rig:
        rig.transfer.put_gate.clear()
        await answered(rig, prompt)
        await wait_for(rig.transfer.put_open.is_set)
        batch = rig.requests.batch
        assert batch.num_pages - batch.num_free_pages == CHAIN_BLOCKS - PROMPT_BLOCKS, "hits need no page any more"
        batch.check_invariants()
        rig.transfer.put_gate.set()
        await nothing_is_held(rig, node)
        assert rig.written_back("written") == 1


async def test_close_waits_for_the_open_put_and_gives_the_rest_up(prefill: Prefill, store: MemoryStore) -> None:
    node = local_store(store)
    prompts = [await prefilled(node, prefill, name=f"r{idx}", seed=idx) for idx in range(2)]
    async with decode_rig(prefill, store, store_node=node) as rig:
        rig.transfer.put_gate.clear()
        tokens = [await answered(rig, prompt) for prompt in prompts]
        await wait_for(rig.transfer.put_open.is_set)
    first = objects_of(prefill, tokens[0], range(PROMPT_BLOCKS, CHAIN_BLOCKS))
    assert set(rig.transfer.put_keys) <= first, "the second one began"
    assert rig.requests.batch.num_free_pages == rig.requests.batch.num_pages
    assert node.pool.stats().reservations == 0


@pytest.mark.parametrize("num_rounds", range(12))
async def test_close_at_any_moment_gives_the_pages_back_once(
    prefill: Prefill, store: MemoryStore, num_rounds: int
) -> None:
    """After so many rounds of the event loop; the put takes less than one."""
    node, clock = local_store(store), MonotonicClock()
    given_back: list[WriteJob] = []
    writes = WriteBacks(
        prefill.client,
        prefill.runner.kv,
        prefill.layout,
        stores=StoreNodes(node, "", own_node_id=LOCAL_NODE_ID, clock=clock),
        clock=clock,
        metrics=DecodeMetrics(CollectorRegistry()),
        keep=lambda _job, _pages: None,
        give_back=given_back.append,
    )
    job = WriteJob(
        key=RequestKey("r", 1),
        store_address="",
        root=root_hash(prefill.layout.digest(), ""),
        hashes=chain(prefill, [3] * 16),
        pages=[0, 1],
    )
    writes.submit(job)
    for _ in range(num_rounds):
        await asyncio.sleep(0)
        time.sleep(0.001)  # noqa: ASYNC251 - the put thread goes on, the loop does not
    await writes.close()
    assert given_back == [job]
    assert node.pool.stats().reservations == 0


async def test_request_that_waits_for_pages_gets_those_of_writes_that_have_not_begun(
    prefill: Prefill, store: MemoryStore
) -> None:
    node = local_store(store)
    num_new = CHAIN_BLOCKS - PROMPT_BLOCKS
    long_blocks = 10
    first, second = [await prefilled(node, prefill, name=f"r{idx}", seed=idx) for idx in range(2)]
    length = long_blocks * BLOCK_TOKENS - MAX_TOKENS + 1
    third = await prefilled(node, prefill, name="long", length=length)
    async with decode_rig(prefill, store, store_node=node, num_pages=long_blocks + num_new) as rig:
        rig.transfer.put_gate.clear()
        await answered(rig, first)
        await wait_for(rig.transfer.put_open.is_set)
        tokens = await answered(rig, second)
        await answered(rig, third)
        await wait_for(lambda: rig.written_back("dropped") >= 1)
        rig.transfer.put_gate.set()
        await nothing_is_held(rig, node)
        assert rig.written_back("dropped") == 1
        assert rig.written_back("written") == 2
        assert await hit_blocks(node, prefill, tokens) == PROMPT_BLOCKS


@asynccontextmanager
async def served(node: LocalStoreNode) -> AsyncIterator[str]:
    """The address of a store process."""
    server = Server()
    server.add(
        kvstore_pb2_grpc.add_KvStoreServicer_to_server,
        KvStoreService(node, node_id="there", boot_id="boot"),
        "moontide.v1.KvStore",
    )
    port = await server.start("127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.close()


async def test_answer_goes_to_the_store_process_that_holds_its_prompt(prefill: Prefill, store: MemoryStore) -> None:
    here = local_store(store)
    pool = PoolState(capacity_bytes=1 << 30, clock=MonotonicClock(), node_id="there")
    there = LocalStoreNode(pool, MemoryTransfer(store))
    prompt = prefill.run("r", prompt_ids(PARTIAL_LENGTH), SAMPLED)
    async with served(there) as address, decode_rig(prefill, store, store_node=here) as rig:
        rig.open(prompt)
        rig.start(prompt, store_address=address)
        tokens = conversation(prompt, await rig.answer(prompt))
        await nothing_is_held(rig, there)
        assert await hit_blocks(there, prefill, tokens) == CHAIN_BLOCKS
        assert await hit_blocks(here, prefill, tokens) == 0
        assert all(key.endswith("/there") for key in rig.transfer.put_keys)
