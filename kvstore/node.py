"""The store node of one host: PoolState, plus the acts that follow from its decisions.

`service.py` puts it behind gRPC and `StoreNodeClient` (client.py) calls it from afar; in tests and in one-process runs it is
used directly, with the same methods. The order that protects conductors: `removed` is published before bytes go.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from typing import Any, Protocol, TypeVar

from prometheus_client import CollectorRegistry

from kvstore.block import BlockHash
from kvstore.layout import KVLayout
from kvstore.metrics import StoreMetrics
from kvstore.pool import (
    BlockInfo,
    Eviction,
    PoolState,
    PoolStats,
    RequestKey,
    ReserveReply,
    ReserveRequest,
    ReserveResult,
    StoredRun,
)
from kvstore.ssd import SsdBlock
from kvstore.tiering import SsdMover
from kvstore.transfer.base import Arena, RemoveStatus, StoreUnavailable, Transfer, arena_with_room
from kvstore.verify import BlockHealth, Verification, read_back
from moontide.errors import BadRequest, ConfigError, NodeLost
from moontide.log import get_logger
from moontide.registry import raise_if_cancelled

JANITOR_PERIOD_S = 0.25
DRAIN_POLL_S = 0.05
VERIFY_BYTES = 16 << 20
"""Transfer memory through which blocks are read back; a larger object gets as much as it needs."""
PROMOTE_TIMEOUT_S = 2.0
"""Longest wait of a reservation for blocks from the SSD, GBs on any SSD; what is not back by then is computed. Far below what callers
give a call."""
_OBJECTS_PER_ROUND = 1024

log = get_logger(__name__)

T = TypeVar("T")


class EventSink(Protocol):
    """Where a node says what it holds; KvEventWriter in production."""

    @property
    def number(self) -> int:
        """Of the change that was told last."""
        ...

    async def stored(self, runs: Sequence[StoredRun]) -> None: ...

    async def removed(self, hashes: Sequence[BlockHash]) -> None: ...

    async def heal(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class NodeIdentity:
    node_id: str
    """Also the holder in the keys of its blocks."""
    boot_id: str
    segment: str = ""
    """Where puts of its blocks belong; "" when the store has one segment only."""


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
        is_write_back: bool = False,
    ) -> ReserveReply:
        """Room and pins for the KV of one prompt, whose full blocks are `block_hashes` from the first on. Idempotent.

        `is_write_back` stands for prompt and answer of a request that is over: what is there already counts as no hit in the metrics.
        Raises: NodeLost for an unregistered layout and while the process shuts down, BadRequest for a chain that contradicts itself.
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
        boot_id: str = "local",
        events: EventSink | None = None,
        registry: CollectorRegistry | None = None,
        ssd: SsdMover | None = None,
        check_placement_above: float = 1.0,
    ) -> None:
        """
        Args:
            registry: takes the counters; None keeps them to this object.
            ssd: None: evicted blocks are lost.
            check_placement_above: filled share of the pool above which sealed blocks are looked for in this host's segment.
        """
        self.metrics = StoreMetrics(registry or CollectorRegistry())
        self.pool = pool
        self._transfer = transfer
        self._identity = NodeIdentity(node_id=pool.node_id, boot_id=boot_id, segment=transfer.segment)
        self._events = events
        self._layouts: dict[bytes, KVLayout] = {}
        self._is_draining = False
        self._acts: set[asyncio.Task[Any]] = set()
        """What has to run to its end once it is begun."""
        self._removing = asyncio.Lock()
        # Held from the choice of victims to their removal, so that the janitor removes nothing before it is published.
        self._check_placement_above = check_placement_above
        self._ssd = ssd
        self._promoting = asyncio.Lock()
        # Held while a thread brings blocks back from the SSD.
        self._overdue: asyncio.Task[None] | None = None
        """The promotion that nobody waits for any more."""
        self._verifying = asyncio.Lock()
        # Held while a thread reads into the arena.
        self._verify_arena: Arena | None = None

    async def register_layout(self, layout: KVLayout) -> NodeIdentity:
        for known in self._layouts.values():
            if known.model_fingerprint == layout.model_fingerprint and known != layout:
                raise ConfigError(
                    f"this store holds the model in another layout: registered {known.to_json()}, asked for "
                    f"{layout.to_json()}; use equal block_tokens, layer_group and dtype on all nodes, or another store"
                )
        self._layouts[layout.digest()] = layout
        return self._identity

    async def drain(self, timeout_s: float) -> None:
        """Grant no new reservation; return when the others have ended, or after `timeout_s`. Its janitor goes on meanwhile."""
        self._is_draining = True
        try:
            async with asyncio.timeout(timeout_s):
                while self.pool.stats().reservations:
                    await asyncio.sleep(DRAIN_POLL_S)
        except TimeoutError:
            log.warning("reservations cut off by shutdown", reservations=self.pool.stats().reservations)

    def layout(self, layout_digest: bytes) -> KVLayout:
        """Raises: NodeLost if it is not registered."""
        layout = self._layouts.get(layout_digest)
        if layout is None:
            # The caller registered it when it started, with a store process that is gone.
            raise NodeLost(
                f"layout {layout_digest.hex() or '(none)'} is not registered here: the store process was started anew; call "
                "RegisterLayout and try again"
            )
        return layout

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
        request = ReserveRequest(
            owner=RequestKey(request_id, epoch),
            layout=self.layout(layout_digest),
            root=parent_hash,
            hashes=tuple(block_hashes),
            has_partial=has_partial,
            lease_s=_checked_lease_s(lease_s),
        )
        is_new = not self.pool.holds(request.owner)
        self._check_open(request.owner)
        reply = self.pool.reserve(request)
        if reply.result is ReserveResult.WAIT:
            # A caller that gives up must not leave objects marked as being removed.
            await self._to_the_end(self._make_room(request))
            self._check_open(request.owner)  # a drain that began meanwhile may be over: it waits for what is held
            reply = self.pool.reserve(request)
        if self._ssd is not None and reply.result is ReserveResult.RESERVED:
            reply = await self._promote(self._ssd, request, reply)
        self.metrics.reserves.labels(reply.result.name.lower()).inc()
        if is_new and reply.result is ReserveResult.RESERVED and not is_write_back:
            self.metrics.hit_blocks.inc(reply.hit_blocks)
            self.metrics.asked_blocks.inc(len(request.hashes))
        return replace(reply, segment=self._identity.segment)

    async def seal(self, *, request_id: str, epoch: int, first_block: int, num_blocks: int) -> None:
        runs = self.pool.seal(RequestKey(request_id, epoch), first_block=first_block, num_blocks=num_blocks)
        if self._ssd is not None:
            self._ssd.used(block_hash for run in runs for block_hash in run.hashes)
        if self._events is not None:
            # A caller that gives up must not leave blocks sealed that nobody hears of.
            await self._to_the_end(self._events.stored(runs))
        if runs and self.pool.used_fraction > self._check_placement_above:
            # Nobody waits for it: what landed elsewhere can be read all the same.
            self._begin(self._count_misplaced([each for run in runs for each in run.hashes]))

    async def renew(self, request_ids: Sequence[str], *, lease_s: float) -> list[str]:
        return self.pool.renew(request_ids, lease_s=_checked_lease_s(lease_s))

    async def release(self, *, request_id: str, epoch: int) -> None:
        self.pool.release(RequestKey(request_id, epoch))

    async def stats(self) -> PoolStats:
        stats = self.pool.stats()
        if self._ssd is None:
            return stats
        ssd = self._ssd.ssd.stats()
        return replace(
            stats, ssd_capacity_bytes=ssd.capacity_bytes, ssd_used_bytes=ssd.used_bytes, ssd_blocks=ssd.num_blocks
        )

    def list_blocks(self, *, max_blocks: int | None = None) -> Iterator[BlockInfo]:
        """What this host holds, in the order of arrival; other calls may come between two blocks."""
        return self.pool.blocks(max_blocks=max_blocks)

    def sealed_blocks(self) -> tuple[int, Iterator[BlockInfo]]:
        """Number of a change, and blocks: with the changes that follow that one they are what is sealed.

        Other calls may come between two blocks. Needs events.
        """
        assert self._events is not None
        return self._events.number, (block for block in self.pool.blocks() if block.is_sealed)

    async def list_ssd_blocks(self) -> list[SsdBlock]:
        """What only the SSD has."""
        if self._ssd is None:
            return []
        blocks = await asyncio.to_thread(self._ssd.ssd.blocks)
        return [block for block in blocks if not self.pool.is_sealed(block.hash)]

    async def evict(self, hashes: Sequence[BlockHash] = (), *, num_bytes: int = 0) -> Eviction:
        """Drop these blocks and all that follow them, or, without any, the coldest of at least `num_bytes`; what is in use stays.

        Raises: BadRequest when neither is given.
        """
        if not hashes and num_bytes < 1:
            raise BadRequest(f"num_bytes={num_bytes} and no block evict nothing; name blocks, or 1 byte or more")

        def choose() -> Eviction:
            return self.pool.evict_chains(hashes) if hashes else self.pool.evict_coldest(num_bytes)

        return await self._to_the_end(self._evict(choose))

    async def verify(self, *, max_blocks: int | None = None, drop_damaged: bool = False) -> Verification:
        """Read sealed blocks back, in the order of arrival, and compare them with their trailers.

        Pins nothing: what leaves meanwhile is not counted, and what seems bad is read once more, for it may have left and come back.
        `drop_damaged` evicts what is missing or damaged, with all that follows it; what could not be read stays. Raises:
        StoreUnavailable when the store stops serving, which says nothing about its blocks.
        """
        missing: list[BlockHash] = []
        damaged: list[BlockHash] = []
        unread: list[BlockHash] = []
        num_blocks = 0
        sealed = (block for block in self.pool.blocks() if block.is_sealed)
        for layout, run in groupby(islice(sealed, max_blocks), key=lambda block: block.layout):
            while hashes := [block.hash for block in islice(run, max(1, VERIFY_BYTES // layout.block_bytes))]:
                found = await self._health_of(layout, hashes)
                suspects = [h for h, health in found.items() if health is not BlockHealth.INTACT]
                intact = found.keys() - suspects
                found = await self._health_of(layout, suspects)
                num_blocks += len(intact) + len(found)
                missing += [h for h, health in found.items() if health is BlockHealth.MISSING]
                damaged += [h for h, health in found.items() if health is BlockHealth.DAMAGED]
                unread += [h for h, health in found.items() if health is BlockHealth.UNREAD]
        if drop_damaged and (missing or damaged):
            await self.evict([*missing, *damaged])
        return Verification(num_blocks=num_blocks, missing=missing, damaged=damaged, unread=unread)

    async def close(self) -> None:
        """Wait for removals and events that are under way."""
        await asyncio.gather(*self._acts, return_exceptions=True)

    async def run(self) -> None:
        """Expire leases, remove what is due, keep the events whole, fill the SSD; until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_repeat(self.tidy, "janitor"), name="kvstore janitor")
            if self._ssd is not None:
                tasks.create_task(_repeat(self.keep, "ssd"), name="kvstore ssd")
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

    async def keep(self) -> None:
        """Copy the blocks that wait for it to the SSD."""
        while self._ssd is not None and self._ssd.has_waiting:
            await self._to_the_end(self._ssd.keep_next())

    def _begin(self, act: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(act, name="kvstore act")
        self._acts.add(task)
        task.add_done_callback(self._acts.discard)
        return task

    async def _to_the_end(self, act: Coroutine[Any, Any, T]) -> T:
        """Wait for `act`; cancelling the wait does not cancel it."""
        return await asyncio.shield(self._begin(act))

    async def _promote(self, ssd: SsdMover, request: ReserveRequest, reply: ReserveReply) -> ReserveReply:
        """Bring blocks of a reservation that was granted back from the SSD, as many as come in time."""
        ssd.used(request.hashes[: reply.hit_blocks])
        is_slow = self._overdue is not None and not self._overdue.done()
        if is_slow or not ssd.ssd.chain_hit(request.layout.digest(), request.hashes[reply.hit_blocks :]):
            return reply
        with ssd.metrics.promote_seconds.time():
            task = self._begin(self._bring_back(ssd, request))
            await asyncio.wait({task}, timeout=PROMOTE_TIMEOUT_S)
        if task.done():
            task.result()
        else:
            self._overdue = task
        hit_blocks = self.pool.hit_blocks(request.hashes)
        return replace(reply, hit_blocks=hit_blocks, promoted_blocks=max(0, hit_blocks - reply.hit_blocks))

    async def _bring_back(self, ssd: SsdMover, request: ReserveRequest) -> None:
        """One request at a time: who waited for another one with the same prefix finds it sealed."""
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + PROMOTE_TIMEOUT_S
        async with self._promoting:
            while self.pool.holds(request.owner) and loop.time() < ends_s:
                first_block = self.pool.hit_blocks(request.hashes)
                num_blocks = await asyncio.to_thread(ssd.fetch, request.layout, request.hashes[first_block:])
                # Its room went with the reservation: what was put late is removed like any late put.
                if not num_blocks or not self.pool.holds(request.owner):
                    return
                request_id, epoch = request.owner
                await self.seal(request_id=request_id, epoch=epoch, first_block=first_block, num_blocks=num_blocks)
                ssd.metrics.hit_blocks.inc(num_blocks)

    def _check_open(self, owner: RequestKey) -> None:
        """Raises: NodeLost if a drain has begun and this is none of the reservations that may come to their end."""
        if self._is_draining and not self.pool.holds(owner):
            raise NodeLost("the store process shuts down; choose another host, or try again")

    async def _make_room(self, request: ReserveRequest) -> None:
        async with self._removing:
            await self._let_go(self.pool.evict_for(request))

    async def _evict(self, choose: Callable[[], Eviction]) -> Eviction:
        async with self._removing:
            eviction = choose()
            await self._let_go(eviction.hashes)
        return eviction

    async def _let_go(self, victims: Sequence[BlockHash]) -> None:
        """Publish that these blocks are gone and begin to remove what is due; the caller holds `_removing`."""
        if victims:
            self.metrics.evicted_blocks.inc(len(victims))
            if self._ssd is not None:
                self._ssd.evicted(victims)
            if self._events is not None:
                await self._events.removed(victims)
        await self._remove_due()

    async def _health_of(self, layout: KVLayout, hashes: Sequence[BlockHash]) -> dict[BlockHash, BlockHealth]:
        """What reading these blocks shows of those that are still sealed afterwards."""
        found = await self._to_the_end(self._read_back(layout, hashes))
        return {h: health for h, health in zip(hashes, found, strict=True) if self.pool.is_sealed(h)}

    async def _read_back(self, layout: KVLayout, hashes: Sequence[BlockHash]) -> list[BlockHealth]:
        async with self._verifying:
            self._verify_arena = arena_with_room(
                self._transfer, self._verify_arena, needed_bytes=layout.object_bytes(0), usual_bytes=VERIFY_BYTES
            )
            return await asyncio.to_thread(
                read_back, self._transfer, self._verify_arena, layout, hashes, holder=self.pool.node_id
            )

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

    async def _count_misplaced(self, hashes: Sequence[BlockHash]) -> None:
        """A full segment lets puts spill into other hosts' segments, and says nothing."""
        keys = self.pool.keys_of(hashes)
        try:
            misplaced = await asyncio.to_thread(self._transfer.misplaced, keys)
        except StoreUnavailable as error:
            log.warning("placement not checked", objects=len(keys), reason=str(error))
            return
        if misplaced:
            self.metrics.misplaced.inc(len(misplaced))
            log.warning("objects in other hosts' segments", objects=len(misplaced), of=len(keys), first=misplaced[0])

    def _show(self, stats: PoolStats) -> None:
        self.metrics.capacity_bytes.set(stats.capacity_bytes)
        self.metrics.used_bytes.set(stats.used_bytes)
        self.metrics.sealed_blocks.set(stats.sealed_blocks)
        self.metrics.pinned_blocks.set(stats.pinned_blocks)
        self.metrics.reservations.set(stats.reservations)
        self.metrics.removals.set(stats.objects_to_remove)
        if self._ssd is not None:
            self._ssd.show()


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
