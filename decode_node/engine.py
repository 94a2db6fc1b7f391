"""StepLoop: the one thread that computes. Every step is one forward with one token of each running request.

    loop:  take commands (joins and leaves happen here, between steps)
           forward -> sample -> report the tokens
           requests that ended leave by themselves, and so do those whose K/V was not there in time

A request may join while the last layer groups of its K/V are still being copied: its first step waits for each of them where it
needs it, for GATE_TIMEOUT_S at most, since everybody in the step waits with it.

Commands come over one bounded queue from the event loop; what happened goes back through `report`. The loop knows pages,
tokens and sampling; it knows neither sessions nor the store.

Tensor shapes: T = B running requests, V vocabulary.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from decode_node.layer_gate import LayerGate
from kvstore.pool import RequestKey
from model_runner.runner import Runner, Segment
from model_runner.sampling import sample
from moontide.clock import Clock
from moontide.errors import Internal
from moontide.log import get_logger
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
    """Where `token_id` belongs."""
    token_id: int
    """The last token drawn so far; its K/V is not computed yet."""
    output_idx: int
    """Index of `token_id` in the request's output."""
    sampling: SamplingParams
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
    late: Sequence[RequestKey]
    """Got no token because their K/V was not there in time, and have left the loop."""
    started_at_s: float
    ended_at_s: float


@dataclass(frozen=True)
class StepFailed:
    """A step raised: every request in it has left the loop without a token."""

    keys: Sequence[RequestKey]
    error: Internal


@dataclass(frozen=True)
class Left:
    """No forward of this request is open, and none will come."""

    key: RequestKey


StepReport = StepDone | StepFailed | Left


@dataclass
class _Slot:
    """A running request: `token_id` is fed next, at `position`."""

    key: RequestKey
    pages: Sequence[int]
    position: int
    token_id: int
    output_idx: int
    sampling: SamplingParams
    gate: LayerGate | None
    """Until its first step is over."""


class StepLoop:
    """Runs the batch. `submit` and `close` belong to the event loop, everything else to the compute thread."""

    def __init__(self, runner: Runner, *, max_batch: int, clock: Clock, report: Callable[[StepReport], None]) -> None:
        """`report` is called in the compute thread, in the order of what happened."""
        self._runner = runner
        self._max_context = runner.info.max_context
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
                    command.token_id,
                    command.output_idx,
                    command.sampling,
                    command.gate,
                )

    def _step(self) -> None:
        slots = list(self._slots.values())
        started_at_s = self._clock.now()
        try:
            tokens = self._forward(slots)
        except Exception as error:
            log.exception("step failed", requests=len(slots))
            self._slots.clear()
            self._report(
                StepFailed(
                    [slot.key for slot in slots], Internal(f"decode step failed: {type(error).__name__}: {error}")
                )
            )
            return
        late = [slot.key for slot in slots if slot.key not in tokens]
        for key in late:
            del self._slots[key]
        done = StepDone(
            tokens=[self._advance(slot, tokens[slot.key]) for slot in slots if slot.key in tokens],
            late=late,
            started_at_s=started_at_s,
            ended_at_s=self._clock.now(),
        )
        self._report(done)

    def _forward(self, slots: Sequence[_Slot]) -> dict[RequestKey, SampledToken]:
        """The next token of every request whose K/V is there in time."""
        gates = {slot.key: slot.gate for slot in slots if slot.gate is not None}
        left_s = GATE_TIMEOUT_S
        late: set[RequestKey] = set()

        def before_layer_group(group_idx: int) -> None:
            nonlocal left_s
            until_s = self._clock.now() + left_s
            for key in gates.keys() - late:
                if not gates[key].wait(group_idx + 1, timeout_s=left_s):
                    late.add(key)
                left_s = max(0.0, until_s - self._clock.now())

        logits_BV = self._runner.forward(
            [Segment(start=slot.position, num_tokens=1, pages=slot.pages, wants_logits=True) for slot in slots],
            token_ids_T=torch.tensor([slot.token_id for slot in slots], dtype=torch.int64),
            before_layer_group=before_layer_group if gates else None,
        )
        # The rows of the others are right whatever is in the pages of the late ones; theirs may be no numbers at all.
        rows = [row for row, slot in enumerate(slots) if slot.key not in late]
        if not rows:
            return {}
        in_time = [slots[row] for row in rows]
        tokens = sample(
            logits_BV[rows] if late else logits_BV,
            [slot.sampling for slot in in_time],
            [slot.output_idx + 1 for slot in in_time],
        )
        return {slot.key: token for slot, token in zip(in_time, tokens, strict=True)}

    def _advance(self, slot: _Slot, token: SampledToken) -> NewToken:
        slot.position += 1
        slot.output_idx += 1
        slot.token_id = token.token_id
        slot.gate = None
        reason = finish_reason(
            slot.sampling, token.token_id, slot.output_idx, position=slot.position, max_context=self._max_context
        )
        if reason is not None:
            del self._slots[slot.key]
        return NewToken(key=slot.key, token=token, output_idx=slot.output_idx, finish_reason=reason)


def finish_reason(
    sampling: SamplingParams, token_id: int, output_idx: int, *, position: int, max_context: int
) -> FinishReason | None:
    """Whether the token at `position` ends the request: by its own settings, or because it fills the model's context."""
    reason = sampling.finish_reason(token_id, output_idx)
    if reason is None and position + 1 >= max_context:
        return FinishReason.LENGTH
    return reason
