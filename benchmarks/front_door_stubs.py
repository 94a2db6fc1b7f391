"""A prefill group, a decode instance and a store process that compute nothing, as one process that announces itself in the registry.

`python benchmarks/front_door_stubs.py --registry URL --model-dir DIR [--step-s S]`: what is measured with it is the conductor alone. The
answer to every prompt is one fixed text, token by token; every step of the decode stub gives each of its requests one token, and all
tokens of a step travel in one message, as the real node sends them.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from tokenizers import Tokenizer

from kvstore.layout import KVLayout
from moontide.config import RegistryConfig
from moontide.registry import Announcer, NodeRecord
from moontide.rpc import Server
from moontide.service import run_service
from moontide_proto.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    kvstore_pb2,
    kvstore_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)

HOST = "127.0.0.1"
HOST_ID = "stub-host"
MODEL_ID = "stub"
ANSWER_TOKENS = 4096
"""Length of the text that answers repeat."""
LAYOUT = KVLayout(
    model_fingerprint="stub", num_layers=4, num_planes=2, num_kv_heads=1, head_dim=64, dtype="bfloat16",
    block_tokens=64, layer_group=1,
)  # fmt: skip
LOADS = {
    "prefill": {
        "free_pages": 1e6, "num_pages": 1e6, "chunk_tokens": 2048.0, "num_stages": 1.0, "step_token_s": 1e-4,
    },
    "decode": {
        "free_pages": 1e6, "num_pages": 1e6, "chunk_tokens": 2048.0, "max_batch": 4096.0, "prefill_room_tokens": 2048.0,
        "step_overhead_s": 1e-5, "step_token_s": 1e-9,
    },
    "kvstore": {},
}  # fmt: skip
"""What they report: the prefill group is slower, so that the decode instance computes short prompts."""
Key = tuple[str, int]


class StubStore(kvstore_pb2_grpc.KvStoreServicer):
    async def Renew(self, _request: kvstore_pb2.RenewRequest, _context: Any) -> kvstore_pb2.RenewReply:
        return kvstore_pb2.RenewReply()

    async def Release(self, _request: kvstore_pb2.ReleaseRequest, _context: Any) -> kvstore_pb2.ReleaseReply:
        return kvstore_pb2.ReleaseReply()

    async def Snapshot(
        self, _request: kvstore_pb2.SnapshotRequest, _context: Any
    ) -> AsyncIterator[kvstore_pb2.SnapshotRuns]:
        yield kvstore_pb2.SnapshotRuns(boot_id="1")


class StubPrefill(prefill_pb2_grpc.PrefillServicer):
    def __init__(self, answer: Callable[[int], int], store_address: str) -> None:
        self._answer = answer
        self._store_address = store_address

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, _context: Any
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        accepted = prefill_pb2.PrefillAccepted(store_node_id="store-0", store_address=self._store_address)
        yield prefill_pb2.PrefillEvent(accepted=accepted)
        token = common_pb2.Token(token_id=self._answer(request.output_idx), output_idx=request.output_idx)
        yield prefill_pb2.PrefillEvent(first_token=prefill_pb2.FirstToken(token=token))
        num_blocks = len(request.token_ids) // 4 // LAYOUT.block_tokens
        yield prefill_pb2.PrefillEvent(completed=prefill_pb2.PrefillCompleted(num_blocks=num_blocks, has_partial=True))


@dataclass
class _Running:
    next_idx: int
    max_tokens: int


class StubDecode(decode_pb2_grpc.DecodeServicer):
    def __init__(self, answer: Callable[[int], int], step_s: float) -> None:
        self._answer = answer
        self._step_s = step_s

    async def Session(
        self, commands: AsyncIterator[decode_pb2.DecodeCommand], context: Any
    ) -> AsyncIterator[decode_pb2.DecodeEvents]:
        running: dict[Key, _Running] = {}
        outgoing: asyncio.Queue[list[decode_pb2.DecodeEvent]] = asyncio.Queue()
        woken = asyncio.Event()
        tasks = [
            asyncio.create_task(self._read(commands, running, outgoing, woken)),
            asyncio.create_task(self._step(running, outgoing, woken)),
        ]
        try:
            while True:
                yield decode_pb2.DecodeEvents(events=await outgoing.get())
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(
        self,
        commands: AsyncIterator[decode_pb2.DecodeCommand],
        running: dict[Key, _Running],
        outgoing: asyncio.Queue[list[decode_pb2.DecodeEvent]],
        woken: asyncio.Event,
    ) -> None:
        """A local prefill takes no time: its first token leaves at once, the others with the steps."""
        limits: dict[Key, int] = {}
        async for command in commands:
            key = (command.request_id, command.epoch)
            match command.WhichOneof("command"):
                case "open":
                    limits[key] = command.open.sampling.max_tokens
                    if command.open.HasField("local_prefill"):
                        done = _event(key, local_prefill_done=decode_pb2.LocalPrefillDone())
                        request = _Running(command.open.output_idx, limits.pop(key))
                        outgoing.put_nowait([done, *self._tokens(key, request, running)])
                case "start" if key in limits:
                    outgoing.put_nowait([_event(key, pulled=decode_pb2.DecodePulled())])
                    running[key] = _Running(command.start.first_token.output_idx + 1, limits.pop(key))
                case "cancel":
                    limits.pop(key, None)
                    running.pop(key, None)
            if running:
                woken.set()

    async def _step(
        self,
        running: dict[Key, _Running],
        outgoing: asyncio.Queue[list[decode_pb2.DecodeEvent]],
        woken: asyncio.Event,
    ) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            await woken.wait()
            due_s = max(due_s + self._step_s, loop.time())
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            step = tuple(running.items())
            running.clear()
            outgoing.put_nowait([event for key, request in step for event in self._tokens(key, request, running)])
            if not running:
                woken.clear()

    def _tokens(self, key: Key, request: _Running, running: dict[Key, _Running]) -> list[decode_pb2.DecodeEvent]:
        """The next token, and the end if it was the last; otherwise the request runs on."""
        idx, request.next_idx = request.next_idx, request.next_idx + 1
        token = common_pb2.Token(token_id=self._answer(idx), output_idx=idx)
        events = [_event(key, tokens=decode_pb2.DecodeTokens(tokens=[token]))]
        if request.next_idx < request.max_tokens:
            running[key] = request
        else:
            events.append(_event(key, finished=decode_pb2.DecodeFinished(reason=common_pb2.FINISH_REASON_LENGTH)))
        return events


def _event(key: Key, **what: Any) -> decode_pb2.DecodeEvent:
    return decode_pb2.DecodeEvent(request_id=key[0], epoch=key[1], **what)


def answer_ids(model_dir: Path) -> list[int]:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    text = "\n\n".join(topics[name] for name in sorted(topics))[: ANSWER_TOKENS * 8]
    return list(islice(cycle(tokenizer.encode(text, add_special_tokens=False).ids), ANSWER_TOKENS))


async def serve(args: argparse.Namespace, stop: asyncio.Event) -> None:
    ids = answer_ids(args.model_dir)

    def answer(idx: int) -> int:
        return ids[idx % ANSWER_TOKENS]

    async with AsyncExitStack() as opened:
        store_address = await _start(
            opened, args.registry, "store-0", "kvstore", kvstore_pb2_grpc.add_KvStoreServicer_to_server, StubStore()
        )
        prefill, decode = StubPrefill(answer, store_address), StubDecode(answer, args.step_s)
        add_prefill, add_decode = (
            prefill_pb2_grpc.add_PrefillServicer_to_server,
            decode_pb2_grpc.add_DecodeServicer_to_server,
        )
        await _start(opened, args.registry, "prefill-0", "prefill", add_prefill, prefill)
        await _start(opened, args.registry, "decode-0", "decode", add_decode, decode)
        print("ready", flush=True)
        await stop.wait()


async def _start(
    opened: AsyncExitStack, registry_url: str, node_id: str, role: str, register: Any, servicer: object
) -> str:
    """Serve on a free port and announce it; returns the address."""
    server = Server()
    server.add(register, servicer, node_id)
    port = await server.start(HOST, 0)
    opened.push_async_callback(server.close)
    record = NodeRecord(
        node_id=node_id,
        role=role,
        address=f"{HOST}:{port}",
        http_address="",
        boot_id="1",
        model_id=MODEL_ID,
        layout_json=LAYOUT.to_json(),
        host_id=HOST_ID,
        load=LOADS[role],
    )
    announcer = Announcer(RegistryConfig(url=registry_url), lambda: record)
    await announcer.start()
    opened.push_async_callback(announcer.close)
    return record.address


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--registry", required=True)
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument(
        "--step-s", type=float, default=0.0, help="time between two steps of decode; 0: as fast as it can"
    )
    return run_service(partial(serve, parser.parse_args()))


if __name__ == "__main__":
    raise SystemExit(main())
