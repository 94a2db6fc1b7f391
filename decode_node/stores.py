"""StoreNodes: the store processes that hold the prompts of this node's requests."""

from __future__ import annotations

from kvstore.client import StoreNodeClient
from kvstore.node import StoreNode
from moontide.clock import Clock
from moontide.tls import Tls

CALL_TIMEOUT_S = 5.0
LEASE_S = 60.0
"""Of a reservation that this node holds. Longer than all waits of a write-back together, a stuck put included, so that nothing renews
it and no put comes after its end."""
_IDLE_CLIENT_S = 2 * LEASE_S
"""A connection to a store that nobody used for so long is closed."""


class StoreNodes:
    """The own store process and, by address, others."""

    def __init__(
        self, own: StoreNode, own_address: str, *, own_node_id: str, clock: Clock, tls: Tls | None = None
    ) -> None:
        """The caller closes `own`."""
        self.own_node_id = own_node_id
        self._own = own
        self._own_address = own_address
        self._clock = clock
        self._tls = tls
        self._clients: dict[str, tuple[StoreNodeClient, float]] = {}

    def at(self, address: str) -> StoreNode:
        """The store process at `address`; "" stands for the own one."""
        if address in ("", self._own_address):
            return self._own
        client, _ = self._clients.get(address) or (
            StoreNodeClient(address, timeout_s=CALL_TIMEOUT_S, tls=self._tls),
            0.0,
        )
        self._clients[address] = (client, self._clock.now())
        return client

    async def close_idle(self, idle_s: float = _IDLE_CLIENT_S) -> None:
        now_s = self._clock.now()
        for address in [address for address, (_, used_s) in self._clients.items() if now_s - used_s >= idle_s]:
            client, _ = self._clients.pop(address)
            await client.close()

    async def close(self) -> None:
        await self.close_idle(0.0)
