"""A stage reads its own tensors and no others; dummy weights do not depend on the split."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model_runner.model_source import ModelSource
from model_runner.stage import StageSpec
from model_runner.stage_model import StageModel
from moontide.errors import ModelError
from tests.fakes.tiny_models import FAMILIES, NUM_LAYERS, tiny_model_dir
from tests.unit.model_runner.stages import kv_of, load_stages, prefill

PROMPT = list(range(3, 60))
PAGES = [4, 2, 7, 1]


def spec(start: int, end: int) -> StageSpec:
    return StageSpec(stage_idx=0, num_stages=3, start_layer=start, end_layer=end, num_layers=NUM_LAYERS)


def stage_tensors(model_dir: Path, start: int, end: int, *, load_format: str = "safetensors", seed: int = 0) -> dict:
    """Parameters and buffers of a stage under their names in the whole model."""
    source = ModelSource(path=model_dir, model_id="m", load_format=load_format, seed=seed)
    model = StageModel(source, spec(start, end), dtype="float32", device="cpu")._model
    tensors = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        parts = name.split(".")
        if "layers" in parts:
            at = parts.index("layers") + 1
            parts[at] = str(int(parts[at]) + start)
        tensors[".".join(parts)] = tensor
    return tensors


def copy_with(model_dir: Path, to: Path, tensors: dict[str, torch.Tensor]) -> Path:
    to.mkdir()
    for file in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (to / file).write_bytes((model_dir / file).read_bytes())
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


def layer_of(key: str) -> int | None:
    parts = key.split(".")
    return int(parts[parts.index("layers") + 1]) if "layers" in parts else None


@pytest.mark.parametrize("family", FAMILIES)
def test_stage_holds_its_own_tensors_only(family: str, tiny_root: Path) -> None:
    model_dir = tiny_model_dir(family, tiny_root)
    whole = stage_tensors(model_dir, 0, NUM_LAYERS)
    is_tied = json.loads((model_dir / "config.json").read_text()).get("tie_word_embeddings", False)
    for start, end in ((0, 2), (2, 4), (4, 6)):
        part = stage_tensors(model_dir, start, end)
        for name, tensor in part.items():
            assert torch.equal(tensor, whole[name]), name
        layers = {layer_of(name) for name in part} - {None}
        assert layers == set(range(start, end))
        has_embedding = start == 0 or (end == NUM_LAYERS and is_tied)
        assert any("embed_tokens.weight" in name for name in part) == has_embedding
        assert ("lm_head.weight" in part) == (end == NUM_LAYERS)


@pytest.mark.parametrize("family", ["llama", "mixtral", "deepseek_v3"])
def test_tensors_of_other_stages_are_never_read(family: str, tiny_root: Path, tmp_path: Path) -> None:
    """In this copy they have impossible shapes: whoever reads one fails."""
    model_dir = tiny_model_dir(family, tiny_root)
    tensors = load_file(model_dir / "model.safetensors")
    spoilt = {key: torch.zeros(1) if layer_of(key) in (0, 1, 4, 5) else tensor for key, tensor in tensors.items()}
    for key in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
        spoilt[key] = torch.zeros(1)
    copy = copy_with(model_dir, tmp_path / "spoilt", spoilt)
    expected = stage_tensors(model_dir, 2, 4)
    found = stage_tensors(copy, 2, 4)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    with pytest.raises(ModelError, match=r"do not fit its config\.json"):
        stage_tensors(copy, 0, 2)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_shards_without_a_tensor_of_the_stage_are_not_opened(family: str, tiny_root: Path, tmp_path: Path) -> None:
    """Only the shards a stage needs are there, so a stage that opens another fails."""
    model_dir = tiny_model_dir(family, tiny_root)
    tensors = load_file(model_dir / "model.safetensors")
    shards = {key: f"model-{'rest' if layer_of(key) is None else layer_of(key)}.safetensors" for key in tensors}
    copy = copy_with(model_dir, tmp_path / "sharded", {})
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    for shard in ("model-rest.safetensors", "model-2.safetensors", "model-3.safetensors"):
        save_file(
            {key: tensors[key] for key in tensors if shards[key] == shard}, copy / shard, metadata={"format": "pt"}
        )
    expected = stage_tensors(model_dir, 2, 4)
    found = stage_tensors(copy, 2, 4)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    with pytest.raises(ModelError, match=r"has no model-0.safetensors, which model.safetensors.index.json names"):
        stage_tensors(copy, 0, 2)


def test_missing_tensor_is_refused_by_name(tiny_root: Path, tmp_path: Path) -> None:
    model_dir = tiny_model_dir("llama", tiny_root)
    tensors = load_file(model_dir / "model.safetensors")
    del tensors["model.layers.1.self_attn.q_proj.weight"]
    copy = copy_with(model_dir, tmp_path / "holes", tensors)
    with pytest.raises(ModelError, match=r"first model.layers.1.self_attn.q_proj.weight"):
        stage_tensors(copy, 0, 2)
    assert stage_tensors(copy, 2, 4)


@pytest.mark.parametrize("family", FAMILIES)
def test_dummy_weights_are_the_same_for_any_split(family: str, tiny_root: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((tiny_model_dir(family, tiny_root) / "config.json").read_bytes())
    whole = stage_tensors(bare, 0, NUM_LAYERS, load_format="dummy")
    for start, end in ((0, 1), (1, 5), (5, 6)):
        for name, tensor in stage_tensors(bare, start, end, load_format="dummy").items():
            assert torch.equal(tensor, whole[name]), name
    weight = "model.layers.1.self_attn.o_proj.weight"
    other = stage_tensors(bare, 0, NUM_LAYERS, load_format="dummy", seed=1)
    assert not torch.equal(whole[weight], other[weight])
    assert not torch.equal(whole[weight], whole[weight.replace("1", "2")])


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "deepseek_v2"])
def test_dummy_activations_stay_sane(family: str, tiny_root: Path) -> None:
    model_dir = tiny_model_dir(family, tiny_root)
    seen = []
    for num_stages in (1, 3):
        stages = load_stages(model_dir, num_stages, load_format="dummy", dtype="bfloat16")
        logits = prefill(stages, PROMPT, PAGES, chunk=20)
        seen.append((torch.stack(list(logits.values())), kv_of(stages, PAGES)))
    assert seen[0][0].isfinite().all()
    assert 0 < seen[0][0].std() < 100
    assert torch.equal(seen[0][0], seen[1][0])
    assert torch.equal(seen[0][1], seen[1][1])
