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

    def set_stages(self, stages: Sequence[StepModel]) -> None:
        """The stages were measured anew."""
        self._stages = tuple(stages)

    def step_s(self, first_token: int, num_tokens: int) -> float:
        """Time that each chunk of a prompt shall take on the slowest stage, when tokens [first_token, num_tokens) are to be
        computed; infinite for chunks of fixed size."""
        if self._is_fixed or not self._stages:
            return math.inf
        shape = StepShape.of_chunk(num_tokens - first_token, first_token)
        slowest = max(self._stages, key=lambda stage: stage.work_s(shape))
        work_s = slowest.work_s(shape)
        num_chunks = best_num_chunks(
            num_stages=len(self._stages), work_s=work_s * len(self._stages), overhead_s=slowest.overhead_s
        )
        step_s = slowest.overhead_s + work_s / max(1.0, num_chunks)
        fewest = max(self._block_tokens, slowest.knee_tokens)
        shortest_s = max(
            slowest.time_s(StepShape.of_chunk(fewest, first_token)),
            slowest.time_s(StepShape.of_chunk(self._block_tokens, max(0, num_tokens - self._block_tokens))),
        )
        return max(min(step_s, self._max_step_s), shortest_s)

    def next_chunk(self, cursor: int, num_tokens: int, step_s: float) -> int:
        """Tokens of the chunk that starts at `cursor`: about `step_s` long, to a block border, at most `chunk_tokens`.

        It takes the rest of the prompt as well if that is less than half a chunk.
        """
        rest = num_tokens - cursor
        chunk = self._chunk_tokens
        if math.isfinite(step_s):
            wanted = min(stage.tokens_within(step_s, cursor) for stage in self._stages)
            end = round((cursor + min(wanted, chunk)) / self._block_tokens) * self._block_tokens
            chunk = min(max(end - cursor, self._block_tokens - cursor % self._block_tokens), chunk)
            if rest < 1.5 * chunk and rest <= self._chunk_tokens:
                return rest
        return min(rest, chunk)

    def remaining_s(self, cursor: int, num_tokens: int, step_s: float) -> float:
        """Predicted time for the rest of a prompt, alone in the group; 0 while nothing is known."""
        if not self._stages:
            return 0.0
        tokens = num_tokens - cursor
        shape = StepShape.of_chunk(tokens, cursor)
        works_s = [stage.work_s(shape) for stage in self._stages]
        slowest_s = max(works_s)
        overhead_s = self._stages[works_s.index(slowest_s)].overhead_s
        num_chunks = max(1.0, tokens / self._chunk_tokens)
        if math.isfinite(step_s):
            num_chunks = max(num_chunks, slowest_s / max(step_s - overhead_s, 1e-9))
        mean_s = overhead_s + slowest_s / num_chunks
        fill = sum(works_s) / slowest_s - 1 if slowest_s else 0.0
        return num_chunks * mean_s + fill * mean_s

    def has_room(self, shape: StepShape, extra: StepShape) -> bool:
        """Whether a step gets better by `extra`: while its overhead is much of its time, or it is below the knee."""
        if shape.tokens + extra.tokens > self._chunk_tokens:
            return False
        if self._is_fixed or not self._stages:
            return True
        return any(
            shape.tokens < stage.knee_tokens or stage.overhead_s > _WORTH_PACKING * stage.time_s(shape)
            for stage in self._stages
        )

    def plan(self, first_token: int, num_tokens: int) -> list[int]:
        """Tokens of every chunk of a prompt."""
        step_s = self.step_s(first_token, num_tokens)
        chunks: list[int] = []
        while first_token < num_tokens:
            chunks.append(self.next_chunk(first_token, num_tokens, step_s))
            first_token += chunks[-1]
        return chunks
