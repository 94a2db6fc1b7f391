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

    Raises: ModelError when it cannot be served, ConfigError when its layers cannot be split over that many stages.
    """
    from kvstore.layout import KVLayout, choose_layer_group
    from model_runner.model_source import load_model_info, resolve_model  # takes seconds: it loads torch
    from model_runner.stage import default_dtype, split_layers

    source = resolve_model(config.model.name, load_format=config.model.load_format)
    dtype = default_dtype(config.model.device) if config.model.dtype == "auto" else config.model.dtype
    info = load_model_info(source, dtype=dtype)
    one_layer = KVLayout(
        model_fingerprint=info.fingerprint,
        num_layers=info.num_layers,
        num_planes=info.num_planes,
        num_kv_heads=info.num_kv_heads,
        head_dim=info.head_dim,
        dtype=dtype,
        block_tokens=config.kv.block_tokens,
        layer_group=1,
    )
    layer_group = config.kv.layer_group or choose_layer_group(info.num_layers, one_layer.layer_bytes)
    split_layers(info.num_layers, config.deploy.stages, layer_group=layer_group)
    return PreparedModel(source.path, source.model_id)
