"""A prefix index that follows a running cluster as a conductor's does, to be compared with what the store processes say they hold."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

from prometheus_client import CollectorRegistry

from conductor.index_follower import IndexFollower
from conductor.metrics import ConductorMetrics
from conductor.prefix_index import PrefixIndex
from conductor.registry import NodeRegistry
from kvstore.index import KvEvents
from moontide import rpc
from moontide.clock import MonotonicClock
from moontide.config import RegistryConfig
from moontide_proto.v1 import kvstore_pb2, kvstore_pb2_grpc

TIMEOUT_S = 10.0


class IndexWatch:
    """Made by `watching`."""

    def __init__(self, config: RegistryConfig) -> None:
        metrics = ConductorMetrics(CollectorRegistry())
        self.index = PrefixIndex()
        self.registry = NodeRegistry(config, MonotonicClock(), metrics)
        self.follower = IndexFollower(self.index, KvEvents(config), metrics, nodes=lambda: self.registry.nodes)

    async def difference(self) -> str:
        """How the index differs from what the stores that are alive list as sealed, in words; "" when it does not."""
        stores = [n.record for n in self.registry.nodes if n.record.role == "kvstore" and n.alive]
        if not stores:
            return "no store is in the registry"
        for store in stores:
            parents = await sealed_blocks(store.address)
            known = self.index.num_blocks_of(store.node_id)
            if known != len(parents):
                return f"{store.node_id} holds {len(parents)} blocks, the index knows {known}"
            for block in parents.keys() - set(parents.values()):
                chain = _chain(block, parents)
                hit = self.index.hit_blocks(chain).get(store.node_id, 0)
                if hit != len(chain):
                    return f"{store.node_id} holds a chain of {len(chain)} blocks, the index finds {hit} of them"
        return ""


@asynccontextmanager
async def watching(registry_url: str) -> AsyncIterator[IndexWatch]:
    watch = IndexWatch(RegistryConfig(url=registry_url))
    try:
        await watch.registry.start()
        watch.follower.start()
        yield watch
    finally:
        await watch.follower.close()
        await watch.registry.close()


async def sealed_blocks(store_address: str) -> dict[bytes, bytes]:
    """Hash -> hash of the block before it, of what a store process holds."""
    async with rpc.open_channel(store_address) as channel:
        stub = kvstore_pb2_grpc.KvStoreStub(channel)  # type: ignore[no-untyped-call]
        blocks = stub.ListBlocks(kvstore_pb2.ListBlocksRequest(), timeout=TIMEOUT_S)
        return {block.hash: block.parent_hash async for block in blocks if block.is_sealed}


async def evict_all(store_address: str) -> int:
    """Drop what nobody uses; returns the number of blocks."""
    async with rpc.open_channel(store_address) as channel:
        stub = kvstore_pb2_grpc.KvStoreStub(channel)  # type: ignore[no-untyped-call]
        request = kvstore_pb2.EvictRequest(num_bytes=2**62)
        reply = cast(kvstore_pb2.EvictReply, await stub.Evict(request, timeout=TIMEOUT_S))
        return reply.num_blocks


def _chain(block: bytes, parents: dict[bytes, bytes]) -> list[bytes]:
    """From the first block of a prompt to this one."""
    chain = [block]
    while (parent := parents[chain[-1]]) in parents:
        chain.append(parent)
    return chain[::-1]
