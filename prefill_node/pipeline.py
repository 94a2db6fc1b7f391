"""The loop of one stage in one group epoch: applies the log in order and decides nothing.

    event loop      apply(entry) -> steps ->+-> [hidden states from the link] -> compute thread -> report, send on
                                            fetches -> fetch thread -> report
    compute thread  forward, sampling; hands each finished layer group to the put thread
    put thread      puts; reports after the last group of a step

The border is one executor queue in each direction of work and `call_soon_threadsafe` back. The queues are bounded by the
log: at most num_stages + slack steps are in flight, and a page is put or fetched once before it is reused.

Tensor shapes: T tokens of the step, D hidden size, R rows that get logits, V vocabulary.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvstore.block import BLOCK_HASH_BYTES, BlockHash
from kvstore.client import BlockRef, StoreClient
from kvstore.node import NodeIdentity
from kvstore.pool import RequestKey
from model_runner.kv_fetch import fetch_blocks
from model_runner.runner import Runner, Segment
from model_runner.sampling import sample
from moontide.clock import Clock
from moontide.errors import Internal
from moontide.log import get_logger
from moontide.perf_model import OnlineFit, StepModel, StepSample, StepShape
from moontide.sampling_params import SamplingParams
from moontide.token_ids import unpack_token_ids
from moontide_proto.v1 import common_pb2, stage_pb2
from prefill_node.kv_push import KVPusher, PushBlock, PushResult, StepPush
from prefill_node.link import ExpectedTensor, LinkError, LinkReceiver, LinkSender, tensor_bytes
from prefill_node.metrics import StageMetrics
from prefill_node.stage_times import StageTimes
from prefill_node.step_log import chunk_key

Report = Callable[[stage_pb2.StageReport], None]

log = get_logger(__name__)


class StageThreads:
    """The threads of a stage process. Each runs one job at a time, in the order of submission."""

    def __init__(self, *, torch_threads: int) -> None:
        def on_start() -> None:
            torch.set_num_threads(torch_threads)

        self.compute = ThreadPoolExecutor(1, "compute", initializer=on_start)
        self.put = ThreadPoolExecutor(1, "put")
        self.fetch = ThreadPoolExecutor(1, "fetch")
        self.watch = ThreadPoolExecutor(1, "watch")
        """Questions after the store's health: they may not queue behind other questions that the store leaves unanswered."""
        self._is_closed = False

    async def wait_idle(self, *, timeout_s: float) -> None:
        """Return once everything submitted so far is over. Raises: Internal when a job does not end."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                for thread in (self.compute, self.put, self.fetch):
                    await loop.run_in_executor(thread, _nothing)
        except TimeoutError as error:
            raise Internal(
                f"a job of an ended epoch still runs after {timeout_s} s; the process has to be restarted"
            ) from error

    async def close(self, *, timeout_s: float) -> None:
        """End the threads with the jobs they run. Idempotent.

        Raises: Internal when a job does not end: the memory that it works on has to stay until the process ends.
        """
        if self._is_closed:
            return
        self._is_closed = True
        try:
            await self.wait_idle(timeout_s=timeout_s)
        finally:
            for thread in (self.compute, self.put, self.fetch, self.watch):
                thread.shutdown(wait=False, cancel_futures=True)


@dataclass
class _Request:
    """What this stage holds of a request."""

    pages: list[int] = field(default_factory=list)
    """Block table so far."""
    open_jobs: int = 0
    """Forwards, puts and fetches that are not over."""
    is_ended: bool = False


@dataclass(frozen=True, kw_only=True)
class _Step:
    """One ComputeStep, made ready when the entry arrives: later entries may not change its block tables."""

    seq: int
    chunks: tuple[stage_pb2.Chunk, ...]
    segments: tuple[Segment, ...]
    partial_pages: tuple[tuple[int, int], ...]
    """(page, tokens in it) of the partial blocks that the step finishes."""
    shape: StepShape
    push: StepPush
    expected: ExpectedTensor


@dataclass(frozen=True, kw_only=True)
class _Running:
    """A step that the compute thread has, or will take next."""

    step: _Step
    received_s: float | None
    """When its hidden states were here; None on the first stage, which needs none."""
    computed: asyncio.Future[_Computed]


@dataclass(frozen=True, kw_only=True)
class _Computed:
    started_s: float
    ended_s: float
    payload: memoryview | None
    """Bytes of the hidden states for the next stage."""
    tokens: list[common_pb2.Token]


class StagePipeline:
    """Everything that this stage holds of one group epoch; a new epoch starts with a new object."""

    def __init__(
        self,
        *,
        epoch: int,
        runner: Runner,
        client: StoreClient,
        store: NodeIdentity,
        threads: StageThreads,
        report: Report,
        clock: Clock,
        metrics: StageMetrics,
        dtype: str,
        transfer_timeout_s: float,
        step_model: StepModel | None,
        push: str,
        max_push_bytes: int,
    ) -> None:
        """
        Args:
            store: the store process that accounts what this group stores.
            report: takes this stage's reports, on the event loop.
            dtype: of the hidden states.
            transfer_timeout_s: bound on one tensor's way over a link.
            step_model: how long this stage takes for a step, if that is known.
            push: `prefill.push`; `max_push_bytes` likewise.
        """
        self._epoch = epoch
        self._runner = runner
        self._client = client
        self._holder = store.node_id
        self._threads = threads
        self._send_report = report
        self._clock = clock
        self._metrics = metrics
        self._dtype = dtype
        self._transfer_timeout_s = transfer_timeout_s
        self._loop = asyncio.get_running_loop()
        self._last_seq = 0
        self._requests: dict[RequestKey, _Request] = {}
        self._steps: asyncio.Queue[_Step] = asyncio.Queue()
        self._running: asyncio.Queue[_Running] = asyncio.Queue()
        self._link_free_s = 0.0
        """When the last hidden states were sent."""
        self.times = StageTimes(metrics, clock)
        self._step_times = OnlineFit(step_model)
        self._closed = threading.Event()
        self._failed: asyncio.Future[None] = self._loop.create_future()
        self._pusher = KVPusher(
            client=client,
            kv=runner.kv,
            put_thread=threads.put,
            clock=clock,
            metrics=metrics,
            mode=push,
            max_call_bytes=max_push_bytes,
            skip=self._is_over,
            on_done=lambda result: self._on_loop(lambda: self._finish_puts(result)),
            retry_wait=self._closed.wait,
            segment=store.segment,
        )

    async def run(self, *, receiver: LinkReceiver | None, sender: LinkSender | None) -> None:
        """Work until cancelled. Raises: an ExceptionGroup of what broke: a link, a forward, a report that was refused."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._start_steps(receiver), name="start-steps")
            tasks.create_task(self._finish_steps(sender), name="finish-steps")
            await self._failed

    async def close(self, *, timeout_s: float) -> None:
        """Skip what is queued and wait for what runs: afterwards no thread touches the pages. Raises: Internal."""
        self._closed.set()
        self._failed.cancel()
        while not self._running.empty():
            self._running.get_nowait().computed.cancel()
        await self._threads.wait_idle(timeout_s=timeout_s)
        self._metrics.put_waiting_bytes.set(0)

    def apply(self, entry: stage_pb2.LogEntry) -> None:
        """Take the next entry of the log. Raises: Internal when it does not follow the one before."""
        if entry.epoch != self._epoch or entry.seq != self._last_seq + 1:
            raise Internal(
                f"log entry {entry.seq} of epoch {entry.epoch} after entry {self._last_seq} of epoch {self._epoch}"
            )
        self._last_seq = entry.seq
        kind = entry.WhichOneof("entry")
        if kind == "compute":
            self.times.open_step()
            self.times.open_store_job()
            self._steps.put_nowait(self._plan(entry.seq, entry.compute))
        elif kind == "fetch":
            self._fetch(entry.fetch)
        elif kind == "end":
            key = RequestKey(entry.end.request_id, entry.end.request_epoch)
            self._requests[key].is_ended = True
            self._pusher.end_request(key)
            self._end_if_idle(key)
        else:
            raise Internal(f"log entry {entry.seq} is of an unknown kind; run one version on all stages")

    # Steps: event loop -> compute thread -> event loop.

    def _plan(self, seq: int, compute: stage_pb2.ComputeStep) -> _Step:
        page_tokens = self._runner.kv.page_tokens
        segments, blocks, partial_pages = [], [], []
        for chunk in compute.chunks:
            key = chunk_key(chunk)
            request = self._requests.setdefault(key, _Request())
            request.pages.extend(chunk.new_pages)
            request.open_jobs += 2  # its forward and its puts
            end = chunk.first_token + chunk.num_tokens
            segments.append(
                Segment(
                    start=chunk.first_token,
                    num_tokens=chunk.num_tokens,
                    pages=tuple(request.pages),
                    wants_logits=chunk.is_last,
                )
            )
            first_page = chunk.first_token // page_tokens
            names: list[BlockHash | None] = [*_split_hashes(chunk.block_hashes)]
            if end % page_tokens:
                names.append(None)
                partial_pages.append((request.pages[end // page_tokens], end % page_tokens))
            blocks += [
                PushBlock(BlockRef(name, key.request_id, key.epoch, self._holder), request.pages[first_page + offset])
                for offset, name in enumerate(names)
            ]
        shape = StepShape.of_chunks((segment.num_tokens, segment.start) for segment in segments)
        step_model = self._step_times.model
        return _Step(
            seq=seq,
            chunks=tuple(compute.chunks),
            segments=tuple(segments),
            partial_pages=tuple(partial_pages),
            shape=shape,
            push=self._pusher.plan(
                seq,
                blocks,
                requests=[chunk_key(chunk) for chunk in compute.chunks],
                finished=[chunk_key(chunk) for chunk in compute.chunks if chunk.is_last],
                step_s=step_model.time_s(shape) if step_model else None,
            ),
            expected=ExpectedTensor(
                epoch=self._epoch,
                seq=seq,
                request_ids=[chunk.request_id for chunk in compute.chunks],
                first_tokens=[chunk.first_token for chunk in compute.chunks],
                num_tokens=sum(chunk.num_tokens for chunk in compute.chunks),
                hidden_size=self._runner.info.hidden_size,
                dtype=self._dtype,
            ),
        )

    async def _start_steps(self, receiver: LinkReceiver | None) -> None:
        while True:
            await self._start_step(receiver)

    async def _start_step(self, receiver: LinkReceiver | None) -> None:
        """1. (later stages) the next tensor's header  2. the next step of the log  3. its payload  4. to the compute thread."""
        if receiver is None:
            step, hidden_TD, received_s = await self._steps.get(), None, None
        else:
            header, payload_bytes = await receiver.next_header()
            step = await self._step_of(header)
            hidden_TD = await receiver.payload(header, payload_bytes, step.expected, timeout_s=self._transfer_timeout_s)
            received_s = self._clock.now()
        computed = self._loop.run_in_executor(self._threads.compute, self._compute, step, hidden_TD)
        self._running.put_nowait(_Running(step=step, received_s=received_s, computed=computed))

    async def _step_of(self, header: stage_pb2.TensorHeader) -> _Step:
        """The log may be a little behind the link: it travels on another connection."""
        try:
            async with asyncio.timeout(self._transfer_timeout_s):
                return await self._steps.get()
        except TimeoutError as error:
            raise LinkError(f"link carries step {header.seq}, and the log has none after {self._last_seq}") from error

    async def _finish_steps(self, sender: LinkSender | None) -> None:
        while True:
            await self._finish_step(sender)

    async def _finish_step(self, sender: LinkSender | None) -> None:
        """1. the forward's end, in order  2. report it  3. hidden states to the next stage; their memory is free afterwards.

        A link that is behind delays reports too, and so what stage 0 plans; forwards go on meanwhile.
        """
        running = await self._running.get()
        step, computed = running.step, await running.computed
        compute_s = computed.ended_s - computed.started_s
        self._step_times.add(StepSample(step.shape, compute_s))
        wait_send_s = max(0.0, self._link_free_s - computed.ended_s)
        self._metrics.wait_send_seconds.inc(wait_send_s)
        self._metrics.chunk_tokens.inc(step.expected.num_tokens)
        wait_recv_s = self.times.close_step(
            ready_s=running.received_s, started_s=computed.started_s, ended_s=computed.ended_s
        )
        self._report(
            step_done=stage_pb2.StepDone(
                seq=step.seq,
                wait_recv_s=wait_recv_s,
                wait_send_s=wait_send_s,
                compute_s=compute_s,
                age_s=self._clock.now() - computed.ended_s,
                tokens=computed.tokens,
            )
        )
        for chunk in step.chunks:
            self._job_over(chunk_key(chunk))
        if sender is not None:
            assert computed.payload is not None, "a stage that is not the last has hidden states to send"
            await sender.send(step.expected, computed.payload, timeout_s=self._transfer_timeout_s)
            self._link_free_s = self._clock.now()

    @torch.inference_mode()
    def _compute(self, step: _Step, hidden_TD: Tensor | None) -> _Computed:
        """In the compute thread."""
        started_s = self._clock.now()
        try:
            tokens, payload = self._forward(step, hidden_TD)
        except Exception:
            # What had been started goes on without the error, and `close` promises that no page is touched after it.
            self._wait_idle()
            raise
        return _Computed(started_s=started_s, ended_s=self._clock.now(), payload=payload, tokens=tokens)

    def _forward(self, step: _Step, hidden_TD: Tensor | None) -> tuple[list[common_pb2.Token], memoryview | None]:
        """Returns what _Computed holds, with all of it on the host."""
        for page, num_tokens in step.partial_pages:
            self._runner.kv.zero_tail(page, num_tokens)
        output = self._runner.forward(
            step.segments,
            token_ids_T=_token_ids(step.chunks) if self._runner.spec.is_first_stage else None,
            hidden_TD=hidden_TD,
            on_layer_group=lambda group_idx: self._pusher.group_done(step.push, group_idx),
        )
        if self._runner.spec.is_last_stage:
            return _sample(step.chunks, output), None
        return [], tensor_bytes(output.cpu().contiguous())

    def _wait_idle(self) -> None:
        try:
            self._runner.wait_idle()
        except Exception:
            log.exception("device failed")  # one that cannot even be waited for writes nothing more

    def _finish_puts(self, result: PushResult) -> None:
        self.times.close_store_job()
        self._metrics.puts_failed.inc(result.failed)
        self._report(
            puts_done=stage_pb2.PutsDone(
                seq=result.seq,
                put_s=result.put_s,
                age_s=self._clock.now() - result.ended_s,
                failed=result.failed,
            )
        )
        for key in result.requests:
            self._job_over(key)

    # Fetches: event loop -> fetch thread -> event loop.

    def _fetch(self, fetch: stage_pb2.FetchPrefix) -> None:
        key = RequestKey(fetch.request_id, fetch.request_epoch)
        self.times.open_store_job()
        self._requests[key] = _Request(pages=list(fetch.pages), open_jobs=1)
        self._threads.fetch.submit(self._fetch_and_report, key, fetch)

    def _fetch_and_report(self, key: RequestKey, fetch: stage_pb2.FetchPrefix) -> None:
        """In the fetch thread."""
        started_s = self._clock.now()
        try:
            num_blocks = self._fetch_blocks(key, fetch)
        except Exception:
            log.exception("fetch failed", request_id=key.request_id)
            num_blocks = 0
        ended_s = self._clock.now()
        self._on_loop(lambda: self._finish_fetch(key, num_blocks, started_s, ended_s))

    def _fetch_blocks(self, key: RequestKey, fetch: stage_pb2.FetchPrefix) -> int:
        """Blocks, from the start of the prompt, that are verified in the pages in all layer groups of this stage."""
        hashes = _split_hashes(fetch.block_hashes)
        refs = [BlockRef(name, key.request_id, key.epoch, self._holder) for name in hashes]
        arrived = fetch_blocks(
            self._client,
            self._runner.kv,
            list(zip(refs, fetch.pages[fetch.first_block :], strict=True)),
            is_cancelled=lambda: self._is_over(key),
            only_prefix=True,
        )
        return fetch.first_block + sum(itertools.takewhile(bool, arrived))

    def _finish_fetch(self, key: RequestKey, num_blocks: int, started_s: float, ended_s: float) -> None:
        self.times.close_store_job()
        self._report(
            fetch_done=stage_pb2.FetchDone(
                request_id=key.request_id,
                request_epoch=key.epoch,
                num_blocks=num_blocks,
                fetch_s=ended_s - started_s,
                age_s=self._clock.now() - ended_s,
            )
        )
        self._job_over(key)

    # Ends.

    def _job_over(self, key: RequestKey) -> None:
        self._requests[key].open_jobs -= 1
        self._end_if_idle(key)

    def _end_if_idle(self, key: RequestKey) -> None:
        request = self._requests[key]
        if request.is_ended and request.open_jobs == 0:
            del self._requests[key]
            self._report(end_done=stage_pb2.EndDone(request_id=key.request_id, request_epoch=key.epoch))

    def _is_over(self, key: RequestKey) -> bool:
        """Whether work for a request is pointless; may be asked in any thread."""
        request = self._requests.get(key)
        return self._closed.is_set() or request is None or request.is_ended

    # The way back.

    def _report(
        self,
        *,
        step_done: stage_pb2.StepDone | None = None,
        puts_done: stage_pb2.PutsDone | None = None,
        fetch_done: stage_pb2.FetchDone | None = None,
        end_done: stage_pb2.EndDone | None = None,
    ) -> None:
        """A report that is refused ends the epoch: see `run`."""
        try:
            self._send_report(
                stage_pb2.StageReport(
                    epoch=self._epoch,
                    stage_idx=self._runner.spec.stage_idx,
                    step_done=step_done,
                    puts_done=puts_done,
                    fetch_done=fetch_done,
                    end_done=end_done,
                )
            )
        except Exception as error:
            log.warning("report refused", error=str(error))
            if not self._failed.done():
                self._failed.set_exception(error)

    def _on_loop(self, act: Callable[[], None]) -> None:
        """From another thread; nothing happens any more once the epoch is over."""
        self._loop.call_soon_threadsafe(lambda: None if self._closed.is_set() else act())


def _nothing() -> None:
    """Runs when everything before it in the thread's queue is over."""


def _split_hashes(packed: bytes) -> list[BlockHash]:
    return [BlockHash(packed[i : i + BLOCK_HASH_BYTES]) for i in range(0, len(packed), BLOCK_HASH_BYTES)]


def _token_ids(chunks: Sequence[stage_pb2.Chunk]) -> Tensor:
    """[T] int64."""
    return torch.from_numpy(np.concatenate([unpack_token_ids(chunk.token_ids) for chunk in chunks]).astype(np.int64))


def _sample(chunks: Sequence[stage_pb2.Chunk], logits_RV: Tensor) -> list[common_pb2.Token]:
    """One token, or why there is none, for each chunk that finishes its prompt, in order."""
    last = [chunk for chunk in chunks if chunk.is_last]
    if not last:
        return []
    output_idx = [chunk.output_idx for chunk in last]
    drawn = sample(logits_RV, [SamplingParams.from_proto(chunk.sampling) for chunk in last], output_idx)
    return [
        common_pb2.Token(output_idx=idx, error=str(token)) if isinstance(token, Internal) else token.to_proto(idx)
        for token, idx in zip(drawn, output_idx, strict=True)
    ]
