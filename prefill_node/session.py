"""One epoch of a complete group, seen from stage 0: pages, plan and log, and the prompts that are in them.

    Prompt   pages taken -> (fetch) -> chunks, cursor moves when a chunk is sent -> end -> fence -> pages free

Runs on the event loop and never waits. When the group is lost the whole object goes; a new epoch starts with a new one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kvstore.pool import RequestKey
from model_runner.pages import PageAllocator
from moontide.clock import Clock
from moontide.errors import Internal
from moontide.token_ids import pack_token_ids
from moontide_proto.v1 import common_pb2, stage_pb2
from prefill_node.prompt import Prompt
from prefill_node.scheduler import PlannedChunk, Scheduler
from prefill_node.step_log import LogViolation, PutsOutcome, StepLog, chunk_key

Send = Callable[[stage_pb2.LogEntry], None]


class GroupSession:
    """Owner of the group's pages and of its log for one epoch."""

    def __init__(
        self, *, epoch: int, num_stages: int, num_pages: int, scheduler: Scheduler, send: Send, clock: Clock
    ) -> None:
        """
        Args:
            send: gives an entry to every stage, this one included.
        """
        self.epoch = epoch
        self._num_stages = num_stages
        self.pages = PageAllocator(num_pages)
        self.log = StepLog(epoch=epoch, num_stages=num_stages)
        self.pages_freed = asyncio.Event()
        self.last_report_s = clock.now()
        """When a stage last reported progress, or the log was last empty. While micro-batches are in flight only their ends count
        as progress: a stage whose forward hangs still acknowledges everything else."""
        self._scheduler = scheduler
        self._send = send
        self._clock = clock
        self._prompts: dict[RequestKey, Prompt] = {}

    @property
    def queued_tokens(self) -> int:
        return self._scheduler.queued_tokens

    @property
    def num_prompts(self) -> int:
        """Prompts that hold pages, those behind the fence included."""
        return len(self._prompts)

    def knows(self, key: RequestKey) -> bool:
        """Whether the group still holds something of that request."""
        return key in self._prompts

    def take_pages(self, prompt: Prompt) -> bool:
        """Take all pages of a prompt, so that it never waits half-way; False when too few are free."""
        if prompt.num_pages > self.pages.num_free:
            return False
        prompt.pages = self.pages.allocate(prompt.num_pages)
        self._prompts[prompt.key] = prompt
        return True

    def fetch(self, prompt: Prompt, num_blocks: int) -> None:
        """Have the first blocks fetched on every stage; `prompt.fetched` tells how far they came."""
        self._note_start()
        prompt.num_pages_sent = num_blocks
        self._send(
            self.log.append_fetch(
                prompt.key, block_hashes=b"".join(prompt.block_hashes[:num_blocks]), pages=prompt.pages[:num_blocks]
            )
        )

    def compute(self, prompt: Prompt, *, cursor: int) -> None:
        """Compute the prompt from token `cursor` on, after the prompts before it."""
        prompt.put_tokens = cursor
        self._scheduler.add(prompt.key, order=prompt.order, num_tokens=prompt.num_tokens, cursor=cursor)
        self._pump()

    def finish(self, prompt: Prompt) -> None:
        """The prompt is done, or given up in whatever phase; its pages are free after the fence."""
        if prompt.key not in self._prompts:
            return
        self._scheduler.remove(prompt.key)
        if self.log.knows(prompt.key):
            self._note_start()
            self._send(self.log.append_end(prompt.key))
        else:
            self._free(prompt.key)

    def on_report(self, stage_idx: int, report: stage_pb2.StageReport) -> None:
        """Raises: LogViolation when the report cannot be."""
        now = self._clock.now()
        kind = report.WhichOneof("report")
        if kind == "step_done" or not self.log.in_flight_steps:
            self.last_report_s = now
        if kind == "step_done":
            self._on_step_done(stage_idx, report.step_done, now)
        elif kind == "puts_done":
            self._on_puts_done(stage_idx, report.puts_done, now)
        elif kind == "fetch_done":
            self._on_fetch_done(stage_idx, report.fetch_done, now)
        elif kind == "end_done":
            key = RequestKey(report.end_done.request_id, report.end_done.request_epoch)
            if self.log.end_done(stage_idx, key):
                self._free(key)
        else:
            raise Internal(f"stage {stage_idx} sent a report of an unknown kind; run one version on all stages")

    def close(self) -> None:
        """The group is lost: nothing is sent or freed any more."""
        self._prompts.clear()

    def check_invariants(self) -> None:
        """Every page is free or belongs to exactly one prompt, and the log's books agree."""
        self.pages.check_invariants()
        self.log.check_invariants()
        held = [page for prompt in self._prompts.values() for page in prompt.pages]
        assert len(held) == len(set(held)), "a page belongs to two prompts"
        assert len(held) + self.pages.num_free == self.pages.num_pages, "a page is lost"

    def _pump(self) -> None:
        """Fill the pipeline."""
        while planned := self._scheduler.next_micro_batch(in_flight_steps=self.log.in_flight_steps):
            if not self.log.in_flight_steps:
                self.last_report_s = self._clock.now()
            self._send(self.log.append_compute([self._chunk(chunk) for chunk in planned]))

    def _chunk(self, planned: PlannedChunk) -> stage_pb2.Chunk:
        prompt = self._prompts[planned.key]
        prompt.number_chunk(planned.first_token)
        end = planned.first_token + planned.num_tokens
        end_page = -(-end // prompt.block_tokens)
        new_pages = prompt.pages[prompt.num_pages_sent : end_page]
        prompt.num_pages_sent = max(prompt.num_pages_sent, end_page)
        hashes = prompt.block_hashes[planned.first_token // prompt.block_tokens : end // prompt.block_tokens]
        return stage_pb2.Chunk(
            request_id=prompt.key.request_id,
            request_epoch=prompt.key.epoch,
            first_token=planned.first_token,
            num_tokens=planned.num_tokens,
            new_pages=new_pages,
            token_ids=pack_token_ids(prompt.token_ids[planned.first_token : end]),
            block_hashes=b"".join(hashes),
            is_last=planned.is_last,
            sampling=prompt.sampling.to_proto() if planned.is_last else None,
            output_idx=prompt.output_idx,
        )

    def _on_step_done(self, stage_idx: int, report: stage_pb2.StepDone, now: float) -> None:
        chunks = self.log.step_done(stage_idx, report.seq)
        ended_s = now - report.age_s
        for chunk in chunks:
            prompt = self._prompts[chunk_key(chunk)]
            prompt.add_span(f"stage {stage_idx}", end_s=ended_s, duration_s=report.compute_s, chunk=chunk)
            if stage_idx == 0 and prompt.compute_started_s is None:
                prompt.compute_started_s = ended_s - report.compute_s
        if stage_idx == self._num_stages - 1:
            self._note_tokens(chunks, report.tokens, now)
        self._pump()

    def _note_tokens(self, chunks: Sequence[stage_pb2.Chunk], tokens: Sequence[common_pb2.Token], now: float) -> None:
        last = [chunk for chunk in chunks if chunk.is_last]
        if len(tokens) != len(last):
            raise LogViolation(f"the last stage sent {len(tokens)} tokens for {len(last)} finished prompts")
        for chunk, token in zip(last, tokens, strict=True):
            prompt = self._prompts[chunk_key(chunk)]
            prompt.first_token_s = now
            if not prompt.first_token.done():
                prompt.first_token.set_result(token)

    def _on_puts_done(self, stage_idx: int, report: stage_pb2.PutsDone, now: float) -> None:
        chunks = self.log.step_chunks(report.seq)
        outcome = self.log.puts_done(stage_idx, report.seq, failed=report.failed)
        for chunk in chunks:
            self._prompts[chunk_key(chunk)].add_span(
                f"stage {stage_idx} put", end_s=now - report.age_s, duration_s=report.put_s, chunk=chunk
            )
        if outcome is not None:
            self._note_puts(outcome)

    def _note_puts(self, outcome: PutsOutcome) -> None:
        for chunk in outcome.chunks:
            prompt = self._prompts[chunk_key(chunk)]
            prompt.put_tokens = chunk.first_token + chunk.num_tokens
            prompt.failed_puts += outcome.failed
            prompt.puts_changed.set()

    def _on_fetch_done(self, stage_idx: int, report: stage_pb2.FetchDone, now: float) -> None:
        key = RequestKey(report.request_id, report.request_epoch)
        num_blocks = self.log.fetch_done(stage_idx, key, report.num_blocks)
        prompt = self._prompts[key]
        prompt.add_span(f"stage {stage_idx}", end_s=now - report.age_s, duration_s=report.fetch_s, chunk=None)
        if num_blocks is not None and not prompt.fetched.done():
            prompt.fetched.set_result(num_blocks)

    def _free(self, key: RequestKey) -> None:
        self.pages.free(self._prompts.pop(key).pages)
        self.pages_freed.set()

    def _note_start(self) -> None:
        if not self.log.has_open_work:
            self.last_report_s = self._clock.now()
