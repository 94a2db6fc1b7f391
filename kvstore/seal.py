"""What has to be true before a block is sealed: every object of it was seen to exist."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvstore.client import BlockRef, StoreClient
from kvstore.transfer.base import StoreUnavailable
from moontide.errors import TransferFailed

_FIRST_POLL_S = 0.01
_LONGEST_POLL_S = 0.5


async def wait_until_stored(client: StoreClient, blocks: Sequence[BlockRef], *, timeout_s: float, failed: int) -> None:
    """Return once every layer group of `blocks` is seen to exist.

    A put that succeeds does not prove it: another writer may have the object open.

    Args:
        failed: objects of these blocks whose put did not succeed. If there are any and a block is missing, nobody will
            put it any more, so there is nothing to wait for.
    Raises: TransferFailed when objects are missing after `timeout_s`.
    """
    wait_s = _FIRST_POLL_S
    loop = asyncio.get_running_loop()
    until_s = loop.time() + timeout_s
    unseen = list(blocks)
    while True:
        try:
            missing = await asyncio.to_thread(client.missing, unseen)
            unseen = [unseen[position] for position in sorted({position for position, _ in missing})]
            reason = f"{len(missing)} objects of {len(blocks)} blocks are not in the store"
        except StoreUnavailable as error:
            reason = str(error)
        else:
            if not missing:
                return
            if failed:
                raise TransferFailed(f"{reason}: {failed} puts failed; what they hold has to be computed again")
        if loop.time() >= until_s:
            raise TransferFailed(f"{reason} after {timeout_s} s; what they hold has to be computed again")
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, _LONGEST_POLL_S)
