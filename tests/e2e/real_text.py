"""Real prose as prompts: the language reference that every Python carries (`pydoc_data.topics`)."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import Tokenizer


class RealText:
    """The text as one row of token ids; pieces that start at different places share no first block."""

    def __init__(self, model_dir: Path) -> None:
        tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        pieces = tokenizer.encode_batch_fast([topics[name] for name in sorted(topics)], add_special_tokens=False)
        self._token_ids = [token_id for piece in pieces for token_id in piece.ids]

    def piece(self, start: int, length: int) -> list[int]:
        assert start + length <= len(self._token_ids), f"the text has {len(self._token_ids)} tokens"
        return self._token_ids[start : start + length]
