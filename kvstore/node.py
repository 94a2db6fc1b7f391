"""The store node of one host: PoolState, plus the acts that follow from its decisions.

`service.py` puts it behind gRPC and `StoreNodeClient` (client.py) calls it from afar; in tests and in one-process runs it is
used directly, with the same methods. The order that protects conductors: `removed` is published before bytes go.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from prometheus_client import CollectorRegistry

from kvstore.block import BlockHash
from kvstore.layout import KVLayout
from kvstore.metrics import StoreMetrics
from kvstore.pool import (
    PoolState,
    PoolStats,
    RequestKey,
    ReserveReply,
    ReserveRequest,
    ReserveResult,
    StoredRun,
)
from kvstore.transfer.base import RemoveStatus, Transfer
from moontide.errors import BadRequest, ConfigError, NodeLost
from moontide.log import get_logger
from moontide.registry import raise_if_cancelled

JANITOR_PERIOD_S = 0.25
_OBJECTS_PER_ROUND = 1024

log = get_logger(__name__)


class EventSink(Protocol):
    """Where a node says what it holds; KvEventWriter in production."""

    async def stored(self, runs: Sequence[StoredRun]) -> None: ...

    async def removed(self, hashes: Sequence[BlockHash]) -> None: ...

    async def heal(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class NodeIdentity:
    node_id: str
    boot_id: str


class StoreNode(Protocol):
    """What a prefill group or a decode instance can ask of a host's store process."""

    async def register_layout(self, layout: KVLayout) -> NodeIdentity:
        """Raises: ConfigError if the model is registered with another layout."""
        ...

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
        """Room and pins for the KV of one prompt, whose full blocks are `block_hashes` from the first on. Idempotent.

        Raises: NodeLost for an unregistered layout, BadRequest for a chain that contradicts itself.
        """
        ...

    async def seal(self, *, request_id: str, epoch: int, first_block: int, num_blocks: int) -> None:
        """Make blocks of the reservation visible; the caller has seen all their objects exist. Idempotent.

        A block whose predecessor is not sealed yet becomes visible together with it. Raises: BlockMissing after the
        reservation's end.
        """
        ...

    async def renew(self, request_ids: Sequence[str], *, lease_s: float) -> list[str]:
        """Extend all epochs of these requests; returns the ids that hold nothing here."""
        ...

    async def release(self, *, request_id: str, epoch: int) -> None:
        """Give the reservation back. The partial block and unsealed blocks go, sealed ones stay cached. Idempotent."""
        ...

    async def stats(self) -> PoolStats: ...

    async def close(self) -> None: ...


class LocalStoreNode:
    """StoreNode in this process. `run` is its janitor; without it, call `tidy` where time should pass."""

    def __init__(
        self,
        pool: PoolState,
        transfer: Transfer,
        *,
        node_id: str = "local",
        boot_id: str = "local",
        events: EventSink | None = None,
        registry: CollectorRegistry | None = None,
    ) -> None:
        """Counters go to `registry`, None keeps them to this object."""
        self.metrics = StoreMetrics(registry or CollectorRegistry())
        self.pool = pool
        self._transfer = transfer
        self._identity = NodeIdentity(node_id=node_id, boot_id=boot_id)
        self._events = events
        self._layouts: dict[bytes, KVLayout] = {}
        self._acts: set[asyncio.Task[None]] = set()
        """What has to run to its end once it is begun."""
        self._removing = asyncio.Lock()
        # Held from the choice of victims to their removal, so that the janitor removes nothing before it is published.

    async def register_layout(self, layout: KVLayout) -> NodeIdentity:
        for known in self._layouts.values():
            if known.model_fingerprint == layout.model_fingerprint and known != layout:
                raise ConfigError(
                    f"this store holds the model in another layout: registered {known.to_json()}, asked for "
                    f"{layout.to_json()}; use equal block_tokens, layer_group and dtype on all nodes, or another store"
                )
        self._layouts[layout.digest()] = layout
        return self._identity

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
        layout = self._layouts.get(layout_digest)
        if layout is None:
            # The caller registered it when it started, with a store process that is gone.
            raise NodeLost(
                f"layout {layout_digest.hex() or '(none)'} is not registered here: the store process was started anew; call "
                "RegisterLayout and try again"
            )
        request = ReserveRequest(
            owner=RequestKey(request_id, epoch),
            layout=layout,
            root=parent_hash,
            hashes=tuple(block_hashes),
            has_partial=has_partial,
            lease_s=_checked_lease_s(lease_s),
        )
        is_new = not self.pool.holds(request.owner)
        reply = self.pool.reserve(request)
        if reply.result is ReserveResult.WAIT:
            # A caller that gives up must not leave objects marked as being removed.
            await self._to_the_end(self._make_room(request))
            reply = self.pool.reserve(request)
        self.metrics.reserves.labels(reply.result.name.lower()).inc()
        if is_new and reply.result is ReserveResult.RESERVED:
            self.metrics.hit_blocks.inc(reply.hit_blocks)
            self.metrics.asked_blocks.inc(len(request.hashes))
        return reply

    async def seal(self, *, request_id: str, epoch: int, first_block: int, num_blocks: int) -> None:
        runs = self.pool.seal(RequestKey(request_id, epoch), first_block=first_block, num_blocks=num_blocks)
        if self._events is not None:
            # A caller that gives up must not leave blocks sealed that nobody hears of.
            await self._to_the_end(self._events.stored(runs))

    async def renew(self, request_ids: Sequence[str], *, lease_s: float) -> list[str]:
        return self.pool.renew(request_ids, lease_s=_checked_lease_s(lease_s))

    async def release(self, *, request_id: str, epoch: int) -> None:
        self.pool.release(RequestKey(request_id, epoch))

    async def stats(self) -> PoolStats:
        return self.pool.stats()

    async def close(self) -> None:
        """Wait for removals and events that are under way."""
        await asyncio.gather(*self._acts, return_exceptions=True)

    async def run(self) -> None:
        """Expire leases, remove what is due, keep the events whole; until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_repeat(self.tidy, "janitor"), name="kvstore janitor")
            if self._events is not None:
                tasks.create_task(_repeat(self._events.heal, "kv events"), name="kvstore events")

    async def tidy(self) -> None:
        """End leases and remove everything that is due."""
        is_more_due = True
        while is_more_due:
            for owner in self.pool.expire():
                self.metrics.expired.inc()
                log.warning("reservation expired", request_id=owner.request_id, epoch=owner.epoch)
            async with self._removing:
                is_more_due = await self._remove_due()
            self._show(self.pool.stats())

    async def _to_the_end(self, act: Coroutine[Any, Any, None]) -> None:
        """Wait for `act`; cancelling the wait does not cancel it."""
        task = asyncio.create_task(act, name="kvstore act")
        self._acts.add(task)
        task.add_done_callback(self._acts.discard)
        await asyncio.shield(task)

    async def _make_room(self, request: ReserveRequest) -> None:
        async with self._removing:
            victims = self.pool.evict_for(request)
            if victims:
                self.metrics.evicted_blocks.inc(len(victims))
                if self._events is not None:
                    await self._events.removed(victims)
            await self._remove_due()

    async def _remove_due(self) -> bool:
        """One batch of removals; returns whether it was a full one, so that more may be due."""
        removals = self.pool.due_removals(max_objects=_OBJECTS_PER_ROUND)
        if not removals:
            return False
        keys = [key for removal in removals for key in removal.keys]
        statuses = [RemoveStatus.FAILED] * len(keys)
        try:
            statuses = await asyncio.to_thread(self._transfer.remove, keys)
        finally:
            at = 0
            for removal in removals:
                self.pool.finish_removal(removal, statuses[at : at + len(removal.keys)])
                at += len(removal.keys)
        return len(keys) >= _OBJECTS_PER_ROUND

    def _show(self, stats: PoolStats) -> None:
        self.metrics.capacity_bytes.set(stats.capacity_bytes)
        self.metrics.used_bytes.set(stats.used_bytes)
        self.metrics.sealed_blocks.set(stats.sealed_blocks)
        self.metrics.pinned_blocks.set(stats.pinned_blocks)
        self.metrics.reservations.set(stats.reservations)
        self.metrics.removals.set(stats.objects_to_remove)


async def _repeat(act: Callable[[], Awaitable[None]], what: str) -> None:
    while True:
        try:
            await act()
        except Exception:
            # It outlives one bad round: without it no lease would end and no byte would come back.
            log.exception("round failed", what=what)
        raise_if_cancelled()
        await asyncio.sleep(JANITOR_PERIOD_S)


def _checked_lease_s(lease_s: float) -> float:
    if not 0 < lease_s <= 3600:
        raise BadRequest(f"lease_s={lease_s} is outside of (0, 3600]; renew instead of asking for more")
    return lease_s
