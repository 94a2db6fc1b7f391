"""PacedRunner: a stage that takes as long as a profile says instead of computing, for runs at a scale that the machine cannot compute.

Pages, callbacks, shapes and errors are those of a StageRunner, so that everything around it is real; K/V and tokens are
made up, but each is a function of layer and position, so that a wrong page or a lost step shows.

    start --- layers of group 0 --- | on_layer_group(0) --- layers of group 1 --- | on_layer_group(1) --- start + t(c, p)

Tensor shapes: T rows (all segments packed), D hidden size, V vocabulary, R rows that get logits, H head size.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvstore.layout import KVLayout
from model_runner.kv_cache import PagedKVCache
from model_runner.model_source import ModelInfo
from model_runner.runner import Segment, check_layout, pages_of
from model_runner.stage import StageSpec
from moontide.clock import Clock, MonotonicClock
from moontide.config import build
from moontide.errors import ConfigError
from moontide.perf_model import StepModel, StepShape

_SLEEP_LATE_S = 100e-6
"""A sleep ends about so much late; the end of a step is awaited by looking at the clock."""
_TOKEN_LOGIT = 1e4
"""The others have 0: no temperature makes another token likely."""
_LAYER_STRIDE = 0x9E3779B1
"""Odd, so that the K/V of two layers differ at every position."""


@dataclass(frozen=True, kw_only=True)
class PacedProfile:
    """Step times of a whole model on one node."""

    overhead_s: float
    """Seconds of every step, on every stage."""
    token_s: float
    """Seconds per token, all layers together."""
    pair_s: float
    """Seconds per (query, key) pair, all layers together."""
    knee_tokens: int = 0
    """Fewer tokens take as long as this many."""
    decode_step_s: float | None = None
    """Seconds of a decode step of any batch, in which prompt tokens have room as long as token_s of all its tokens is no more; None:
    overhead_s and the token part of the batch."""
    stage_speed: tuple[float, ...] = ()
    """Speed of each stage of a prefill group; empty: all 1."""

    def __post_init__(self) -> None:
        for name in ("overhead_s", "token_s", "pair_s", "knee_tokens"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name}={getattr(self, name)} is below 0; give seconds, or tokens for the knee")
        if self.decode_step_s is not None and not self.decode_step_s >= 0:
            raise ConfigError(f"decode_step_s={self.decode_step_s} is below 0; give seconds, or leave it out")
        if not all(speed > 0 for speed in self.stage_speed):
            raise ConfigError(
                f"stage_speed={list(self.stage_speed)} must hold numbers above 0; 1 is a node of the profile"
            )

    @classmethod
    def read(cls, path: Path) -> PacedProfile:
        """Raises: ConfigError naming the file and what is wrong with it."""
        try:
            tree = json.loads(path.expanduser().read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.profile={path} is no readable JSON file: {error}") from error
        if not isinstance(tree, dict):
            raise ConfigError(
                f"model.profile={path} holds no JSON object; write one with overhead_s, token_s and pair_s"
            )
        try:
            return build(cls, tree)
        except ConfigError as error:
            raise ConfigError(f"model.profile={path}: {error}") from error

    def stage_model(self, spec: StageSpec) -> StepModel:
        """t(c, p) of one stage of a prefill group: the overhead, and its layers' share of the work.

        Raises: ConfigError if the speeds are those of a group of another size.
        """
        if self.stage_speed and len(self.stage_speed) != spec.num_stages:
            raise ConfigError(
                f"stage_speed={list(self.stage_speed)} of the profile is for {len(self.stage_speed)} stages and the group has "
                f"{spec.num_stages}; give one speed per stage, or none"
            )
        speed = self.stage_speed[spec.stage_idx] if self.stage_speed else 1.0
        share = spec.num_local_layers / spec.num_layers / speed
        return StepModel(
            overhead_s=self.overhead_s,
            token_s=self.token_s * share,
            pair_s=self.pair_s * share,
            knee_tokens=self.knee_tokens,
        )

    def decode_model(self) -> StepModel:
        """The time of a step of a decode instance."""
        if self.decode_step_s is not None:
            knee_tokens = int(self.decode_step_s / self.token_s) if self.token_s else 0
            overhead_s = self.decode_step_s - self.token_s * knee_tokens
            return StepModel(overhead_s=overhead_s, token_s=self.token_s, pair_s=0.0, knee_tokens=knee_tokens)
        return StepModel(overhead_s=self.overhead_s, token_s=self.token_s, pair_s=0.0, knee_tokens=self.knee_tokens)


class PacedRunner:
    """A Runner that sleeps. One thread uses it at a time."""

    kv: PagedKVCache
    info: ModelInfo
    spec: StageSpec
    step_model: StepModel | None
    attention = "paced"

    def __init__(
        self,
        info: ModelInfo,
        spec: StageSpec,
        *,
        layout: KVLayout,
        kv: PagedKVCache,
        pace: StepModel,
        clock: Clock | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """
        Args:
            pace: how long this stage takes for a step.
            sleep: waits so many seconds on `clock`; tests hand in both.
        Raises: ConfigError if layout and model do not fit.
        """
        check_layout(layout, info)
        self.info = info
        self.spec = spec
        self.kv = kv
        self.step_model = pace
        self._pace = pace
        self._layout = layout
        self._clock = clock or MonotonicClock()
        self._sleep = sleep

    def forward(
        self,
        segments: Sequence[Segment],
        *,
        token_ids_T: Tensor | None = None,
        hidden_TD: Tensor | None = None,
        before_layer_group: Callable[[int], Collection[int]] | None = None,
        on_layer_group: Callable[[int], None] | None = None,
    ) -> Tensor:
        """See Runner. Returns after the step's time and what `before_layer_group` waits; what writing the K/V takes is inside
        of it, unless it alone takes longer."""
        started_s = self._clock.now()
        given = token_ids_T if self.spec.is_first_stage else hidden_TD
        assert given is not None
        assert given.shape[0] == sum(segment.num_tokens for segment in segments), "rows and segments differ"
        places = written = self._places(segments)
        step_s = self._pace.time_s(StepShape.of_chunks((each.num_tokens, each.start) for each in segments))
        for group_idx in self.kv.groups:
            if before_layer_group is not None:
                waited_since_s = self._clock.now()
                silent = before_layer_group(group_idx)
                started_s += self._clock.now() - waited_since_s
                if silent:
                    rows_T = _rows_without(silent, segments)
                    written = tuple(each_T[rows_T] for each_T in places)
            pages_T, slots_T, positions_T = written
            layers = self._layout.group_layers(group_idx)
            for layer_idx in layers:
                kv_TH = paced_kv(layer_idx, positions_T, head_dim=self.info.head_dim).to(self.kv.layer(0).dtype)
                self.kv.layer(layer_idx - self.spec.start_layer)[pages_T, :, :, slots_T] = kv_TH[:, None, None]
            done = (layers.stop - self.spec.start_layer) / self.spec.num_local_layers
            self._sleep_until(started_s + done * step_s)
            if on_layer_group is not None:
                on_layer_group(group_idx)
        while self._clock.now() < started_s + step_s:
            pass
        return self._output(segments, len(given))

    def wait_idle(self) -> None:
        """See Runner. Nothing goes on after a forward."""

    def _places(self, segments: Sequence[Segment]) -> tuple[Tensor, ...]:
        """Page, slot in the page and position of every row, [T] int64 each. Raises: OutOfPages."""
        page_tokens = self.kv.page_tokens
        pages, positions = [], []
        for segment in segments:
            positions_T = torch.arange(segment.start, segment.start + segment.num_tokens)
            first_page = segment.start // page_tokens
            written = torch.tensor(pages_of(segment, self.kv)[first_page:])
            pages.append(written[positions_T // page_tokens - first_page])
            positions.append(positions_T)
        positions_T = torch.cat(positions)
        return torch.cat(pages), positions_T % page_tokens, positions_T

    def _sleep_until(self, moment_s: float) -> None:
        left_s = moment_s - _SLEEP_LATE_S - self._clock.now()
        if left_s > 0:
            self._sleep(left_s)

    def _output(self, segments: Sequence[Segment], num_rows: int) -> Tensor:
        if not self.spec.is_last_stage:
            return torch.zeros(num_rows, self.info.hidden_size, dtype=self.kv.layer(0).dtype)
        ends = [each.start + each.num_tokens for each in segments if each.wants_logits]
        logits_RV = torch.zeros(len(ends), self.info.vocab_size)
        for row, end in enumerate(ends):
            logits_RV[row, paced_token(end, self.info)] = _TOKEN_LOGIT
        return logits_RV


def _rows_without(silent: Collection[int], segments: Sequence[Segment]) -> Tensor:
    """Rows of all segments but those of these indices."""
    is_written = [torch.full((each.num_tokens,), idx not in silent) for idx, each in enumerate(segments)]
    return torch.cat(is_written).nonzero()[:, 0]


def paced_token(position: int, info: ModelInfo) -> int:
    """The token that a paced model puts at `position`: never one that ends the answer by itself."""
    usable = info.vocab_size - len(info.eos_token_ids)
    token_id = position % usable
    for eos_id in sorted(info.eos_token_ids):
        token_id += eos_id <= token_id
    return token_id


def paced_kv(layer_idx: int, positions_T: Tensor, *, head_dim: int) -> Tensor:
    """[T, H]: K and V, in every head, that a paced model has there: the bytes of a number that belongs to (layer, position).

    Whole numbers below 256 are exact in bfloat16.
    """
    numbers_T = (positions_T + layer_idx * _LAYER_STRIDE) % 2**32
    shifts_H = torch.arange(head_dim) % 4 * 8
    return numbers_T[:, None] >> shifts_H & 255
