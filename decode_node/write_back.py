"""WriteBacks: full blocks that decode has completed go into the store, so that the next turn of a conversation hits them.

    request   finished | reserve the chain | put what is no hit  | see it exist, seal | release
    pages     of the whole chain           | of what is put      | none
              can be dropped                 cannot, once its turn has come

A prompt that was computed here goes the same way as soon as its last token is fed: its request runs, so its pages are no loss and
cannot be dropped.

Best effort: a store without room, a call that fails, pages that others wait for mean "not cached" and are counted, and nothing is
tried again. The puts have a thread of their own and go one request after the other, a bounded call at a time, so that neither steps
nor pulls wait for them. Everything but the puts lives on the event loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from decode_node.metrics import DecodeMetrics
from decode_node.stores import CALL_TIMEOUT_S, LEASE_S, StoreNodes
from kvstore.block import BlockHash
from kvstore.client import BlockRef, StoreClient
from kvstore.layout import KVLayout
from kvstore.node import StoreNode
from kvstore.pool import RequestKey, ReserveReply, ReserveResult
from kvstore.seal import wait_until_stored
from kvstore.transfer.base import PutStatus
from model_runner.kv_cache import PagedKVCache
from moontide.clock import Clock
from moontide.deadline import Deadline
from moontide.errors import DeadlineExceeded, Internal, MoontideError, TransferFailed
from moontide.log import get_logger

_MAX_CALL_BYTES = 8 * 1024 * 1024
"""Most bytes of one put, a few milliseconds of copying."""
_TIMEOUT_S = 10.0
"""No put begins so long after the request has ended: until then somebody may wait for its pages."""
_SEEN_TIMEOUT_S = 5.0

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class WriteJob:
    """The full blocks of a request that has ended, prompt and answer, or of a prompt that was computed here; and their pages."""

    key: RequestKey
    store_address: str
    """The store process that accounts the prompt."""
    root: BlockHash
    hashes: Sequence[BlockHash]
    pages: Sequence[int]
    is_prompt: bool = False
    """Its reservation is there already (prompt_pins.py), and stays when the job is over."""

    @property
    def reservation_id(self) -> str:
        return self.key.request_id if self.is_prompt else f"{self.key.request_id}.w"


class WriteBacks:
    """Runs WriteJobs. Pages of a job belong to it from `submit` until `give_back` or `drop`."""

    def __init__(
        self,
        client: StoreClient,
        kv: PagedKVCache,
        layout: KVLayout,
        *,
        stores: StoreNodes,
        clock: Clock,
        metrics: DecodeMetrics,
        keep: Callable[[WriteJob, Sequence[int]], None],
        give_back: Callable[[WriteJob], None],
    ) -> None:
        """
        Args:
            keep: only these pages of a job are still needed.
            give_back: nobody touches the job's pages any more. Both are called on the event loop.
        """
        self._client = client
        self._kv = kv
        self._layout = layout
        self._stores = stores
        self._clock = clock
        self._metrics = metrics
        self._keep = keep
        self._give_back = give_back
        self._untouched: dict[WriteJob, asyncio.Task[None]] = {}
        """Jobs that hold pages which no put touches yet, oldest first."""
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="write back")
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(self, job: WriteJob, *, on_end: Callable[[], None] | None = None) -> None:
        """Run a job; `on_end` is called on the event loop once nothing of it is left."""
        task = asyncio.create_task(self._run(job), name=f"write back {job.key.request_id}")
        self._untouched[job] = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if on_end is not None:
            task.add_done_callback(lambda _task: on_end())

    def drop(self) -> RequestKey | None:
        """Give up the youngest job of an ended request whose puts have not begun; its pages are the caller's again.

        None if there is none.
        """
        for job in reversed(self._untouched):
            if not job.is_prompt:
                self._untouched.pop(job).cancel()
                self._metrics.write_backs.labels("dropped").inc()
                return job.key
        return None

    async def wait_idle(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """Give everything up; returns after the put that is open, when all pages have been given back."""
        while self._untouched:
            job, _ = self._untouched.popitem()
            self._metrics.write_backs.labels("dropped").inc()
            self._give_back(job)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._thread.shutdown()

    async def _run(self, job: WriteJob) -> None:
        started_s = self._clock.now()
        try:
            await self._stores.close_idle()
            outcome = await self._write(job, Deadline.after(_TIMEOUT_S, self._clock))
        except MoontideError as error:
            outcome = error.code
            self._log(job, error)
        except Exception:
            log.exception("write-back failed", request_id=job.key.request_id, epoch=job.key.epoch)
            outcome = Internal.__name__
        finally:
            if self._untouched.pop(job, None) is not None:
                self._give_back(job)
        self._metrics.write_backs.labels(outcome).inc()
        self._metrics.write_back_seconds.observe(self._clock.now() - started_s)

    async def _write(self, job: WriteJob, deadline: Deadline) -> str:
        """Returns how it ended, if no error ended it."""
        store = self._stores.at(job.store_address)
        # Every time: a store process that was started anew has forgotten the layout.
        identity = await store.register_layout(self._layout)
        try:
            reply = await self._reserve(store, job)
            first_new, num_blocks = reply.hit_blocks, len(job.hashes)
            if reply.result is not ReserveResult.RESERVED:
                return "full" if reply.result is ReserveResult.WAIT else "too_large"
            if first_new == num_blocks:
                return "cached"
            refs = [
                BlockRef(block_hash, job.key.request_id, job.key.epoch, identity.node_id)
                for block_hash in job.hashes[first_new:]
            ]
            num_failed = await self._put(job, refs, identity.segment, deadline)
            if num_failed:
                raise TransferFailed(f"{num_failed} objects of {len(refs)} blocks could not be put")
            await wait_until_stored(self._client, refs, timeout_s=_SEEN_TIMEOUT_S, failed=0)
            await store.seal(
                request_id=job.reservation_id, epoch=job.key.epoch, first_block=first_new, num_blocks=len(refs)
            )
        finally:
            if not job.is_prompt:
                await self._release(store, job)
        self._metrics.written_blocks.inc(len(refs))
        self._metrics.written_bytes.inc(len(refs) * self._layout.block_bytes)
        return "written"

    async def _reserve(self, store: StoreNode, job: WriteJob) -> ReserveReply:
        return await store.reserve(
            request_id=job.reservation_id,
            epoch=job.key.epoch,
            layout_digest=self._layout.digest(),
            parent_hash=job.root,
            block_hashes=job.hashes,
            has_partial=False,
            lease_s=LEASE_S,
            is_write_back=True,
        )

    async def _put(self, job: WriteJob, refs: Sequence[BlockRef], segment: str, deadline: Deadline) -> int:
        """Put the last blocks of the chain when it is their turn; returns the objects that failed."""
        pages = job.pages[-len(refs) :]
        self._keep(job, pages)
        await asyncio.sleep(0)  # who gets the other pages may have dropped this job: it ends here then
        async with self._turn:
            del self._untouched[job]
            stop = threading.Event()
            putting = asyncio.get_running_loop().run_in_executor(
                self._thread, self._put_all, refs, pages, segment, stop, deadline
            )
            try:
                return await asyncio.shield(putting)
            finally:
                # The fence: when this is cancelled, a put may still read the pages.
                stop.set()
                if not putting.done():
                    await asyncio.wait({putting})
                self._give_back(job)

    def _put_all(
        self, refs: Sequence[BlockRef], pages: Sequence[int], segment: str, stop: threading.Event, deadline: Deadline
    ) -> int:
        """Runs in the put thread. Returns the objects that could not be put. Raises: DeadlineExceeded."""
        num_failed = 0
        for group_idx, part in self._calls(len(refs)):
            if stop.is_set():
                break
            if deadline.expired:
                raise DeadlineExceeded(
                    f"the store is slow: not all puts of the answer began within {_TIMEOUT_S} s of its end"
                )
            self._kv.copy_out(group_idx, list(pages[part]))
            slots = [
                (ref, self._kv.slot_address(group_idx, page)) for ref, page in zip(refs[part], pages[part], strict=True)
            ]
            statuses = self._client.put_group(group_idx, slots, segment=segment)
            num_failed += sum(status is not PutStatus.STORED_OR_OPEN for status in statuses)
        return num_failed

    def _calls(self, num_blocks: int) -> Iterator[tuple[int, slice]]:
        """Layer group and blocks of each put."""
        for group_idx in self._kv.groups:
            step = max(1, _MAX_CALL_BYTES // self._layout.object_bytes(group_idx))
            for start in range(0, num_blocks, step):
                yield group_idx, slice(start, start + step)

    async def _release(self, store: StoreNode, job: WriteJob) -> None:
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                await store.release(request_id=job.reservation_id, epoch=job.key.epoch)
        except (MoontideError, TimeoutError) as error:
            self._log(job, error)

    def _log(self, job: WriteJob, error: Exception) -> None:
        log.warning("not written back", request_id=job.key.request_id, epoch=job.key.epoch, message=error)
