"""StageSpec: the half-open layer range of one pipeline stage, and how a model's layers are split into stages."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moontide.errors import ConfigError

MEASURED = "measured"
"""Value of `prefill.layer_split`: even at first, then by the speeds that the stages have measured."""


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """Layers [start_layer, end_layer) of a model of `num_layers`, held by stage `stage_idx` of `num_stages`."""

    stage_idx: int
    num_stages: int
    start_layer: int
    end_layer: int
    num_layers: int

    def __post_init__(self) -> None:
        if not 0 <= self.stage_idx < self.num_stages:
            raise ConfigError(f"stage_idx={self.stage_idx} is not in [0, num_stages={self.num_stages}); count from 0")
        if not 0 <= self.start_layer < self.end_layer <= self.num_layers:
            raise ConfigError(
                f"layers [{self.start_layer}, {self.end_layer}) are no part of a model of {self.num_layers} layers; "
                f"need 0 <= start_layer < end_layer <= {self.num_layers}"
            )

    @property
    def is_first_stage(self) -> bool:
        return self.start_layer == 0

    @property
    def is_last_stage(self) -> bool:
        return self.end_layer == self.num_layers

    @property
    def num_local_layers(self) -> int:
        return self.end_layer - self.start_layer


def split_layers(
    num_layers: int, num_stages: int, *, layer_group: int, speeds: Sequence[float] | None = None
) -> list[StageSpec]:
    """Cut the layers into stages whose slowest takes the least time, with borders on the borders of layer groups.

    A stored object holds a whole layer group, so no group may be spread over two stages. Stages of equal speed differ by
    one group at most, and the last gets the smaller share: it also computes the output head. Of uneven ones the last gets
    as much as the slowest time allows, and the others share the rest so that they take the least time in all: a slow
    stage costs least when it is the last, for while the others fill the pipeline it would not be ready anyway.

    Args:
        speeds: layers per second of each stage, in any unit; None: all alike.
    Raises: ConfigError if there are more stages than layer groups.
    """
    if num_stages < 1:
        raise ConfigError(f"num_stages={num_stages} is below 1; give the number of pipeline stages")
    num_groups = -(-num_layers // layer_group)
    if num_stages > num_groups:
        raise ConfigError(
            f"num_stages={num_stages} is more than the {num_groups} layer groups of {num_layers} layers in groups of "
            f"{layer_group}, and a group is never split; use at most {num_groups} stages or a smaller layer_group"
        )
    if speeds is None or len(set(speeds)) == 1:
        borders = [-(-num_groups * idx // num_stages) for idx in range(num_stages + 1)]
    else:
        assert len(speeds) == num_stages, f"{len(speeds)} speeds for {num_stages} stages"
        shares = _uneven_shares(speeds, num_groups, last_lacks=num_groups - num_layers / layer_group)
        borders = [0, *itertools.accumulate(shares)]
    return _stages([min(border * layer_group, num_layers) for border in borders])


def parse_layer_split(text: str, num_layers: int, num_stages: int, *, layer_group: int) -> list[StageSpec]:
    """The stages that `prefill.layer_split` asks for; as even as they can be when it is empty, or not measured yet.

    Raises: ConfigError if the split is not one of this model and group.
    """
    if text in ("", MEASURED):
        return split_layers(num_layers, num_stages, layer_group=layer_group)
    even = split_layers(num_layers, num_stages, layer_group=layer_group)
    way_out = f"leave it empty for {format_layer_split(even)}"
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ConfigError(
            f"prefill.layer_split={text!r} is no list of layer counts; write one number above 0 per stage with commas "
            f"between them, or {way_out}"
        )
    sizes = [int(word) for word in words]
    if len(sizes) != num_stages:
        raise ConfigError(
            f"prefill.layer_split={text!r} is for {len(sizes)} stages and the group has prefill.num_stages={num_stages}; "
            f"give one number per stage, or {way_out}"
        )
    if sum(sizes) != num_layers:
        raise ConfigError(
            f"prefill.layer_split={text!r} has {sum(sizes)} layers in all and the model {num_layers}; "
            f"make the numbers add up, or {way_out}"
        )
    borders = [0, *itertools.accumulate(sizes)]
    for border in borders[1:-1]:
        if border % layer_group:
            raise ConfigError(
                f"prefill.layer_split={text!r} cuts a layer group at layer {border}, and stored objects hold whole groups of "
                f"kv.layer_group={layer_group} layers; use multiples of {layer_group} for all stages but the last, or {way_out}"
            )
    return _stages(borders)


def format_layer_split(stages: Sequence[StageSpec]) -> str:
    """The value of `prefill.layer_split` that stands for these stages."""
    return ",".join(str(stage.num_local_layers) for stage in stages)


def _stages(borders: Sequence[int]) -> list[StageSpec]:
    return [
        StageSpec(stage_idx=idx, num_stages=len(borders) - 1, start_layer=start, end_layer=end, num_layers=borders[-1])
        for idx, (start, end) in enumerate(itertools.pairwise(borders))
    ]


def _uneven_shares(speeds: Sequence[float], num_groups: int, *, last_lacks: float) -> list[int]:
    """Layer groups of each stage, one at least. `last_lacks`: the part of a whole group that the last one of all is short of."""
    last = len(speeds) - 1

    def time(stage_idx: int, share: int) -> float:
        return (share - last_lacks * (stage_idx == last)) / speeds[stage_idx]

    def most_within(longest: float) -> list[int]:
        """The most groups that each stage computes in that time."""
        return [sum(time(idx, share) <= longest for share in range(1, num_groups + 1)) for idx in range(last + 1)]

    times = sorted(time(idx, share) for idx in range(last + 1) for share in range(1, num_groups + 1))
    enough = (most for most in map(most_within, times) if min(most) > 0 and sum(most) >= num_groups)
    most = next(enough)
    shares = [1] * last + [min(most[last], num_groups - last)]
    for idx in sorted(range(last), key=lambda idx: (-speeds[idx], -idx)):
        shares[idx] += min(most[idx] - 1, num_groups - sum(shares))
    return shares


def default_dtype(device: str = "cpu") -> str:
    """The dtype that "auto" stands for: bfloat16 where the device multiplies it in hardware, else float32."""
    if device != "cpu":
        return "bfloat16"
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text().split() if cpuinfo.exists() else []
    return "bfloat16" if "avx512_bf16" in flags or "amx_bf16" in flags else "float32"
