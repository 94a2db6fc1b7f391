from __future__ import annotations

import json
import random

import pytest

from conductor.id_list import cut_ids
from conductor.openai_schema import parse_completion
from moontide.errors import BadRequest


@pytest.fixture(autouse=True)
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conductor.id_list.MIN_BYTES", 0)
    monkeypatch.setattr("conductor.id_list.SLICE_BYTES", 16)


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("num", [1, 2, 7, 500])
async def test_ids_and_the_rest_of_the_body_are_as_json_says(num: int, indent: int | None) -> None:
    source = random.Random(num)
    ids = [source.choice([0, 7, source.randrange(2**32)]) for _ in range(num)]
    fields = {"model": "m", "prompt": ids, "max_tokens": 3, "user": "]"}
    body = await parse_completion(json.dumps(fields, indent=indent).encode())
    assert body.prompt.tolist() == ids
    assert (body.model, body.max_tokens) == ("m", 3)
    cut = await cut_ids(json.dumps(fields, indent=indent).encode())
    assert cut is not None
    assert json.loads(cut.rest) == {**fields, "prompt": cut.mark}


@pytest.mark.parametrize(
    "prompt",
    [
        '"text [1, 2]"',
        '["text"]',
        "[[1, 2]]",
        "[]",
        "[1, -2]",
        "[1.5]",
        '[1, "2"]',
        "[1, true]",
        f"[{2**32}]",
        f"[{2**70}]",
    ],
)
async def test_everything_but_a_plain_list_is_left_to_the_json_parser(prompt: str) -> None:
    data = f'{{"prompt": {prompt}, "max_tokens": 3}}'.encode()
    assert await cut_ids(data) is None
    assert (await parse_completion(data)).prompt == json.loads(prompt)


@pytest.mark.parametrize(
    "prompt", ["[1, 2,]", "[1, 2, ]", "[1,, 2]", "[1 2]", "[1, 2", f"[{'1,' * 40}]", f"[{'12, ' * 8}]"]
)
async def test_broken_lists_are_refused_as_ever(prompt: str) -> None:
    with pytest.raises(BadRequest, match="no valid JSON"):
        await parse_completion(f'{{"prompt": {prompt}}}'.encode())


async def test_list_in_another_place_is_not_the_prompt() -> None:
    data = b'{"extra": {"prompt": [1, 2, 3]}, "prompt": "text"}'
    body = await parse_completion(data)
    assert body.prompt == "text"
    assert body.model_extra == {"extra": {"prompt": [1, 2, 3]}}
