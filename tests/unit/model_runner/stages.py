"""Drives all stages of a model in one process: the shortest caller of StageRunner there can be."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from kvstore.layout import KVLayout
from model_runner.model_source import ModelSource, load_model_info
from model_runner.runner import Segment, StageRunner
from model_runner.stage import split_layers

PAGE_TOKENS = 16


def make_layout(source: ModelSource, *, dtype: str = "float32", layer_group: int = 1) -> KVLayout:
    """A layout of one layer per group by default, so that any layer may be a stage border."""
    return load_model_info(source, dtype=dtype).layout(block_tokens=PAGE_TOKENS, layer_group=layer_group)


def load_stages(
    model_dir: Path,
    num_stages: int,
    *,
    num_pages: int = 24,
    dtype: str = "float32",
    load_format: str = "safetensors",
    seed: int = 0,
    layer_group: int = 1,
    kernels: str = "auto",
) -> list[StageRunner]:
    source = ModelSource(path=model_dir, model_id=model_dir.name, load_format=load_format, seed=seed)
    layout = make_layout(source, dtype=dtype, layer_group=layer_group)
    specs = split_layers(layout.num_layers, num_stages, layer_group=layer_group)
    return [
        StageRunner.load(source, spec, dtype=dtype, layout=layout, num_pages=num_pages, kernels=kernels)
        for spec in specs
    ]


def run_step(
    stages: Sequence[StageRunner],
    segments: Sequence[Segment],
    token_ids: Sequence[int],
    *,
    on_layer_group: Callable[[int], None] | None = None,
) -> Tensor:
    """Logits of one step through every stage."""
    out = stages[0].forward(segments, token_ids_T=torch.tensor(token_ids), on_layer_group=on_layer_group)
    for stage in stages[1:]:
        out = stage.forward(segments, hidden_TD=out, on_layer_group=on_layer_group)
    return out


def prefill(
    stages: Sequence[StageRunner], prompt: Sequence[int], pages: Sequence[int], *, chunk: int, start: int = 0
) -> dict[int, Tensor]:
    """Compute prompt[start:] chunk by chunk; position -> logits [V] of each chunk's last token."""
    logits: dict[int, Tensor] = {}
    for first in range(start, len(prompt), chunk):
        ids = prompt[first : first + chunk]
        segment = Segment(start=first, num_tokens=len(ids), pages=pages, wants_logits=True)
        logits[first + len(ids) - 1] = run_step(stages, [segment], ids)[0]
    return logits


def decode(
    stages: Sequence[StageRunner], position: int, token: int, pages: Sequence[int], *, num_tokens: int
) -> list[int]:
    """Greedy tokens after `token` at `position`."""
    tokens = [token]
    for idx in range(num_tokens):
        segment = Segment(start=position + idx, num_tokens=1, pages=pages, wants_logits=True)
        tokens.append(int(run_step(stages, [segment], tokens[-1:]).argmax()))
    return tokens[1:]


def kv_of(stages: Sequence[StageRunner], pages: Sequence[int]) -> Tensor:
    """All K/V of these pages, layer after layer: [L, pages, planes, K, S, H]."""
    layers = [stage.kv.layer(idx) for stage in stages for idx in range(stage.spec.num_local_layers)]
    return torch.stack([layer[list(pages)] for layer in layers])
