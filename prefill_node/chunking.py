"""How a prompt is cut into chunks (pure).

Each chunk of a prompt shall take equally long, whatever prefix it attends to: so every stage always has the next one when
it is done with the last, and the pipeline is idle for P - 1 chunks only. How long follows from the number of chunks that
makes the makespan shortest; chunks end on block borders, for only whole blocks are shared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from moontide.perf_model import StepModel, StepShape, best_num_chunks

_WORTH_PACKING = 0.05
"""Steps are packed while their overhead is more than this share of their time."""

_KNEE_TRIES = 6
"""Lengths tried for a step near the knee; the makespan is flat about its minimum."""


class ChunkPlanner:
    """Cuts prompts for one group of stages."""

    def __init__(
        self,
        *,
        chunking: str,
        chunk_tokens: int,
        block_tokens: int,
        max_step_s: float,
        stages: Sequence[StepModel] = (),
    ) -> None:
        """
        Args:
            chunking, chunk_tokens, max_step_s: as in PrefillConfig.
            stages: how long each stage takes; while nothing is known, chunks are of fixed size.
        """
        self._is_fixed = chunking == "fixed"
        self._chunk_tokens = chunk_tokens
        self._block_tokens = block_tokens
        self._max_step_s = max_step_s
        self._stages = tuple(stages)

    @property
    def stages(self) -> Sequence[StepModel]:
        """Empty while nothing is known."""
        return self._stages

    def set_stages(self, stages: Sequence[StepModel]) -> None:
        """The stages were measured anew."""
        self._stages = tuple(stages)

    def num_chunks(self, first_token: int, num_tokens: int) -> int:
        """Chunks of tokens [first_token, num_tokens) of a prompt that make its makespan shortest; 0 for chunks of fixed size."""
        if self._is_fixed or not self._stages:
            return 0
        tokens = num_tokens - first_token
        shape = StepShape.of_chunk(tokens, first_token)
        best = best_num_chunks(
            num_stages=len(self._stages),
            work_s=sum(stage.work_s(shape) for stage in self._stages),
            overhead_s=max(stage.overhead_s for stage in self._stages),
        )
        return max(1, round(min(best, tokens / self._block_tokens)))

    def step_s(self, first_token: int, num_tokens: int, *, num_chunks: int = 0) -> float:
        """Time that each chunk of a prompt shall take on the slowest stage, when tokens [first_token, num_tokens) are to be
        computed, in so many chunks or, by default, in the best number; infinite for chunks of fixed size."""
        num_chunks = num_chunks or self.num_chunks(first_token, num_tokens)
        if not num_chunks:
            return math.inf
        mean = _mean_chunk(StepShape.of_chunk(num_tokens - first_token, first_token), num_chunks)
        slowest = max(self._stages, key=lambda stage: stage.time_s(mean))
        step_s = slowest.time_s(mean)
        if step_s > 0 and slowest.tokens_within(step_s, num_tokens) < slowest.knee_tokens:
            step_s = self._step_near_knee_s(slowest, first_token, num_tokens)
        return max(min(step_s, self._longest_step_s(slowest, first_token, num_tokens)), self._block_s(num_tokens))

    def next_chunk(self, cursor: int, num_tokens: int, step_s: float) -> int:
        """Tokens of the chunk that starts at `cursor`: about `step_s` long, to a block border, at most `chunk_tokens`.

        It takes the rest of the prompt as well if less than half a chunk would remain and that is cheaper than a chunk more.
        """
        rest = num_tokens - cursor
        block = self._block_tokens
        first_border = cursor - cursor % block + block
        last_border = (cursor + self._chunk_tokens) // block * block
        if math.isinf(step_s):
            return min(rest, last_border - cursor)
        wanted = min(stage.tokens_within(step_s, cursor) for stage in self._stages)
        end = round((cursor + min(wanted, self._chunk_tokens)) / block) * block
        chunk = min(max(end, first_border), last_border) - cursor
        if rest <= chunk or (
            rest <= min(1.5 * chunk, self._chunk_tokens) and self._is_cheaper(cursor, chunk, rest, step_s)
        ):
            return rest
        return chunk

    def remaining_s(self, cursor: int, num_tokens: int, step_s: float) -> float:
        """Predicted time for the rest of a prompt, alone in the group; 0 while nothing is known."""
        return sum(self._times_s(cursor, num_tokens, step_s))

    def bottleneck_s(self, cursor: int, num_tokens: int, step_s: float) -> float:
        """The part of it in which the slowest stage works: what a prompt behind it waits for; 0 while nothing is known."""
        return self._times_s(cursor, num_tokens, step_s)[0]

    def charged_s(self, shape: StepShape) -> float:
        """What a step counts for: its expected time; while nothing is known a step of `chunk_tokens` counts as the longest one."""
        return self.slowest_s(shape) or self._max_step_s * shape.tokens / self._chunk_tokens

    def slowest_s(self, shape: StepShape) -> float:
        """Expected time of a step on the stage that takes longest; 0 while nothing is known."""
        return max((stage.time_s(shape) for stage in self._stages), default=0.0)

    def has_room(self, shape: StepShape, extra: StepShape) -> bool:
        """Whether a step gets better by `extra`: while its overhead is much of its time, or it is below the knee."""
        if shape.tokens + extra.tokens > self._chunk_tokens:
            return False
        if self._is_fixed or not self._stages:
            return True
        slowest = max(self._stages, key=lambda stage: stage.time_s(shape))
        return shape.tokens < slowest.knee_tokens or slowest.overhead_s > _WORTH_PACKING * slowest.time_s(shape)

    def plan(self, first_token: int, num_tokens: int) -> list[int]:
        """Tokens of every chunk of a prompt."""
        step_s = self.step_s(first_token, num_tokens)
        chunks: list[int] = []
        while first_token < num_tokens:
            chunks.append(self.next_chunk(first_token, num_tokens, step_s))
            first_token += chunks[-1]
        return chunks

    def _times_s(self, cursor: int, num_tokens: int, step_s: float) -> tuple[float, float]:
        """Predicted times for the rest of a prompt: the slowest stage at work, and that stage waiting for the others."""
        if not self._stages:
            return 0.0, 0.0
        tokens = num_tokens - cursor
        shape = StepShape.of_chunk(tokens, cursor)
        fewest, most = max(1.0, tokens / self._chunk_tokens), max(1.0, tokens / self._block_tokens)
        if math.isinf(step_s):
            num_chunks: float = math.ceil(fewest)
            longest_tokens = min(tokens, self._chunk_tokens)
            longest = StepShape.of_chunk(longest_tokens, num_tokens - longest_tokens)
            chunk_s = self.slowest_s(_mean_chunk(shape, num_chunks))
            longest_s = self.slowest_s(longest)
        else:
            planned = max(stage.num_steps(step_s, cursor, num_tokens) for stage in self._stages)
            num_chunks = min(max(planned, fewest), most)
            longest = _mean_chunk(shape, num_chunks)
            chunk_s = longest_s = step_s if num_chunks == planned else self.slowest_s(longest)
        times_s = [stage.time_s(longest) for stage in self._stages]
        fill = sum(times_s) / max(times_s) - 1 if longest_s else 0.0
        return num_chunks * chunk_s, fill * longest_s

    def _is_cheaper(self, cursor: int, chunk: int, rest: int, step_s: float) -> bool:
        """Whether one chunk of `rest` tokens keeps the group busy for less time than a chunk and a small one after it.

        A small chunk pays the overhead and the knee once more; a chunk longer than the others is awaited by every other stage.
        """
        one_s = self.slowest_s(StepShape.of_chunk(rest, cursor))
        first_s = self.slowest_s(StepShape.of_chunk(chunk, cursor))
        second_s = self.slowest_s(StepShape.of_chunk(rest - chunk, cursor + chunk))
        return one_s + (len(self._stages) - 1) * max(0.0, one_s - step_s) <= first_s + second_s

    def _block_s(self, num_tokens: int) -> float:
        """The last block of a prompt fits a step, and so does every one before."""
        block = self._block_tokens
        return self.slowest_s(StepShape.of_chunk(block, max(0, num_tokens - block)))

    def _step_near_knee_s(self, stage: StepModel, first_token: int, num_tokens: int) -> float:
        """The best step when the last chunks, which attend to the most, are below the knee if the first are not far above."""
        knee = min(stage.knee_tokens, num_tokens - first_token)
        shortest_s = stage.time_s(StepShape.of_chunk(knee, first_token))
        ratio = stage.time_s(StepShape.of_chunk(knee, num_tokens - knee)) / shortest_s
        num_filling = len(self._stages) - 1

        def makespan_s(step_s: float) -> float:
            return (max(1.0, stage.num_steps(step_s, first_token, num_tokens)) + num_filling) * step_s

        steps_s = (shortest_s * math.pow(ratio, idx / _KNEE_TRIES) for idx in range(_KNEE_TRIES + 1))
        return min(steps_s, key=makespan_s)

    def _longest_step_s(self, stage: StepModel, first_token: int, num_tokens: int) -> float:
        """`max_step_s`, unless that is so much below the knee that most of a step would be waste."""
        knee, half = stage.knee_tokens, stage.knee_tokens // 2
        return max(
            self._max_step_s,
            stage.time_s(StepShape.of_chunk(knee, first_token)) if knee else 0.0,
            stage.time_s(StepShape.of_chunk(half, max(0, num_tokens - half))) if half else 0.0,
        )


def _mean_chunk(shape: StepShape, num_chunks: float) -> StepShape:
    return StepShape(math.ceil(shape.tokens / num_chunks), shape.pairs / num_chunks)
