"""Prefixes that many requests share are copied to more hosts before one host's link is too narrow for them.

    heat     requests per second that hit a prefix, fading with time
    copies   as many as keep the share of time in which a holder sends this prefix below TARGET_BUSY
Heat is kept for prefixes of 1, 2, 4, ... blocks, so a shared document is found whatever follows it in each prompt, and a request costs
log(blocks). A copy is an ordinary block: it leaves like any other when it is no longer used (docs/decisions/006-replicas.md).
Source of the aim: Mooncake, arXiv:2407.00079, section 6.2.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge

from conductor.view import ClusterView, NoChoice
from kvstore.block import BlockHash
from kvstore.client import StoreNodeClient
from moontide.clock import Clock
from moontide.errors import MoontideError
from moontide.log import get_logger
from moontide.metrics import start_at_zero
from moontide.tls import Tls

HALF_LIFE_S = 60.0
MIN_RATE_PER_S = 0.1
"""A prefix with fewer hits is cold: where it is needed it is copied on the way (PrefillRequest.copy_blocks)."""
TARGET_BUSY = 0.3
"""Share of time; above it a fetch of the prefix waits noticeably for another one."""
MAX_COPIES = 8
MAX_PREFIXES = 1024
PERIOD_S = 1.0
COPY_TIMEOUT_S = 10.0
_FADING_PER_S = math.log(2) / HALF_LIFE_S

log = get_logger(__name__)


@dataclass(kw_only=True)
class _Prefix:
    root: BlockHash
    hashes: Sequence[BlockHash]
    """Of a prompt that begins with it; only the first `num_blocks` count."""
    num_blocks: int
    hits: float
    """Weighted by their age: half for one that is a half-life old."""
    noted_s: float

    def rate_per_s(self, now_s: float) -> float:
        return self.hits * math.exp(-(now_s - self.noted_s) * _FADING_PER_S) * _FADING_PER_S


@dataclass(frozen=True, kw_only=True)
class Replication:
    """A prefix that one more store should hold."""

    root: BlockHash
    hashes: tuple[BlockHash, ...]
    store_id: str


class Heat:
    """Which prefixes are hot (pure; times are moments on the caller's clock)."""

    def __init__(self) -> None:
        self._prefixes: OrderedDict[BlockHash, _Prefix] = OrderedDict()
        """By their last block; the one noted last is last."""

    def __len__(self) -> int:
        return len(self._prefixes)

    def note(self, root: BlockHash, hashes: Sequence[BlockHash], hit_blocks: int, now_s: float) -> None:
        """A prompt came whose first `hit_blocks` blocks some store holds."""
        num_blocks = 1
        while num_blocks <= hit_blocks:
            key = hashes[num_blocks - 1]
            known = self._prefixes.get(key)
            if known is None:
                known = _Prefix(root=root, hashes=hashes, num_blocks=num_blocks, hits=0.0, noted_s=now_s)
                self._prefixes[key] = known
            known.hits = known.hits * math.exp(-(now_s - known.noted_s) * _FADING_PER_S) + 1.0
            known.noted_s = now_s
            self._prefixes.move_to_end(key)
            num_blocks *= 2
        while len(self._prefixes) > MAX_PREFIXES:
            self._prefixes.popitem(last=False)

    def replications(
        self,
        hit_blocks: Callable[[Sequence[BlockHash]], Mapping[str, int]],
        stores: Mapping[str, float],
        *,
        block_send_s: float,
        now_s: float,
    ) -> list[Replication]:
        """What should be copied now, the longest and hottest first; one for each store at most.

        Args:
            hit_blocks: leading blocks of a chain that each store holds, by store node id.
            stores: live store processes by node id, with the filled share of each.
            block_send_s: time in which a holder sends one block.
        """
        found: list[Replication] = []
        free = dict(stores)
        hot = [prefix for prefix in self._prefixes.values() if prefix.rate_per_s(now_s) >= MIN_RATE_PER_S]
        for prefix in sorted(hot, key=lambda each: each.num_blocks * each.rate_per_s(now_s), reverse=True):
            hashes = tuple(prefix.hashes[: prefix.num_blocks])
            holders = {node_id for node_id, num in hit_blocks(hashes).items() if num >= len(hashes)} & stores.keys()
            holders |= {each.store_id for each in found if each.hashes[: len(hashes)] == hashes}
            busy = prefix.rate_per_s(now_s) * len(hashes) * block_send_s
            wanted = min(MAX_COPIES, len(stores), max(1, math.ceil(busy / TARGET_BUSY)))
            candidates = free.keys() - holders
            if holders and len(holders) < wanted and candidates:
                emptiest = min(candidates, key=lambda node_id: (free[node_id], node_id))
                del free[emptiest]
                found.append(Replication(root=prefix.root, hashes=hashes, store_id=emptiest))
        return found


class HotBlocks:
    """Has hot prefixes copied, in the background."""

    def __init__(
        self,
        view: Callable[[], ClusterView | NoChoice],
        hit_blocks: Callable[[Sequence[BlockHash]], Mapping[str, int]],
        *,
        clock: Clock,
        metrics: CollectorRegistry,
        tls: Tls | None = None,
    ) -> None:
        self._tls = tls
        self._view = view
        self._hit_blocks = hit_blocks
        self._clock = clock
        self._heat = Heat()
        self._copying: dict[str, asyncio.Task[None]] = {}
        """By the store that copies: one at a time each."""
        self._task: asyncio.Task[None] | None = None
        self._copied = Counter(
            "conductor_hot_copied_blocks_total", "Blocks of hot prefixes that were copied to one more store.",
            registry=metrics,
        )  # fmt: skip
        self._copies = Counter(
            "conductor_hot_copies_total",
            "Copies of hot prefixes: whole, part or failed.",
            ["outcome"],
            registry=metrics,
        )
        start_at_zero(self._copies, "whole", "part", "failed")
        tracked = Gauge("conductor_hot_prefixes", "Prefixes whose heat is known.", registry=metrics)
        tracked.set_function(lambda: float(len(self._heat)))

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="hot blocks")

    async def close(self) -> None:
        tasks = [*self._copying.values(), *([self._task] if self._task is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def note(self, root: BlockHash, hashes: Sequence[BlockHash], hits: Mapping[str, int]) -> None:
        """A prompt was placed."""
        self._heat.note(root, hashes, max(hits.values(), default=0), self._clock.now())

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            view = self._view()
            if isinstance(view, ClusterView) and len(view.stores) > 1:
                self._begin_copies(view)

    def _begin_copies(self, view: ClusterView) -> None:
        stores = {
            store.node_id: store.load.get("used_bytes", 0.0) / max(store.load.get("capacity_bytes", 0.0), 1.0)
            for store in view.stores
            if store.node_id not in self._copying
        }
        block_send_s = view.layout.block_bytes / view.fetch_bytes_per_s
        for wanted in self._heat.replications(
            self._hit_blocks, stores, block_send_s=block_send_s, now_s=self._clock.now()
        ):
            store = view.stores[view.store_row_of[wanted.store_id]]
            task = asyncio.create_task(self._copy(store.address, view.layout.digest(), wanted), name="hot copy")
            self._copying[wanted.store_id] = task

    async def _copy(self, address: str, layout_digest: bytes, wanted: Replication) -> None:
        client = StoreNodeClient(address, tls=self._tls)
        outcome = "failed"
        try:
            replica = await client.replicate(
                layout_digest=layout_digest, root=wanted.root, hashes=wanted.hashes, timeout_s=COPY_TIMEOUT_S
            )
            self._copied.inc(replica.copied_blocks)
            outcome = "whole" if replica.num_blocks == len(wanted.hashes) else "part"
        except MoontideError as error:
            log.warning("hot prefix not copied", store=wanted.store_id, error=str(error))
        finally:
            self._copies.labels(outcome).inc()
            del self._copying[wanted.store_id]
            await client.close()
