"""Replication on demand: copies of blocks that another host holds, in this host's segment.

    find the holder of most | reserve | get from there, put here under our name, see it exist, seal | release

A replica is a block of this host like any other: accounted, published, cold as soon as it is there, evicted without asking anybody
(docs/decisions/006-replicas.md).
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from kvstore.block import BlockHash
from kvstore.client import BlockRef, Replica, StoreClient
from kvstore.layout import KVLayout
from kvstore.node import LocalStoreNode
from kvstore.pool import RequestKey, ReserveResult
from kvstore.transfer.base import Arena, PutStatus, Transfer, arena_with_room
from moontide.clock import Clock
from moontide.deadline import Deadline
from moontide.log import get_logger

_ARENA_BYTES = 32 << 20
"""Transfer memory, taken at the first replication; a larger object gets as much as it needs."""
_LEASE_SLACK_S = 30.0
"""Covers the copy that is under way when the time is over."""

log = get_logger(__name__)


class Replicator:
    """One replication at a time: they share the transfer memory, and must not crowd out the hosts' other traffic."""

    def __init__(
        self,
        node: LocalStoreNode,
        transfer: Transfer,
        *,
        other_holders: Callable[[], Awaitable[Sequence[str]]],
        clock: Clock,
    ) -> None:
        """`other_holders` returns the node ids of the other live store processes."""
        self._node = node
        self._transfer = transfer
        self._other_holders = other_holders
        self._clock = clock
        self._numbers = itertools.count()
        self._busy = asyncio.Lock()
        self._acts: set[asyncio.Task[Replica]] = set()
        self._arena: Arena | None = None
        self._copied: set[BlockHash] = set()

    @property
    def num_blocks(self) -> int:
        """Sealed blocks that were copied from another host."""
        self._copied = {block_hash for block_hash in self._copied if self._node.pool.is_sealed(block_hash)}
        return len(self._copied)

    async def replicate(
        self, *, layout_digest: bytes, root: BlockHash, hashes: Sequence[BlockHash], timeout_s: float
    ) -> Replica:
        """Copy what this host lacks of the leading blocks of a prompt; what does not fit, or in time, is left out.

        Raises: NodeLost for an unregistered layout, BadRequest for a chain that contradicts itself, StoreUnavailable.
        """
        act = self._replicate(layout_digest, root, hashes, timeout_s)
        task = asyncio.create_task(act, name="replicate")
        self._acts.add(task)
        task.add_done_callback(self._acts.discard)
        # A caller that gives up must not leave a thread behind that copies into memory of the next replication.
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Wait for what is under way."""
        await asyncio.gather(*self._acts, return_exceptions=True)

    async def _replicate(
        self, layout_digest: bytes, root: BlockHash, hashes: Sequence[BlockHash], timeout_s: float
    ) -> Replica:
        layout = self._node.layout(layout_digest)
        deadline = Deadline.after(timeout_s, self._clock)
        async with self._busy:
            started_s = self._clock.now()
            num_held = self._num_held(hashes)
            client = StoreClient(self._transfer, layout)
            holder, num_there = await self._find_holder(client, hashes[num_held:])
            key = RequestKey(f"replica-{next(self._numbers)}", 0)
            while num_there:
                chain = hashes[: num_held + num_there]
                reply = await self._node.reserve(
                    request_id=key.request_id,
                    epoch=key.epoch,
                    layout_digest=layout_digest,
                    parent_hash=root,
                    block_hashes=chain,
                    has_partial=False,
                    lease_s=timeout_s + _LEASE_SLACK_S,
                )
                if reply.result is ReserveResult.RESERVED:
                    try:
                        await self._fill(
                            client, layout, key, holder, chain, first_block=reply.hit_blocks, deadline=deadline
                        )
                    finally:
                        await self._node.release(request_id=key.request_id, epoch=key.epoch)
                    break
                num_there //= 2  # fewer may fit
            num_blocks = self._num_held(hashes)
            return Replica(
                num_blocks=num_blocks,
                copied_blocks=max(0, num_blocks - num_held),
                copy_s=self._clock.now() - started_s,
            )

    def _num_held(self, hashes: Sequence[BlockHash]) -> int:
        return sum(1 for _ in itertools.takewhile(self._node.pool.is_sealed, hashes))

    async def _find_holder(self, client: StoreClient, hashes: Sequence[BlockHash]) -> tuple[str, int]:
        """The store process that has most of these blocks from the first on, and how many."""
        best = ("", 0)
        for holder in await self._other_holders() if hashes else ():
            missing = await asyncio.to_thread(client.missing, [BlockRef(each, "", 0, holder) for each in hashes])
            num_there = min((position for position, _ in missing), default=len(hashes))
            best = max(best, (holder, num_there), key=lambda candidate: candidate[1])
        return best

    async def _fill(
        self,
        client: StoreClient,
        layout: KVLayout,
        key: RequestKey,
        holder: str,
        chain: Sequence[BlockHash],
        *,
        first_block: int,
        deadline: Deadline,
    ) -> None:
        """Copy and seal blocks of a reservation until one cannot be copied or the time is over."""
        object_bytes = layout.object_bytes(0)
        self._arena = arena_with_room(self._transfer, self._arena, needed_bytes=object_bytes, usual_bytes=_ARENA_BYTES)
        slots = [self._arena.address + at for at in range(0, self._arena.nbytes - object_bytes + 1, object_bytes)]
        while first_block < len(chain) and not deadline.expired:
            sources = [BlockRef(each, *key, holder) for each in chain[first_block : first_block + len(slots)]]
            num_copied = await asyncio.to_thread(
                _copy, client, layout, list(zip(sources, slots, strict=False)), holder=self._node.pool.node_id
            )
            await self._node.seal(
                request_id=key.request_id, epoch=key.epoch, first_block=first_block, num_blocks=num_copied
            )
            self._copied.update(chain[first_block : first_block + num_copied])
            self._node.metrics.replicated_blocks.inc(num_copied)
            if num_copied < len(sources):
                log.warning("replica not complete", holder=holder, blocks=len(chain), copied=first_block + num_copied)
                return
            first_block += num_copied


def _copy(client: StoreClient, layout: KVLayout, blocks: Sequence[tuple[BlockRef, int]], *, holder: str) -> int:
    """Read blocks into their slots, group by group, and put them under another holder's name; returns how many leading ones are
    seen to exist there."""
    for group_idx in range(layout.num_groups):
        arrived = client.get_group(group_idx, blocks)
        blocks = blocks[: sum(itertools.takewhile(bool, arrived))]
        copies = [(replace(ref, holder=holder), slot) for ref, slot in blocks]
        statuses = client.put_group(group_idx, copies)
        stored = [status is PutStatus.STORED_OR_OPEN for status in statuses]
        blocks = blocks[: sum(itertools.takewhile(bool, stored))]
    missing = client.missing([replace(ref, holder=holder) for ref, _ in blocks])
    return min((position for position, _ in missing), default=len(blocks))
