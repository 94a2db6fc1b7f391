"""The per-host store process: data client, store node, gRPC service, registry record, health.

    DataClient (child, owns the segment) <-- MooncakeTransfer -- LocalStoreNode -- KvStoreService (gRPC)
                                                   |                |-- KvEventWriter -> Valkey
                                                   `-- Replicator   |-- PeerCheck -> engines of other hosts
Nothing computes here: one event loop, and worker threads for the blocking calls into the transfer.
"""

import asyncio
import dataclasses
import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import grpc.aio
import redis.asyncio as redis
from prometheus_client import CollectorRegistry
from redis.exceptions import RedisError

from kvstore.block import BLOCK_HASH_BYTES, BlockHash
from kvstore.config import KvStoreConfig
from kvstore.data_client import DataClient
from kvstore.index import KvEventWriter, split_hashes
from kvstore.layout import KVLayout
from kvstore.metrics import SsdMetrics
from kvstore.node import LocalStoreNode
from kvstore.pool import BlockInfo, PoolState
from kvstore.preflight import PeerCheck, require_master, require_segment
from kvstore.replicate import Replicator
from kvstore.ssd import SsdTier
from kvstore.tiering import SsdMover
from kvstore.transfer.base import PutItem, PutStatus, StoreUnavailable, Transfer
from kvstore.transfer.mooncake import MooncakeTransfer
from moontide.clock import MonotonicClock
from moontide.errors import BadRequest, NodeLost
from moontide.log import get_logger
from moontide.metrics import HealthServer
from moontide.registry import Announcer, NodeRecord, connect, read_records
from moontide.rpc import Server, grpc_errors
from moontide.tls import Tls
from moontide_proto.v1 import kvstore_pb2 as pb
from moontide_proto.v1 import kvstore_pb2_grpc as pb_grpc

_SNAPSHOT_MESSAGE_BLOCKS = 2048
_WATCH_PERIOD_S = 0.5
_MARKER_BYTES = 64
_CHECKS_TO_RED = 3
"""A slow answer or two of the master on a busy host say nothing about the pool."""
_ARENA_BYTES = 1 << 30
"""Most transfer memory of this process; what it copies blocks through is allocated when it is needed."""

log = get_logger(__name__)

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class KvStoreService(pb_grpc.KvStoreServicer):
    """Messages in and out of a LocalStoreNode."""

    def __init__(
        self, node: LocalStoreNode, *, node_id: str, boot_id: str, replicator: Replicator | None = None
    ) -> None:
        """Without a replicator this host holds no replicas."""
        self._node = node
        self._replicator = replicator
        self._node_id = node_id
        self._boot_id = boot_id

    async def RegisterLayout(self, request: pb.RegisterLayoutRequest, context: Context) -> pb.RegisterLayoutReply:
        async with grpc_errors(context):
            try:
                layout = KVLayout.from_json(request.layout_json)
            except (ValueError, TypeError) as error:
                raise BadRequest(f"layout_json is no KVLayout: {error}", param="layout_json") from error
            identity = await self._node.register_layout(layout)
        return pb.RegisterLayoutReply(node_id=identity.node_id, boot_id=identity.boot_id, segment=identity.segment)

    async def Reserve(self, request: pb.ReserveRequest, context: Context) -> pb.ReserveReply:
        async with grpc_errors(context, request.request_id):
            hashes = _hashes_of(request.block_hashes)
            reply = await self._node.reserve(
                request_id=request.request_id,
                epoch=request.epoch,
                layout_digest=request.layout_digest,
                parent_hash=_root_of(request.parent_hash),
                block_hashes=hashes,
                has_partial=request.has_partial,
                lease_s=request.lease_s,
                is_write_back=request.is_write_back,
            )
        return pb.ReserveReply(
            result=pb.ReserveReply.Result.Value(reply.result.name),
            hit_blocks=reply.hit_blocks,
            needed_bytes=reply.needed_bytes,
            capacity_bytes=reply.capacity_bytes,
            segment=reply.segment,
            promoted_blocks=reply.promoted_blocks,
        )

    async def Seal(self, request: pb.SealRequest, context: Context) -> pb.SealReply:
        async with grpc_errors(context, request.request_id):
            await self._node.seal(
                request_id=request.request_id,
                epoch=request.epoch,
                first_block=request.first_block,
                num_blocks=request.num_blocks,
            )
        return pb.SealReply()

    async def Renew(self, request: pb.RenewRequest, context: Context) -> pb.RenewReply:
        async with grpc_errors(context):
            unknown = await self._node.renew(request.request_ids, lease_s=request.lease_s)
        return pb.RenewReply(unknown_request_ids=unknown)

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseReply:
        async with grpc_errors(context, request.request_id):
            await self._node.release(request_id=request.request_id, epoch=request.epoch)
        return pb.ReleaseReply()

    async def GetStats(self, request: pb.KvStoreStatsRequest, context: Context) -> pb.KvStoreStats:
        stats = await self._node.stats()
        return pb.KvStoreStats(
            node_id=self._node_id,
            boot_id=self._boot_id,
            capacity_bytes=stats.capacity_bytes,
            used_bytes=stats.used_bytes,
            sealed_blocks=stats.sealed_blocks,
            reservations=stats.reservations,
            pinned_blocks=stats.pinned_blocks,
            objects_to_remove=stats.objects_to_remove,
            ssd_capacity_bytes=stats.ssd_capacity_bytes,
            ssd_used_bytes=stats.ssd_used_bytes,
            ssd_blocks=stats.ssd_blocks,
            replica_blocks=self._replicator.num_blocks if self._replicator is not None else 0,
        )

    async def Replicate(self, request: pb.ReplicateRequest, context: Context) -> pb.ReplicateReply:
        reply = pb.ReplicateReply()
        async with grpc_errors(context):
            hashes = _hashes_of(request.block_hashes)
            if self._replicator is not None:
                replica = await self._replicator.replicate(
                    layout_digest=request.layout_digest,
                    root=_root_of(request.parent_hash),
                    hashes=hashes,
                    timeout_s=request.timeout_s,
                )
                reply = pb.ReplicateReply(**dataclasses.asdict(replica))
        return reply

    async def Snapshot(self, request: pb.SnapshotRequest, context: Context) -> AsyncIterator[pb.SnapshotRuns]:
        async with grpc_errors(context):
            number, blocks = self._node.sealed_blocks()
            is_first = True
            while (part := list(islice(blocks, _SNAPSHOT_MESSAGE_BLOCKS))) or is_first:
                is_first = False
                yield pb.SnapshotRuns(boot_id=self._boot_id, event_number=number, runs=_runs(part))

    async def ListBlocks(self, request: pb.ListBlocksRequest, context: Context) -> AsyncIterator[pb.BlockInfo]:
        async with grpc_errors(context):
            num_listed = 0
            for block in self._node.list_blocks(max_blocks=request.max_blocks or None):
                num_listed += 1
                yield pb.BlockInfo(
                    hash=block.hash,
                    parent_hash=block.parent,
                    num_bytes=block.layout.block_bytes,
                    tier="dram",
                    is_sealed=block.is_sealed,
                    references=block.num_refs,
                    uses=block.num_uses,
                    idle_s=block.idle_s,
                )
            rest = request.max_blocks - num_listed if request.max_blocks else None
            for kept in islice(await self._node.list_ssd_blocks(), rest):
                yield pb.BlockInfo(
                    hash=kept.hash, parent_hash=kept.parent, num_bytes=kept.num_bytes, tier="ssd", is_sealed=True
                )

    async def Evict(self, request: pb.EvictRequest, context: Context) -> pb.EvictReply:
        async with grpc_errors(context):
            hashes = _hashes_of(request.block_hashes)
            eviction = await self._node.evict(hashes, num_bytes=request.num_bytes)
        return pb.EvictReply(
            num_blocks=len(eviction.hashes), num_bytes=eviction.num_bytes, num_pinned=eviction.num_pinned
        )

    async def Verify(self, request: pb.VerifyRequest, context: Context) -> pb.VerifyReply:
        async with grpc_errors(context):
            result = await self._node.verify(max_blocks=request.max_blocks or None, drop_damaged=request.drop_damaged)
        return pb.VerifyReply(
            num_blocks=result.num_blocks,
            num_missing=len(result.missing),
            num_damaged=len(result.damaged),
            num_unread=len(result.unread),
            bad_hashes=b"".join([*result.missing, *result.damaged, *result.unread]),
        )


def _runs(blocks: Sequence[BlockInfo]) -> Iterator[pb.SnapshotRun]:
    """Neighbours that follow each other in a chain, put together."""
    at = 0
    for idx, block in enumerate(blocks, 1):
        if idx == len(blocks) or blocks[idx].parent != block.hash:
            yield pb.SnapshotRun(parent_hash=blocks[at].parent, block_hashes=b"".join(b.hash for b in blocks[at:idx]))
            at = idx


class PoolWatch:
    """Tells whether the segment still is what it was when this boot began.

    A marker object is put at start. Gone while the master answers means that the master lost its metadata or dropped our
    segment: every block is lost, and only a new boot starts clean.
    """

    def __init__(self, data_client: DataClient, transfer: Transfer, *, boot_id: str) -> None:
        self._data_client = data_client
        self._transfer = transfer
        self._marker_key = f"boot/{boot_id}"
        self._num_failures = 0
        self.problem: str | None = "the segment was not checked yet"
        """Why blocks cannot be stored or read right now; None: they can."""

    async def begin(self) -> None:
        """Raises: StoreUnavailable if the marker cannot be stored."""
        marker = self._transfer.allocate(_MARKER_BYTES)
        (status,) = await asyncio.to_thread(
            self._transfer.put, [PutItem(self._marker_key, marker.address, _MARKER_BYTES)]
        )
        if status is not PutStatus.STORED_OR_OPEN:
            raise StoreUnavailable(f"the new segment takes no object: {status.name}")
        await self.check()

    async def check(self) -> None:
        """Look once. Raises: NodeLost when this boot is over."""
        code = self._data_client.exit_code()
        if code is not None:
            self.problem = f"the data client ended with code {code}"
            raise NodeLost(self.problem)
        try:
            (is_there,) = await asyncio.to_thread(self._transfer.exists, [self._marker_key])
        except StoreUnavailable as error:
            self._num_failures += 1
            if self._num_failures >= _CHECKS_TO_RED:
                self._note(str(error))
            return
        self._num_failures = 0
        if not is_there:
            self.problem = "the store's master forgot this segment"
            raise NodeLost(self.problem)
        self._note(None)

    def _note(self, problem: str | None) -> None:
        if (problem is None) != (self.problem is None):
            (log.info if problem is None else log.warning)("pool", problem=problem or "none")
        self.problem = problem


def _root_of(parent_hash: bytes) -> BlockHash:
    """Raises: BadRequest for a wrong length."""
    if len(parent_hash) != BLOCK_HASH_BYTES:
        raise BadRequest(
            f"parent_hash has {len(parent_hash)} bytes, a root hash has {BLOCK_HASH_BYTES}", param="parent_hash"
        )
    return BlockHash(parent_hash)


def _hashes_of(packed: bytes) -> tuple[BlockHash, ...]:
    """Raises: BadRequest for a length that is no multiple of a hash's."""
    try:
        return split_hashes(packed)
    except ValueError as error:
        raise BadRequest(f"block_hashes: {error}", param="block_hashes") from error


async def serve(config: KvStoreConfig, stop: asyncio.Event) -> None:
    """Run until `stop` is set. Raises: NodeLost when the segment is lost; ConfigError, StoreUnavailable at start."""
    boot_id = uuid.uuid4().hex
    node_id, host = config.node.node_id, config.node.host
    tls = Tls.load(config.tls)
    async with AsyncExitStack() as stack:
        ssd = None
        if config.kvstore.ssd_dir:
            ssd = await asyncio.to_thread(
                SsdTier.open, Path(config.kvstore.ssd_dir), capacity_bytes=config.kvstore.ssd_bytes
            )
            stack.callback(ssd.close)
        master_rpc, master_http = config.kvstore.master_rpc, config.kvstore.master_http
        await asyncio.to_thread(require_master, master_rpc=master_rpc, master_http=master_http, host=host)
        data_client = await DataClient.start(config)
        stack.callback(data_client.close)
        transfer = await asyncio.to_thread(_attach, data_client.address, master_http)
        stack.callback(transfer.close)
        watch = PoolWatch(data_client, transfer, boot_id=boot_id)
        await watch.begin()
        await asyncio.to_thread(require_segment, master_http, transfer.segment, host=host)

        metrics = CollectorRegistry()
        pool = PoolState(
            capacity_bytes=config.kvstore.capacity_bytes,
            clock=MonotonicClock(),
            policy=config.kvstore.eviction,
            node_id=node_id,
        )
        events = KvEventWriter(config.registry, node_id=node_id, boot_id=boot_id)
        stack.push_async_callback(events.close)
        await events.heal()
        mover = None
        if ssd is not None:
            mover = SsdMover(pool, transfer, ssd, clock=MonotonicClock(), metrics=SsdMetrics(metrics))
        node = LocalStoreNode(
            pool,
            transfer,
            boot_id=boot_id,
            events=events,
            registry=metrics,
            ssd=mover,
            check_placement_above=config.kvstore.check_placement_above,
        )
        stack.push_async_callback(node.close)
        nodes = connect(config.registry)
        stack.push_async_callback(nodes.aclose)
        replicator = Replicator(
            node, transfer, other_holders=lambda: _other_stores(nodes, node_id), clock=MonotonicClock()
        )
        stack.push_async_callback(replicator.close)
        peers = PeerCheck(master_http, own=transfer.segment, host=host, metrics=node.metrics)
        await peers.check()

        health = HealthServer(metrics, lambda: watch.problem)
        stack.push_async_callback(health.close)
        http_port = await health.start(host, config.node.http_port)
        server = Server(tls)
        stack.push_async_callback(server.close)
        service = KvStoreService(node, node_id=node_id, boot_id=boot_id, replicator=replicator)
        server.add(pb_grpc.add_KvStoreServicer_to_server, service, "moontide.v1.KvStore")
        grpc_port = await server.start(host, config.node.grpc_port)

        record = NodeRecord(
            node_id=node_id,
            role="kvstore",
            address=f"{host}:{grpc_port}",
            http_address=f"{host}:{http_port}",
            boot_id=boot_id,
            host_id=config.node.resolve_host_id(),
            pid=os.getpid(),
        )

        def announce() -> NodeRecord | None:
            return None if watch.problem else dataclasses.replace(record, load=_load(pool, peers))

        announcer = Announcer(config.registry, announce)
        stack.push_async_callback(announcer.close)
        await announcer.start()
        await server.set_serving(True)
        log.info(
            "store ready",
            address=record.address,
            http=record.http_address,
            data_client=data_client.address,
            capacity_bytes=pool.capacity_bytes,
            boot_id=boot_id,
        )

        async def drain() -> None:
            log.info("draining", reservations=pool.stats().reservations)
            watch.problem = "the store process shuts down"
            await announcer.close()
            await server.set_serving(False)
            await node.drain(config.kvstore.drain_s)
            log.info("drained")

        try:
            await _run_until(stop, node, watch, peers, drain=drain)
        except NodeLost:
            # First of all: one that stands still answers nobody who closes, and could still write into the memory of others.
            data_client.close()
            raise


async def _run_until(
    stop: asyncio.Event,
    node: LocalStoreNode,
    watch: PoolWatch,
    peers: PeerCheck,
    *,
    drain: Callable[[], Awaitable[None]],
) -> None:
    tasks = [
        asyncio.create_task(node.run(), name="kvstore node"),
        asyncio.create_task(peers.run(), name="kvstore peers"),
    ]
    try:
        while not stop.is_set():
            await watch.check()
            try:
                await asyncio.wait_for(stop.wait(), _WATCH_PERIOD_S)
            except TimeoutError:
                continue
        await drain()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _other_stores(connection: redis.Redis, node_id: str) -> list[str]:
    """Node ids of the live store processes of other hosts; none while the registry is away."""
    try:
        records = await read_records(connection)
    except (RedisError, OSError) as error:
        log.warning("other stores unknown", reason=str(error))
        return []
    return [record.node_id for record in records if record.role == "kvstore" and record.node_id != node_id]


def _attach(client_address: str, master_http: str) -> MooncakeTransfer:
    return MooncakeTransfer(client_address=client_address, master_http=master_http, arena_bytes=_ARENA_BYTES)


def _load(pool: PoolState, peers: PeerCheck) -> dict[str, float]:
    stats = pool.stats()
    return {
        "capacity_bytes": stats.capacity_bytes,
        "used_bytes": stats.used_bytes,
        "reservations": stats.reservations,
        "unreachable_peers": peers.num_unreachable,
    }
