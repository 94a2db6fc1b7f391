"""StepLoop: the one thread that computes. Every step is one forward: a token of each running request, chunks of prompts beside them.

    loop:  take commands (joins and leaves happen here, between steps)
           plan the chunks (step_plan.py) -> forward -> sample -> report the tokens
           requests that ended leave by themselves, and so do those whose K/V was not there in time or whose logits are no numbers

A request comes with the tokens whose K/V is still to be computed: the first token of its answer, or the part of its prompt that
this node prefills. Once they are fed the next token is drawn, by the same rule as everywhere.

A request may join while the last layer groups of its K/V are still being copied: its first step waits for each of them where it
needs it, for GATE_TIMEOUT_S at most, since everybody in the step waits with it.

Commands come over one bounded queue from the event loop; what happened goes back through `report`. The loop knows pages,
tokens and sampling; it knows neither sessions nor the store.

Tensor shapes: T rows of all segments, R requests that get a token, V vocabulary.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass

import torch

from decode_node.layer_gate import LayerGate
from decode_node.step_plan import PromptPart, plan_chunks
from kvstore.pool import RequestKey
from model_runner.runner import Runner, Segment
from model_runner.sampling import sample
from moontide.clock import Clock
from moontide.errors import Internal
from moontide.log import get_logger
from moontide.perf_model import StepModel, StepShape
from moontide.sampling_params import FinishReason, SampledToken, SamplingParams

GATE_TIMEOUT_S = 0.04
"""Most that a step waits for K/V in all."""

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Join:
    """Run a request whose K/V of positions [0, position) is in `pages`, or will be once `gate` is open."""

    key: RequestKey
    pages: Sequence[int]
    """Cover every position that may follow."""
    position: int
    """Where the first of `token_ids` belongs."""
    token_ids: Sequence[int]
    """Tokens whose K/V is to be computed: one that was drawn before, or what is left of a prompt."""
    output_idx: int
    """Index in the request's output of the token that is drawn after them."""
    sampling: SamplingParams
    tbt_slo_s: float | None
    gate: LayerGate | None


@dataclass(frozen=True)
class Leave:
    """Stop running a request. Answered by Left even if the request is not running any more."""

    key: RequestKey


@dataclass(frozen=True, kw_only=True)
class NewToken:
    key: RequestKey
    token: SampledToken
    output_idx: int
    finish_reason: FinishReason | None
    """Set on the last token of a request, which has left the loop then."""


@dataclass(frozen=True, kw_only=True)
class StepDone:
    tokens: Sequence[NewToken]
    chunks: Sequence[tuple[RequestKey, int]]
    """Prompts that got on by so many tokens and not to their end."""
    late: Sequence[RequestKey]
    """Got nothing because their K/V was not there in time, and have left the loop."""
    failed: Sequence[tuple[RequestKey, Internal]]
    """No token can be drawn for them, and they have left the loop; nothing is wrong with the others."""
    started_at_s: float
    ended_at_s: float
    shape: StepShape | None
    """What was computed; None if the step waited for K/V, so that its time says nothing."""


@dataclass(frozen=True)
class StepFailed:
    """A step raised: every running request has left the loop without a token."""

    keys: Sequence[RequestKey]
    error: Internal


@dataclass(frozen=True)
class Left:
    """No forward of this request is open, and none will come."""

    key: RequestKey


StepReport = StepDone | StepFailed | Left


@dataclass
class _Slot:
    """A running request: `token_ids` are fed next, from `position` on."""

    key: RequestKey
    pages: Sequence[int]
    position: int
    token_ids: Sequence[int]
    output_idx: int
    """Of the token that is drawn next."""
    sampling: SamplingParams
    tbt_slo_s: float | None
    gate: LayerGate | None
    """Until its first step is over."""

    @property
    def is_prompt(self) -> bool:
        """Whether it may share its tokens out over several steps."""
        return len(self.token_ids) > 1


@dataclass(frozen=True)
class _Work:
    """A request's part of a step."""

    slot: _Slot
    num_tokens: int

    @property
    def gets_token(self) -> bool:
        return self.num_tokens == len(self.slot.token_ids)


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """What a forward brought; a request is in one of them at most."""

    tokens: Mapping[RequestKey, SampledToken]
    late: Set[RequestKey]
    failed: Mapping[RequestKey, Internal]


class StepLoop:
    """Runs the batch. `submit` and `close` belong to the event loop, everything else to the compute thread."""

    def __init__(
        self,
        runner: Runner,
        *,
        max_batch: int,
        chunk_tokens: int,
        step_model: Callable[[], StepModel | None],
        clock: Clock,
        report: Callable[[StepReport], None],
    ) -> None:
        """
        Args:
            chunk_tokens: most prompt tokens of a step.
            step_model: asked before every step with a prompt, in the compute thread.
            report: called in the compute thread, in the order of what happened.
        """
        self._runner = runner
        self._max_context = runner.info.max_context
        self._chunk_tokens = chunk_tokens
        self._step_model = step_model
        self._clock = clock
        self._report = report
        # One Join and one Leave for each of max_batch requests, and the end: it never fills up.
        self._commands: queue.Queue[Join | Leave | None] = queue.Queue(2 * max_batch + 1)
        self._slots: dict[RequestKey, _Slot] = {}
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def submit(self, command: Join | Leave) -> None:
        self._commands.put_nowait(command)

    def close(self) -> None:
        """End after the step that is open; blocks until then."""
        self._commands.put_nowait(None)
        self._thread.join()

    def _run(self) -> None:
        while self._take_commands():
            if self._slots:
                self._step()

    def _take_commands(self) -> bool:
        """Apply what waits, or wait for something if nothing runs; False asks the thread to end."""
        while True:
            try:
                command = self._commands.get(block=not self._slots)
            except queue.Empty:
                return True
            if command is None:
                return False
            if isinstance(command, Leave):
                self._slots.pop(command.key, None)
                self._report(Left(command.key))
            else:
                self._slots[command.key] = _Slot(
                    command.key,
                    command.pages,
                    command.position,
                    command.token_ids,
                    command.output_idx,
                    command.sampling,
                    command.tbt_slo_s,
                    command.gate,
                )

    def _step(self) -> None:
        work = self._plan()
        started_at_s = self._clock.now()
        is_gated = any(each.slot.gate is not None for each in work)
        shape = StepShape.of_chunks((each.num_tokens, each.slot.position) for each in work)
        try:
            outcome = self._forward(work)
        except Exception as error:
            keys = list(self._slots)
            log.exception("step failed", requests=len(keys))
            self._slots.clear()
            self._wait_idle()
            self._report(StepFailed(keys, Internal(f"decode step failed: {type(error).__name__}: {error}")))
            return
        left = outcome.late | outcome.failed.keys()
        for key in left:
            del self._slots[key]
        going_on = [each for each in work if each.slot.key not in left]
        chunks = [(each.slot.key, each.num_tokens) for each in going_on if not each.gets_token]
        advanced = [self._advance(each, outcome.tokens.get(each.slot.key)) for each in going_on]
        done = StepDone(
            chunks=chunks,
            tokens=[new for new in advanced if new is not None],
            late=sorted(outcome.late),
            failed=list(outcome.failed.items()),
            started_at_s=started_at_s,
            ended_at_s=self._clock.now(),
            shape=None if is_gated else shape,
        )
        self._report(done)

    def _plan(self) -> list[_Work]:
        """Who takes part in the next step, with how many tokens."""
        work = [_Work(slot, 1) for slot in self._slots.values() if not slot.is_prompt]
        prompts = [slot for slot in self._slots.values() if slot.is_prompt]
        if not prompts:
            return work
        slos = [each.slot.tbt_slo_s for each in work if each.slot.tbt_slo_s is not None]
        chunks = plan_chunks(
            [PromptPart(slot.position, slot.position + len(slot.token_ids)) for slot in prompts],
            StepShape.of_chunks((1, each.slot.position) for each in work),
            model=self._step_model(),
            chunk_tokens=self._chunk_tokens,
            tbt_slo_s=min(slos, default=None),
        )
        return work + [_Work(slot, tokens) for slot, tokens in zip(prompts, chunks, strict=True) if tokens]

    def _forward(self, work: Sequence[_Work]) -> _Outcome:
        """Compute the step and draw. Nothing writes to pages any more afterwards."""
        gates = {each.slot.key: each.slot.gate for each in work if each.slot.gate is not None}
        left_s = GATE_TIMEOUT_S
        late: set[RequestKey] = set()

        def before_layer_group(group_idx: int) -> Collection[int]:
            nonlocal left_s
            until_s = self._clock.now() + left_s
            for key in gates.keys() - late:
                if not gates[key].wait(group_idx + 1, timeout_s=left_s):
                    late.add(key)
                left_s = max(0.0, until_s - self._clock.now())
            # What they would write may belong to a page that is still being copied, and then checked.
            return {idx for idx, each in enumerate(work) if each.slot.key in late}

        segments = [
            Segment(
                start=each.slot.position,
                num_tokens=each.num_tokens,
                pages=each.slot.pages,
                wants_logits=each.gets_token,
            )
            for each in work
        ]
        token_ids = [token_id for each in work for token_id in each.slot.token_ids[: each.num_tokens]]
        logits_RV = self._runner.forward(
            segments,
            token_ids_T=torch.tensor(token_ids, dtype=torch.int64),
            before_layer_group=before_layer_group if gates else None,
        )
        # The rows of the others are right whatever is in the pages of the late ones; theirs may be no numbers at all.
        drawing = [each.slot for each in work if each.gets_token]
        rows = [row for row, slot in enumerate(drawing) if slot.key not in late]
        if not rows:
            self._runner.wait_idle()
            return _Outcome(tokens={}, late=late, failed={})
        in_time = [drawing[row] for row in rows]
        drawn = sample(
            logits_RV[rows] if len(rows) < len(drawing) else logits_RV,
            [slot.sampling for slot in in_time],
            [slot.output_idx for slot in in_time],
        )
        answers = list(zip([slot.key for slot in in_time], drawn, strict=True))
        return _Outcome(
            tokens={key: each for key, each in answers if isinstance(each, SampledToken)},
            late=late,
            failed={key: each for key, each in answers if isinstance(each, Internal)},
        )

    def _wait_idle(self) -> None:
        """After an error: what had been started goes on without it, and pages are freed next."""
        try:
            self._runner.wait_idle()
        except Exception:
            log.exception("device failed")  # one that cannot even be waited for writes nothing more

    def _advance(self, work: _Work, token: SampledToken | None) -> NewToken | None:
        """The tokens of a request are fed; `token` was drawn, if they were the last ones."""
        slot = work.slot
        slot.position += work.num_tokens
        slot.gate = None
        if token is None:
            slot.token_ids = slot.token_ids[work.num_tokens :]
            return None
        output_idx = slot.output_idx
        slot.token_ids = [token.token_id]
        slot.output_idx += 1
        reason = finish_reason(
            slot.sampling, token.token_id, output_idx, position=slot.position, max_context=self._max_context
        )
        if reason is not None:
            del self._slots[slot.key]
        return NewToken(key=slot.key, token=token, output_idx=output_idx, finish_reason=reason)


def finish_reason(
    sampling: SamplingParams, token_id: int, output_idx: int, *, position: int, max_context: int
) -> FinishReason | None:
    """Whether the token at `position` ends the request: by its own settings, or because it fills the model's context."""
    reason = sampling.finish_reason(token_id, output_idx)
    if reason is None and position + 1 >= max_context:
        return FinishReason.LENGTH
    return reason
