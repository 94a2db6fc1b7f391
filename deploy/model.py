"""The check of a model before anything starts, so that a wrong one costs seconds and one line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deploy.config import ClusterConfig


@dataclass(frozen=True)
class PreparedModel:
    """A model that the cluster can serve."""

    path: Path
    model_id: str


def prepare_model(config: ClusterConfig) -> PreparedModel:
    """The model's directory; the built-in one is unpacked on first use.

    Raises: ModelError when it cannot be served, ConfigError when its layers cannot be split over that many stages, or as asked, or
        its profile does not fit.
    """
    from model_runner.model_source import describe_model  # takes seconds: it loads torch
    from model_runner.paced import PacedProfile
    from model_runner.stage import parse_layer_split

    described = describe_model(config.model, config.kv)
    stages = parse_layer_split(
        config.prefill.layer_split,
        described.info.num_layers,
        config.deploy.stages,
        layer_group=described.layout.layer_group,
    )
    if config.model.load_format == "paced":
        PacedProfile.read(Path(config.model.profile)).stage_model(stages[0])
    return PreparedModel(described.source.path, described.source.model_id)
