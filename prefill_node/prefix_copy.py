"""Leading blocks of a prompt that another host's store holds, on their way into this host's while the prompt queues.

arrival ......... pages taken ........ its turn ........ + what the copy saves
   |--- copying ------|--- awaited here at most so long -------|              then what has arrived is a hit, the rest is computed
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from kvstore.block import BlockHash
from kvstore.client import Replica
from kvstore.layout import KVLayout
from moontide.errors import MoontideError
from moontide.log import get_logger
from prefill_node.load import RecentSpeed
from prefill_node.metrics import GroupMetrics
from prefill_node.prompt import Prompt

log = get_logger(__name__)


class Copier(Protocol):
    """The store process of this host: StoreNodeClient, or the Replicator itself where it runs in this process."""

    async def replicate(
        self, *, layout_digest: bytes, root: BlockHash, hashes: Sequence[BlockHash], timeout_s: float
    ) -> Replica: ...


class PrefixCopies:
    """Has prefixes copied, and knows how fast that was."""

    def __init__(self, copier: Copier | None, layout: KVLayout, metrics: GroupMetrics) -> None:
        """`copier`: None: nobody copies."""
        self.speed = RecentSpeed()
        self._copier = copier
        self._layout = layout
        self._metrics = metrics

    @asynccontextmanager
    async def copying(self, prompt: Prompt, *, timeout_s: float) -> AsyncIterator[asyncio.Task[None] | None]:
        """Copy the blocks that are wanted for a prompt for up to `timeout_s`; nobody waits for them after the end of the block.

        Yields: the copy; None if there is none.
        """
        if self._copier is None or timeout_s <= 0:
            yield None
            return
        task = asyncio.create_task(self._copy(self._copier, prompt, timeout_s), name="copy of a prefix")
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _copy(self, copier: Copier, prompt: Prompt, timeout_s: float) -> None:
        outcome = "given up"
        try:
            replica = await copier.replicate(
                layout_digest=self._layout.digest(),
                root=prompt.root,
                hashes=prompt.block_hashes[: prompt.copy_blocks],
                timeout_s=timeout_s,
            )
            outcome = "part" if replica.num_blocks < prompt.copy_blocks else "whole"
            self.speed.add(replica.copied_blocks * self._layout.block_bytes, replica.copy_s)
        except MoontideError as error:
            outcome = "failed"
            log.warning("prefix not copied", request_id=prompt.key.request_id, error=str(error))
        finally:
            self._metrics.copies.labels(outcome).inc()
