"""Weights of one stage: only this stage's tensors are read, or made from a seed.

The model was built on the meta device, so it has no memory before this. What other stages hold is replaced by
placeholders first; the library's loader then reads only keys that the model still has. A plain name-by-name read would
not do: checkpoints of mixture-of-experts models store one tensor per expert, and the modules hold them fused.

The loader is private API of transformers; the tests compare every family and split with the stock model.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging as transformers_logging

from model_runner.model_source import ModelSource
from model_runner.stage import StageSpec
from moontide.errors import ModelError

_LAYER_KEY = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class Elsewhere(nn.Identity):
    """Placeholder of a module whose weights another stage holds."""


def load_stage_weights(model: Any, source: ModelSource, spec: StageSpec, *, dtype: torch.dtype) -> None:
    """Fill the parameters and buffers of one stage of `model`, and drop those of the others.

    Args:
        model: the causal-LM model, built on the meta device with its full config.
    Afterwards: layers outside the stage, and what only the first or last stage needs, are `Elsewhere`; nothing of the
        rest is left on the meta device. Tensors of the file's own dtype are views of the mapped file.
    Raises: ModelError if a tensor is missing or has another shape.
    """
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    drop_other_stages(model, spec)
    if source.load_format == "dummy":
        _make_weights(model, source.seed)
    else:
        _read_weights(model, source, spec, dtype)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    unfilled = [name for name, tensor in tensors if tensor.device.type == "meta"]
    if unfilled:
        raise ModelError(
            f"model {source.model_id!r}: no weights for {', '.join(unfilled[:5])}; the checkpoint is incomplete"
        )


def drop_other_stages(model: Any, spec: StageSpec) -> None:
    inner = model.get_decoder()
    for layer_idx in range(spec.num_layers):
        if not spec.start_layer <= layer_idx < spec.end_layer:
            inner.layers[layer_idx] = Elsewhere()
    shares_embedding = _is_tied(model) and spec.is_last_stage
    if not (spec.is_first_stage or shares_embedding):
        inner.embed_tokens = Elsewhere()
    if not spec.is_last_stage:
        inner.norm = Elsewhere()
        model.lm_head = Elsewhere()
        model.all_tied_weights_keys = {}


def _read_weights(model: Any, source: ModelSource, spec: StageSpec, dtype: torch.dtype) -> None:
    load_config = LoadStateDictConfig(
        pretrained_model_name_or_path=str(source.path),
        dtype=dtype,
        dtype_plan=model._get_dtype_plan(dtype),
        weight_mapping=get_model_conversion_mapping(model),  # type: ignore[arg-type]
    )
    files = [str(file) for file in _stage_files(source.path, spec)]
    report, _ = type(model)._load_pretrained_model(model, None, files, load_config)
    is_tied_head = _is_tied(model) and spec.is_last_stage
    missing = sorted(set(report.missing_keys) - ({"lm_head.weight"} if is_tied_head else set()))
    if missing or report.mismatched_keys or report.conversion_errors:
        wrong = missing or sorted(map(str, report.mismatched_keys)) or sorted(map(str, report.conversion_errors))
        raise ModelError(
            f"model {source.model_id!r}: {len(wrong)} tensors are missing or do not fit its config.json, first "
            f"{wrong[0]}; download the checkpoint again"
        )
    # Rotary and other buffers are not in the file; the library computes them where it initialises missing weights.
    model._move_missing_keys_from_meta_to_device(report.missing_and_mismatched(), None, None, None)
    model._initialize_missing_keys(False)
    if is_tied_head:
        model.tie_weights(missing_keys=report.missing_keys, recompute_mapping=False)


def _stage_files(path: Path, spec: StageSpec) -> list[Path]:
    """The safetensors files that hold anything but layers of other stages."""
    index = path / "model.safetensors.index.json"
    if not index.exists():
        return sorted(path.glob("*.safetensors"))
    weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    names = {file for key, file in weight_map.items() if _may_be_needed(key, spec)}
    absent = sorted(name for name in names if not (path / name).is_file())
    if absent:
        raise ModelError(f"model directory {path} has no {absent[0]}, which {index.name} names; download it again")
    return [path / name for name in sorted(names)]


def _may_be_needed(key: str, spec: StageSpec) -> bool:
    layer = _LAYER_KEY.search(key)
    return layer is None or spec.start_layer <= int(layer.group(1)) < spec.end_layer


def _make_weights(model: Any, seed: int) -> None:
    """Initialise every module as the architecture does for training, each from its own seed.

    The seed of a module is made of its name, so its weights do not depend on which other modules this stage holds.
    """
    model.to_empty(device="cpu")
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for name, module in model.named_modules():
            torch.manual_seed(_seed_of(name, seed))
            model._init_weights(module)
    if not isinstance(model.lm_head, Elsewhere):
        model.tie_weights()


def _seed_of(name: str, seed: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little") >> 1


def _is_tied(model: Any) -> bool:
    return bool(model.config.tie_word_embeddings)
