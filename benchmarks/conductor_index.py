"""A large synthetic prefix cache: what a thousand store nodes hold, the events and snapshots that tell it, and prompts that hit it.

Documents are as long as a prompt. Most are held by one node, some by a few, very few (shared instructions) by many, each holder with a
part of its own length. The documents that prompts come from are held by more, and have real tokens and hashes, all others random keys: an
index sees no difference. bench_conductor.py measures on it; nothing here needs the index.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import queue
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.queues import Queue
from typing import Any

import grpc.aio
import numpy as np
import numpy.typing as npt

from kvstore.block import BLOCK_HASH_BYTES, BlockHash, hash_blocks, root_hash
from kvstore.client import Snapshot
from moontide.registry import NodeRecord
from moontide.rpc import open_channel
from moontide_proto.v1 import kvstore_pb2 as pb

PROMPT_TOKENS = 32_768
RUN_BLOCKS = 32
"""Blocks of one event: a chunk of 2048 tokens in blocks of 64."""
MESSAGE_BLOCKS = 2048
_NUM_SOURCES = 100
"""Documents that prompts come from."""
_SNAPSHOT_METHOD = "/moontide.v1.KvStore/Snapshot"
_START_TIMEOUT_S = 60.0

Keys = npt.NDArray[np.uint64]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    token_ids: npt.NDArray[np.uint32]
    hashes: list[BlockHash]


@dataclass(frozen=True, kw_only=True)
class Corpus:
    block_tokens: int
    num_nodes: int
    keys: Keys
    """[documents, blocks of a document]: the first 8 bytes of each hash."""
    holders: list[list[tuple[int, int]]]
    """Per document, which nodes hold how many leading blocks of it."""
    prompts: list[Prompt]

    @property
    def num_blocks(self) -> int:
        """Distinct blocks that somebody holds."""
        return sum(max(num_blocks for _, num_blocks in held) for held in self.holders)

    def packed(self, document: int, first: int, end: int) -> bytes:
        """Hashes of some blocks, back to back."""
        words = np.zeros((end - first, BLOCK_HASH_BYTES // 8), np.uint64)
        words[:, 0] = self.keys[document, first:end]
        return words.tobytes()

    def runs(self) -> Iterator[tuple[int, int, int, int]]:
        """(node, document, first block, end) of each event that tells the whole of it."""
        for document, held in enumerate(self.holders):
            for node, num_blocks in held:
                for first in range(0, num_blocks, RUN_BLOCKS):
                    yield node, document, first, min(first + RUN_BLOCKS, num_blocks)


def make_corpus(*, num_blocks: int, num_nodes: int, block_tokens: int, num_prompts: int, seed: int) -> Corpus:
    rng = np.random.default_rng(seed)
    length = PROMPT_TOKENS // block_tokens
    root = root_hash(b"bench", "")
    num_documents = max(_NUM_SOURCES, num_blocks // length)
    keys = rng.integers(1, 2**64, (num_documents, length), dtype=np.uint64)
    sources = rng.integers(0, 50_000, (_NUM_SOURCES, PROMPT_TOKENS), dtype=np.uint32)
    for document, token_ids in enumerate(sources):
        hashes = hash_blocks(token_ids, block_tokens=block_tokens, root=root)
        keys[document] = np.frombuffer(b"".join(hashes), np.uint64)[:: BLOCK_HASH_BYTES // 8]
    prompts = []
    for number in range(num_prompts):
        token_ids = rng.integers(0, 50_000, PROMPT_TOKENS, dtype=np.uint32)
        num_shared = int(rng.integers(0, PROMPT_TOKENS)) if number % 5 else 0
        token_ids[:num_shared] = sources[int(rng.integers(_NUM_SOURCES)), :num_shared]
        prompts.append(Prompt(token_ids=token_ids, hashes=hash_blocks(token_ids, block_tokens=block_tokens, root=root)))
    return Corpus(
        block_tokens=block_tokens,
        num_nodes=num_nodes,
        keys=keys,
        holders=[_holders(rng, num_nodes, length, number < _NUM_SOURCES) for number in range(num_documents)],
        prompts=prompts,
    )


def _holders(rng: np.random.Generator, num_nodes: int, length: int, is_source: bool) -> list[tuple[int, int]]:
    shares = [0.50, 0.30, 0.18, 0.02] if is_source else [0.80, 0.15, 0.048, 0.002]
    num_holders = min(num_nodes, int(rng.choice([1, 2, 8, 200], p=shares)))
    nodes = rng.choice(num_nodes, num_holders, replace=False).tolist()
    parts = [length, *rng.integers(1, length + 1, num_holders - 1).tolist()]
    return list(zip(nodes, parts, strict=True))


def _serve_snapshots(corpus: Corpus, ports: Queue[int]) -> None:
    """One gRPC server that answers for every store node; which one is asked stands in the call's metadata."""
    pieces: list[list[bytes]] = [[] for _ in range(corpus.num_nodes)]
    for document, held in enumerate(corpus.holders):
        for node, num_blocks in held:
            pieces[node].append(corpus.packed(document, 0, num_blocks))

    async def snapshot(_request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[bytes]:
        node = int(dict(context.invocation_metadata() or ())["node"])
        chains = iter(pieces[node])
        runs: list[pb.SnapshotRun] = []
        num_blocks = 0
        for chain in chains:
            runs.append(pb.SnapshotRun(parent_hash=bytes(BLOCK_HASH_BYTES), block_hashes=chain))
            num_blocks += len(chain) // BLOCK_HASH_BYTES
            if num_blocks >= MESSAGE_BLOCKS:
                yield pb.SnapshotRuns(boot_id="1", event_number=0, runs=runs).SerializeToString()
                runs, num_blocks = [], 0
        yield pb.SnapshotRuns(boot_id="1", event_number=0, runs=runs).SerializeToString()

    async def serve() -> None:
        server = grpc.aio.server()
        method = grpc.unary_stream_rpc_method_handler(snapshot)
        handler = grpc.method_handlers_generic_handler("moontide.v1.KvStore", {"Snapshot": method})
        server.add_generic_rpc_handlers((handler,))
        ports.put(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        await server.wait_for_termination()

    asyncio.run(serve())


@contextmanager
def snapshot_server(corpus: Corpus) -> Iterator[list[NodeRecord]]:
    """A process that answers as all store nodes; yields their records."""
    context = multiprocessing.get_context("fork")
    ports: Queue[int] = context.Queue()
    process = context.Process(target=_serve_snapshots, args=(corpus, ports), daemon=True)
    process.start()
    try:
        port = ports.get(timeout=_START_TIMEOUT_S)
        yield [
            NodeRecord(
                node_id=node_name(node),
                role="kvstore",
                address=f"127.0.0.1:{port}",
                http_address="",
                boot_id="1",
                load={"number": node},
            )
            for node in range(corpus.num_nodes)
        ]
    except queue.Empty as error:
        raise RuntimeError("the snapshot server did not start") from error
    finally:
        process.kill()
        process.join()


async def read_snapshot(store: NodeRecord) -> AsyncIterator[Snapshot]:
    """As conductor.index_follower reads it, from a server of many nodes."""
    async with open_channel(store.address) as channel:
        ask = channel.unary_stream(
            _SNAPSHOT_METHOD,
            request_serializer=pb.SnapshotRequest.SerializeToString,
            response_deserializer=pb.SnapshotRuns.FromString,
        )
        metadata = (("node", str(int(store.load["number"]))),)
        async for reply in ask(pb.SnapshotRequest(), timeout=60.0, metadata=metadata):
            yield Snapshot(reply.boot_id, reply.event_number, b"".join(run.block_hashes for run in reply.runs))


def node_name(node: int) -> str:
    """As in conductor_decisions.py."""
    return f"store-{node}"
