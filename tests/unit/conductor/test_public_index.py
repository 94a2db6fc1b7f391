from __future__ import annotations

import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from conductor.config import ConductorSettings
from conductor.indexer_api import IndexerApi
from conductor.prefix_index import PrefixIndex
from conductor.public_index import open_public_index
from conductor.registry import Node
from kvstore.block import hash_blocks, root_hash
from kvstore.index import KvEntry, Stored
from moontide.errors import ConfigError
from moontide.registry import NodeRecord
from moontide.tls import Tls
from tests.fakes.layouts import TINY_LAYOUT as LAYOUT

RECORD = NodeRecord(
    node_id="prefill-0",
    role="prefill",
    address="",
    http_address="",
    boot_id="b",
    layout_json=LAYOUT.to_json(),
)
NODES = [Node(record=RECORD, alive=True, read_s=0.0)]


def settings_with(**fields: Any) -> ConductorSettings:
    return ConductorSettings(model_dir=Path("none"), served_model_name="m", **fields)


async def test_nothing_is_opened_that_the_config_does_not_name() -> None:
    async with open_public_index(settings_with(), host="127.0.0.1", index=PrefixIndex(), nodes=list) as public:
        assert public.tell is None
        assert public.known_tokens is None


async def test_everything_that_the_config_names_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = []
    start = IndexerApi.start

    async def noting_port(self: IndexerApi, host: str, port: int, tls: Tls | None = None) -> int:
        ports.append(await start(self, host, port, tls))
        return ports[-1]

    monkeypatch.setattr(IndexerApi, "start", noting_port)
    settings = settings_with(
        kv_event_sources=("vllm-0=tcp://127.0.0.1:9",),
        kv_event_endpoint="tcp://127.0.0.1:*",
        kv_event_token_ids=True,
        indexer_port=0,
    )
    index, ids = PrefixIndex(), np.arange(8, dtype=np.uint32)
    hashes = hash_blocks(ids, block_tokens=4, root=root_hash(LAYOUT.digest(), ""))
    index.apply("store-0", Stored(hashes[0], b"".join(hashes)))
    async with AsyncExitStack() as opened:
        public = await opened.enter_async_context(
            open_public_index(settings, host="127.0.0.1", index=index, nodes=lambda: NODES)
        )
        assert public.known_tokens is not None
        assert public.tell is not None
        await public.tell(KvEntry("store-0", "b", 1, Stored(hashes[0], b"".join(hashes))))
        http = await opened.enter_async_context(aiohttp.ClientSession(f"http://127.0.0.1:{ports[0]}"))
        async with http.post("/query", json={"model": "m", "token_ids": ids.tolist()}) as reply:
            assert (await reply.json())["default"]["store-0"]["longest_matched"] == 8


async def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    monkeypatch.delitem(sys.modules, "conductor.kv_event_sockets", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'moontide\[kv-events\]'"):
        async with open_public_index(
            settings_with(indexer_port=0), host="127.0.0.1", index=PrefixIndex(), nodes=lambda: NODES
        ):
            pass
