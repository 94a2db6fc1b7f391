from __future__ import annotations

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.block import BlockHash
from kvstore.keys import BlockKey, PartialKey, block_key, check_node_id, parse_key, partial_key
from moontide.errors import BadRequest, ConfigError

REQUEST_IDS = st.text("abzAZ09_.:-", min_size=1, max_size=128)


@given(st.binary(min_size=32, max_size=32), st.integers(0, 500), st.binary(min_size=32, max_size=32), REQUEST_IDS)
def test_block_key_round_trip(layout_digest: bytes, group_idx: int, block_hash: bytes, holder: str) -> None:
    key = block_key(layout_digest, group_idx, BlockHash(block_hash), holder)
    assert parse_key(key) == BlockKey(
        layout_tag=layout_digest[:8], group_idx=group_idx, block_hash=BlockHash(block_hash), holder=holder
    )
    assert quote(key, safe="/:") == key


@given(REQUEST_IDS, st.integers(0, 2**32 - 1), st.integers(0, 500))
def test_partial_key_round_trip(request_id: str, epoch: int, group_idx: int) -> None:
    key = partial_key(request_id, epoch, group_idx)
    assert parse_key(key) == PartialKey(request_id=request_id, epoch=epoch, group_idx=group_idx)
    assert "," not in key


@pytest.mark.parametrize("request_id", ["", "a,b", "a/b", "a b", "ü", "x" * 129, "a\n"])
def test_an_id_that_breaks_a_key_is_refused(request_id: str) -> None:
    with pytest.raises(BadRequest, match="request_id="):
        partial_key(request_id, 0, 0)


@pytest.mark.parametrize("node_id", ["", "a,b", "host/0", "x" * 129])
def test_a_node_id_that_breaks_a_key_is_refused(node_id: str) -> None:
    with pytest.raises(ConfigError, match="cannot name objects"):
        check_node_id(node_id)


@pytest.mark.parametrize(
    "key", ["", "b/0123456789abcdef/1/" + "ab" * 32, "b/00/1/aa", "p/only-this", "boot/1234", "p/a/1/2/3"]
)
def test_foreign_keys_are_none(key: str) -> None:
    assert parse_key(key) is None
