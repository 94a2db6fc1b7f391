"""The way of K/V into the store: every stage puts each layer group behind the compute of the next ones; stage 0 seals.

    compute thread   group 0 | group 1 | group 2 | ...        `group_done` after each
    put thread                 put 0   | put 1   | put 2      `on_done` after the last group of a step

A put that succeeds does not mean that the object is there (another writer may have it open), so a block is sealed only
when every layer group of it is seen to exist.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from kvstore.client import BlockRef, StoreClient
from kvstore.pool import RequestKey
from kvstore.transfer.base import PutStatus, StoreUnavailable
from model_runner.kv_cache import PagedKVCache
from moontide.clock import Clock
from moontide.errors import TransferFailed
from moontide.log import get_logger

_PUT_ATTEMPTS = 4
_FIRST_RETRY_S = 0.05
_FIRST_POLL_S = 0.01
_LONGEST_POLL_S = 0.5

log = get_logger(__name__)


@dataclass(frozen=True)
class PushBlock:
    """A block that a step has finished: its name and its page."""

    ref: BlockRef
    page: int

    @property
    def key(self) -> RequestKey:
        return RequestKey(self.ref.request_id, self.ref.epoch)


@dataclass(kw_only=True)
class StepPush:
    """The puts of one step on one stage. Belongs to the compute thread until its first group is done, then to the put thread."""

    seq: int
    requests: Sequence[RequestKey]
    """One entry per chunk of the step."""
    blocks: Sequence[PushBlock]
    groups_left: int
    started_s: float | None = None
    failed: int = 0


@dataclass(frozen=True, kw_only=True)
class PushResult:
    seq: int
    requests: Sequence[RequestKey]
    put_s: float
    """From the start of the first put to the end of the last."""
    ended_s: float
    failed: int


class KVPusher:
    """Puts of one stage in one group epoch; they run one after the other in the put thread.

    The thread's queue is bounded by the pages: a page is put once, and it is not reused before its puts are over.
    """

    def __init__(
        self,
        *,
        client: StoreClient,
        kv: PagedKVCache,
        put_thread: Executor,
        clock: Clock,
        skip: Callable[[RequestKey], bool],
        on_done: Callable[[PushResult], None],
        retry_wait: Callable[[float], bool],
    ) -> None:
        """
        Args:
            skip: whether a request has ended, so that its blocks need not be put; called in the put thread.
            on_done: called in the put thread after the last group of a step.
            retry_wait: waits so many seconds; True when the epoch is over and another attempt is pointless.
        """
        self._client = client
        self._kv = kv
        self._put_thread = put_thread
        self._clock = clock
        self._skip = skip
        self._on_done = on_done
        self._retry_wait = retry_wait

    def group_done(self, push: StepPush, group_idx: int) -> None:
        """The K/V of this layer group is in the pages. Called in the compute thread; never waits for a put."""
        self._put_thread.submit(self._put_and_report, push, group_idx)

    def _put_and_report(self, push: StepPush, group_idx: int) -> None:
        if push.started_s is None:
            push.started_s = self._clock.now()
        try:
            push.failed += self._put(push.blocks, group_idx)
        except Exception:
            log.exception("put failed", step=push.seq, group_idx=group_idx)
            push.failed += len(push.blocks)
        push.groups_left -= 1
        if push.groups_left == 0:
            now = self._clock.now()
            self._on_done(
                PushResult(
                    seq=push.seq,
                    requests=push.requests,
                    put_s=now - push.started_s,
                    ended_s=now,
                    failed=push.failed,
                )
            )

    def _put(self, blocks: Sequence[PushBlock], group_idx: int) -> int:
        """Put one group of some blocks, again where it failed; returns how many could not be stored."""
        open_blocks = list(blocks)
        wait_s = _FIRST_RETRY_S
        for attempt in range(_PUT_ATTEMPTS):
            open_blocks = [block for block in open_blocks if not self._skip(block.key)]
            if not open_blocks:
                break
            self._kv.copy_out(group_idx, [block.page for block in open_blocks])
            statuses = self._client.put_group(
                group_idx, [(block.ref, self._kv.slot_address(group_idx, block.page)) for block in open_blocks]
            )
            pairs = zip(open_blocks, statuses, strict=True)
            open_blocks = [block for block, status in pairs if status is not PutStatus.STORED_OR_OPEN]
            if not open_blocks:
                break
            if attempt + 1 == _PUT_ATTEMPTS or self._retry_wait(wait_s * random.uniform(0.8, 1.2)):
                log.warning("objects not stored", group_idx=group_idx, objects=len(open_blocks))
                break
            wait_s *= 4
        return len(open_blocks)


async def wait_until_stored(client: StoreClient, blocks: Sequence[BlockRef], *, timeout_s: float, failed: int) -> None:
    """Return once every layer group of `blocks` is seen to exist.

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
                raise TransferFailed(f"{reason}: {failed} puts failed; the prompt has to be computed again")
        if loop.time() >= until_s:
            raise TransferFailed(f"{reason} after {timeout_s} s; the prompt has to be computed again")
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, _LONGEST_POLL_S)
