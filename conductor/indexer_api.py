"""Cache hits over HTTP for routers of other systems: POST /query and /query_by_hash of the indexer API (RFC kvcache-ai/Mooncake#1403).

It tells how many leading tokens of a prompt each of our store nodes (CPU) and each instance of another engine (GPU) holds. It answers
whoever reaches its port, also whether a prompt is cached under a salt: open the port to routers alone.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from aiohttp import web

from conductor.kv_event_formats import block_hash_of, standard_hashes
from conductor.prefix_index import PrefixIndex
from kvstore.block import BlockHash, hash_blocks, root_hash
from kvstore.layout import KVLayout
from moontide.errors import BadRequest, ModelNotFound, MoontideError
from moontide.tls import Tls

Hits = dict[str, dict[str, Any]]


class IndexerApi:
    def __init__(
        self,
        index: PrefixIndex,
        foreign: PrefixIndex,
        *,
        model_name: str,
        layout: Callable[[], KVLayout | None],
        max_body_bytes: int,
    ) -> None:
        """
        Args:
            foreign: blocks of other engines under the standard's hashes.
            layout: of what our stores hold; None while no node is there.
        """
        self._index = index
        self._foreign = foreign
        self._model_name = model_name
        self._layout = layout
        self._max_body_bytes = max_body_bytes
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int, tls: Tls | None = None) -> int:
        """Listen, with TLS if `tls` has a certificate; returns the port. Raises: OSError when the port is taken."""
        app = web.Application(client_max_size=self._max_body_bytes)
        app.add_routes([web.post("/query", self._query), web.post("/query_by_hash", self._query_by_hash)])
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port, ssl_context=tls.http_server() if tls else None).start()
        return int(self._runner.addresses[0][1])

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _query(self, http: web.Request) -> web.Response:
        return await self._answer(http, self._hits_of_tokens)

    async def _query_by_hash(self, http: web.Request) -> web.Response:
        return await self._answer(http, self._hits_of_hashes)

    async def _answer(self, http: web.Request, hits: Callable[[Mapping[str, Any]], Any]) -> web.Response:
        try:
            body = _body(await http.read())
            if body.get("model") != self._model_name:
                raise ModelNotFound(f"model {body.get('model')!r} is not served here; ask for {self._model_name!r}")
            found: Hits = await hits(body)
        except MoontideError as error:
            return web.json_response({"error": str(error)}, status=error.http_code)
        wanted = body.get("instance_id")
        return web.json_response(
            {
                str(body.get("tenant_id") or "default"): {
                    instance_id: hit for instance_id, hit in found.items() if wanted in (None, instance_id)
                }
            }
        )

    async def _hits_of_tokens(self, body: Mapping[str, Any]) -> Hits:
        token_ids = _unsigned(body, "token_ids", np.uint32)
        block_tokens = self._block_tokens(body)
        layout = self._layout()
        # In a thread: hashing a long prompt would hold up the event loop.
        own: list[BlockHash] = []
        if layout is not None and layout.block_tokens == block_tokens:
            root = root_hash(layout.digest(), str(body.get("cache_salt") or ""))
            own = await asyncio.to_thread(hash_blocks, token_ids, block_tokens=block_tokens, root=root)
        foreign = await asyncio.to_thread(standard_hashes, token_ids, block_tokens=block_tokens)
        return self._hits(own, foreign, block_tokens)

    async def _hits_of_hashes(self, body: Mapping[str, Any]) -> Hits:
        name = "seq_hashes" if "seq_hashes" in body else "block_hash"
        hashes = [block_hash_of(each) for each in _unsigned(body, name, np.uint64).tolist()]
        return self._hits(hashes, hashes, self._block_tokens(body))

    def _hits(self, own: list[BlockHash], foreign: list[BlockHash], block_tokens: int) -> Hits:
        found = {}
        for instance_id, num_blocks in self._index.hit_blocks(own).items():
            num_tokens = num_blocks * block_tokens
            found[instance_id] = {"longest_matched": num_tokens, "GPU": 0, "CPU": num_tokens, "DISK": 0, "DP": {}}
        for instance_id, num_blocks in self._foreign.hit_blocks(foreign).items():
            num_tokens = num_blocks * block_tokens
            found[instance_id] = {
                "longest_matched": num_tokens,
                "GPU": num_tokens,
                "CPU": 0,
                "DISK": 0,
                "DP": {"0": num_tokens},
            }
        return found

    def _block_tokens(self, body: Mapping[str, Any]) -> int:
        layout = self._layout()
        value = body.get("block_size", layout.block_tokens if layout is not None else None)
        if not isinstance(value, int) or value < 1:
            raise BadRequest(f"block_size={value!r} is no number of tokens; give 1 or more", param="block_size")
        return value


def _body(raw: bytes) -> Mapping[str, Any]:
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise BadRequest(f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the body is no JSON object")
    return body


def _unsigned(body: Mapping[str, Any], name: str, dtype: type[np.unsignedinteger[Any]]) -> Any:
    """The numbers in a field as an array [n]. Raises: BadRequest."""
    values = body.get(name)
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise BadRequest(f"{name} is missing or no list of integers", param=name)
    try:
        return np.array(values, dtype)
    except OverflowError as error:
        raise BadRequest(f"{name} holds a number outside of {np.dtype(dtype).name}: {error}", param=name) from error
