"""The built-in model is prepared once, whole, however many ask for it at once."""

import multiprocessing
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from model_runner import builtin_model
from model_runner.model_source import load_model_info, resolve_model
from moontide.errors import ModelError


@pytest.mark.slow
def test_two_processes_prepare_one_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOONTIDE_CACHE", str(tmp_path))
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(2) as pool:
        paths = pool.starmap_async(builtin_model.prepare, [(), ()]).get(timeout=120)
    assert paths[0] == paths[1] == builtin_model.prepare()
    assert {file.name for file in (tmp_path / "models").iterdir() if file.is_dir()} == {paths[0].name}
    info = load_model_info(resolve_model("smollm2"), dtype="bfloat16")
    assert (info.num_layers, info.vocab_size, info.eos_token_ids) == (30, 49152, (2,))
    tokenizer = Tokenizer.from_file(str(paths[0] / "tokenizer.json"))
    text = "<|im_start|>user\nWhat is 1234 + 5?<|im_end|>\n"
    encoded = tokenizer.encode(text)
    assert encoded.ids[0] == 1
    assert [token for token in encoded.tokens if token.isdigit()] == list("12345")
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text


def test_lock_of_a_stuck_process_is_reported(tmp_path: Path) -> None:
    lock = tmp_path / "m.lock"
    with (
        builtin_model._locked(lock, timeout_s=1),
        pytest.raises(ModelError, match="another process has held"),
        builtin_model._locked(lock, timeout_s=0),
    ):
        pass
