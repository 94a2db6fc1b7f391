"""Text to token ids and back, without torch or transformers.

A text is cut where the pre-tokenizer cuts anyway; whether pieces and whole agree is checked on a sample when the model is loaded.

short  cut into words, most of which are known from before: a fifth of the time that the library takes, less than a switch of threads costs
long   cut into pieces of a few thousand characters. A conversation that comes back longer has the same pieces up to its end, so that
       only what is new is encoded, as one batch, in a worker thread, which leaves the interpreter to the event loop.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, Protocol

import jinja2
import jinja2.ext
import numpy as np
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from conductor.piece_cache import PieceCache
from conductor.word_cache import WordCache, cut_into_words
from moontide.errors import BadRequest, ModelError
from moontide.log import get_logger
from moontide.token_ids import TokenArray

PIECE_CHARS = 4096
"""Text between two cuts; small enough that the ids of a piece are copied in well under a millisecond."""
BATCH_PIECES = 16
SHORT_CHARS = 8192
"""A text up to this length is encoded where it arrives: about half a millisecond, eight if no word of it is known."""
PIECE_CACHE_BYTES = 128 * 1024 * 1024
"""Text and ids of pieces that are kept: about 15 million tokens."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\ufffd"
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")
_SAMPLE = (
    "The quick brown fox jumps over 12 lazy dogs, doesn't it? Der Fluss fließt; naïve café.\n\n"
    "  indented code = {'a': [1, 2, 3]}\tand a tab  two spaces after\r\nПривет мир, 你好 世界 🙂 end of text "
) * 3

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class ChatMessage:
    role: str
    content: str


class Tokenizer:
    """Tokenizer and chat template of one model directory. Immutable after `load`; safe to use from several tasks."""

    def __init__(self, core: tokenizers.Tokenizer, config: Mapping[str, Any], template: str | None) -> None:
        self._core = core
        self._words = WordCache(lambda text: core.encode(text, add_special_tokens=False).ids)
        self._pieces = PieceCache(PIECE_CACHE_BYTES)
        self._special = _special_tokens(config)
        self._template = _compile_template(template) if template is not None else None
        self._prefix, self._suffix = self._added_by_post_processor()
        added = core.get_added_tokens_decoder()
        self._added = {i: token.content for i, token in added.items()}
        spec = json.loads(core.to_str()).get("decoder")
        self._byte_of_char = _byte_alphabet() if "ByteLevel" in json.dumps(spec) else None
        self._has_byte_fallback = "ByteFallback" in json.dumps(spec)
        # When text is the bytes of its tokens in a row, a stream needs no look at the tokens before.
        self._joins_bytes = spec is not None and spec.get("type") == "ByteLevel"
        self._text_bytes = {i: b"" for i, token in added.items() if token.special}
        """What each token adds to a text, as far as it was asked for."""
        self.cuts_text = self._pieces_equal_whole()
        if not self.cuts_text:
            log.info("texts are encoded whole: this tokenizer does not cut between words")

    @classmethod
    def load(cls, model_dir: Path) -> Tokenizer:
        """Raises: ModelError naming the file that is missing or broken."""
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{path} does not exist; conductor.model_dir must hold the model's tokenizer.json")
        try:
            core = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"{path} cannot be read as a tokenizer: {error}") from error
        core.no_truncation()
        core.no_padding()
        config = read_json(model_dir / "tokenizer_config.json", required=False)
        return cls(core, config, _find_template(model_dir, config))

    async def encode(self, text: str, *, add_special_tokens: bool) -> TokenArray:
        """Token ids, [n] uint32. `add_special_tokens` adds what the model expects around a bare prompt (BOS, for most)."""
        if len(text) <= SHORT_CHARS:
            return self.encode_blocking(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.encode_blocking, text, add_special_tokens=add_special_tokens)

    def encode_blocking(self, text: str, *, add_special_tokens: bool) -> TokenArray:
        if not self.cuts_text:
            parts = self._encode_batch([text])
        elif len(text) <= SHORT_CHARS:
            parts = [self._words.ids(text)]
        else:
            parts = self._encode_long(text)
        if add_special_tokens:
            parts = [np.asarray(self._prefix, np.uint32), *parts, np.asarray(self._suffix, np.uint32)]
        return np.concatenate(parts)

    def _encode_long(self, text: str) -> list[TokenArray]:
        """The last piece will be a longer one in the next turn, so it is not kept."""
        pieces = cut_text(text)
        known = [self._pieces.get(piece) for piece in pieces]
        new = [piece for piece, ids in zip(pieces, known, strict=True) if ids is None]
        encoded = iter(self._encode_batch(new))
        parts = [next(encoded) if ids is None else ids for ids in known]
        for piece, before, ids in zip(pieces[:-1], known, parts, strict=False):
            if before is None:
                self._pieces.put(piece, ids)
        return parts

    def _encode_batch(self, texts: list[str]) -> list[TokenArray]:
        """A few at a time: what the library returns holds a string for each token, and freeing a million of them takes a while."""
        return [
            np.asarray(encoding.ids, np.uint32)
            for start in range(0, len(texts), BATCH_PIECES)
            for encoding in self._core.encode_batch_fast(texts[start : start + BATCH_PIECES], add_special_tokens=False)
        ]

    async def encode_chat(self, messages: Sequence[ChatMessage]) -> TokenArray:
        """Token ids of a conversation, ready for the assistant's answer. Raises: BadRequest when the template refuses it."""
        if sum(len(message.content) for message in messages) <= SHORT_CHARS:
            return self._encode_chat_blocking(messages)
        return await asyncio.to_thread(self._encode_chat_blocking, messages)

    def _encode_chat_blocking(self, messages: Sequence[ChatMessage]) -> TokenArray:
        return self.encode_blocking(self.render_chat(messages), add_special_tokens=False)

    def render_chat(self, messages: Sequence[ChatMessage]) -> str:
        """The prompt text of a conversation. Raises: BadRequest when there is no template or it refuses the messages."""
        if self._template is None:
            raise BadRequest("this model has no chat template; use /v1/completions", param="messages")
        conversation = [{"role": m.role, "content": m.content} for m in messages]
        try:
            return self._template.render(
                messages=conversation, tools=None, documents=None, add_generation_prompt=True, **self._special
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise BadRequest(f"the model's chat template refuses these messages: {error}", param="messages") from error

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids, without special tokens."""
        return self._core.decode(list(token_ids), skip_special_tokens=True)

    def token_text(self, token_id: int) -> str:
        """One token alone, special tokens by name; U+FFFD where it is part of a character."""
        return self._core.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for; empty for an id without a token."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._core.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_of_char is not None:
            return self._from_alphabet(token)
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return token.replace("\u2581", " ").encode()

    def _from_alphabet(self, token: str) -> bytes:
        """The bytes that a token of a byte-level vocabulary is written for; as it stands when it was not made of bytes."""
        assert self._byte_of_char is not None
        try:
            return bytes([self._byte_of_char[char] for char in token])
        except KeyError:
            return token.encode()

    def text_bytes(self, token_id: int) -> bytes:
        """What the token adds to a text: its bytes, nothing for special tokens."""
        found = self._text_bytes.get(token_id)
        if found is None:
            found = self._text_bytes[token_id] = self._from_alphabet(self._core.id_to_token(token_id) or "")
        return found

    def detokenizer(self) -> Detokenizer:
        return ByteDetokenizer(self) if self._joins_bytes else WindowDetokenizer(self)

    def ends_inside_character(self, token_id: int) -> bool:
        """Whether text that ends with this token may still change: a run of byte tokens is decoded as a whole."""
        return self._has_byte_fallback and _BYTE_TOKEN.fullmatch(self._core.id_to_token(token_id) or "") is not None

    def _added_by_post_processor(self) -> tuple[list[int], list[int]]:
        """Ids before and after a bare prompt. tokenizer.json alone decides; transformers ignores add_bos_token beside it, too."""
        bare = self._core.encode("a", add_special_tokens=False).ids
        full = self._core.encode("a", add_special_tokens=True).ids
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return full[:start], full[start + len(bare) :]
        return [], []

    def _pieces_equal_whole(self) -> bool:
        if any(len(cut_into_words(token)) + len(cut_text(token, piece_chars=0)) > 2 for token in self._added.values()):
            return False
        whole = self._core.encode(_SAMPLE, add_special_tokens=False).ids
        return all(
            [i for e in self._core.encode_batch_fast(pieces, add_special_tokens=False) for i in e.ids] == whole
            for pieces in (cut_text(_SAMPLE, piece_chars=1), cut_into_words(_SAMPLE))
        )


class Detokenizer(Protocol):
    """Text of one request, token by token. All pieces joined, with `flush` at the end, equal `decode` of all ids.

    Text that a later token may still change (the first bytes of a character) is held back.
    """

    def step(self, token_id: int) -> str:
        """Add one token; returns the text that became final."""

    def flush(self) -> str:
        """No more tokens: returns what was held back."""


class ByteDetokenizer:
    """For byte-level vocabularies: one look-up per token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._text_bytes = tokenizer.text_bytes
        self._decode = _Utf8Decoder("replace").decode

    def step(self, token_id: int) -> str:
        return self._decode(self._text_bytes(token_id))

    def flush(self) -> str:
        return self._decode(b"", True)


class WindowDetokenizer:
    """For all others. Decoding looks at a window of ids:

    [0, start) sent, not looked at again | [start, read) sent, context for the next | [read, end) not sent yet
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        self._start = 0
        self._read = 0

    def step(self, token_id: int) -> str:
        self._token_ids.append(token_id)
        text = self._unsent()
        if not text or text.endswith(_REPLACEMENT) or self._tokenizer.ends_inside_character(token_id):
            return ""
        self._start, self._read = self._read, len(self._token_ids)
        return text

    def flush(self) -> str:
        text = self._unsent()
        self._start = self._read = len(self._token_ids)
        return text

    def _unsent(self) -> str:
        known = self._tokenizer.decode(self._token_ids[self._start : self._read])
        return self._tokenizer.decode(self._token_ids[self._start :])[len(known) :]


def cut_text(text: str, *, piece_chars: int = PIECE_CHARS) -> list[str]:
    """Cut before a space that stands between two letters, at the first such place after every `piece_chars` characters."""
    pieces = []
    start = 0
    while (cut := next(_cuts(text, start + piece_chars), None)) is not None:
        pieces.append(text[start:cut])
        start = cut
    if start < len(text):
        pieces.append(text[start:])
    return pieces


def _cuts(text: str, start: int) -> Iterator[int]:
    """Positions >= `start` of a space between two letters."""
    position = text.find(" ", max(1, start))
    while 0 < position < len(text) - 1:
        if text[position - 1].isalpha() and text[position + 1].isalpha():
            yield position
        position = text.find(" ", position + 1)


def read_json(path: Path, *, required: bool = True) -> dict[str, Any]:
    """A JSON object from a file of the model. Raises: ModelError; a file that is not required may be missing ({})."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if not required:
            return {}
        raise ModelError(
            f"{path} does not exist; conductor.model_dir must be a prepared Hugging Face directory"
        ) from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, ... as text; a token is written as text or as an object with `content`."""
    found = {}
    for key, value in config.items():
        if key.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[key] = text
    return found


def _find_template(model_dir: Path, config: Mapping[str, Any]) -> str | None:
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several named ones
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's part for training; here it only passes its body through."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own declaration)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile_template(source: str) -> jinja2.Template:
    """A template with what chat templates rely on; sandboxed, because it comes with the model."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ModelError(f"the model's chat template is no valid jinja2: {error}") from error


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Plain JSON; jinja's own filter escapes HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _byte_alphabet() -> dict[str, int]:
    """Which byte each character of a byte-level vocabulary stands for: printable Latin-1 stands for itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}
