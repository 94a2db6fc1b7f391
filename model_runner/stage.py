"""StageSpec: the half-open layer range of one pipeline stage, and how a model's layers are split into stages."""

from dataclasses import dataclass
from pathlib import Path

from moontide.errors import ConfigError


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


def split_layers(num_layers: int, num_stages: int, *, layer_group: int) -> list[StageSpec]:
    """Cut the layers into stages of nearly equal size whose borders lie on the borders of layer groups.

    A stored object holds a whole layer group, so no group may be spread over two stages. The last stage gets the
    smaller share: it also computes the output head, and a slow stage costs least when it is the last.
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
    borders = [min(-(-num_groups * idx // num_stages) * layer_group, num_layers) for idx in range(num_stages + 1)]
    return [
        StageSpec(
            stage_idx=idx,
            num_stages=num_stages,
            start_layer=borders[idx],
            end_layer=borders[idx + 1],
            num_layers=num_layers,
        )
        for idx in range(num_stages)
    ]


def default_dtype(device: str = "cpu") -> str:
    """The dtype that "auto" stands for: bfloat16 where the device multiplies it in hardware, else float32."""
    if device != "cpu":
        return "bfloat16"
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text().split() if cpuinfo.exists() else []
    return "bfloat16" if "avx512_bf16" in flags or "amx_bf16" in flags else "float32"
