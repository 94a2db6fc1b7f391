"""Tiny models with seeded weights, one per family, and what stock transformers generates with them.

Made so that corruption shows: more layers than stages, weights far larger than usual (with the usual ones attention
hardly matters), sliding windows shorter than prompts, and logits whose best two are clearly apart.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

NUM_LAYERS = 6
VOCAB_SIZE = 3 + 256
"""Special tokens and bytes."""
WINDOW = 24
_WEIGHTS_VERSION = 3
"""Counts changes of the weights below, so that a cached directory of older ones is not used."""
MIN_TOP2_GAP = 1e-4
"""A reference whose best two logits are closer than this does not tell right from wrong."""

_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_ALTERNATING = ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2)
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
_LATENT = {
    **_EXPERTS,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 2,
    "n_group": 1,
    "topk_group": 1,
}
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "qwen2": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 3}),
    "qwen3": ("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 9.0,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW, "layer_types": _ALTERNATING},
    ),
    "phi3": ("Phi3Config", {"original_max_position_embeddings": 8192}),
    "smollm3": ("SmolLM3Config", {"no_rope_layer_interval": 3, "tie_word_embeddings": True}),
    "olmo2": ("Olmo2Config", {}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**_EXPERTS, "head_dim": 16, "num_experts": 4, "mlp_only_layers": [0, 3], "decoder_sparse_step": 1},
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": (
        "GptOssConfig",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "layer_types": _ALTERNATING,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 2.0,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
        },
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        {**_LATENT, "q_lora_rank": None, "head_dim": 8, "topk_method": "greedy"},
    ),
    "deepseek_v3": ("DeepseekV3Config", {**_LATENT, "q_lora_rank": 32}),
}
FAMILIES: tuple[str, ...] = tuple(_CONFIGS)


def tiny_model_dir(family: str, root: Path, **overrides: Any) -> Path:
    """Return the directory of a family's tiny model below `root`, made on first use: weights, tokenizer, template.

    `overrides` change the config. A directory that is there is used as it is, so one root serves a whole test session.
    """
    class_name, own = _CONFIGS[family]
    settings = {**_BASE, **own, **overrides}
    name = hashlib.sha256(json.dumps([_WEIGHTS_VERSION, settings], sort_keys=True).encode()).hexdigest()[:10]
    directory = root / f"{family}-{name}"
    if not directory.exists():
        scratch = root / f"{directory.name}.new"
        scratch.mkdir(parents=True, exist_ok=True)
        config = getattr(transformers, class_name)(**settings)
        _seeded_model(config).save_pretrained(scratch)
        _save_tokenizer(scratch)
        scratch.rename(directory)
    return directory


def reference_model(model_dir: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The stock model with eager attention."""
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, attn_implementation="eager").eval()


def reference_generate(
    model_dir: Path, prompt_ids: list[int], max_tokens: int, dtype: torch.dtype = torch.float32
) -> list[int]:
    """Greedy tokens of transformers' `generate`, end-of-sequence ignored; cached in the model's directory.

    Raises: ValueError if the best two logits come closer than MIN_TOP2_GAP: take another prompt then.
    """
    key = hashlib.sha256(json.dumps([prompt_ids, max_tokens, str(dtype)]).encode()).hexdigest()[:20]
    cached = model_dir / f"reference-{key}.json"
    if cached.exists():
        tokens: list[int] = json.loads(cached.read_text())
        return tokens
    model = reference_model(model_dir, dtype)
    ids = torch.tensor([prompt_ids])
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=max_tokens,
            max_new_tokens=max_tokens,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
    tokens = output.sequences[0, len(prompt_ids) :].tolist()
    best_two = torch.stack(output.logits)[:, 0].float().topk(2).values
    gap = float((best_two[:, 0] - best_two[:, 1]).min())
    if dtype == torch.float32 and gap < MIN_TOP2_GAP:
        raise ValueError(f"the best two logits of {model_dir.name} come as close as {gap:.1e}; take another prompt")
    cached.write_text(json.dumps(tokens))
    return tokens


def _seeded_model(config: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name == "model.norm.weight" and config.tie_word_embeddings:
                parameter.fill_(8.0)  # makes up for the small embedding, which is the head too
                continue
            if "embed" in name or "lm_head" in name:
                # A large tied embedding would make a model that repeats its last token whatever K/V it sees.
                std = 0.05 if config.tie_word_embeddings else 0.3
            elif parameter.dim() >= 2:
                std = 0.16
            elif "sinks" in name:
                std = 1.0
            elif "bias" in name:
                std = 0.1
            else:
                continue
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    return model


def _save_tokenizer(directory: Path) -> None:
    """Byte-level: ids 0-2 are special, 3-258 the bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: idx for idx, token in enumerate([*_SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL_TOKENS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=_SPECIAL_TOKENS[0],
        eos_token=_SPECIAL_TOKENS[2],
        pad_token=_SPECIAL_TOKENS[0],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = _CHAT_TEMPLATE
    fast.save_pretrained(directory)
