"""Whether the stages of a group take equally long, and which layers each should have instead (pure).

A pipeline is as fast as its slowest stage. Hosts differ, so the layers are split by what each stage has measured of itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from model_runner.stage import StageSpec, format_layer_split, split_layers
from moontide.perf_model import StepModel, StepShape

_UNEVEN = 1.1
"""Times that differ by a larger factor are worth a line."""
_WORTH_MOVING = 0.01
"""A split that saves less of the slowest stage's time is no better."""


@dataclass(frozen=True, kw_only=True)
class UnevenStages:
    """What was measured of a group, and what would make it faster. As text: one line for people."""

    chunk_tokens: int
    """The chunk that all times are of; as many tokens are before it."""
    step_s: tuple[float, ...]
    """Seconds of each stage."""
    layer_s: tuple[float, ...]
    """Seconds per layer of each stage."""
    better_split: str | None
    """Value of prefill.layer_split for these hosts in this order; None: layer groups allow no better one."""
    gain: float
    """Share of the slowest stage's time that it saves."""
    misplaced_stage: int | None
    """Stage on the slowest host, if that is not the last one."""

    def __str__(self) -> str:
        found = (
            f"for a chunk of {self.chunk_tokens} tokens the stages take {_seconds(self.step_s)} s, "
            f"{_seconds(self.layer_s)} s per layer"
        )
        if self.better_split is None:
            split = "no other split on borders of kv.layer_group is better"
        else:
            split = f"prefill.layer_split={self.better_split} makes the slowest stage {self.gain:.0%} faster"
        if self.misplaced_stage is None:
            return f"{found}; {split}"
        return f"{found}; {split}; the slow host of stage {self.misplaced_stage} costs least as the last stage"


def uneven_stages(
    split: Sequence[StageSpec], models: Sequence[StepModel | None], *, layer_group: int, chunk_tokens: int
) -> UnevenStages | None:
    """What to do about stages that take unequally long; None when they do not, or one was not measured."""
    shape = StepShape.of_chunk(chunk_tokens, chunk_tokens)
    step_s = tuple(model.time_s(shape) for model in models if model is not None)
    if len(step_s) < len(split) or max(step_s) <= _UNEVEN * min(step_s):
        return None
    layer_s = tuple(time_s / spec.num_local_layers for time_s, spec in zip(step_s, split, strict=True))
    better = split_layers(
        split[0].num_layers, len(split), layer_group=layer_group, speeds=[1 / time_s for time_s in layer_s]
    )
    better_s = max(time_s * spec.num_local_layers for time_s, spec in zip(layer_s, better, strict=True))
    gain = 1 - better_s / max(step_s)
    return UnevenStages(
        chunk_tokens=chunk_tokens,
        step_s=step_s,
        layer_s=layer_s,
        better_split=format_layer_split(better) if gain > _WORTH_MOVING else None,
        gain=max(0.0, gain),
        misplaced_stage=layer_s.index(max(layer_s)) if max(layer_s) > _UNEVEN * layer_s[-1] else None,
    )


def _seconds(times: Sequence[float]) -> str:
    return ", ".join(f"{time_s:.3g}" for time_s in times)
