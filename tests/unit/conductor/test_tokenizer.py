from __future__ import annotations

import itertools
import json
import pydoc_data.topics
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, normalizers, processors

from conductor.tokenizer import PIECE_CHARS, ChatMessage, Tokenizer, cut_text
from moontide.errors import BadRequest, ModelError
from tests.fakes.text_model import EOS, text_model_dir

DOCUMENT = "\n\n".join(pydoc_data.topics.topics.values())[:200_000]


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.load(model_dir)


@pytest.fixture(scope="module")
def core(model_dir: Path) -> Core:
    return Core.from_file(str(model_dir / "tokenizer.json"))


def byte_fallback_tokenizer() -> Tokenizer:
    """As Llama 2's: spaces are U+2581, unknown characters become byte tokens, which are decoded a run at a time."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    for token in ("\u2581", "a", "b", "\u2581a", "\u2581b", "ab"):
        vocab[token] = len(vocab)
    core = Core(
        models.BPE(vocab, [("\u2581", "a"), ("\u2581", "b"), ("a", "b")], unk_token="<unk>", byte_fallback=True)
    )
    core.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(core, {}, None)


async def test_pieces_encode_as_the_whole(tokenizer: Tokenizer, core: Core) -> None:
    assert tokenizer.cuts_text
    assert len(cut_text(DOCUMENT)) > 20
    ids = await tokenizer.encode(DOCUMENT, add_special_tokens=False)
    assert ids.dtype == np.uint32
    assert ids.tolist() == core.encode(DOCUMENT, add_special_tokens=False).ids


@given(st.text(st.sampled_from("ab é  \n\t.,'1你好🙂_"), max_size=200))
@settings(max_examples=200, deadline=None)
def test_cuts_lie_between_words_and_lose_nothing(text: str) -> None:
    pieces = cut_text(text, piece_chars=1)
    assert "".join(pieces) == text
    for before, after in itertools.pairwise(pieces):
        assert before[-1].isalpha()
        assert after[0] == " "
        assert after[1].isalpha()


@given(st.text(st.sampled_from("the quick é  \n\t.,'1你好🙂_<|im_start|>"), max_size=300))
@settings(max_examples=200, deadline=None)
def test_smallest_pieces_encode_as_the_whole(core: Core, text: str) -> None:
    ids = [i for piece in cut_text(text, piece_chars=1) for i in core.encode(piece, add_special_tokens=False).ids]
    assert ids == core.encode(text, add_special_tokens=False).ids


@given(
    st.lists(
        st.sampled_from(["the", "quick", "é", "ß.", "don't", ",", "(a)", "x1", " ", "\n", "\t", "你好", "🙂", EOS]),
        max_size=60,
    )
)
@settings(max_examples=200, deadline=None)
def test_words_encode_as_the_whole_known_or_not(tokenizer: Tokenizer, core: Core, words: list[str]) -> None:
    text = " ".join(words)
    for _ in range(2):
        ids = tokenizer.encode_blocking(text, add_special_tokens=False)
        assert ids.dtype == np.uint32
        assert ids.tolist() == core.encode(text, add_special_tokens=False).ids


def test_words_are_forgotten_when_there_are_too_many(
    model_dir: Path, core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conductor.word_cache.MAX_KEPT_CHARS", 100)
    tokenizer = Tokenizer.load(model_dir)
    text = " ".join(f"word{chr(97 + i)}" for i in range(25))
    assert tokenizer.encode_blocking(text, add_special_tokens=False).tolist() == core.encode(text).ids
    words = tokenizer._words
    assert sum(map(len, (*words._first, *words._others))) <= words._num_chars <= 100


def test_conversation_that_comes_back_longer_is_not_encoded_again(
    model_dir: Path, core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer.load(model_dir)
    encoded: list[str] = []
    encode = tokenizer._encode_batch
    monkeypatch.setattr(tokenizer, "_encode_batch", lambda texts: encoded.extend(texts) or encode(texts))
    text = DOCUMENT[:100_000]
    for turn in range(3):
        encoded.clear()
        text += f" and this is question number {turn}, which asks for more."
        assert tokenizer.encode_blocking(text, add_special_tokens=False).tolist() == core.encode(text).ids
        assert (sum(map(len, encoded)) < 3 * PIECE_CHARS) == (turn > 0)
    tokenizer._pieces.check_invariants()


def test_tokenizer_that_joins_words_is_encoded_whole() -> None:
    tokenizer = byte_fallback_tokenizer()
    assert not tokenizer.cuts_text
    ids = tokenizer.encode_blocking("ab ab " * 2000, add_special_tokens=False).tolist()
    assert tokenizer.decode(ids) == "ab ab " * 2000


@pytest.mark.parametrize("make", ["byte level", "byte fallback"])
def test_streamed_text_is_the_whole_text(tokenizer: Tokenizer, make: str) -> None:
    subject = tokenizer if make == "byte level" else byte_fallback_tokenizer()
    rng = random.Random(7)
    vocab_size = subject._core.get_vocab_size()
    for _ in range(300):
        ids = [rng.randrange(vocab_size) for _ in range(rng.randrange(40))]
        stream = subject.detokenizer()
        text = "".join(stream.step(token_id) for token_id in ids) + stream.flush()
        assert text == subject.decode(ids)


def test_broken_characters_stream_as_the_whole_text(tokenizer: Tokenizer) -> None:
    single = [i for i in range(tokenizer._core.get_vocab_size()) if len(tokenizer.token_bytes(i)) == 1]
    high = [i for i in single if tokenizer.token_bytes(i)[0] >= 0x80]
    rng = random.Random(8)
    for _ in range(2000):
        ids = [rng.choice(high if rng.random() < 0.8 else single) for _ in range(rng.randrange(12))]
        stream = tokenizer.detokenizer()
        assert "".join(map(stream.step, ids)) + stream.flush() == tokenizer.decode(ids)


def test_streaming_sends_whole_characters_as_soon_as_they_are_whole(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_blocking("a🦊b", add_special_tokens=False).tolist()
    stream = tokenizer.detokenizer()
    pieces = [stream.step(token_id) for token_id in ids]
    assert "".join(pieces) == "a🦊b"
    assert [piece for piece in pieces if piece] == ["a", "🦊", "b"]


def test_special_tokens_are_left_out_of_text_but_named_alone(tokenizer: Tokenizer, core: Core) -> None:
    eos_id = core.token_to_id(EOS)
    assert tokenizer.decode([5, eos_id]) == tokenizer.decode([5])
    assert tokenizer.token_text(eos_id) == EOS
    assert tokenizer.token_bytes(eos_id) == EOS.encode()
    assert tokenizer.token_bytes(10_000) == b""


@pytest.mark.parametrize("text", ["héllo 世界 🙂\n", "ab ab"])
@pytest.mark.parametrize("make", ["byte level", "byte fallback"])
def test_bytes_of_tokens_join_to_the_text(tokenizer: Tokenizer, make: str, text: str) -> None:
    subject = tokenizer if make == "byte level" else byte_fallback_tokenizer()
    ids = subject.encode_blocking(text, add_special_tokens=False).tolist()
    assert b"".join(subject.token_bytes(i) for i in ids).decode().removeprefix(" ") == text


def test_bos_comes_from_the_post_processor_of_tokenizer_json(model_dir: Path, core: Core) -> None:
    bos_id = core.token_to_id("<s>")
    config = json.loads((model_dir / "tokenizer_config.json").read_text())
    bare = core.encode("fox", add_special_tokens=False).ids

    def encode(core: Core, config: dict[str, object], *, add: bool = True) -> list[int]:
        return Tokenizer(core, config, None).encode_blocking("fox", add_special_tokens=add).tolist()

    assert encode(core, config) == bare
    assert encode(core, {**config, "add_bos_token": True}) == bare
    with_bos = Core.from_str(core.to_str())
    with_bos.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos_id)])
    assert encode(with_bos, config) == [bos_id, *bare]
    assert encode(with_bos, config, add=False) == bare
    assert encode(with_bos, {**config, "add_bos_token": False}) == [bos_id, *bare]


def test_template_refusal_is_the_clients_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(BadRequest, match="no such role"):
        tokenizer.render_chat([ChatMessage(role="forbidden", content="x")])
    with pytest.raises(BadRequest, match="no chat template"):
        byte_fallback_tokenizer().render_chat([ChatMessage(role="user", content="x")])


def test_template_cannot_reach_the_interpreter(model_dir: Path) -> None:
    core = Core.from_file(str(model_dir / "tokenizer.json"))
    hostile = Tokenizer(core, {}, "{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(BadRequest, match="unsafe"):
        hostile.render_chat([ChatMessage(role="user", content="x")])


def test_missing_or_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json does not exist"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path)


SAME_AS_TRANSFORMERS = """
import json, sys
from transformers import PreTrainedTokenizerFast
directory, chats, texts = json.loads(sys.stdin.read())
theirs = PreTrainedTokenizerFast.from_pretrained(directory)
print("RESULT" + json.dumps({
    "chats": [theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats],
    "texts": [theirs(text)["input_ids"] for text in texts],
}))
"""


def transformers_says(directory: Path, chats: list[list[dict[str, str]]], texts: list[str]) -> dict[str, list[Any]]:
    """Rendered chats and encoded texts, by transformers in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", SAME_AS_TRANSFORMERS],
        input=json.dumps([str(directory), chats, texts]),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    answer: dict[str, list[Any]] = json.loads(done.stdout.split("RESULT")[1])
    return answer


RICH_TEMPLATE = """{#- a comment -#}
{%- set ns = namespace(first=true) -%}
{% for message in messages %}
    {%- if loop.first and message.role != 'system' %}
System: {{ {'today': strftime_now('%Y'), 'é<': [1, 2]} | tojson }}
    {% endif %}
    {%- if not ns.first %}{{ '\\n' }}{% endif -%}
    {%- set ns.first = false -%}
    {%- if message.role == 'skip' %}{% continue %}{% endif -%}
    {{ bos_token }}{{ message.role | upper }}: {% generation %}{{ message.content | trim }}{% endgeneration %}{{ eos_token }}
{% endfor %}
  {% if tools %}tools{% endif %}
{%- if add_generation_prompt %}ASSISTANT:{% endif %}
"""


@pytest.mark.parametrize("variant", ["plain", "rich", "add_bos_token", "bos post-processor"])
def test_templates_and_special_tokens_are_those_of_transformers(tmp_path: Path, variant: str) -> None:
    directory = text_model_dir(tmp_path)
    if variant == "rich":
        (directory / "chat_template.jinja").write_text(RICH_TEMPLATE)
    if variant == "add_bos_token":
        config = json.loads((directory / "tokenizer_config.json").read_text())
        (directory / "tokenizer_config.json").write_text(json.dumps({**config, "add_bos_token": True}))
    if variant == "bos post-processor":
        core = Core.from_file(str(directory / "tokenizer.json"))
        bos_id = core.token_to_id("<s>")
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos_id)])
        core.save(str(directory / "tokenizer.json"))
    chats = [
        [{"role": "user", "content": " hi <b> "}],
        [{"role": "system", "content": "be kind"}, {"role": "skip", "content": ""}, {"role": "user", "content": "é\n"}],
    ]
    texts = ["The quick brown fox", "", "<|im_start|>user 🙂"]
    ours = Tokenizer.load(directory)
    theirs = transformers_says(directory, chats, texts)
    assert [ours.render_chat([ChatMessage(**m) for m in chat]) for chat in chats] == theirs["chats"]
    assert [ours.encode_blocking(text, add_special_tokens=True).tolist() for text in texts] == theirs["texts"]


def test_built_in_model_encodes_pieces_as_the_whole_and_renders_as_transformers() -> None:
    """The directory is prepared by model_runner in a process of its own, because that imports torch."""
    prepare = "from model_runner.model_source import resolve_model; print('PATH' + str(resolve_model('smollm2').path))"
    done = subprocess.run([sys.executable, "-c", prepare], capture_output=True, text=True, check=True, timeout=120)
    directory = Path(done.stdout.split("PATH")[1].strip())
    tokenizer = Tokenizer.load(directory)
    assert tokenizer.cuts_text
    text = "\n\n".join(pydoc_data.topics.topics.values())
    whole = Core.from_file(str(directory / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    assert tokenizer.encode_blocking(text, add_special_tokens=False).tolist() == whole
    chats = [
        [{"role": "user", "content": "hi"}],
        [
            {"role": "system", "content": "be kind"},
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
        ],
    ]
    theirs = transformers_says(directory, chats, ["Once upon a time"])
    assert [tokenizer.render_chat([ChatMessage(**m) for m in chat]) for chat in chats] == theirs["chats"]
    assert [tokenizer.encode_blocking("Once upon a time", add_special_tokens=True).tolist()] == theirs["texts"]
