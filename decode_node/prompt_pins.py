"""PromptPins: reservations of prompts that this node computes itself, so that their prefix hits stay and their blocks have room.

    take --> hit --> pulled | computed | written (write_back.py) --> given back

Best effort: a store without room or without answer means no pins. What a store without room holds is pulled all the same: objects
are proven by their trailers, what is evicted before its pull is missed, and what is missed is computed. Lives on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from decode_node.stores import CALL_TIMEOUT_S, LEASE_S, StoreNodes
from kvstore.block import BlockHash
from kvstore.pool import RequestKey
from moontide.errors import MoontideError
from moontide.log import get_logger

_TAKE_TIMEOUT_S = 2.0
"""A client waits for its first token: the store may evict for so long."""

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class PinnedPrompt:
    """The full blocks of a prompt, at the store process that accounts them."""

    key: RequestKey
    store_address: str
    root: BlockHash
    hashes: Sequence[BlockHash]


class PromptPins:
    """Owner of the reservations."""

    def __init__(self, layout_digest: bytes, stores: StoreNodes) -> None:
        self._layout_digest = layout_digest
        self._stores = stores
        self._open: dict[RequestKey, tuple[PinnedPrompt, asyncio.Task[None]]] = {}
        self._releasing: set[asyncio.Task[None]] = set()

    def take(self, prompt: PinnedPrompt, on_hit: Callable[[int], None]) -> None:
        """Reserve, then call `on_hit` with the number of leading blocks that the store holds; not once it is given back."""
        task = asyncio.create_task(self._take(prompt, on_hit), name=f"pin {prompt.key.request_id}")
        self._open[prompt.key] = (prompt, task)

    def give_back(self, key: RequestKey) -> None:
        """Nothing of the prompt is needed any more. Idempotent."""
        prompt, taking = self._open.pop(key, (None, None))
        if prompt is None or taking is None:
            return
        taking.cancel()
        task = asyncio.create_task(self._release(prompt, taking), name=f"unpin {key.request_id}")
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)

    async def close(self) -> None:
        for key in list(self._open):
            self.give_back(key)
        await asyncio.gather(*self._releasing)

    async def _take(self, prompt: PinnedPrompt, on_hit: Callable[[int], None]) -> None:
        store = self._stores.at(prompt.store_address)
        num_blocks = 0
        try:
            async with asyncio.timeout(_TAKE_TIMEOUT_S):
                reply = await store.reserve(
                    request_id=prompt.key.request_id,
                    epoch=prompt.key.epoch,
                    layout_digest=self._layout_digest,
                    parent_hash=prompt.root,
                    block_hashes=prompt.hashes,
                    has_partial=False,
                    lease_s=LEASE_S,
                )
            num_blocks = reply.hit_blocks
        except (MoontideError, TimeoutError) as error:
            self._log("prefix hit unknown", prompt, error)
        except Exception:
            log.exception("prefix hit unknown", request_id=prompt.key.request_id, epoch=prompt.key.epoch)
        asyncio.get_running_loop().call_soon(self._tell, prompt.key, on_hit, num_blocks)

    def _tell(self, key: RequestKey, on_hit: Callable[[int], None], num_blocks: int) -> None:
        if key in self._open:
            on_hit(num_blocks)

    async def _release(self, prompt: PinnedPrompt, taking: asyncio.Task[None]) -> None:
        await asyncio.wait({taking})
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                await self._stores.at(prompt.store_address).release(
                    request_id=prompt.key.request_id, epoch=prompt.key.epoch
                )
        except (MoontideError, TimeoutError) as error:
            self._log("pins go with their lease", prompt, error)

    def _log(self, what: str, prompt: PinnedPrompt, error: Exception) -> None:
        log.warning(what, request_id=prompt.key.request_id, epoch=prompt.key.epoch, message=error)
