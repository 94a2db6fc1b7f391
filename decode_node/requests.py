"""DecodeRequests: every request of a decode node, from its Open to its one terminal event.

Lives on the event loop and owns all state; the two threads get commands and send reports:

    commands (service.py) --> DecodeRequests --PullJob--> pull thread    --PullArriving, PullDone--+
                                  |  ^       --Join,Leave--> compute thread --StepDone, StepFailed, Left--+
    events   (service.py) <-------+  +------------------------ Outbox <--------------------------------+
                                  +--WriteJob--> WriteBacks (write_back.py), when an answer is over

Nothing here blocks, so a cancel takes effect at once; the pages of what a thread still touches follow with its report.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from decode_node.batch import Batch, Phase
from decode_node.config import DecodeConfig
from decode_node.engine import Join, Leave, Left, NewToken, StepDone, StepFailed, StepLoop, StepReport, finish_reason
from decode_node.kv_pull import PullArriving, PullDone, PullJob, PullThread, blocks_per_job
from decode_node.metrics import DecodeMetrics
from decode_node.outbox import Outbox
from decode_node.write_back import StoreNodes, WriteBacks, WriteJob
from kvstore.block import BlockHash, hash_blocks, root_hash
from kvstore.client import BlockRef, StoreClient
from kvstore.keys import LOCAL_NODE_ID, check_request_id
from kvstore.layout import KVLayout
from kvstore.pool import RequestKey
from model_runner.runner import Runner
from moontide.clock import Clock
from moontide.errors import (
    BadRequest,
    BlockMissing,
    Cancelled,
    DeadlineExceeded,
    MoontideError,
    NodeLost,
    PromptTooLong,
)
from moontide.log import get_logger
from moontide.sampling_params import FinishReason, SampledToken, SamplingParams
from moontide.token_ids import TokenArray

_OUTBOX_REPORTS = 256
_SESSION_EVENTS = 16_384
"""A conductor that is so many events behind does not read any more."""
_FIRST_RETRY_S = 0.005
_MAX_RETRY_S = 0.1
_EARLY_S = 0.02
"""A request joins before its last layer groups are there if they are expected so soon (docs/decisions/009-decode-joins-when.md)."""
_SAME_BAR_S = 0.01
"""Pulls of one request that follow each other so closely are one bar of its timeline."""

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class OpenRequest:
    """A prompt whose K/V prefill computes, and what is to be decoded after it."""

    token_ids: TokenArray
    sampling: SamplingParams
    output_idx: int
    """Output index of the token that prefill draws."""
    cache_salt: str
    timeout_s: float


@dataclass(frozen=True, kw_only=True)
class WorkSpan:
    """One bar of the request's timeline; the start counts from its Open."""

    name: str
    start_s: float
    duration_s: float
    first_token: int = 0
    num_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Pulled:
    """Every byte of the prompt's K/V is in pages."""

    key: RequestKey
    wait_pages_s: float
    handoff_s: float
    spans: Sequence[WorkSpan]
    age_s: float


@dataclass(frozen=True, kw_only=True)
class Tokens:
    key: RequestKey
    token: SampledToken
    output_idx: int
    spans: Sequence[WorkSpan]
    age_s: float


@dataclass(frozen=True, kw_only=True)
class Finished:
    key: RequestKey
    reason: FinishReason
    stop_token_id: int | None


@dataclass(frozen=True, kw_only=True)
class Failed:
    key: RequestKey
    error: MoontideError


DecodeEvent = Pulled | Tokens | Finished | Failed


class ConductorSession:
    """The way back to one conductor. When it is closed, its requests are dropped."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[DecodeEvent] = asyncio.Queue(_SESSION_EVENTS)
        self.overflow = asyncio.Event()
        """Set when the conductor does not read its events: the session must end."""

    def send(self, event: DecodeEvent) -> None:
        try:
            self.events.put_nowait(event)
        except asyncio.QueueFull:
            self.overflow.set()


@dataclass
class _Request:
    """A request that has not ended. What it holds is in the Batch."""

    key: RequestKey
    session: ConductorSession
    sampling: SamplingParams
    output_idx: int
    prompt_tokens: int
    refs: Sequence[BlockRef]
    """One per block of the prompt; the last may be the partial one. Their holder is not known before they are sealed."""
    root: BlockHash
    """Of the chain of `refs`."""
    tail_ids: list[int]
    """Tokens after the last full block of the prompt, and those of the answer so far. The K/V of the last one is never computed."""
    opened_at_s: float
    deadline: asyncio.TimerHandle
    holder: str = LOCAL_NODE_ID
    """Node id of the store process that accounts the blocks."""
    pages_at_s: float = 0.0
    started_at_s: float = 0.0
    pulled_at_s: float = 0.0
    first_token: SampledToken | None = None
    job: PullJob | None = None
    is_arriving: bool = False
    """The first layer groups of the open pull are there, and the others will be soon."""
    is_pulled: bool = False
    """Everything is in the pages, and the conductor knows."""
    retry: asyncio.TimerHandle | None = None
    num_retries: int = 0
    missing_since_s: float | None = None
    spans: list[WorkSpan] = field(default_factory=list)
    has_tokens: bool = False
    store_address: str = ""


class DecodeRequests:
    """All requests of one node. Every method belongs to the event loop it was made on."""

    def __init__(
        self,
        runner: Runner,
        client: StoreClient,
        layout: KVLayout,
        *,
        stores: StoreNodes,
        config: DecodeConfig,
        clock: Clock,
        metrics: DecodeMetrics,
    ) -> None:
        self.batch = Batch(num_pages=runner.kv.num_pages, max_batch=config.max_batch, max_queue=config.max_queue)
        self._info = runner.info
        self._layout = layout
        self._layout_digest = layout.digest()
        self._job_blocks = blocks_per_job(layout)
        self._config = config
        self._clock = clock
        self._metrics = metrics
        self._outbox: Outbox[PullArriving | PullDone | StepReport] = Outbox(self._on_report, capacity=_OUTBOX_REPORTS)
        self._pulls = PullThread(client, runner.kv, clock=clock, report=self._outbox.send)
        self._steps = StepLoop(runner, max_batch=config.max_batch, clock=clock, report=self._outbox.send)
        self._writes = WriteBacks(
            client,
            runner.kv,
            layout,
            stores=stores,
            clock=clock,
            metrics=metrics,
            keep=self._keep_for_write,
            give_back=self._on_written,
        )
        self._requests: dict[RequestKey, _Request] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_draining = False
        metrics.watch(self.batch)

    @property
    def is_alive(self) -> bool:
        """Whether both threads run."""
        return self._pulls.is_alive and self._steps.is_alive

    def start(self) -> None:
        self._pulls.start()
        self._steps.start()

    async def drain(self, timeout_s: float) -> None:
        """Take no new request, let the others end and be written back, and hand back what is left after `timeout_s`."""
        self._is_draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
                await self._writes.wait_idle()
        except TimeoutError:
            for request in list(self._requests.values()):
                self._fail(request, NodeLost("the decode node shuts down before the request has ended"))

    async def close(self) -> None:
        """Drop every request and end the threads. All pages are free afterwards."""
        for request in list(self._requests.values()):
            self._end(request, None, outcome="dropped")
        await self._writes.close()
        await asyncio.to_thread(self._pulls.close)
        await asyncio.to_thread(self._steps.close)
        await asyncio.sleep(0)  # the last reports were queued on this loop before the threads ended
        self._outbox.close()

    def open_session(self) -> ConductorSession:
        return ConductorSession()

    def close_session(self, session: ConductorSession) -> None:
        """Drop the requests of a conductor that is gone."""
        for request in [r for r in self._requests.values() if r.session is session]:
            self._end(request, None, outcome="dropped")

    def open(self, session: ConductorSession, key: RequestKey, wanted: OpenRequest) -> None:
        """Take a request in. One that cannot be served fails at once, with an event."""
        try:
            self._open(session, key, wanted)
        except MoontideError as error:
            log.warning("request refused", request_id=key.request_id, epoch=key.epoch, code=error.code, message=error)
            self._metrics.ended.labels(error.code).inc()
            session.send(Failed(key=key, error=error))

    def sealed(
        self, session: ConductorSession, key: RequestKey, num_blocks: int, *, holder: str = LOCAL_NODE_ID
    ) -> None:
        """The first `num_blocks` full blocks can be pulled; the store process `holder` accounts them."""
        request = self._find(session, key)
        if request is not None:
            request.holder = holder
            self.batch.seal(key, min(num_blocks, request.prompt_tokens // self._layout.block_tokens))
            self._pull(request)

    def start_decoding(
        self,
        session: ConductorSession,
        key: RequestKey,
        token: SampledToken,
        output_idx: int,
        *,
        store_address: str = "",
    ) -> None:
        """Prefill is over: everything can be pulled, and `token` is the first to be fed.

        `store_address` is where the prompt is accounted, and the answer will be; "" stands for this host's store process.
        """
        request = self._find(session, key)
        if request is None or request.first_token is not None:
            return
        if output_idx < request.output_idx or not 0 <= token.token_id < self._info.vocab_size:
            self._fail(
                request,
                BadRequest(
                    f"first token {token.token_id} at output index {output_idx} does not fit a request that was opened at "
                    f"output index {request.output_idx} for a vocabulary of {self._info.vocab_size}; send what prefill drew"
                ),
            )
            return
        request.first_token = token
        request.tail_ids.append(token.token_id)
        request.store_address = store_address
        request.output_idx = output_idx
        request.started_at_s = self._clock.now()
        reason = finish_reason(
            request.sampling,
            token.token_id,
            output_idx,
            position=request.prompt_tokens,
            max_context=self._info.max_context,
        )
        if reason is not None:
            self._end(request, _finished(request, token.token_id, reason), outcome=reason.value)
            return
        self.batch.start(key)
        self._pull(request)
        self._check_ready(request)

    def cancel(self, session: ConductorSession, key: RequestKey) -> None:
        request = self._find(session, key)
        if request is not None:
            self._fail(request, Cancelled("the conductor cancelled the request"))

    def _find(self, session: ConductorSession, key: RequestKey) -> _Request | None:
        """The request, if it is open and this session's; a command for any other comes late and means nothing."""
        request = self._requests.get(key)
        return request if request is not None and request.session is session else None

    def _open(self, session: ConductorSession, key: RequestKey, wanted: OpenRequest) -> None:
        if self._is_draining:
            raise NodeLost("the decode node shuts down; choose another")
        self._check(key, wanted)
        num_tokens = len(wanted.token_ids)
        root = root_hash(self._layout_digest, wanted.cache_salt)
        refs = self._block_refs(key, wanted.token_ids, root)
        # The last token is never fed, so its K/V needs no room.
        last_output = num_tokens + wanted.sampling.max_tokens - wanted.output_idx - 1
        num_pages = -(-min(last_output, self._info.max_context) // self._layout.block_tokens)
        self.batch.open(key, num_blocks=len(refs), num_pages=num_pages)
        self._requests[key] = _Request(
            key=key,
            session=session,
            sampling=wanted.sampling,
            output_idx=wanted.output_idx,
            prompt_tokens=num_tokens,
            refs=refs,
            root=root,
            tail_ids=wanted.token_ids[num_tokens - num_tokens % self._layout.block_tokens :].tolist(),
            opened_at_s=self._clock.now(),
            deadline=asyncio.get_running_loop().call_later(
                wanted.timeout_s, partial(self._on_deadline, key, wanted.timeout_s)
            ),
        )
        self._idle.clear()
        self._progress()

    def _check(self, key: RequestKey, wanted: OpenRequest) -> None:
        check_request_id(key.request_id)
        num_tokens = len(wanted.token_ids)
        if num_tokens == 0:
            raise BadRequest("token_ids is empty; a prompt has at least one token", param="token_ids")
        if num_tokens >= self._info.max_context:
            raise PromptTooLong(
                f"the prompt has {num_tokens} tokens and the model's context holds {self._info.max_context}; at least one "
                "must be left for the output",
                param="token_ids",
            )
        largest = int(wanted.token_ids.max())
        if largest >= self._info.vocab_size:
            raise BadRequest(
                f"token id {largest} is outside the vocabulary of {self._info.vocab_size}; use the model's own tokenizer",
                param="token_ids",
            )
        if wanted.output_idx >= wanted.sampling.max_tokens:
            raise BadRequest(
                f"output_idx={wanted.output_idx} leaves nothing of max_tokens={wanted.sampling.max_tokens}",
                param="output_idx",
            )
        if not math.isfinite(wanted.timeout_s):
            raise BadRequest(f"timeout_s={wanted.timeout_s} is no number of seconds; every request has a deadline")
        if wanted.timeout_s <= 0:
            raise DeadlineExceeded(f"timeout_s={wanted.timeout_s} leaves no time; give the request a larger timeout")

    def _block_refs(self, key: RequestKey, token_ids: TokenArray, root: BlockHash) -> list[BlockRef]:
        block_tokens = self._layout.block_tokens
        hashes = hash_blocks(token_ids, block_tokens=block_tokens, root=root)
        refs = [BlockRef(block_hash, key.request_id, key.epoch) for block_hash in hashes]
        if len(token_ids) % block_tokens:
            refs.append(BlockRef(None, key.request_id, key.epoch))
        return refs

    def _progress(self) -> None:
        """Hand out what became free: pages to those that wait, places in the batch to those that are ready."""
        admitted = self.batch.admit()
        while self.batch.may_drop_write and (dropped := self._writes.drop()) is not None:
            self.batch.write_done(dropped)
            admitted += self.batch.admit()
        for key in admitted:
            request = self._requests[key]
            request.pages_at_s = self._clock.now()
            self._pull(request)
        for key in self.batch.join():
            request = self._requests[key]
            entry = self.batch.find(key)
            assert entry is not None
            assert request.first_token is not None
            self._steps.submit(
                Join(
                    key=key,
                    pages=entry.pages,
                    position=request.prompt_tokens,
                    token_id=request.first_token.token_id,
                    output_idx=request.output_idx,
                    sampling=request.sampling,
                    gate=request.job.gate if request.job is not None else None,
                )
            )

    def _pull(self, request: _Request) -> None:
        """Ask for the next blocks, unless a pull of this request is open or waits for its next try."""
        if request.retry is not None:
            return
        blocks = self.batch.take_pull(request.key, limit=self._job_blocks)
        if not blocks:
            return
        entry = self.batch.find(request.key)
        assert entry is not None
        request.job = PullJob(
            key=request.key,
            blocks=blocks,
            refs=[replace(request.refs[block], holder=request.holder) for block in blocks],
            pages=[entry.pages[block] for block in blocks],
            is_urgent=entry.started,
        )
        request.is_arriving = False
        self._pulls.submit(request.job)

    def _check_ready(self, request: _Request) -> None:
        """Run the request once its step can begin; tell the conductor once nothing needs the store's copy any more."""
        entry = self.batch.find(request.key)
        assert entry is not None
        if entry.started and entry.is_pulled and not request.is_pulled:
            self._tell_pulled(request)
        if self.batch.make_ready(request.key, is_arriving=request.is_arriving):
            self._progress()

    def _tell_pulled(self, request: _Request) -> None:
        request.is_pulled = True
        handoff_s = max(0.0, request.pulled_at_s - request.started_at_s)
        wait_pages_s = request.pages_at_s - request.opened_at_s
        self._metrics.handoff_seconds.observe(handoff_s)
        self._metrics.wait_pages_seconds.observe(wait_pages_s)
        request.session.send(
            Pulled(
                key=request.key,
                wait_pages_s=wait_pages_s,
                handoff_s=handoff_s,
                spans=request.spans,
                age_s=self._clock.now() - request.opened_at_s,
            )
        )

    def _on_report(self, report: PullArriving | PullDone | StepReport) -> None:
        match report:
            case StepDone():
                self._on_step(report)
            case PullArriving():
                self._on_arriving(report)
            case PullDone():
                self._on_pull(report)
            case StepFailed():
                self._on_step_failed(report)
            case Left():
                self.batch.let_go(report.key)
                self._progress()

    def _on_arriving(self, arriving: PullArriving) -> None:
        request = self._requests.get(arriving.job.key)
        if request is not None and request.num_retries == 0 and arriving.rest_s <= _EARLY_S:
            request.is_arriving = True
            self._check_ready(request)

    def _on_pull(self, done: PullDone) -> None:
        job = done.job
        self.batch.pull_done(job.key, job.blocks, missing=done.missing)
        request = self._requests.get(job.key)
        if request is None:
            self._progress()  # it ended meanwhile, and its pages are free only now
            return
        request.job = None
        self._note_pull(request, done)
        if done.missing:
            self._try_again(request, done)
            return
        request.num_retries, request.missing_since_s = 0, None
        self._pull(request)
        self._check_ready(request)

    def _note_pull(self, request: _Request, done: PullDone) -> None:
        num_arrived = len(done.job.blocks) - len(done.missing)
        self._metrics.pull_seconds.observe(done.ended_at_s - done.started_at_s)
        self._metrics.pulled_bytes.inc(num_arrived * self._layout.block_bytes)
        self._metrics.missed_blocks.inc(len(done.missing))
        request.pulled_at_s = done.ended_at_s
        if num_arrived:
            block_tokens = self._layout.block_tokens
            arrived = [block for block in done.job.blocks if block not in done.missing]
            tokens = sum(min(block_tokens, request.prompt_tokens - block * block_tokens) for block in arrived)
            span = WorkSpan(
                name="pull",
                start_s=done.started_at_s - request.opened_at_s,
                duration_s=done.ended_at_s - done.started_at_s,
                first_token=arrived[0] * block_tokens,
                num_tokens=tokens,
            )
            _append_span(request.spans, span)

    def _try_again(self, request: _Request, done: PullDone) -> None:
        """A block that was sealed can be late for milliseconds; one that stays away ends the request."""
        now_s = self._clock.now()
        if request.missing_since_s is None:
            request.missing_since_s = now_s
        if done.error is not None and not done.error.retriable:
            self._fail(request, done.error)
        elif now_s - request.missing_since_s >= self._config.pull_retry_s:
            self._fail(request, done.error or self._block_missing(request, done))
        else:
            delay_s = min(_MAX_RETRY_S, _FIRST_RETRY_S * 2**request.num_retries) * random.uniform(0.5, 1.5)
            request.num_retries += 1
            request.retry = asyncio.get_running_loop().call_later(delay_s, self._on_retry, request)

    def _block_missing(self, request: _Request, done: PullDone) -> BlockMissing:
        return BlockMissing(
            f"the store does not have {len(done.missing)} of {len(request.refs)} blocks of the prompt (first: block "
            f"{min(done.missing)}), asked for {self._config.pull_retry_s} s (decode.pull_retry_s); the prompt must be computed again"
        )

    def _on_retry(self, request: _Request) -> None:
        request.retry = None
        self._pull(request)

    def _on_step(self, done: StepDone) -> None:
        self._metrics.step_seconds.observe(done.ended_at_s - done.started_at_s)
        self._metrics.step_requests.observe(len(done.tokens))
        self._metrics.tokens.inc(len(done.tokens))
        for new in done.tokens:
            request = self._requests.get(new.key)
            if request is not None:  # else it ended during the step; Left follows
                self._on_token(request, new, done)
        for key in done.late:
            request = self._requests.get(key)
            if request is not None:  # else it ended during the step; Left follows
                self._on_late(request)
        self._progress()

    def _on_late(self, request: _Request) -> None:
        """Blocks were not there when its step needed them: it runs again once they are."""
        self._metrics.late_joins.inc()
        request.is_arriving = False
        self.batch.put_back(request.key)
        self._pull(request)
        self._check_ready(request)

    def _write_back(self, request: _Request) -> None:
        """Have the blocks stored that the answer completed, before the request's pages go. The token drawn last has no K/V."""
        if not self._config.write_back:
            return
        hashes = [ref.hash for ref in request.refs if ref.hash is not None]
        computed_ids = np.array(request.tail_ids[:-1], dtype=np.uint32)
        parent = hashes[-1] if hashes else request.root
        new_hashes = hash_blocks(computed_ids, block_tokens=self._layout.block_tokens, root=parent)
        if not new_hashes:
            return
        hashes += new_hashes
        entry = self.batch.find(request.key)
        assert entry is not None
        pages = entry.pages[: len(hashes)]
        self.batch.keep_for_write(request.key, pages)
        self._writes.submit(
            WriteJob(
                key=request.key, store_address=request.store_address, root=request.root, hashes=hashes, pages=pages
            )
        )

    def _keep_for_write(self, key: RequestKey, pages: Sequence[int]) -> None:
        self.batch.keep_for_write(key, pages)
        self._progress()

    def _on_written(self, key: RequestKey) -> None:
        self.batch.write_done(key)
        self._progress()

    def _on_token(self, request: _Request, new: NewToken, done: StepDone) -> None:
        request.tail_ids.append(new.token.token_id)
        spans: list[WorkSpan] = []
        if not request.has_tokens:
            request.has_tokens = True
            spans.append(
                WorkSpan(
                    name="first step",
                    start_s=done.started_at_s - request.opened_at_s,
                    duration_s=done.ended_at_s - done.started_at_s,
                    first_token=request.prompt_tokens,
                    num_tokens=1,
                )
            )
        age_s = self._clock.now() - request.opened_at_s
        request.session.send(Tokens(key=new.key, token=new.token, output_idx=new.output_idx, spans=spans, age_s=age_s))
        if new.finish_reason is not None:
            self._write_back(request)
            self.batch.let_go(new.key)
            self._forget(
                request,
                _finished(request, new.token.token_id, new.finish_reason),
                outcome=new.finish_reason.value,
            )

    def _on_step_failed(self, failed: StepFailed) -> None:
        for key in failed.keys:
            request = self._requests.get(key)
            if request is not None:  # else it ended during the step; Left follows
                self.batch.let_go(key)
                self._forget(request, Failed(key=key, error=failed.error), outcome=failed.error.code)
        self._progress()

    def _on_deadline(self, key: RequestKey, timeout_s: float) -> None:
        entry = self.batch.find(key)
        assert entry is not None
        self._fail(
            self._requests[key],
            DeadlineExceeded(
                f"timeout of {timeout_s:.3f} s passed on the decode node (state: {entry.phase.value}); "
                "give the request a larger timeout"
            ),
        )

    def _fail(self, request: _Request, error: MoontideError) -> None:
        if not isinstance(error, Cancelled):
            log.warning(
                "request failed",
                request_id=request.key.request_id,
                epoch=request.key.epoch,
                code=error.code,
                message=error,
            )
        self._end(request, Failed(key=request.key, error=error), outcome=error.code)

    def _end(self, request: _Request, event: Finished | Failed | None, *, outcome: str) -> None:
        """End a request from outside the step loop, in whatever phase it is."""
        entry = self.batch.find(request.key)
        if entry is not None and entry.phase is Phase.RUNNING:
            self._steps.submit(Leave(request.key))
        self.batch.end(request.key)
        self._forget(request, event, outcome=outcome)
        self._progress()

    def _forget(self, request: _Request, event: Finished | Failed | None, *, outcome: str) -> None:
        """The request has ended in the batch: stop its timers, tell its conductor. Its record goes, so this happens once."""
        del self._requests[request.key]
        request.deadline.cancel()
        if request.retry is not None:
            request.retry.cancel()
        if request.job is not None:
            request.job.cancelled.set()
        if event is not None:
            request.session.send(event)
        self._metrics.ended.labels(outcome).inc()
        if not self._requests:
            self._idle.set()


def _finished(request: _Request, token_id: int, reason: FinishReason) -> Finished:
    return Finished(key=request.key, reason=reason, stop_token_id=token_id if reason is FinishReason.STOP else None)


def _append_span(spans: list[WorkSpan], span: WorkSpan) -> None:
    """Add a bar, or make the last one longer if this follows at once, so that a long prompt has few."""
    if spans:
        last = spans[-1]
        last_end_s = last.start_s + last.duration_s
        follows = last.first_token + last.num_tokens == span.first_token
        if follows and span.start_s - last_end_s < _SAME_BAR_S:
            spans[-1] = WorkSpan(
                name=last.name,
                start_s=last.start_s,
                duration_s=span.start_s + span.duration_s - last.start_s,
                first_token=last.first_token,
                num_tokens=last.num_tokens + span.num_tokens,
            )
            return
    spans.append(span)
