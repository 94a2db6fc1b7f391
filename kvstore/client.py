"""What stages and decode instances use: whole blocks in and out of the pool with proof of whose bytes they are (trailer.py), and
the RPC client of the host's store process.
"""

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc.aio
from prometheus_client import CollectorRegistry

from kvstore.block import BlockHash
from kvstore.index import check_packed
from kvstore.keys import LOCAL_NODE_ID, block_key, partial_key
from kvstore.layout import KVLayout
from kvstore.metrics import ClientMetrics
from kvstore.node import NodeIdentity
from kvstore.pool import PoolStats, ReserveReply, ReserveResult
from kvstore.trailer import is_intact, slot_at, write_trailer
from kvstore.transfer.base import GetItem, GetStatus, PutItem, PutStatus, Transfer
from moontide import rpc
from moontide.errors import Cancelled, DeadlineExceeded, NodeLost
from moontide.tls import Tls
from moontide_proto.v1 import kvstore_pb2 as pb
from moontide_proto.v1 import kvstore_pb2_grpc as pb_grpc

_CALL_TIMEOUT_S = 10.0
"""Reserve may evict, and removing objects from a store that just died takes seconds."""


@dataclass(frozen=True, slots=True)
class BlockRef:
    """A block as a request sees it: full and shared under its hash, or partial and private to (request_id, epoch)."""

    hash: BlockHash | None
    """None: the partial block."""
    request_id: str
    epoch: int
    holder: str = LOCAL_NODE_ID
    """Node id of the store process that accounts it. Ignored for a partial block, whose request has one store."""

    def key(self, layout_digest: bytes, group_idx: int) -> str:
        if self.hash is None:
            return partial_key(self.request_id, self.epoch, group_idx)
        return block_key(layout_digest, group_idx, self.hash, self.holder)


@dataclass(frozen=True, kw_only=True)
class Replica:
    """What a replication has come to."""

    num_blocks: int
    """Leading blocks that this host holds now."""
    copied_blocks: int
    """Of them, those that were copied."""
    copy_s: float
    """How long that took, without the wait for replications before it."""


class StoreClient:
    """Puts and gets of layer groups. Blocking and thread safe; every call is idempotent."""

    def __init__(self, transfer: Transfer, layout: KVLayout, *, registry: CollectorRegistry | None = None) -> None:
        """Counters go to `registry`, None keeps them to this object."""
        self.metrics = ClientMetrics(registry or CollectorRegistry())
        self._transfer = transfer
        self._layout = layout
        self._layout_digest = layout.digest()
        self._object_bytes = [layout.object_bytes(group_idx) for group_idx in range(layout.num_groups)]

    def put_group(
        self, group_idx: int, blocks: Sequence[tuple[BlockRef, int]], *, segment: str = ""
    ) -> list[PutStatus]:
        """Store one layer group of several blocks: see `put`."""
        return self.put([(block, group_idx, address) for block, address in blocks], segment=segment)

    def put(self, objects: Sequence[tuple[BlockRef, int, int]], *, segment: str = "") -> list[PutStatus]:
        """Store objects.

        Writes the trailer into the last 64 bytes of each slot, then makes one batched put.

        Args:
            objects: (block, layer group, address of the slot in an arena of the transfer); a slot has
                `layout.object_bytes(group_idx)`.
            segment: where the objects belong; "" stands for this host's own.
        Returns: one status per object. Only `missing` proves that the objects are there.
        """
        items = []
        for block, group_idx, address in objects:
            key = block.key(self._layout_digest, group_idx)
            nbytes = self._object_bytes[group_idx]
            write_trailer(slot_at(address, nbytes), key, self._layout_digest)
            items.append(PutItem(key, address, nbytes))
        statuses = self._transfer.put(items, segment=segment)
        for status, count in Counter(statuses).items():
            self.metrics.puts.labels(status.name.lower()).inc(count)
        return statuses

    def get_group(self, group_idx: int, blocks: Sequence[tuple[BlockRef, int]]) -> list[bool]:
        """Fetch one layer group of several blocks: see `get`."""
        return self.get([(block, group_idx, address) for block, address in blocks])

    def get(self, objects: Sequence[tuple[BlockRef, int, int]]) -> list[bool]:
        """Fetch objects into their slots.

        Args:
            objects: (block, layer group, address of the slot).
        Returns: True only where trailer, key, layout, length and checksum agree; elsewhere the slot holds anything and
            must not be used.
        """
        keys = [block.key(self._layout_digest, group_idx) for block, group_idx, _ in objects]
        statuses = self._transfer.get(
            [
                GetItem(key, address, self._object_bytes[group_idx])
                for key, (_, group_idx, address) in zip(keys, objects, strict=True)
            ]
        )
        arrived = [
            status is GetStatus.HIT
            and is_intact(slot_at(address, self._object_bytes[group_idx]), key, self._layout_digest)
            for key, (_, group_idx, address), status in zip(keys, objects, statuses, strict=True)
        ]
        for (status, is_there), count in Counter(zip(statuses, arrived, strict=True)).items():
            is_corrupt = status is GetStatus.HIT and not is_there
            self.metrics.gets.labels("corrupt" if is_corrupt else status.name.lower()).inc(count)
        return arrived

    def missing(self, blocks: Sequence[BlockRef], groups: Sequence[int] | None = None) -> set[tuple[int, int]]:
        """Return (position in `blocks`, group_idx) of every object that is not seen to exist; grants no lease.

        Raises: StoreUnavailable.
        """
        wanted = range(self._layout.num_groups) if groups is None else groups
        places = [(position, group_idx) for position in range(len(blocks)) for group_idx in wanted]
        keys = [blocks[position].key(self._layout_digest, group_idx) for position, group_idx in places]
        return {place for place, seen in zip(places, self._transfer.exists(keys), strict=True) if not seen}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A piece of what a store process holds."""

    boot_id: str
    number: int
    """Of the last change that all pieces include."""
    packed: bytes
    """Hashes of sealed blocks, back to back."""


class StoreNodeClient:
    """StoreNode over gRPC. Failed calls raise the errors of moontide/errors.py; all calls may be repeated."""

    def __init__(self, address: str, *, timeout_s: float = _CALL_TIMEOUT_S, tls: Tls | None = None) -> None:
        """`timeout_s` bounds each call."""
        self._address = address
        self._timeout_s = timeout_s
        self._channel = rpc.open_channel(address, tls)
        self._stub = pb_grpc.KvStoreStub(self._channel)  # type: ignore[no-untyped-call]

    async def register_layout(self, layout: KVLayout) -> NodeIdentity:
        request = pb.RegisterLayoutRequest(layout_json=layout.to_json())
        reply: pb.RegisterLayoutReply = await self._call(self._stub.RegisterLayout, request)
        return NodeIdentity(node_id=reply.node_id, boot_id=reply.boot_id, segment=reply.segment)

    async def reserve(
        self,
        *,
        request_id: str,
        epoch: int,
        layout_digest: bytes,
        parent_hash: BlockHash,
        block_hashes: Sequence[BlockHash],
        has_partial: bool,
        lease_s: float,
        is_write_back: bool = False,
    ) -> ReserveReply:
        request = pb.ReserveRequest(
            request_id=request_id,
            epoch=epoch,
            layout_digest=layout_digest,
            parent_hash=parent_hash,
            block_hashes=b"".join(block_hashes),
            has_partial=has_partial,
            lease_s=lease_s,
            is_write_back=is_write_back,
        )
        reply: pb.ReserveReply = await self._call(self._stub.Reserve, request)
        return ReserveReply(
            result=ReserveResult[pb.ReserveReply.Result.Name(reply.result)],
            hit_blocks=reply.hit_blocks,
            needed_bytes=reply.needed_bytes,
            capacity_bytes=reply.capacity_bytes,
            segment=reply.segment,
            promoted_blocks=reply.promoted_blocks,
        )

    async def seal(self, *, request_id: str, epoch: int, first_block: int, num_blocks: int) -> None:
        request = pb.SealRequest(request_id=request_id, epoch=epoch, first_block=first_block, num_blocks=num_blocks)
        await self._call(self._stub.Seal, request)

    async def renew(self, request_ids: Sequence[str], *, lease_s: float) -> list[str]:
        request = pb.RenewRequest(request_ids=request_ids, lease_s=lease_s)
        reply: pb.RenewReply = await self._call(self._stub.Renew, request)
        return list(reply.unknown_request_ids)

    async def release(self, *, request_id: str, epoch: int) -> None:
        await self._call(self._stub.Release, pb.ReleaseRequest(request_id=request_id, epoch=epoch))

    async def replicate(
        self, *, layout_digest: bytes, root: BlockHash, hashes: Sequence[BlockHash], timeout_s: float
    ) -> Replica:
        """Have this host copy what it lacks of the leading blocks of a prompt."""
        request = pb.ReplicateRequest(
            layout_digest=layout_digest, parent_hash=root, block_hashes=b"".join(hashes), timeout_s=timeout_s
        )
        reply: pb.ReplicateReply = await self._call(
            self._stub.Replicate, request, timeout_s=timeout_s + self._timeout_s
        )
        return Replica(num_blocks=reply.num_blocks, copied_blocks=reply.copied_blocks, copy_s=reply.copy_s)

    async def stats(self) -> PoolStats:
        reply: pb.KvStoreStats = await self._call(self._stub.GetStats, pb.KvStoreStatsRequest())
        return PoolStats(
            capacity_bytes=reply.capacity_bytes,
            used_bytes=reply.used_bytes,
            sealed_blocks=reply.sealed_blocks,
            reservations=reply.reservations,
            pinned_blocks=reply.pinned_blocks,
            objects_to_remove=reply.objects_to_remove,
            ssd_capacity_bytes=reply.ssd_capacity_bytes,
            ssd_used_bytes=reply.ssd_used_bytes,
            ssd_blocks=reply.ssd_blocks,
        )

    async def snapshot(self, *, timeout_s: float) -> AsyncIterator[Snapshot]:
        """Everything that is sealed, in pieces, at least one. Raises: NodeLost."""
        try:
            async for reply in self._stub.Snapshot(pb.SnapshotRequest(), timeout=timeout_s):
                packed = b"".join(run.block_hashes for run in reply.runs)
                check_packed(packed)
                yield Snapshot(reply.boot_id, reply.event_number, packed)
        except grpc.aio.AioRpcError as error:
            raise NodeLost(f"no snapshot of kvstore {self._address}: {error.details()}") from error
        except ValueError as error:
            raise NodeLost(f"unreadable snapshot of kvstore {self._address}: {error}") from error

    async def close(self) -> None:
        await self._channel.close()

    async def _call(self, method: Any, request: Any, *, timeout_s: float | None = None) -> Any:
        # The timeout is this client's own and not a request's, and a cancelled call that raises this was ended by the peer.
        try:
            return await rpc.call(
                method, request, timeout_s=timeout_s or self._timeout_s, peer=f"kvstore {self._address}"
            )
        except (DeadlineExceeded, Cancelled) as error:
            raise NodeLost(str(error)) from error
