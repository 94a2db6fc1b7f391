"""Reservations that this conductor's requests hold in store processes: renewed while needed, released at every end."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from conductor.metrics import ConductorMetrics
from kvstore.client import StoreNodeClient
from moontide.clock import Clock
from moontide.errors import Internal, MoontideError
from moontide.log import get_logger
from moontide.tls import Tls

CALL_TIMEOUT_S = 5.0
IDLE_CLIENT_S = 60.0
"""A connection to a store that nobody used for so long is closed."""

log = get_logger(__name__)


@dataclass(eq=False)
class _Store:
    client: StoreNodeClient
    used_s: float
    held: set[tuple[str, int]] = field(default_factory=set)


class StoreLeases:
    """One renewal per store and period carries all its requests."""

    def __init__(self, *, lease_s: float, clock: Clock, metrics: ConductorMetrics, tls: Tls | None = None) -> None:
        self._tls = tls
        self._lease_s = lease_s
        self._clock = clock
        self._metrics = metrics
        self._stores: dict[str, _Store] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def num_held(self) -> int:
        return sum(len(store.held) for store in self._stores.values())

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="store leases")

    def hold(self, address: str, request_id: str, epoch: int) -> None:
        """Renew this reservation from now on."""
        self._store(address).held.add((request_id, epoch))

    async def release(self, address: str, request_id: str, epoch: int) -> None:
        """Give it back; a store that does not answer forgets it when the lease ends."""
        store = self._store(address)
        store.held.discard((request_id, epoch))
        try:
            await store.client.release(request_id=request_id, epoch=epoch)
        except MoontideError as error:
            self._failed("release", address, error)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.gather(*(store.client.close() for store in self._stores.values()))

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            await asyncio.gather(*(self._renew(address) for address in tuple(self._stores)))

    async def _renew(self, address: str) -> None:
        store = self._stores[address]
        request_ids = sorted({request_id for request_id, _ in store.held})
        if not request_ids:
            if self._clock.now() - store.used_s > IDLE_CLIENT_S:
                del self._stores[address]
                await store.client.close()
            return
        store.used_s = self._clock.now()
        try:
            unknown = await store.client.renew(request_ids, lease_s=self._lease_s)
        except MoontideError as error:
            self._failed("renew", address, error)
            return
        except Exception as error:  # one store must not end the renewals at all of them
            log.exception("renewal failed", store=address)
            self._failed("renew", address, Internal(f"{type(error).__name__}: {error}"))
            return
        lost = set(unknown) & {request_id for request_id, _ in store.held}
        if lost:
            log.warning("reservations gone before their release", store=address, request_ids=",".join(sorted(lost)))

    def _store(self, address: str) -> _Store:
        store = self._stores.get(address)
        if store is None:
            store = self._stores[address] = _Store(
                StoreNodeClient(address, timeout_s=CALL_TIMEOUT_S, tls=self._tls), self._clock.now()
            )
        store.used_s = self._clock.now()
        return store

    def _failed(self, operation: str, address: str, error: MoontideError) -> None:
        self._metrics.store_errors.labels(operation).inc()
        log.warning("store call failed", operation=operation, store=address, error=str(error))
