"""Where a model comes from (a Hugging Face directory, the built-in model, seeded random weights) and what it is.

Reads config files and samples of the weights, never a whole tensor; builds no module.
"""

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from kvstore.access import KvConfig
from kvstore.layout import KVLayout, choose_layer_group
from model_runner import builtin_model
from model_runner.config import LOAD_FORMATS, ModelConfig
from model_runner.kv_cache import TORCH_DTYPES
from model_runner.stage import default_dtype
from moontide.errors import ModelError

SUPPORTED_MODEL_TYPES = (
    "deepseek_v2",
    "deepseek_v3",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3",
)
_LATENT_MODEL_TYPES = ("deepseek_v2", "deepseek_v3")
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Position encodings whose angles depend on nothing but the position, so that any chunking gives the same K."""
_KNOWN_UNFIT = {
    "gemma3": "it is multimodal; serve a text-only checkpoint (model_type gemma3_text)",
    "qwen3_next": "its linear-attention layers keep a state that paged K/V does not hold",
    "lfm2": "its convolution layers keep a state that paged K/V does not hold",
    "mamba": "it has no attention, and its state does not fit paged K/V",
    "mamba2": "it has no attention, and its state does not fit paged K/V",
}
_SAMPLE_BYTES = 4096
_SAMPLE_EVERY_BYTES = 16 << 20
"""Samples of a tensor begin at most so far apart."""
_WHOLE_BYTES = 64 << 10
"""Tensors of up to so many bytes, as norms and biases are, are read whole: one read costs less than three."""


@dataclass(frozen=True)
class ModelSource:
    """A model directory and how its weights are made."""

    path: Path
    model_id: str
    """The name it was asked for by; what clients call it."""
    load_format: str = "safetensors"
    """"safetensors": the directory's weights; "dummy": seeded random weights; "paced": none. The latter two need only config.json."""
    seed: int = 0
    """Seed of dummy weights; without meaning for others."""


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """What the rest of the system needs to know about a model."""

    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_context: int
    num_planes: int
    """2: K and V; 1: the latent of multi-head latent attention, which then counts as one KV head."""
    num_kv_heads: int
    head_dim: int
    eos_token_ids: tuple[int, ...]
    fingerprint: str
    """Hex digest of config and weights; equal on every host that has the same files."""
    dtype: str
    """"float32" or "bfloat16"."""

    def layout(self, *, block_tokens: int, layer_group: int) -> KVLayout:
        """How its K/V lies in pages and in the store."""
        return KVLayout(
            model_fingerprint=self.fingerprint,
            num_layers=self.num_layers,
            num_planes=self.num_planes,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            block_tokens=block_tokens,
            layer_group=layer_group,
        )


def resolve_model(name: str, *, load_format: str = "safetensors") -> ModelSource:
    """Find the model `name`: a directory, or the built-in model, which is prepared on first use.

    Raises: ModelError if there is no such model, or its directory lacks a file.
    """
    if load_format not in LOAD_FORMATS:
        raise ModelError(f"load_format={load_format!r} is unknown; use one of {', '.join(LOAD_FORMATS)}")
    path = builtin_model.prepare() if name in builtin_model.NAMES else Path(name).expanduser()
    if not path.is_dir():
        raise ModelError(
            f"model {name!r} is neither an existing directory nor a built-in model; give the path of a Hugging Face "
            f"directory or one of {', '.join(builtin_model.NAMES)}"
        )
    _require(path / "config.json", "it describes the architecture; copy the complete Hugging Face directory")
    if load_format == "safetensors":
        if not list(path.glob("*.safetensors")):
            raise ModelError(
                f"model directory {path} has no *.safetensors file; download the weights in that format, or start with "
                "load_format=dummy for random ones"
            )
        _require(path / "tokenizer.json", "it turns text into token ids; copy it from the model's repository")
    return ModelSource(path=path, model_id=name, load_format=load_format)


def load_model_info(source: ModelSource, *, dtype: str) -> ModelInfo:
    """Read what a model is. Raises: ModelError, with the reason, if this runner cannot compute it exactly."""
    if dtype not in TORCH_DTYPES:
        raise ModelError(f"dtype={dtype!r} is not supported; use one of {', '.join(TORCH_DTYPES)}")
    config = load_config(source)
    is_latent = config.model_type in _LATENT_MODEL_TYPES
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return ModelInfo(
        model_type=config.model_type,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_context=config.max_position_embeddings,
        num_planes=1 if is_latent else 2,
        num_kv_heads=1 if is_latent else config.num_key_value_heads,
        head_dim=config.kv_lora_rank + config.qk_rope_head_dim if is_latent else head_dim,
        eos_token_ids=_eos_token_ids(source.path, config),
        fingerprint=_fingerprint(source),
        dtype=dtype,
    )


def load_config(source: ModelSource) -> Any:
    """The transformers config of a supported model. Raises: ModelError otherwise."""
    declared = _read_json(source.path / "config.json")
    model_type = declared.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        reason = _KNOWN_UNFIT.get(str(model_type), "nobody has proven that its stages compute the same tokens")
        raise ModelError(
            f"model {source.model_id!r} has model_type={model_type!r}, which is not supported: {reason}; "
            f"supported are {', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    if declared.get("quantization_config"):
        raise ModelError(
            f"model {source.model_id!r} has quantised weights (quantization_config in config.json), which are not "
            "supported; use a bfloat16 or float32 checkpoint"
        )
    config = AutoConfig.from_pretrained(source.path, local_files_only=True)
    if getattr(config, "use_bidirectional_attention", False):
        raise ModelError(
            f"model {source.model_id!r} attends in both directions (use_bidirectional_attention), so a prompt cannot be "
            "computed chunk by chunk; use a causal checkpoint"
        )
    for parameters in _rope_parameters(config):
        _check_rope(source, parameters, config.max_position_embeddings)
    return config


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """The position encodings of a model: one, or one per layer type."""
    given = getattr(config, "rope_parameters", None) or {}
    return [given] if "rope_type" in given else [each for each in given.values() if isinstance(each, dict)]


def _check_rope(source: ModelSource, parameters: dict[str, Any], max_context: int) -> None:
    rope_type = parameters.get("rope_type", "default")
    if rope_type in _ROPE_TYPES:
        return
    if rope_type == "longrope":
        original = parameters["original_max_position_embeddings"]
        if max_context <= original:
            return
        raise ModelError(
            f"model {source.model_id!r} has rope_type='longrope' with a context of {max_context} beyond its original "
            f"{original}: its angles change with the length of the prompt, so K of an earlier chunk would be wrong; set "
            f"max_position_embeddings to {original} in config.json to serve it with the short factors"
        )
    raise ModelError(
        f"model {source.model_id!r} has rope_type={rope_type!r}, whose angles change with the length of the prompt, so K "
        f"of an earlier chunk would be wrong; use one of {', '.join(_ROPE_TYPES)} in config.json"
    )


def _eos_token_ids(path: Path, config: Any) -> tuple[int, ...]:
    generation = path / "generation_config.json"
    given = _read_json(generation).get("eos_token_id") if generation.exists() else None
    if given is None:
        given = config.eos_token_id
    if given is None:
        return ()
    return (given,) if isinstance(given, int) else tuple(given)


def _fingerprint(source: ModelSource) -> str:
    """Digest of everything in config.json but its `transformers_version`, and of what `_sample_file` sees of the weights.

    KV that was computed with other weights is hit as if it were right when the two have one fingerprint: when they differ only
    between the samples, as after a few rows of a large tensor were edited. Who edits weights like that adds a field to config.json,
    such as `"weights_revision": 2`: a new fingerprint, so that nothing of before is hit.
    """
    config = _read_json(source.path / "config.json")
    config.pop("transformers_version", None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    digest.update(f"{source.load_format} {source.seed if source.load_format == 'dummy' else ''}".encode())
    if source.load_format == "safetensors":
        for file in sorted(source.path.glob("*.safetensors")):
            digest.update(_sample_file(file))
    return digest.hexdigest()


def _sample_file(file: Path) -> bytes:
    """Digest of a safetensors file's size, header and samples of every tensor: one tensor that was trained on differs.

    Cheap for large files: about one read of 4 KiB per 16 MiB, three per tensor at least. Raises: ModelError for a broken file.
    """
    size = file.stat().st_size
    digest = hashlib.sha256(f"{file.name} {size}".encode())
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        header = stream.read(min(header_bytes, size))
        digest.update(header)
        for start, end in _tensor_ranges(file, header):
            for offset, num_bytes in _samples(end - start):
                stream.seek(8 + header_bytes + start + offset)
                digest.update(stream.read(num_bytes))
    return digest.digest()


def _tensor_ranges(file: Path, header: bytes) -> list[tuple[int, int]]:
    """First and last + 1 byte of every tensor, counted from the header's end, in the order of the file."""
    try:
        entries = json.loads(header)
        return sorted(
            (int(start), int(end))
            for start, end in (entry["data_offsets"] for name, entry in entries.items() if name != "__metadata__")
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{file} has no readable safetensors header ({error}); download it again") from error


def _samples(tensor_bytes: int) -> list[tuple[int, int]]:
    """Offset and length of what is read of a tensor: all of a small one, else its first, middle and last bytes and some between."""
    if tensor_bytes <= _WHOLE_BYTES:
        return [(0, tensor_bytes)]
    last = tensor_bytes - _SAMPLE_BYTES
    half_steps = -(-last // (2 * _SAMPLE_EVERY_BYTES))
    return [(last * step // (2 * half_steps), _SAMPLE_BYTES) for step in range(2 * half_steps + 1)]


def _require(file: Path, why: str) -> None:
    if not file.is_file():
        raise ModelError(f"model directory {file.parent} has no {file.name}: {why}")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} is not readable JSON ({error}); copy it again from the model's repository") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} holds no JSON object; copy it again from the model's repository")
    return content


@dataclass(frozen=True)
class DescribedModel:
    """A model as it is served: where it comes from, what it is, and the shape of its stored KV."""

    source: ModelSource
    info: ModelInfo
    layout: KVLayout


def describe_model(model: ModelConfig, kv: KvConfig) -> DescribedModel:
    """Resolve the settings that say "automatic". Raises: ModelError when the model cannot be served."""
    source = resolve_model(model.name, load_format=model.load_format)
    dtype = default_dtype(model.device) if model.dtype == "auto" else model.dtype
    info = load_model_info(source, dtype=dtype)
    one_layer = info.layout(block_tokens=kv.block_tokens, layer_group=1)
    layer_group = kv.layer_group or choose_layer_group(info.num_layers, one_layer.layer_bytes)
    return DescribedModel(source, info, replace(one_layer, layer_group=layer_group))
