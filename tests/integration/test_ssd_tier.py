"""A store process with an SSD below its small pool, over the real Mooncake."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvstore.block import BlockHash
from kvstore.client import BlockRef
from kvstore.layout import TRAILER_BYTES
from kvstore.pool import ReserveReply, ReserveResult
from kvstore.transfer.base import PutStatus
from moontide import rpc
from moontide.config import free_port
from moontide_proto.v1 import kvstore_pb2 as pb
from moontide_proto.v1 import kvstore_pb2_grpc as pb_grpc
from tests.integration.test_kvstore_service import (
    LAYOUT,
    NODE_ID,
    NUM_BLOCKS,
    Writer,
    arguments,
    attached,
    backend,
    chain,
    gauge,
    service,
)

CHAIN_BLOCKS = 8
GROUPS = range(LAYOUT.num_groups)


async def reserve(stage: Writer, request_id: str, hashes: list[BlockHash]) -> ReserveReply:
    """Waits for room as a prefill group does."""
    async with asyncio.timeout(20):
        while (reply := await stage.reserve(request_id, hashes)).result is ReserveResult.WAIT:
            await asyncio.sleep(0.05)
    return reply


async def compute(stage: Writer, request_id: str, hashes: list[BlockHash]) -> None:
    assert (await reserve(stage, request_id, hashes)).hit_blocks == 0
    refs = [BlockRef(block_hash, request_id, 1, NODE_ID) for block_hash in hashes]
    for ref in refs:
        for group_idx in GROUPS:
            payload = payload_of(ref, group_idx)
            stage.arena.buffer[: len(payload)] = payload
            assert stage.client.put_group(group_idx, [(ref, stage.arena.address)]) == [PutStatus.STORED_OR_OPEN]
    assert stage.client.missing(refs) == set()
    await stage.node.seal(request_id=request_id, epoch=1, first_block=0, num_blocks=len(hashes))
    await stage.node.release(request_id=request_id, epoch=1)


def payload_of(ref: BlockRef, group_idx: int) -> bytes:
    assert ref.hash is not None
    seed = int.from_bytes(ref.hash[:6], "big") + group_idx
    return np.random.default_rng(seed).bytes(LAYOUT.object_bytes(group_idx) - TRAILER_BYTES)


def check_bytes(stage: Writer, request_id: str, hashes: Sequence[BlockHash]) -> None:
    for block_hash in hashes:
        ref = BlockRef(block_hash, request_id, 1, NODE_ID)
        for group_idx in GROUPS:
            assert stage.client.get_group(group_idx, [(ref, stage.arena.address)]) == [True]
            payload = payload_of(ref, group_idx)
            assert bytes(stage.arena.buffer[: len(payload)]) == payload


async def until_kept(stage: Writer, num_blocks: int) -> None:
    async with asyncio.timeout(20):
        while (await stage.node.stats()).ssd_blocks < num_blocks:
            await asyncio.sleep(0.05)


async def tiers(address: str, *, max_blocks: int) -> list[str]:
    """Where the blocks are that the store process lists."""
    async with rpc.open_channel(address) as channel:
        stub = pb_grpc.KvStoreStub(channel)  # type: ignore[no-untyped-call]
        request = pb.ListBlocksRequest(max_blocks=max_blocks)
        return [found.tier async for found in stub.ListBlocks(request, timeout=10)]


async def test_evicted_blocks_come_back_and_those_of_a_killed_process_too(tmp_path: Path) -> None:
    chains = [chain(seed, CHAIN_BLOCKS) for seed in range(100, 100 + 2 * NUM_BLOCKS // CHAIN_BLOCKS)]
    settings = [f"kvstore.ssd_dir={tmp_path / 'ssd'}", f"kvstore.ssd_bytes={1 << 30}"]
    with backend() as to:
        with service(to, settings=settings) as first:
            async with attached(first) as stage:
                for position, hashes in enumerate(chains):
                    await compute(stage, f"fill-{position}", hashes)
                    await until_kept(stage, CHAIN_BLOCKS * (position + 1))
                assert (await stage.node.stats()).sealed_blocks <= NUM_BLOCKS < CHAIN_BLOCKS * len(chains)
                assert {"dram", "ssd"} == set(await tiers(first.record.address, max_blocks=0))
                assert len(await tiers(first.record.address, max_blocks=NUM_BLOCKS + 1)) == NUM_BLOCKS + 1
                assert await asyncio.to_thread(gauge, first.record, "kvstore_ssd_not_kept_blocks_total") == 0
                evicted = await reserve(stage, "evicted", chains[0])
                assert evicted.hit_blocks == evicted.promoted_blocks == CHAIN_BLOCKS
                check_bytes(stage, "evicted", chains[0])

                in_use = [*arguments(to, client_port=free_port(), node_id="store-1"), "--set", settings[0]]
                refused = await asyncio.to_thread(subprocess.run, in_use, capture_output=True, timeout=60, check=False)
                assert refused.returncode == 2
                assert f"in use by process {first.process.pid}".encode() in refused.stderr
            first.process.kill()
            first.process.wait()
        with service(to, not_boot=first.record.boot_id, settings=settings) as second:
            async with attached(second) as stage:
                for position, hashes in enumerate(chains):
                    reply = await reserve(stage, f"again-{position}", hashes)
                    assert reply.hit_blocks == reply.promoted_blocks == CHAIN_BLOCKS, position
                    check_bytes(stage, f"again-{position}", hashes)
                    await stage.node.release(request_id=f"again-{position}", epoch=1)
