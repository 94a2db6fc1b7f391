"""DecodeRequests: every request of a decode node, from its Open to its one terminal event.

Lives on the event loop and owns all state; the two threads get commands and send reports:

    commands (service.py) --> DecodeRequests --PullJob--> pull thread    --PullArriving, PullDone--+
                                  |  ^       --Join,Leave--> compute thread --StepDone, StepFailed, Left--+
    events   (service.py) <-------+  +------------------------ Outbox <--------------------------------+
                                  +--WriteJob--> WriteBacks (write_back.py), when an answer is over

A prompt that this node prefills itself takes no command after its Open:

    Open | pin its prefix hit (prompt_pins.py) | pull that | chunks in the batch's steps | first token, write the prompt | as any other

Nothing here blocks, so a cancel takes effect at once; the pages of what a thread still touches follow with its report.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from decode_node.batch import Batch, Phase
from decode_node.config import DecodeConfig
from decode_node.engine import Join, Leave, Left, NewToken, StepDone, StepFailed, StepLoop, StepReport, finish_reason
from decode_node.kv_pull import PullArriving, PullDone, PullJob, PullThread, blocks_per_job
from decode_node.load import Load
from decode_node.local_prefill import LocalPrefill
from decode_node.metrics import DecodeMetrics
from decode_node.outbox import Outbox
from decode_node.prompt_pins import PinnedPrompt, PromptPins
from decode_node.request import Request
from decode_node.session import ConductorSession, Failed, Finished, OpenRequest, Pulled, Tokens, WorkSpan
from decode_node.step_times import StepTimes
from decode_node.stores import StoreNodes
from decode_node.write_back import WriteBacks, WriteJob
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
    Declined,
    Internal,
    MoontideError,
    NodeLost,
    PromptTooLong,
)
from moontide.log import get_logger
from moontide.perf_model import StepModel
from moontide.sampling_params import FinishReason, SampledToken
from moontide.token_ids import TokenArray

_OUTBOX_REPORTS = 256
_FIRST_RETRY_S = 0.005
_MAX_RETRY_S = 0.1
_EARLY_S = 0.02
"""A request joins before its last layer groups are there if they are expected so soon (docs/decisions/009-decode-joins-when.md)."""
log = get_logger(__name__)


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
        step_model: StepModel | None = None,
    ) -> None:
        """`step_model`: how long a step takes, where that is known beforehand."""
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
        self._times = StepTimes(
            step_model, max_batch=config.max_batch, chunk_tokens=config.chunk_tokens, metrics=metrics
        )
        self._steps = StepLoop(
            runner,
            max_batch=config.max_batch,
            chunk_tokens=config.chunk_tokens,
            step_model=lambda: self._times.model,
            clock=clock,
            report=self._outbox.send,
        )
        self._own_store = stores.own_node_id
        self._pins = PromptPins(self._layout_digest, stores)
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
        self._requests: dict[RequestKey, Request] = {}
        self.load = Load(self._requests, self.batch, self._times, config)
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_draining = False
        metrics.watch(self.batch)

    @property
    def is_alive(self) -> bool:
        """Whether both threads run."""
        return self._pulls.is_alive and self._steps.is_alive

    @property
    def num_open(self) -> int:
        return len(self._requests)

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
            log.warning("requests handed back", requests=len(self._requests))
            for request in list(self._requests.values()):
                self._fail(request, NodeLost("the decode node shuts down before the request has ended"))

    async def close(self) -> None:
        """Drop every request and end the threads. All pages are free afterwards."""
        for request in list(self._requests.values()):
            self._end(request, None, outcome="dropped")
        await self._writes.close()
        await self._pins.close()
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
            _log_error("request refused", key, error)
            self._metrics.ended.labels(error.code).inc()
            session.send(Failed(key=key, error=error))

    def sealed(
        self, session: ConductorSession, key: RequestKey, num_blocks: int, *, holder: str = LOCAL_NODE_ID
    ) -> None:
        """The first `num_blocks` full blocks can be pulled; the store process `holder` accounts them."""
        request = self._find(session, key)
        if request is not None and request.local is None:
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
        if request is None or request.local is not None or request.first_token is not None:
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

    def _find(self, session: ConductorSession, key: RequestKey) -> Request | None:
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
        self.load.check_open(wanted, num_pages)
        self.batch.open(key, num_blocks=len(refs), num_pages=num_pages)
        store = wanted.local_prefill
        request = self._requests[key] = Request(
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
            tbt_slo_s=wanted.tbt_slo_s,
            local=LocalPrefill(token_ids=wanted.token_ids) if store is not None else None,
            holder=(store.node_id if store is not None else "") or self._own_store,
            store_address=store.address if store is not None else "",
        )
        self._idle.clear()
        self._progress()
        if request.local is not None:
            self._find_hit(request)

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
        if wanted.tbt_slo_s is not None and not wanted.tbt_slo_s > 0:
            raise BadRequest(f"tbt_slo_s={wanted.tbt_slo_s} must be above 0 seconds; leave it out for no bound")

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
            if key in self._requests:  # else it was declined
                self.batch.make_ready(key)
        for key in self.batch.join():
            request = self._requests[key]
            entry = self.batch.find(key)
            assert entry is not None
            position, token_ids, output_idx = self._feed(request)
            self._steps.submit(
                Join(
                    key=key,
                    pages=entry.pages,
                    position=position,
                    token_ids=token_ids,
                    output_idx=output_idx,
                    sampling=request.sampling,
                    tbt_slo_s=request.tbt_slo_s,
                    gate=request.job.gate if request.job is not None else None,
                )
            )

    def _feed(self, request: Request) -> tuple[int, list[int], int]:
        """Where a request that joins goes on: position and ids of the tokens to compute, output index of the one that follows."""
        local = request.local
        if local is not None:
            local.predicted_s = self.load.prefill_s(request, local.part)
            return local.hit_tokens, local.token_ids[local.hit_tokens :].tolist(), request.output_idx
        assert request.first_token is not None
        return request.prompt_tokens, [request.first_token.token_id], request.output_idx + 1

    def _pull(self, request: Request) -> None:
        """Ask for the next blocks, unless a pull of this request is open or waits for its next try.

        Before the first ones, the TBT SLOs are looked at again: the request may end here.
        """
        entry = self.batch.find(request.key)
        assert entry is not None
        if request.retry is not None or entry.phase is not Phase.PULLING or entry.num_available == 0:
            return
        if not self._admit(request):
            return
        blocks = self.batch.take_pull(request.key, limit=self._job_blocks)
        if not blocks:
            return
        request.job = PullJob(
            key=request.key,
            blocks=blocks,
            refs=[replace(request.refs[block], holder=request.holder) for block in blocks],
            pages=[entry.pages[block] for block in blocks],
            is_urgent=entry.started,
        )
        request.is_arriving = False
        if request.local is not None and request.local.fetch_started_s is None:
            request.local.fetch_started_s = self._clock.now()
        self._pulls.submit(request.job)

    def _admit(self, request: Request) -> bool:
        """Whether the request may run, by the state of now; if not, it has ended. Asked until it may."""
        if not request.is_admitted:
            try:
                self.load.check_start(request)
            except Declined as error:
                self._fail(request, error)
                return False
            request.is_admitted = True
        return True

    def _find_hit(self, request: Request) -> None:
        """Pin the prefix hit of a prompt that is computed here, and go on with it."""
        hashes = request.full_hashes
        if not hashes:
            self._start_local(request, 0)
            return
        prompt = PinnedPrompt(key=request.key, store_address=request.store_address, root=request.root, hashes=hashes)
        self._pins.take(prompt, partial(self._start_local, request))

    def _start_local(self, request: Request, hit_blocks: int) -> None:
        """The store holds so many leading blocks of the prompt: pull them, compute the rest."""
        assert request.local is not None
        block_tokens = self._layout.block_tokens
        # The last token is always computed: it gives the first output token.
        hit_blocks = min(hit_blocks, (request.prompt_tokens - 1) // block_tokens)
        request.local.set_hit(hit_blocks * block_tokens)
        if not self._admit(request):
            return
        self.batch.start_local(request.key, hit_blocks)
        self._pull(request)
        self._check_ready(request)

    def _shorten_hit(self, request: Request, hit_blocks: int) -> None:
        """Blocks of the prefix hit did not come: what they hold is computed as well."""
        assert request.local is not None
        log.warning(
            "prefix hit is shorter than promised",
            request_id=request.key.request_id,
            promised_tokens=request.local.hit_tokens,
            tokens=hit_blocks * self._layout.block_tokens,
        )
        request.local.set_hit(hit_blocks * self._layout.block_tokens)
        request.is_admitted = False
        if self._admit(request):
            self.batch.shorten(request.key, hit_blocks)
            self._check_ready(request)

    def _check_ready(self, request: Request) -> None:
        """Run the request once its step can begin; tell the conductor once nothing needs the store's copy any more."""
        if request.key not in self._requests:
            return  # it was declined at its first pull
        entry = self.batch.find(request.key)
        assert entry is not None
        if entry.started and entry.is_pulled and not request.is_pulled:
            request.is_pulled = True
            if request.local is None:
                self._tell_pulled(request)
        if self.batch.make_ready(request.key, is_arriving=request.is_arriving):
            self._progress()

    def _tell_pulled(self, request: Request) -> None:
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
        if done.missing and request.local is not None:
            self._shorten_hit(request, min(done.missing))
            return
        if done.missing:
            self._try_again(request, done)
            return
        request.num_retries, request.missing_since_s = 0, None
        self._pull(request)
        self._check_ready(request)

    def _note_pull(self, request: Request, done: PullDone) -> None:
        num_arrived = len(done.job.blocks) - len(done.missing)
        self._metrics.pull_seconds.observe(done.ended_at_s - done.started_at_s)
        self._metrics.pulled_bytes.inc(num_arrived * self._layout.block_bytes)
        self._metrics.missed_blocks.inc(len(done.missing))
        request.pulled_at_s = done.ended_at_s
        if request.local is not None:
            request.local.fetch_ended_s = done.ended_at_s
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
            request.add_span(span)

    def _try_again(self, request: Request, done: PullDone) -> None:
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

    def _block_missing(self, request: Request, done: PullDone) -> BlockMissing:
        return BlockMissing(
            f"the store does not have {len(done.missing)} of {len(request.refs)} blocks of the prompt (first: block "
            f"{min(done.missing)}), asked for {self._config.pull_retry_s} s (decode.pull_retry_s); the prompt must be computed again"
        )

    def _on_retry(self, request: Request) -> None:
        request.retry = None
        self._pull(request)

    def _on_step(self, done: StepDone) -> None:
        self._metrics.step_seconds.observe(done.ended_at_s - done.started_at_s)
        self._metrics.step_requests.observe(len(done.tokens) + len(done.chunks))
        self._metrics.tokens.inc(len(done.tokens))
        for key, num_tokens in done.chunks:
            request = self._requests.get(key)
            if request is not None and request.local is not None:
                request.local.computed(num_tokens, step_started_s=done.started_at_s)
        for new in done.tokens:
            request = self._requests.get(new.key)
            if request is not None:  # else it ended during the step; Left follows
                self._on_token(request, new, done)
        for key in done.late:
            request = self._requests.get(key)
            if request is not None:  # else it ended during the step; Left follows
                self._on_late(request)
        for key, error in done.failed:
            self._fail_running(key, error)
        self._progress()
        if done.shape is not None:
            self._times.add(done.shape, done.ended_at_s - done.started_at_s)

    def _on_late(self, request: Request) -> None:
        """Blocks were not there when its step needed them: it runs again once they are."""
        self._metrics.late_joins.inc()
        request.is_arriving = False
        self.batch.put_back(request.key)
        self._pull(request)
        self._check_ready(request)

    def _write_back(self, request: Request) -> None:
        """Have the blocks stored that the answer completed, before the request's pages go. The token drawn last has no K/V."""
        if not self._config.write_back:
            return
        hashes = request.full_hashes
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

    def _write_prompt(self, request: Request) -> None:
        """Have the full blocks of a prompt stored that was computed here, while its request goes on."""
        local = request.local
        assert local is not None
        hashes = request.full_hashes
        if len(hashes) * self._layout.block_tokens <= local.hit_tokens:
            self._pins.give_back(request.key)
            return
        local.is_written = True
        entry = self.batch.find(request.key)
        assert entry is not None
        pages = entry.pages[: len(hashes)]
        self.batch.begin_prompt_write(request.key, pages)
        job = WriteJob(
            key=request.key,
            store_address=request.store_address,
            root=request.root,
            hashes=hashes,
            pages=pages,
            is_prompt=True,
        )
        self._writes.submit(job, on_end=partial(self._pins.give_back, request.key))

    def _keep_for_write(self, job: WriteJob, pages: Sequence[int]) -> None:
        if not job.is_prompt:
            self.batch.keep_for_write(job.key, pages)
            self._progress()

    def _on_written(self, job: WriteJob) -> None:
        if job.is_prompt:
            self.batch.prompt_write_done(job.key)
        else:
            self.batch.write_done(job.key)
        self._progress()

    def _on_token(self, request: Request, new: NewToken, done: StepDone) -> None:
        request.tail_ids.append(new.token.token_id)
        request.num_drawn += 1
        spans: list[WorkSpan] = []
        if request.num_drawn == 1:
            spans = self._on_prefilled(request, done) if request.local is not None else [_first_step(request, done)]
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

    def _on_prefilled(self, request: Request, done: StepDone) -> list[WorkSpan]:
        """The last tokens of a prompt were computed here: tell what it took; returns its bars."""
        local = request.local
        assert local is not None
        local.computed(local.num_left, step_started_s=done.started_at_s)
        told = local.done(request.key, opened_s=request.opened_at_s, ended_s=done.ended_at_s)
        self._metrics.local_prefill_seconds.observe(told.compute_s)
        self._metrics.local_prefill_tokens.labels("hit").inc(local.hit_tokens)
        self._metrics.local_prefill_tokens.labels("computed").inc(request.prompt_tokens - local.hit_tokens)
        if told.predicted_s:
            self._metrics.local_prefill_prediction_error.observe(told.predicted_s / told.compute_s - 1)
        request.session.send(told)
        self._write_prompt(request)
        span = WorkSpan(
            name="prefill",
            start_s=done.ended_at_s - told.compute_s - request.opened_at_s,
            duration_s=told.compute_s,
            first_token=local.hit_tokens,
            num_tokens=request.prompt_tokens - local.hit_tokens,
        )
        return [*request.spans, span]

    def _on_step_failed(self, failed: StepFailed) -> None:
        for key in failed.keys:
            self._fail_running(key, failed.error)
        self._progress()

    def _fail_running(self, key: RequestKey, error: Internal) -> None:
        """End a request that has left the step loop by an error."""
        request = self._requests.get(key)
        if request is not None:  # else it ended during the step; Left follows
            _log_error("request failed", key, error)
            self.batch.let_go(key)
            self._forget(request, Failed(key=key, error=error), outcome=error.code)

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

    def _fail(self, request: Request, error: MoontideError) -> None:
        if not isinstance(error, Cancelled):
            _log_error("request failed", request.key, error)
        self._end(request, Failed(key=request.key, error=error), outcome=error.code)

    def _end(self, request: Request, event: Finished | Failed | None, *, outcome: str) -> None:
        """End a request from outside the step loop, in whatever phase it is."""
        if request.key not in self._requests:
            return  # the end of another one made room, and it was declined then
        entry = self.batch.find(request.key)
        if entry is not None and entry.phase is Phase.RUNNING:
            self._steps.submit(Leave(request.key))
        self.batch.end(request.key)
        self._forget(request, event, outcome=outcome)
        self._progress()

    def _forget(self, request: Request, event: Finished | Failed | None, *, outcome: str) -> None:
        """The request has ended in the batch: stop its timers, tell its conductor. Its record goes, so this happens once."""
        del self._requests[request.key]
        request.deadline.cancel()
        if request.retry is not None:
            request.retry.cancel()
        if request.job is not None:
            request.job.cancelled.set()
        if request.local is not None and not request.local.is_written:
            self._pins.give_back(request.key)
        if event is not None:
            request.session.send(event)
        self._metrics.ended.labels(outcome).inc()
        if not self._requests:
            self._idle.set()


def _log_error(what: str, key: RequestKey, error: MoontideError) -> None:
    """A request that is declined goes elsewhere, and nothing is wrong."""
    write = log.info if isinstance(error, Declined) else log.warning
    write(what, request_id=key.request_id, epoch=key.epoch, code=error.code, message=error)


def _finished(request: Request, token_id: int, reason: FinishReason) -> Finished:
    return Finished(key=request.key, reason=reason, stop_token_id=token_id if reason is FinishReason.STOP else None)


def _first_step(request: Request, done: StepDone) -> WorkSpan:
    return WorkSpan(
        name="first step",
        start_s=done.started_at_s - request.opened_at_s,
        duration_s=done.ended_at_s - done.started_at_s,
        first_token=request.prompt_tokens,
        num_tokens=1,
    )
