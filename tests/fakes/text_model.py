"""A model directory without weights, for tests of the front door: a small byte-level BPE tokenizer and a chat template."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

MAX_CONTEXT = 512
EOS = "<|im_end|>"
CHAT_TEMPLATE = (
    "{%- if messages[0]['role'] == 'forbidden' %}{{ raise_exception('no such role') }}{%- endif %}"
    "{% for message in messages %}\n"
    "    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + eos_token + '\\n' -}}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}{{- '<|im_start|>assistant\\n' -}}{% endif %}"
)
CORPUS = [
    "The quick brown fox jumps over the lazy dog and runs away into the deep dark forest.",
    "In the beginning there was a token, and the token was sampled, and the sample was good.",
    "café naïve 你好 世界 🙂 1234567890 def f(x):\n    return x + 1\n",
] * 4


def text_model_dir(root: Path) -> Path:
    """Write the directory below `root` and return it."""
    path = root / "text-model"
    path.mkdir()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "<|im_start|>", EOS)])
    tokenizer.save(str(path / "tokenizer.json"))
    eos_id = tokenizer.token_to_id(EOS)
    _write(
        path / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": EOS, "tokenizer_class": "TokenizersBackend"}
    )
    _write(
        path / "config.json",
        {"model_type": "llama", "max_position_embeddings": MAX_CONTEXT, "vocab_size": tokenizer.get_vocab_size() + 5},
    )
    _write(path / "generation_config.json", {"eos_token_id": eos_id})
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return path


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))
