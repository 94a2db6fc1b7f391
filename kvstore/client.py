"""What stages and decode instances use: whole blocks in and out of the pool with proof of whose bytes they are, and the
RPC client of the host's store process.

Every object ends in a 64-byte trailer. Without it a forced removal or a restart of the store's master can hand a reader
another object's bytes with success.

    magic 4 | version 4 | key digest 24 | layout digest 16 | payload length 8 | xxh3-64 of the payload 8     little-endian
"""

import ctypes
import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import xxhash
from prometheus_client import CollectorRegistry

from kvstore.block import BlockHash
from kvstore.keys import block_key, partial_key
from kvstore.layout import TRAILER_BYTES, KVLayout
from kvstore.metrics import ClientMetrics
from kvstore.node import NodeIdentity
from kvstore.pool import PoolStats, ReserveReply, ReserveResult
from kvstore.transfer.base import GetItem, GetStatus, PutItem, PutStatus, Transfer
from moontide import rpc
from moontide.errors import Cancelled, DeadlineExceeded, NodeLost
from moontide_proto.v1 import kvstore_pb2 as pb
from moontide_proto.v1 import kvstore_pb2_grpc as pb_grpc

_TRAILER = struct.Struct("<4sI24s16sQQ")
_CALL_TIMEOUT_S = 10.0
"""Reserve may evict, and removing objects from a store that just died takes seconds."""
_MAGIC = b"MTKV"
_VERSION = 1
assert _TRAILER.size == TRAILER_BYTES


@dataclass(frozen=True, slots=True)
class BlockRef:
    """A block as a request sees it: full and shared under its hash, or partial and private to (request_id, epoch)."""

    hash: BlockHash | None
    """None: the partial block."""
    request_id: str
    epoch: int

    def key(self, layout_digest: bytes, group_idx: int) -> str:
        if self.hash is None:
            return partial_key(self.request_id, self.epoch, group_idx)
        return block_key(layout_digest, group_idx, self.hash)


class StoreClient:
    """Puts and gets of layer groups. Blocking and thread safe; every call is idempotent."""

    def __init__(self, transfer: Transfer, layout: KVLayout, *, registry: CollectorRegistry | None = None) -> None:
        """Counters go to `registry`, None keeps them to this object."""
        self.metrics = ClientMetrics(registry or CollectorRegistry())
        self._transfer = transfer
        self._layout = layout
        self._layout_digest = layout.digest()

    def put_group(self, group_idx: int, blocks: Sequence[tuple[BlockRef, int]]) -> list[PutStatus]:
        """Store one layer group of several blocks.

        Writes the trailer into the last 64 bytes of each slot, then makes one batched put.

        Args:
            blocks: (block, address of its slot in an arena of the transfer); a slot has `layout.object_bytes(group_idx)`.
        Returns: one status per block. Only `missing` proves that the objects are there.
        """
        payload_bytes = self._layout.payload_bytes(group_idx)
        items = []
        for block, address in blocks:
            key = block.key(self._layout_digest, group_idx)
            slot = _slot(address, payload_bytes)
            slot[payload_bytes:] = self._trailer(key, slot[:payload_bytes])
            items.append(PutItem(key, address, len(slot)))
        statuses = self._transfer.put(items)
        for status in statuses:
            self.metrics.puts.labels(status.name.lower()).inc()
        return statuses

    def get_group(self, group_idx: int, blocks: Sequence[tuple[BlockRef, int]]) -> list[bool]:
        """Fetch one layer group of several blocks into their slots.

        Returns: True only where trailer, key, layout, length and checksum agree; elsewhere the slot holds anything and
            must not be used.
        """
        payload_bytes = self._layout.payload_bytes(group_idx)
        nbytes = self._layout.object_bytes(group_idx)
        keys = [block.key(self._layout_digest, group_idx) for block, _ in blocks]
        statuses = self._transfer.get(
            [GetItem(key, address, nbytes) for key, (_, address) in zip(keys, blocks, strict=True)]
        )
        arrived = []
        for key, (_, address), status in zip(keys, blocks, statuses, strict=True):
            result = status.name.lower()
            if status is GetStatus.HIT:
                slot = _slot(address, payload_bytes)
                if bytes(slot[payload_bytes:]) != self._trailer(key, slot[:payload_bytes]):
                    result = "corrupt"
            self.metrics.gets.labels(result).inc()
            arrived.append(result == "hit")
        return arrived

    def missing(self, blocks: Sequence[BlockRef], groups: Sequence[int] | None = None) -> set[tuple[int, int]]:
        """Return (position in `blocks`, group_idx) of every object that is not seen to exist; grants no lease.

        Raises: StoreUnavailable.
        """
        wanted = range(self._layout.num_groups) if groups is None else groups
        places = [(position, group_idx) for position in range(len(blocks)) for group_idx in wanted]
        keys = [blocks[position].key(self._layout_digest, group_idx) for position, group_idx in places]
        return {place for place, seen in zip(places, self._transfer.exists(keys), strict=True) if not seen}

    def _trailer(self, key: str, payload: memoryview) -> bytes:
        return _TRAILER.pack(
            _MAGIC,
            _VERSION,
            hashlib.sha256(key.encode()).digest()[:24],
            self._layout_digest[:16],
            len(payload),
            xxhash.xxh3_64_intdigest(payload),
        )


def _slot(address: int, payload_bytes: int) -> memoryview:
    return memoryview((ctypes.c_char * (payload_bytes + TRAILER_BYTES)).from_address(address)).cast("B")


class StoreNodeClient:
    """StoreNode over gRPC. Failed calls raise the errors of moontide/errors.py; all calls may be repeated."""

    def __init__(self, address: str, *, timeout_s: float = _CALL_TIMEOUT_S) -> None:
        """`timeout_s` bounds each call."""
        self._address = address
        self._timeout_s = timeout_s
        self._channel = rpc.open_channel(address)
        self._stub = pb_grpc.KvStoreStub(self._channel)  # type: ignore[no-untyped-call]

    async def register_layout(self, layout: KVLayout) -> NodeIdentity:
        request = pb.RegisterLayoutRequest(layout_json=layout.to_json())
        reply: pb.RegisterLayoutReply = await self._call(self._stub.RegisterLayout, request)
        return NodeIdentity(node_id=reply.node_id, boot_id=reply.boot_id)

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
    ) -> ReserveReply:
        request = pb.ReserveRequest(
            request_id=request_id,
            epoch=epoch,
            layout_digest=layout_digest,
            parent_hash=parent_hash,
            block_hashes=b"".join(block_hashes),
            has_partial=has_partial,
            lease_s=lease_s,
        )
        reply: pb.ReserveReply = await self._call(self._stub.Reserve, request)
        return ReserveReply(
            result=ReserveResult[pb.ReserveReply.Result.Name(reply.result)],
            hit_blocks=reply.hit_blocks,
            needed_bytes=reply.needed_bytes,
            capacity_bytes=reply.capacity_bytes,
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

    async def stats(self) -> PoolStats:
        reply: pb.KvStoreStats = await self._call(self._stub.GetStats, pb.KvStoreStatsRequest())
        return PoolStats(
            capacity_bytes=reply.capacity_bytes,
            used_bytes=reply.used_bytes,
            sealed_blocks=reply.sealed_blocks,
            reservations=reply.reservations,
            pinned_blocks=reply.pinned_blocks,
            objects_to_remove=reply.objects_to_remove,
        )

    async def close(self) -> None:
        await self._channel.close()

    async def _call(self, method: Any, request: Any) -> Any:
        # The timeout is this client's own and not a request's, and a cancelled call that raises this was ended by the peer.
        try:
            return await rpc.call(method, request, timeout_s=self._timeout_s, peer=f"kvstore {self._address}")
        except (DeadlineExceeded, Cancelled) as error:
            raise NodeLost(str(error)) from error
