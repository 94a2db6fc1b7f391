"""Paced models for tests and benchmarks: a directory with config and tokenizer, and a profile; their K/V is tiny.

Eight layers in groups of one, so that up to eight stages fit, and 16 bytes of K/V per token and layer in bfloat16: a prompt of a
million tokens is 128 MB.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

NUM_LAYERS = 8
HEAD_DIM = 4
MAX_CONTEXT = 1_200_000
_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = len(_SPECIAL_TOKENS) + 256


@dataclass(frozen=True, kw_only=True)
class PacedModel:
    directory: Path
    profile: Path

    @property
    def settings(self) -> list[str]:
        """What `--set` needs for it; number of pages, blocks and chunks are left to the caller."""
        return [
            f"model.name={json.dumps(str(self.directory))}",
            f"model.profile={json.dumps(str(self.profile))}",
            "model.load_format=paced",
            "model.dtype=bfloat16",
            "kv.layer_group=1",
        ]

    def settings_for(self, stages: int) -> list[str]:
        """A group of so many stages with one layer group each, and few large blocks: so the cores keep up with the pace."""
        return [
            *self.settings,
            f"deploy.stages={stages}",
            f"kv.layer_group={NUM_LAYERS // stages}",
            "kv.block_tokens=256",
            "prefill.num_pages=2048",
            "decode.num_pages=2048",
        ]


def write_paced_model(
    root: Path, *, max_context: int = MAX_CONTEXT, head_dim: int = HEAD_DIM, **profile: Any
) -> PacedModel:
    """Write both below `root`; `profile` are the fields of model_runner.paced.PacedProfile."""
    directory = root / "paced-model"
    directory.mkdir(parents=True)
    config = {
        "model_type": "llama",
        "num_hidden_layers": NUM_LAYERS,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": head_dim,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": max_context,
        "eos_token_id": 2,
    }
    (directory / "config.json").write_text(json.dumps(config))
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    path = root / "profile.json"
    path.write_text(json.dumps(profile))
    return PacedModel(directory=directory, profile=path)


def byte_tokenizer() -> Tokenizer:
    """Ids 0-2 are special, 3-258 the bytes."""
    vocab = {token: idx for idx, token in enumerate([*_SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL_TOKENS))
    return tokenizer
