from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.layout import TRAILER_BYTES, KVLayout, choose_layer_group
from moontide.errors import ConfigError

SMOLLM2 = KVLayout(
    model_fingerprint="f",
    num_layers=30,
    num_planes=2,
    num_kv_heads=3,
    head_dim=64,
    dtype="bfloat16",
    block_tokens=64,
    layer_group=5,
)


def test_sizes_of_a_real_model() -> None:
    assert SMOLLM2.layer_bytes == 48 * 1024
    assert SMOLLM2.bytes_per_token == 2 * 3 * 64 * 2 * 30
    assert SMOLLM2.num_groups == 6
    assert SMOLLM2.payload_bytes(0) == 240 * 1024
    assert SMOLLM2.object_bytes(0) == 240 * 1024 + TRAILER_BYTES
    assert SMOLLM2.block_bytes == 6 * (240 * 1024 + TRAILER_BYTES)


def test_a_short_last_group() -> None:
    layout = replace(SMOLLM2, num_layers=7, layer_group=3)
    assert [list(layout.group_layers(g)) for g in range(layout.num_groups)] == [[0, 1, 2], [3, 4, 5], [6]]
    assert layout.object_bytes(2) == 48 * 1024 + TRAILER_BYTES


@given(st.integers(1, 40), st.data())
def test_groups_cover_each_layer_once_and_add_up_to_a_block(num_layers: int, data: st.DataObject) -> None:
    layout = replace(SMOLLM2, num_layers=num_layers, layer_group=data.draw(st.integers(1, num_layers)))
    covered = [layer for g in range(layout.num_groups) for layer in layout.group_layers(g)]
    assert covered == list(range(num_layers))
    assert all(layer in layout.group_layers(layout.group_of_layer(layer)) for layer in range(num_layers))
    assert sum(layout.object_bytes(g) for g in range(layout.num_groups)) == layout.block_bytes


@pytest.mark.parametrize(
    "change",
    [
        {"model_fingerprint": "g"}, {"num_layers": 31}, {"num_planes": 1}, {"num_kv_heads": 4}, {"head_dim": 128},
        {"dtype": "float32"}, {"block_tokens": 128}, {"layer_group": 6},
    ],
)  # fmt: skip
def test_every_field_changes_the_digest(change: dict[str, object]) -> None:
    assert replace(SMOLLM2, **change).digest() != SMOLLM2.digest()  # type: ignore[arg-type]
    assert len(SMOLLM2.digest()) == 32


def test_json_round_trip() -> None:
    again = KVLayout.from_json(SMOLLM2.to_json())
    assert again == SMOLLM2
    assert again.digest() == SMOLLM2.digest()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float16"}, "dtype='float16'.*bfloat16.*float32"),
        ({"num_planes": 3}, "num_planes=3"),
        ({"layer_group": 31}, "layer_group=31.*at most 30"),
        ({"block_tokens": 0}, "block_tokens=0"),
    ],
)
def test_a_wrong_value_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(SMOLLM2, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_layers", "layer_kib", "expected"),
    [
        (30, 48, 5),  # 4 layers would do; 5 divide 30
        (30, 96, 2),
        (80, 1024, 1),  # large layers go one by one
        (5, 1, 1),  # never more than a quarter of the layers
        (1, 1, 1),
        (29, 48, 4),  # nothing divides a prime
        (32, 1, 8),
    ],
)
def test_layer_group_choice(num_layers: int, layer_kib: int, expected: int) -> None:
    assert choose_layer_group(num_layers, layer_kib * 1024) == expected
