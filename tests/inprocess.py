"""A whole cluster in one process: real stages, links, gRPC, decode, conductor and Valkey; only the bytes of the store lie in a dict.

Cheap enough to try every model family with every number of stages. Real processes and the real store: tests/cluster.py.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from conductor.config import ConductorConfig, ConductorSettings
from conductor.idempotency import Answers
from conductor.index_follower import IndexFollower
from conductor.metrics import ConductorMetrics
from conductor.prefix_index import PrefixIndex
from conductor.registry import NodeRegistry
from conductor.service import Conductor
from conductor.tokenizer import Tokenizer
from conductor.validation import GenerateParams, ServedModel, Submission, TokenPrompt, check_request_id
from decode_node.config import DecodeConfig, DecodeNodeConfig
from decode_node.service import DecodeNode, start_decode
from kvstore.access import KvConfig, StoreAccessConfig
from kvstore.index import KvEvents, KvEventWriter
from kvstore.node import LocalStoreNode
from kvstore.pool import PoolState
from kvstore.service import KvStoreService
from kvstore.transfer.base import Transfer
from kvstore.transfer.memory import MemoryStore, MemoryTransfer
from model_runner.config import ModelConfig
from model_runner.pages import PrefixPages
from moontide.clock import MonotonicClock
from moontide.config import NodeConfig, RegistryConfig, free_port
from moontide.deadline import Deadline
from moontide.registry import Announcer, NodeRecord
from moontide.rpc import Server
from moontide.sampling_params import SampledToken
from moontide.token_ids import pack_token_ids, unpack_token_ids
from moontide_proto.v1 import kvstore_pb2_grpc
from prefill_node.config import PrefillConfig, PrefillNodeConfig
from prefill_node.session import GroupSession
from prefill_node.stage import Stage
from prefill_node.start import start_stage

HOST = "127.0.0.1"
READY_TIMEOUT_S = 30.0
DECODE_PAGES = 1024


@dataclass(frozen=True)
class Answer:
    """What a client got."""

    tokens: list[SampledToken]
    text: str
    finish_reason: str
    cached_tokens: int

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]


@dataclass
class InProcessCluster:
    """One prefill group, one decode instance, one conductor, one store."""

    stages: list[Stage]
    decode: DecodeNode
    conductor: Conductor
    memory: MemoryStore
    store: LocalStoreNode

    @property
    def session(self) -> GroupSession:
        """What the group works on."""
        coordinator = self.stages[0].coordinator
        assert coordinator is not None
        assert coordinator.session is not None
        return coordinator.session

    def forget_pages(self) -> None:
        """Make an idle group fetch from the store what its stages still hold."""
        self.session.pages = PrefixPages(self.session.pages.num_pages)

    async def metrics(self) -> dict[str, float]:
        """Samples of stage 0 without labels, by name."""
        async with (
            aiohttp.ClientSession() as client,
            client.get(f"http://{self.stages[0].http_address}/metrics") as response,
        ):
            families = text_string_to_metric_families(await response.text())
        return {sample.name: sample.value for family in families for sample in family.samples if not sample.labels}

    async def generate(self, prompt: Sequence[int], params: GenerateParams) -> Answer:
        """Serve one prompt of token ids to its end. Raises: MoontideError."""
        submission = Submission(
            request_id=check_request_id(""),
            prompt=TokenPrompt(token_ids=unpack_token_ids(pack_token_ids(prompt))),
            params=params,
            arrival_s=self.conductor.clock.now(),
        )
        tokens: list[SampledToken] = []
        text = reason = ""
        cached = 0
        async with aclosing(self.conductor.generate(submission)) as deltas:
            async for delta in deltas:
                tokens += [output.token for output in delta.tokens]
                text += delta.text
                cached = delta.usage.cached_tokens
                reason = delta.finish_reason.value if delta.finish_reason else reason
        return Answer(tokens=tokens, text=text, finish_reason=reason, cached_tokens=cached)

    async def generate_all(self, prompts: Sequence[Sequence[int]], params: GenerateParams) -> list[Answer]:
        """Serve many prompts at once."""
        return list(await asyncio.gather(*(self.generate(prompt, params) for prompt in prompts)))


@asynccontextmanager
async def inprocess_cluster(
    model_dir: Path,
    *,
    stages: int,
    registry_url: str,
    block_tokens: int = 16,
    chunk_tokens: int = 64,
    layer_group: int = 1,
    pool_bytes: int = 1 << 30,
    num_pages: int = 1024,
    max_batch: int = 16,
    local_prefill: bool = False,
    dtype: str = "float32",
    kernels: str = "auto",
    profile: Path | None = None,
    stage_transfer: Callable[[MemoryStore], Transfer] = MemoryTransfer,
    decode_transfer: Callable[[MemoryStore], Transfer] = MemoryTransfer,
    **prefill: Any,
) -> AsyncIterator[InProcessCluster]:
    """Start everything, wait until a prompt would be served, close everything.

    Args:
        num_pages: of each stage.
        local_prefill: whether the conductor may leave short prompts to the decode instance; the instance takes them in any case.
        dtype, kernels: as in ModelConfig.
        profile: steps are paced and not computed.
        stage_transfer: makes each stage's way to the store.
        decode_transfer: makes that of the decode instance.
        prefill: more fields of PrefillConfig; chunks are of fixed size unless they say so or steps are paced.
    """
    if profile is None:
        prefill = {"chunking": "fixed", **prefill}
    registry = RegistryConfig(url=registry_url, heartbeat_s=0.2, lease_s=5.0)
    memory = MemoryStore(pool_bytes, lease_s=0.2)
    async with AsyncExitStack() as stack:
        store, store_address = await _start_store(stack, memory, registry, pool_bytes)
        access = StoreAccessConfig(
            master_rpc="memory:1", master_http="memory:1", client_address="memory:1", service_address=store_address
        )
        model = ModelConfig(name=str(model_dir), dtype=dtype, kernels=kernels)
        if profile is not None:
            model = replace(model, load_format="paced", profile=str(profile))
        kv = KvConfig(block_tokens=block_tokens, layer_group=layer_group)
        control_address = f"{HOST}:{free_port()}"
        running = []
        for idx in range(stages):
            config = PrefillNodeConfig(
                node=NodeConfig(node_id=f"prefill-0-stage-{idx}"),
                registry=registry,
                model=model,
                kv=kv,
                store=access,
                prefill=PrefillConfig(
                    group_id="prefill-0",
                    stage_idx=idx,
                    num_stages=stages,
                    control_address=control_address,
                    chunk_tokens=chunk_tokens,
                    num_pages=num_pages,
                    **prefill,
                ),
            )
            stage = await start_stage(config, transfer=stage_transfer(memory), store_node=store)
            stack.push_async_callback(stage.close)
            running.append(stage)
        decode_config = DecodeNodeConfig(
            node=NodeConfig(node_id="decode-0"),
            registry=registry,
            store=access,
            model=model,
            kv=kv,
            decode=DecodeConfig(num_pages=DECODE_PAGES, max_batch=max_batch, chunk_tokens=chunk_tokens),
        )
        decode = await start_decode(decode_config, transfer=decode_transfer(memory), store_node=store)
        stack.push_async_callback(decode.close)
        settings = ConductorSettings(model_dir=model_dir, served_model_name="tiny", local_prefill=local_prefill)
        conductor = await _start_conductor(stack, settings, registry)
        deadline = Deadline.after(READY_TIMEOUT_S, MonotonicClock())
        while (reason := conductor.not_ready()) is not None:
            assert not deadline.expired, f"not ready: {reason}"
            await asyncio.sleep(0.02)
        yield InProcessCluster(running, decode, conductor, memory, store)


async def _start_store(
    stack: AsyncExitStack, memory: MemoryStore, registry: RegistryConfig, pool_bytes: int
) -> tuple[LocalStoreNode, str]:
    pool = PoolState(capacity_bytes=pool_bytes * 9 // 10, clock=MonotonicClock(), node_id="kvstore-0")
    events = KvEventWriter(registry, node_id="kvstore-0", boot_id="boot")
    stack.push_async_callback(events.close)
    await events.heal()
    node = LocalStoreNode(pool, MemoryTransfer(memory), boot_id="boot", events=events)
    stack.push_async_callback(node.close)
    janitor = asyncio.create_task(node.run())
    stack.push_async_callback(_cancel, janitor)
    server = Server()
    service = KvStoreService(node, node_id="kvstore-0", boot_id="boot")
    server.add(kvstore_pb2_grpc.add_KvStoreServicer_to_server, service, "moontide.v1.KvStore")
    stack.push_async_callback(server.close)
    address = f"{HOST}:{await server.start(HOST, 0)}"
    record = NodeRecord(
        node_id="kvstore-0",
        role="kvstore",
        address=address,
        http_address=address,
        boot_id="boot",
        host_id=socket.gethostname(),
    )
    announcer = Announcer(registry, lambda: record)
    stack.push_async_callback(announcer.close)
    await announcer.start()
    return node, address


async def _start_conductor(
    stack: AsyncExitStack, settings: ConductorSettings, registry_config: RegistryConfig
) -> Conductor:
    clock, metrics, index = MonotonicClock(), ConductorMetrics(CollectorRegistry()), PrefixIndex()
    config = ConductorConfig(
        node=NodeConfig(node_id="conductor-0"),
        registry=registry_config,
        conductor=settings,
    )
    registry = NodeRegistry(registry_config, clock, metrics)
    stack.push_async_callback(registry.close)
    follower = IndexFollower(index, KvEvents(registry_config), metrics, nodes=lambda: registry.nodes)
    stack.push_async_callback(follower.close)
    answers = Answers(config, registry=registry, metrics=metrics.registry, clock=clock, boot_id="boot")
    stack.push_async_callback(answers.close)
    conductor = Conductor(
        config,
        model=ServedModel.load(settings.model_dir, settings.served_model_name),
        tokenizer=Tokenizer.load(settings.model_dir),
        registry=registry,
        index=index,
        metrics=metrics,
        answers=answers,
        clock=clock,
    )
    stack.push_async_callback(conductor.close)
    await registry.start()
    follower.start()
    conductor.start()
    return conductor


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
