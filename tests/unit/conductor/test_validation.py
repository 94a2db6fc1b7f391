from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conductor.validation import RequestId, ServedModel, check_request_id, id_on_nodes
from kvstore.keys import check_request_id as check_key
from moontide.errors import BadRequest, ModelError


def write(path: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def test_model_is_read_from_its_directory(tmp_path: Path) -> None:
    config = {"max_position_embeddings": 128, "vocab_size": 10, "eos_token_id": 3}
    model = ServedModel.load(write(tmp_path, config), "m")
    assert (model.max_context, model.vocab_size, model.eos_token_ids) == (128, 10, (3,))
    model = ServedModel.load(write(tmp_path, config, {"eos_token_id": [3, 7]}), "m")
    assert model.eos_token_ids == (3, 7)


def test_text_part_of_a_multimodal_config_counts(tmp_path: Path) -> None:
    nested = {"text_config": {"max_position_embeddings": 64, "vocab_size": 9, "eos_token_id": [1]}}
    model = ServedModel.load(write(tmp_path, nested), "m")
    assert (model.max_context, model.vocab_size, model.eos_token_ids) == (64, 9, (1,))


@pytest.mark.parametrize("missing", ["max_position_embeddings", "vocab_size"])
def test_missing_field_is_named(tmp_path: Path, missing: str) -> None:
    config = {"max_position_embeddings": 128, "vocab_size": 10}
    del config[missing]
    with pytest.raises(ModelError, match=f"config.json has no {missing}"):
        ServedModel.load(write(tmp_path, config), "m")


@pytest.mark.parametrize("text", ["config.json", "not json", "[]"])
def test_broken_directory_is_named(tmp_path: Path, text: str) -> None:
    if text != "config.json":
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        ServedModel.load(tmp_path, "m")


@pytest.mark.parametrize("client_id", ["", "a", "x" * 128, "A-b_c.9"])
def test_nodes_see_a_new_valid_id_each_time(client_id: str) -> None:
    request_id = check_request_id(client_id)
    on_nodes = {id_on_nodes(request_id) for _ in range(20)}
    assert len(on_nodes) == 20
    for node_id in on_nodes:
        check_key(node_id)
        assert node_id.startswith(request_id[:100])


@pytest.mark.parametrize("client_id", ["a b", "x" * 129, "é", "a/b", "a\n"])
def test_bad_client_ids_are_refused(client_id: str) -> None:
    with pytest.raises(BadRequest, match="request id"):
        check_request_id(RequestId(client_id))
