"""From a described model to the runner that serves a stage of it."""

from __future__ import annotations

from pathlib import Path

from model_runner.config import ModelConfig
from model_runner.kv_cache import PagedKVCache
from model_runner.model_source import DescribedModel
from model_runner.paced import PacedProfile, PacedRunner
from model_runner.runner import Runner, StageRunner
from model_runner.stage import StageSpec


def load_runner(
    model: ModelConfig,
    described: DescribedModel,
    spec: StageSpec,
    *,
    num_pages: int,
    arena: memoryview,
    is_decode: bool = False,
) -> Runner:
    """Read one stage's weights, or its pace, and lay out its pages in `arena`.

    Args:
        is_decode: whether it serves a decode instance, whose steps a profile paces in another way.
    Raises: ModelError if the model cannot be served; ConfigError if layout, stage and model do not fit, or for the profile.
    """
    info, layout = described.info, described.layout
    if model.load_format == "paced":
        profile = PacedProfile.read(Path(model.profile))
        kv = PagedKVCache(layout, spec, num_pages=num_pages, arena=arena)
        pace = profile.decode_model() if is_decode else profile.stage_model(spec)
        return PacedRunner(info, spec, layout=layout, kv=kv, pace=pace)
    return StageRunner.load(
        described.source,
        spec,
        dtype=info.dtype,
        layout=layout,
        num_pages=num_pages,
        device=model.device,
        kernels=model.kernels,
        arena=arena,
    )
