"""PullThread: copies sealed blocks from the store into pages. The K/V of a prompt comes from there and from nowhere else.

The event loop hands over jobs and gets one PullDone per job; at most one job of a request is open. A job reads all layer
groups of a few blocks. Jobs of requests that only wait for their last blocks go first: their clients wait too.

    group 0 | group 1 | ... | group n        of one job; every group opens its LayerGate a little further
            PullArriving            PullDone
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from decode_node.layer_gate import LayerGate
from kvstore.client import BlockRef, StoreClient
from kvstore.layout import KVLayout
from kvstore.pool import RequestKey
from model_runner.kv_cache import PagedKVCache
from model_runner.kv_fetch import fetch_blocks
from moontide.clock import Clock
from moontide.errors import Internal, MoontideError
from moontide.log import get_logger

_MAX_JOB_BYTES = 32 * 1024 * 1024
"""About 10 ms of copying from the own host: a long prompt delays others by no more."""

log = get_logger(__name__)


def blocks_per_job(layout: KVLayout) -> int:
    return max(1, _MAX_JOB_BYTES // layout.block_bytes)


@dataclass(frozen=True, kw_only=True)
class PullJob:
    """Read every layer group of some blocks of one request into their pages."""

    key: RequestKey
    blocks: Sequence[int]
    """Block indices of the request, one per entry of `refs` and `pages`."""
    refs: Sequence[BlockRef]
    pages: Sequence[int]
    is_urgent: bool
    """Nothing but its last blocks keeps the request from running."""
    cancelled: threading.Event = field(default_factory=threading.Event)
    """Set by the event loop: what is not read yet need not be. PullDone still comes, it is the fence."""
    gate: LayerGate = field(default_factory=LayerGate)


@dataclass(frozen=True, kw_only=True)
class PullArriving:
    """The first layer groups of a job are in the pages and others are still to come; at most once, before its PullDone."""

    job: PullJob
    rest_s: float
    """Time that the others will take, at the rate of the first ones."""


@dataclass(frozen=True, kw_only=True)
class PullDone:
    """No get of the job is open any more."""

    job: PullJob
    missing: Sequence[int]
    """Blocks of which a layer group was not there, or not with the right bytes."""
    error: MoontideError | None
    """What made them missing, when it was not the store's plain answer."""
    started_at_s: float
    ended_at_s: float


class PullThread:
    """One thread that runs PullJobs, urgent ones first, else in order of submission."""

    def __init__(
        self, client: StoreClient, kv: PagedKVCache, *, clock: Clock, report: Callable[[PullArriving | PullDone], None]
    ) -> None:
        """`report` is called in the pull thread."""
        self._client = client
        self._kv = kv
        self._clock = clock
        self._report = report
        # Bounded by the number of requests that hold pages: each has at most one job here.
        self._jobs: queue.PriorityQueue[tuple[int, int, PullJob | None]] = queue.PriorityQueue()
        self._sequence = itertools.count()
        self._thread = threading.Thread(target=self._run, name="pull", daemon=True)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def submit(self, job: PullJob) -> None:
        self._jobs.put((0 if job.is_urgent else 1, next(self._sequence), job))

    def close(self) -> None:
        """End after the job that is open; blocks until then. Jobs that wait are dropped."""
        self._jobs.put((-1, next(self._sequence), None))
        self._thread.join()

    def _run(self) -> None:
        while True:
            _, _, job = self._jobs.get()
            if job is None:
                return
            started_at_s = self._clock.now()
            missing, error = self._pull(job, started_at_s)
            self._report(
                PullDone(job=job, missing=missing, error=error, started_at_s=started_at_s, ended_at_s=self._clock.now())
            )
            # After the report, so that it comes before that of a step that waits for the last group.
            if not missing:
                job.gate.open(len(self._kv.groups))
            job.gate.end()

    def _pull(self, job: PullJob, started_at_s: float) -> tuple[list[int], MoontideError | None]:
        """Returns the blocks that are not complete."""
        num_all = len(self._kv.groups)
        is_told = False

        def on_groups(num_groups: int) -> None:
            nonlocal is_told
            if not 0 < num_groups < num_all:
                return
            job.gate.open(num_groups)
            if not is_told:
                is_told = True
                rate_s = (self._clock.now() - started_at_s) / num_groups
                self._report(PullArriving(job=job, rest_s=rate_s * (num_all - num_groups)))

        try:
            arrived = fetch_blocks(
                self._client,
                self._kv,
                list(zip(job.refs, job.pages, strict=True)),
                is_cancelled=job.cancelled.is_set,
                on_groups=on_groups,
            )
        except MoontideError as error:
            return list(job.blocks), error
        except Exception as error:
            log.exception("pull failed", request_id=job.key.request_id, epoch=job.key.epoch)
            return list(job.blocks), Internal(f"pull from the store failed: {type(error).__name__}: {error}")
        return [block for block, is_there in zip(job.blocks, arrived, strict=True) if not is_there], None
