"""One epoch of a complete group, seen from stage 0: pages, plan and log, and the prompts that are in them.

    Prompt   pages taken -> (fetch) -> chunks, cursor moves when a chunk is sent -> end -> fence -> pages free
                  ^                         |
                  +-- pages taken away <----+   when a prompt that goes first does not fit; what was computed is in the store

Runs on the event loop and never waits. When the group is lost the whole object goes; a new epoch starts with a new one.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence

from kvstore.pool import RequestKey
from model_runner.pages import PrefixPages
from moontide.clock import Clock
from moontide.errors import Internal
from moontide.perf_model import OnlineFit, StepModel, StepSample, StepShape
from moontide.token_ids import pack_token_ids
from moontide_proto.v1 import common_pb2, stage_pb2
from prefill_node.admission import Holder, choose_victims
from prefill_node.chunking import ChunkPlanner
from prefill_node.config import PrefillConfig
from prefill_node.metrics import GroupMetrics
from prefill_node.policy import Candidate
from prefill_node.prompt import Prompt
from prefill_node.scheduler import PlannedChunk, Scheduler
from prefill_node.step_log import LogViolation, PutsOutcome, StepLog, chunk_key
from prefill_node.turns import Turns

Send = Callable[[stage_pb2.LogEntry], None]

_FIRST_EPOCH = 1
"""Of a request: its first attempt."""
_SHORTEST_SLO_S = 0.5
_SLO_PER_PREDICTION = 1.5
"""A prompt that comes without an SLO wants its first token within so many times what it would take alone."""


class GroupSession:
    """Owner of the group's pages and of its log for one epoch."""

    def __init__(
        self,
        *,
        epoch: int,
        config: PrefillConfig,
        num_pages: int,
        block_tokens: int,
        step_models: Sequence[StepModel | None],
        send: Send,
        clock: Clock,
        metrics: GroupMetrics,
    ) -> None:
        """
        Args:
            step_models: what each stage has measured of itself.
            send: gives an entry to every stage, this one included.
        """
        self.epoch = epoch
        self.pages = PrefixPages(num_pages)
        self.log = StepLog(epoch=epoch, num_stages=config.num_stages)
        self.last_report_s = clock.now()
        """When a stage last reported progress, or the log was last empty. While micro-batches are in flight only their ends count
        as progress: a stage whose forward hangs still acknowledges everything else."""
        self.on_pages_changed: Callable[[], None] = _nothing
        """Called when pages became free, or could be taken away from somebody: also whenever a step is over, for time changes whose
        turn it is."""
        self._config = config
        self._fits = [OnlineFit(model) for model in step_models]
        self._planner = ChunkPlanner(
            chunking=config.chunking,
            chunk_tokens=config.chunk_tokens,
            block_tokens=block_tokens,
            max_step_s=config.max_step_s,
        )
        # A turn is the longest planned step: what a tenant that comes waits for while another one has the group.
        self._turns = Turns(policy=config.policy, starvation_s=config.starvation_s, quantum_s=config.max_step_s)
        self._scheduler = Scheduler(
            mode=config.mode,
            turns=self._turns,
            planner=self._planner,
            max_in_flight_steps=config.max_in_flight_steps,
            on_preempted=metrics.preemptions.inc,
            on_starved=metrics.starved_steps.inc,
        )
        self._send = send
        self._clock = clock
        self._metrics = metrics
        self._prompts: dict[RequestKey, Prompt] = {}
        self._unplanned: dict[RequestKey, Prompt] = {}
        """Prompts that the scheduler does not know: they wait for pages or for their prefix."""
        self._bubbles = _Bubbles(config.num_stages, metrics)
        self._use_models()

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

    def predict_s(self, first_token: int, num_tokens: int) -> float:
        """Expected time to compute tokens [first_token, num_tokens) of a prompt, alone in the group; 0 before anything was measured."""
        return self._planner.remaining_s(first_token, num_tokens, self._planner.step_s(first_token, num_tokens))

    @property
    def slowest_stage(self) -> StepModel | None:
        """The model of the stage that takes longest for a full chunk behind another; None before anything was measured."""
        return self._planner.stages[self._slowest_idx] if self._planner.stages else None

    @property
    def queued_s(self) -> float:
        """Predicted time until the slowest stage has done all that is here; 0 before anything was measured."""
        waiting = (
            (max(prompt.put_tokens, prompt.hit_tokens), prompt.num_tokens) for prompt in self._unplanned.values()
        )
        waiting_s = sum(self._planner.bottleneck_s(*each, self._planner.step_s(*each)) for each in waiting)
        return self._in_flight_s + self._scheduler.queued_s + waiting_s

    def ahead_s(self, prompt: Prompt) -> float:
        """Predicted time until a prompt that is not planned yet would get its first step if nobody else came."""
        waiting = [self._candidate(each) for each in self._unplanned.values()]
        line = self._turns.ranked([*self._scheduler.candidates(), *waiting], self._clock.now())
        before = itertools.takewhile(lambda candidate: candidate.key != prompt.key, line)
        return self._in_flight_s + sum(candidate.work_left_s for candidate in before)

    def is_starved(self, prompt: Prompt) -> bool:
        """Whether a prompt without pages has waited so long that it goes first."""
        return self._turns.is_starved(self._candidate(prompt), self._clock.now())

    def arrive(self, prompt: Prompt) -> None:
        """The prompt is here, until it is finished; now it waits for pages."""
        self.expect(prompt, 0)
        self._turns.enter(prompt.key, prompt.share)
        self._unplanned[prompt.key] = prompt

    def expect(self, prompt: Prompt, cursor: int) -> None:
        """Note how long the prompt will take from token `cursor` on, and so when its first token is wanted."""
        prompt.predicted_s = self.predict_s(cursor, prompt.num_tokens)
        slo_s = prompt.ttft_slo_s or max(_SHORTEST_SLO_S, _SLO_PER_PREDICTION * prompt.predicted_s)
        prompt.deadline_s = prompt.arrived_s + slo_s

    def choose(self, waiting: Sequence[Prompt]) -> Prompt | None:
        """Which of the waiting prompts may take its pages now; takes pages away from others if that is how it will fit."""
        now_s = self._clock.now()
        by_key = {prompt.key: prompt for prompt in waiting}
        line = self._turns.ranked([self._candidate(prompt) for prompt in waiting], now_s)
        for candidate in line:
            prompt = by_key[candidate.key]
            if candidate is line[0] and prompt.num_pages > self.pages.num_free:
                self._make_room(candidate, prompt, now_s)
            if prompt.num_pages <= self.pages.num_free:
                return prompt
            if self._turns.is_starved(candidate, now_s) or self._is_making_room:
                return None
        return None

    def take_pages(self, prompt: Prompt, *, hit_blocks: int) -> None:
        """Take all pages of a prompt, so that it never waits half-way. Blocks of the hit that are in pages are shared.

        Not by a second attempt: the store may have lost what decode wants, and only a fetch notices, so that it is put again.
        Raises: OutOfPages.
        """
        names = prompt.block_hashes[:hit_blocks] if prompt.key.epoch == _FIRST_EPOCH else []
        prompt.pages, prompt.held_blocks = self.pages.take(prompt.num_pages, names=names)
        prompt.hit_tokens = hit_blocks * prompt.block_tokens
        prompt.num_pages_sent = 0
        prompt.put_tokens = prompt.held_blocks * prompt.block_tokens
        self._prompts[prompt.key] = prompt

    def fetch(self, prompt: Prompt, num_blocks: int) -> None:
        """Have the first blocks on every stage, from the store unless they are in the pages; `prompt.fetched` tells how far they came."""
        prompt.fetched = asyncio.get_running_loop().create_future()
        if prompt.held_blocks >= num_blocks:
            prompt.fetched.set_result(num_blocks)
            return
        self._note_start()
        prompt.num_pages_sent = num_blocks
        self._send(
            self.log.append_fetch(
                prompt.key,
                block_hashes=b"".join(prompt.block_hashes[prompt.held_blocks : num_blocks]),
                pages=prompt.pages[:num_blocks],
                first_block=prompt.held_blocks,
            )
        )

    def compute(self, prompt: Prompt, *, cursor: int) -> None:
        """Compute the prompt from token `cursor` on, when it is its turn."""
        prompt.put_tokens = cursor
        self._unplanned.pop(prompt.key, None)
        self._scheduler.add(
            prompt.key,
            order=prompt.order,
            num_tokens=prompt.num_tokens,
            cursor=cursor,
            deadline_s=prompt.deadline_s,
            share=prompt.share,
            now_s=self._clock.now(),
        )
        self._pump()
        self.on_pages_changed()

    def finish(self, prompt: Prompt) -> None:
        """The prompt is done, or given up in whatever phase; its pages are free after the fence."""
        self._turns.leave(prompt.key)
        self._unplanned.pop(prompt.key, None)
        if prompt.key not in self._prompts:
            return
        self._scheduler.remove(prompt.key)
        self._end(prompt)

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
        """Every page in use belongs to the prompts that share it, and the log's books agree."""
        self.pages.check_invariants()
        self.log.check_invariants()
        held = {page for prompt in self._prompts.values() for page in prompt.pages}
        assert len(held) + self.pages.num_free == self.pages.num_pages, "a page is lost"

    # Whose turn it is.

    def _candidate(self, prompt: Prompt) -> Candidate:
        return Candidate(
            key=prompt.key,
            order=prompt.order,
            deadline_s=prompt.deadline_s,
            work_s=prompt.predicted_s,
            work_left_s=self.predict_s(prompt.put_tokens, prompt.num_tokens),
            served_s=prompt.waiting_since_s,
            share=prompt.share,
        )

    def _make_room(self, wanting: Candidate, prompt: Prompt, now_s: float) -> None:
        """Take the pages of prompts behind the first in line, if it fits then. Pages that are on their way back count as free.

        Nobody loses any where puts wait for the end of the prompt: what was computed is not in the store.
        """
        if self._config.push == "after-prefill":
            return
        running = self._turns.ranked([*self._scheduler.candidates(), wanting], now_s)
        behind = running[running.index(wanting) + 1 :]
        holders = [Holder(candidate=each, num_pages=self._own_pages(each.key)) for each in behind]
        coming = sum(self._own_pages(key) for key, other in self._prompts.items() if other.is_dropping)
        num_missing = prompt.num_pages - self.pages.num_free - coming
        for key in choose_victims(wanting, num_missing, holders):
            self._drop(self._prompts[key])

    @property
    def _is_making_room(self) -> bool:
        """Whether pages are on their way back, which are for the first in line."""
        return any(prompt.is_dropping for prompt in self._prompts.values())

    def _own_pages(self, key: RequestKey) -> int:
        """Pages of a prompt that nobody shares with it for sure."""
        return len(self._prompts[key].pages) - self._prompts[key].held_blocks

    def _drop(self, prompt: Prompt) -> None:
        """Take the pages of a prompt away once what it has in the pipeline is in the store; it goes on when it has pages again."""
        self._metrics.drops.inc()
        self._scheduler.remove(prompt.key)
        self._unplanned[prompt.key] = prompt
        prompt.waiting_since_s = self._clock.now()
        prompt.is_dropping = True
        self._end_if_drained(prompt.key)

    def _end_if_drained(self, key: RequestKey) -> None:
        prompt = self._prompts[key]
        if prompt.is_dropping and not self.log.is_busy(key):
            self._end(prompt)

    def _end(self, prompt: Prompt) -> None:
        if not self.log.knows(prompt.key):
            self._free(prompt.key)
        elif not self.log.is_ending(prompt.key):
            self._note_start()
            self._send(self.log.append_end(prompt.key))

    # The pipeline.

    def _pump(self) -> None:
        """Fill the pipeline."""
        while planned := self._scheduler.next_micro_batch(
            in_flight_steps=self.log.in_flight_steps, now_s=self._clock.now()
        ):
            if not self.log.in_flight_steps:
                self.last_report_s = self._clock.now()
                self._bubbles.start(self.last_report_s)
            self._note_step(planned)
            for chunk in planned:
                if chunk.is_last:
                    self._turns.leave(chunk.key)
            self._send(self.log.append_compute([self._chunk(chunk) for chunk in planned]))

    def _note_step(self, planned: Sequence[PlannedChunk]) -> None:
        shape = StepShape.of_chunks((chunk.num_tokens, chunk.first_token) for chunk in planned)
        self._metrics.step_chunks.observe(len(planned))
        self._metrics.step_tokens.observe(shape.tokens)
        if expected_s := self._planner.slowest_s(shape):
            self._metrics.planned_step_seconds.observe(expected_s)

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
        started_s = ended_s - report.compute_s
        predicted_s = self._learn(stage_idx, chunks, report.compute_s)
        self._bubbles.note(stage_idx, report.compute_s, ended_s, is_over=not self.log.in_flight_steps)
        for chunk in chunks:
            key = chunk_key(chunk)
            prompt = self._prompts[key]
            prompt.add_span(
                f"stage {stage_idx}",
                end_s=ended_s,
                duration_s=report.compute_s,
                chunk=chunk,
                predicted_s=predicted_s,
            )
            for wait, end_s, duration_s in (
                ("recv", started_s, report.wait_recv_s),
                ("send", ended_s + report.wait_send_s, report.wait_send_s),
            ):
                if duration_s:
                    prompt.add_span(f"stage {stage_idx} {wait}", end_s=end_s, duration_s=duration_s, chunk=chunk)
            if stage_idx == 0 and prompt.compute_started_s is None:
                prompt.compute_started_s = started_s
            if stage_idx == self._config.num_stages - 1:
                self._scheduler.chunk_left(key)
            self._end_if_drained(key)  # its puts may have been reported before
        if stage_idx == self._config.num_stages - 1:
            self._note_tokens(chunks, report.tokens, now)
            self.on_pages_changed()
        self._pump()

    def _learn(self, stage_idx: int, chunks: Sequence[stage_pb2.Chunk], compute_s: float) -> float:
        """Improve the stage's model by a step that ran; returns what was expected of it, 0 without a model."""
        shape = _shape(chunks)
        sample, fit = StepSample(shape, compute_s), self._fits[stage_idx]
        before = fit.model
        if before is not None and compute_s > 0:
            self._metrics.step_prediction_error.labels(stage_idx).observe(fit.error(sample))
        fit.add(sample)
        if fit.model is not before:
            self._use_models()
        return before.time_s(shape) if before else 0.0

    def _use_models(self) -> None:
        models = [fit.model for fit in self._fits]
        if all(models):
            self._planner.set_stages([model for model in models if model])
            self._scheduler.replan()

    @property
    def _slowest_idx(self) -> int:
        shape = StepShape.of_chunk(self._config.chunk_tokens, self._config.chunk_tokens)
        times_s = [stage.time_s(shape) for stage in self._planner.stages]
        return times_s.index(max(times_s))

    @property
    def _in_flight_s(self) -> float:
        """Predicted time of the slowest stage for the steps that it has not computed; 0 before anything was measured."""
        model = self.slowest_stage
        if model is None:
            return 0.0
        steps = self.log.uncomputed(self._slowest_idx)
        times_s = [model.time_s(_shape(chunks)) for chunks in steps]
        if times_s:
            running_s = self._clock.now() - self._bubbles.idle_since_s(self._slowest_idx)
            times_s[0] = max(0.0, times_s[0] - running_s)
        return sum(times_s)

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
            key = chunk_key(chunk)
            prompt = self._prompts[key]
            # A step that another prompt shares is reported late if that prompt's puts are: after the next ones of this prompt.
            prompt.put_tokens = max(prompt.put_tokens, chunk.first_token + chunk.num_tokens)
            prompt.failed_puts += outcome.failed
            prompt.puts_changed.set()
            self._end_if_drained(key)

    def _on_fetch_done(self, stage_idx: int, report: stage_pb2.FetchDone, now: float) -> None:
        key = RequestKey(report.request_id, report.request_epoch)
        num_blocks = self.log.fetch_done(stage_idx, key, report.num_blocks)
        prompt = self._prompts[key]
        prompt.add_span(f"stage {stage_idx}", end_s=now - report.age_s, duration_s=report.fetch_s, chunk=None)
        if num_blocks is not None and not prompt.fetched.done():
            prompt.fetched.set_result(max(num_blocks, prompt.held_blocks))

    def _free(self, key: RequestKey) -> None:
        """Everything that a prompt has computed stays findable in its pages."""
        prompt = self._prompts.pop(key)
        num_complete = prompt.put_tokens // prompt.block_tokens
        self.pages.release(prompt.pages, names=prompt.block_hashes[:num_complete])
        prompt.pages = []
        if prompt.is_dropping:
            prompt.is_dropping = False
            prompt.dropped.set()
        self.on_pages_changed()

    def _note_start(self) -> None:
        if not self.log.has_open_work:
            self.last_report_s = self._clock.now()


class _Bubbles:
    """How long each stage was idle while its group had steps in flight."""

    def __init__(self, num_stages: int, metrics: GroupMetrics) -> None:
        self._metrics = metrics
        self._idle_since_s = [0.0] * num_stages

    def start(self, now_s: float) -> None:
        """The first step goes into an empty pipeline."""
        self._idle_since_s = [now_s] * len(self._idle_since_s)

    def note(self, stage_idx: int, busy_s: float, now_s: float, *, is_over: bool) -> None:
        """A stage has computed a step; `is_over`: it was the last one in the pipeline."""
        self._count(stage_idx, now_s - busy_s)
        self._idle_since_s[stage_idx] = now_s
        if is_over:
            for idx in range(len(self._idle_since_s)):
                self._count(idx, now_s)

    def idle_since_s(self, stage_idx: int) -> float:
        """When a stage had last computed a step, or the first one came into an empty pipeline."""
        return self._idle_since_s[stage_idx]

    def _count(self, stage_idx: int, until_s: float) -> None:
        self._metrics.bubble_seconds.labels(stage_idx).inc(max(0.0, until_s - self._idle_since_s[stage_idx]))


def _shape(chunks: Sequence[stage_pb2.Chunk]) -> StepShape:
    return StepShape.of_chunks((chunk.num_tokens, chunk.first_token) for chunk in chunks)


def _nothing() -> None:
    """Until somebody wants to know."""
