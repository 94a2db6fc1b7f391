"""The way of K/V into the store: every stage puts its layer groups behind the compute of the next ones; stage 0 seals.

    compute thread   group 0 | group 1 | group 2 | group 3 | ...      `group_done` after each; never waits for a put
         queue       objects that are computed and not put, in the order of their compute
    put thread                 put 0   | put 1, 2          | put 3    one call at a time, with all that waits up to a bound

Not every step is put like that (`prefill.push`): where the calls cost more than they hide, all groups of a step wait for its
last one, and to compare with, all steps of a prompt for its last one.

A put that succeeds does not mean that the object is there (another writer may have it open), so a block is sealed only
when every layer group of it is seen to exist: kvstore/seal.py.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

from kvstore.client import BlockRef, StoreClient
from kvstore.pool import RequestKey
from kvstore.transfer.base import PutStatus
from model_runner.kv_cache import PagedKVCache, WriteMark
from moontide.clock import Clock
from moontide.log import get_logger
from prefill_node.metrics import StageMetrics
from prefill_node.push_plan import PutCost, PutSample, fit_put_cost, pushes_layer_wise

_PUT_ATTEMPTS = 4
_FIRST_RETRY_S = 0.05
_COST_WINDOW = 64
"""The last calls that say what one costs."""
_REFIT_EVERY = 8

log = get_logger(__name__)


@dataclass(frozen=True)
class PushBlock:
    """A block that a step has finished: its name and its page."""

    ref: BlockRef
    page: int

    @property
    def key(self) -> RequestKey:
        return RequestKey(self.ref.request_id, self.ref.epoch)


@dataclass(kw_only=True, eq=False)
class StepPush:
    """The puts of one step on one stage."""

    seq: int
    requests: Sequence[RequestKey]
    """One entry per chunk of the step."""
    finished: Sequence[RequestKey]
    """Those whose prompt ends with this step."""
    blocks: Sequence[PushBlock]
    is_layer_wise: bool
    groups_left: int
    """To be computed. Belongs to the compute thread, as `computed` does."""
    computed: list[_Object] = field(default_factory=list)
    """What waits for the step's last group."""
    objects_left: int
    """To be put. Belongs to the put thread, as the rest does."""
    queued_s: float | None = None
    """When the first of them might have been put."""
    started_s: float | None = None
    failed: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Object:
    """One layer group of a block that is computed."""

    push: StepPush
    group_idx: int
    block: PushBlock
    written: WriteMark | None

    @property
    def key(self) -> RequestKey:
        return self.block.key


@dataclass(frozen=True, kw_only=True)
class PushResult:
    seq: int
    requests: Sequence[RequestKey]
    put_s: float
    """From the start of the first put to the end of the last."""
    ended_s: float
    failed: int


class KVPusher:
    """Puts of one stage in one group epoch.

    The queue is bounded by the pages: a page is put once, and it is not reused before its puts are over.
    """

    def __init__(
        self,
        *,
        client: StoreClient,
        kv: PagedKVCache,
        put_thread: Executor,
        clock: Clock,
        metrics: StageMetrics,
        mode: str,
        max_call_bytes: int,
        skip: Callable[[RequestKey], bool],
        on_done: Callable[[PushResult], None],
        retry_wait: Callable[[float], bool],
        segment: str = "",
    ) -> None:
        """
        Args:
            put_thread: runs one job at a time, so one call is on its way.
            mode: `prefill.push`.
            max_call_bytes: most bytes of a call; an object that is larger goes alone.
            skip: whether a request has ended, so that its blocks need not be put; called in any thread.
            on_done: called in the put thread after the last object of a step.
            retry_wait: waits so many seconds; True when the epoch is over and another attempt is pointless.
            segment: where the objects should lie; empty: on this host.
        """
        self._client = client
        self._kv = kv
        self._put_thread = put_thread
        self._clock = clock
        self._metrics = metrics
        self._mode = mode
        self._max_call_bytes = max_call_bytes
        self._skip = skip
        self._on_done = on_done
        self._retry_wait = retry_wait
        self._segment = segment
        self._lock = threading.Lock()
        self._queue: deque[_Object] = deque()
        self._held: dict[RequestKey, list[_Object]] = {}
        """What waits for the end of its prompt."""
        self._waiting_bytes = 0
        """Of the queue and of what is held."""
        self._samples: deque[PutSample] = deque(maxlen=_COST_WINDOW)
        self._num_new_samples = 0
        self._cost: PutCost | None = None

    def plan(
        self,
        seq: int,
        blocks: Sequence[PushBlock],
        *,
        requests: Sequence[RequestKey],
        finished: Sequence[RequestKey],
        step_s: float | None,
    ) -> StepPush:
        """The puts of a step that will be computed.

        Args:
            finished: requests whose prompt ends with this step.
            step_s: what it will take to compute; None if nobody knows.
        """
        is_layer_wise = self._is_layer_wise(len(blocks), step_s)
        self._metrics.pushes.labels(
            "layer-wise" if is_layer_wise else "at-end" if self._mode == "auto" else self._mode
        ).inc()
        num_groups = len(self._kv.groups)
        return StepPush(
            seq=seq,
            requests=requests,
            finished=finished,
            blocks=blocks,
            is_layer_wise=is_layer_wise,
            groups_left=num_groups,
            objects_left=num_groups * len(blocks),
        )

    def group_done(self, push: StepPush, group_idx: int) -> None:
        """The K/V of this layer group is in the pages. Called in the compute thread; never waits for a put."""
        written = self._kv.last_mark(group_idx)
        push.computed += [_Object(push, group_idx, block, written) for block in push.blocks]
        push.groups_left -= 1
        if push.groups_left and not push.is_layer_wise:
            return
        objects, push.computed = push.computed, []
        with self._lock:
            self._wait_more(sum(self._nbytes(each) for each in objects))
            if self._mode == "after-prefill":
                self._hold(objects)
                for key in push.finished:
                    self._enqueue(self._held.pop(key, []))
            else:
                self._enqueue(objects)
        self._put_thread.submit(self._put_all)

    def end_request(self, key: RequestKey) -> None:
        """The end of a request is in the log: what is held of it will not be put, and is over. `skip` knows it already."""
        with self._lock:
            held = self._held.pop(key, [])
            self._enqueue(held)
        if held:
            self._put_thread.submit(self._put_all)

    def _is_layer_wise(self, num_blocks: int, step_s: float | None) -> bool:
        if self._mode != "auto":
            return self._mode == "layer-wise"
        if step_s is None or self._cost is None:
            return True
        groups = self._kv.groups
        return pushes_layer_wise(
            self._cost,
            num_groups=len(groups),
            group_bytes=num_blocks * sum(self._kv.slot_bytes(group_idx) for group_idx in groups) / len(groups),
            step_s=step_s,
            max_call_bytes=self._max_call_bytes,
        )

    def _nbytes(self, each: _Object) -> int:
        return self._kv.slot_bytes(each.group_idx)

    # Under the lock.

    def _hold(self, objects: Sequence[_Object]) -> None:
        for each in objects:
            if self._skip(each.key):  # its end may have been here before
                self._enqueue([each])
            else:
                self._held.setdefault(each.key, []).append(each)

    def _enqueue(self, objects: Sequence[_Object]) -> None:
        now_s = self._clock.now()
        for each in objects:
            if each.push.queued_s is None:
                each.push.queued_s = now_s
        self._queue.extend(objects)

    def _wait_more(self, nbytes: int) -> None:
        self._waiting_bytes += nbytes
        self._metrics.put_waiting_bytes.set(self._waiting_bytes)

    # In the put thread.

    def _put_all(self) -> None:
        """Every job takes what is there, so some find nothing."""
        while batch := self._next_batch():
            self._put_and_report(batch)

    def _next_batch(self) -> list[_Object]:
        batch: list[_Object] = []
        nbytes = 0
        with self._lock:
            while self._queue and (not batch or nbytes + self._nbytes(self._queue[0]) <= self._max_call_bytes):
                batch.append(self._queue.popleft())
                nbytes += self._nbytes(batch[-1])
            self._wait_more(-nbytes)
        return batch

    def _put_and_report(self, batch: Sequence[_Object]) -> None:
        now_s = self._clock.now()
        # A prompt's steps are reported in their order, also when other prompts have a part in its last one.
        pushes = sorted({each.push for each in batch}, key=lambda push: push.seq)
        for push in pushes:
            if push.started_s is None:
                assert push.queued_s is not None, "put before it was queued"
                push.started_s = now_s
                self._metrics.put_wait_seconds.inc(now_s - push.queued_s)
        try:
            failed = self._put(batch)
        except Exception:
            log.exception("put failed", objects=len(batch))
            failed = batch
        for each in failed:
            each.push.failed += 1
        for each in batch:
            each.push.objects_left -= 1
        for push in pushes:
            if push.objects_left == 0:
                self._report(push)

    def _report(self, push: StepPush) -> None:
        assert push.started_s is not None
        now_s = self._clock.now()
        self._on_done(
            PushResult(
                seq=push.seq,
                requests=push.requests,
                put_s=now_s - push.started_s,
                ended_s=now_s,
                failed=push.failed,
            )
        )

    def _put(self, batch: Sequence[_Object]) -> Sequence[_Object]:
        """Put objects, again where it failed; returns those that could not be stored."""
        left = self._wanted(batch)
        self._copy_out(left)
        wait_s = _FIRST_RETRY_S
        for attempt in range(_PUT_ATTEMPTS):
            left = self._wanted(left)
            if not left:
                break
            statuses = self._call(left)
            left = [each for each, status in zip(left, statuses, strict=True) if status is not PutStatus.STORED_OR_OPEN]
            if not left:
                break
            if attempt + 1 == _PUT_ATTEMPTS or self._retry_wait(wait_s * random.uniform(0.8, 1.2)):
                log.warning("objects not stored", objects=len(left))
                break
            wait_s *= 4
        return left

    def _wanted(self, objects: Sequence[_Object]) -> list[_Object]:
        return [each for each in objects if not self._skip(each.key)]

    def _copy_out(self, objects: Sequence[_Object]) -> None:
        for _, group in itertools.groupby(objects, key=lambda each: (each.push.seq, each.group_idx)):
            members = list(group)
            self._kv.copy_out(members[0].group_idx, [each.block.page for each in members], written=members[0].written)

    def _call(self, objects: Sequence[_Object]) -> list[PutStatus]:
        started_s = self._clock.now()
        statuses = self._client.put(
            [
                (each.block.ref, each.group_idx, self._kv.slot_address(each.group_idx, each.block.page))
                for each in objects
            ],
            segment=self._segment,
        )
        put_s = self._clock.now() - started_s
        nbytes = sum(self._nbytes(each) for each in objects)
        self._metrics.put_seconds.inc(put_s)
        self._metrics.put_bytes.inc(nbytes)
        self._metrics.put_batch_objects.observe(len(objects))
        if set(statuses) == {PutStatus.STORED_OR_OPEN}:
            self._learn(PutSample(nbytes, put_s))
        return statuses

    def _learn(self, sample: PutSample) -> None:
        self._samples.append(sample)
        self._num_new_samples += 1
        if self._num_new_samples == _REFIT_EVERY:
            self._num_new_samples = 0
            self._cost = fit_put_cost(self._samples) or self._cost
