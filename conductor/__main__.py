"""`python -m conductor --config F.yaml`: builds the parts of one conductor and runs it until a signal."""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial

from prometheus_client import CollectorRegistry

from conductor import grpc_api, peers
from conductor.config import ConductorConfig
from conductor.idempotency import Answers
from conductor.index_follower import IndexFollower, read_snapshot
from conductor.metrics import ConductorMetrics
from conductor.openai_api import OpenAiApi
from conductor.prefix_index import PrefixIndex
from conductor.public_index import open_public_index
from conductor.registry import NodeRegistry
from conductor.roles import RoleManager
from conductor.service import Conductor
from conductor.tenants import TenantDirectory
from conductor.tokenizer import Tokenizer
from conductor.validation import ServedModel
from kvstore.hash_chain import load_hash_chain
from kvstore.index import KvEvents
from moontide.clock import MonotonicClock
from moontide.config import load_service_config, to_yaml
from moontide.log import get_logger, setup_logging
from moontide.registry import Announcer, NodeRecord
from moontide.rpc import Server
from moontide.service import run_service
from moontide.tls import Tls

LEAVE_S = 5.0
"""Longest wait at shutdown for clients that keep a connection open and send nothing on it."""

log = get_logger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    config = load_service_config(ConductorConfig, argv, "The front door and scheduler of a Moontide cluster.")
    setup_logging(config.node.node_id)
    return run_service(partial(serve, config))


async def serve(config: ConductorConfig, stop: asyncio.Event) -> None:
    """Run a conductor until `stop` is set; then leave the registry, let running requests finish, close."""
    log.info("starting", config=to_yaml(config).replace("\n", "; "))
    settings, clock = config.conductor, MonotonicClock()
    tls = Tls.load(config.tls)
    metrics = ConductorMetrics(CollectorRegistry())
    model = ServedModel.load(settings.model_dir, settings.served_model_name)
    tokenizer = await asyncio.to_thread(Tokenizer.load, settings.model_dir)
    await asyncio.to_thread(load_hash_chain)
    index = PrefixIndex()
    async with AsyncExitStack() as opened:
        registry = NodeRegistry(config.registry, clock, metrics)
        opened.push_async_callback(registry.close)
        public = await opened.enter_async_context(
            open_public_index(settings, host=config.node.host, index=index, nodes=lambda: registry.nodes, tls=tls)
        )
        follower = IndexFollower(
            index,
            KvEvents(config.registry),
            metrics,
            nodes=lambda: registry.nodes,
            read=partial(read_snapshot, tls=tls),
            tell=public.tell,
        )
        opened.push_async_callback(follower.close)
        boot_id = _boot_id()
        answers = Answers(config, registry=registry, metrics=metrics.registry, clock=clock, boot_id=boot_id, tls=tls)
        conductor = Conductor(
            config,
            model=model,
            tokenizer=tokenizer,
            registry=registry,
            index=index,
            answers=answers,
            known_tokens=public.known_tokens,
            metrics=metrics,
            clock=clock,
            tls=tls,
        )
        opened.push_async_callback(conductor.close)
        opened.push_async_callback(answers.close)
        roles = RoleManager(config, registry, metrics, clock, tls)
        opened.push_async_callback(roles.close)
        tenants = TenantDirectory(settings, config.registry, metrics)
        opened.push_async_callback(tenants.close)
        server = Server(tls)
        grpc_api.add_to(server, conductor, tenants, roles)
        peers.add_to(server, answers)
        grpc_port = await server.start(config.node.host, config.node.grpc_port)
        opened.push_async_callback(server.close)
        api = OpenAiApi(conductor, tenants, max_body_bytes=settings.max_body_bytes)
        opened.push_async_callback(api.close)
        http_port = await api.start(config.node.host, config.node.http_port, tls)
        await registry.start()
        await tenants.start()
        follower.start()
        answers.start(f"{config.node.host}:{grpc_port}")
        conductor.start()
        roles.start()
        announcer = Announcer(config.registry, partial(_record, config, conductor, grpc_port, http_port, boot_id))
        await announcer.start()
        opened.push_async_callback(announcer.close)
        _keep_out_of_collections()
        log.info(
            "serving", http=f"{config.node.host}:{http_port}", grpc=f"{config.node.host}:{grpc_port}", model=model.name
        )
        await _keep_health(server, conductor, stop, period_s=config.registry.heartbeat_s)
        log.info("draining", active=conductor.num_active, connections=api.num_connections)
        conductor.begin_drain()
        await announcer.close()
        await server.set_serving(False)
        async with asyncio.TaskGroup() as leaving:
            # Clients hear at once that they should go elsewhere; what they have open, and what they send before they hear it, is served.
            calls = leaving.create_task(server.close(settings.drain_s))
            ends_s = clock.now() + settings.drain_s
            await api.leave(min(LEAVE_S, settings.drain_s))
            await conductor.drain(max(0.0, ends_s - clock.now()))
            calls.cancel()
    log.info("stopped")


async def _keep_health(server: Server, conductor: Conductor, stop: asyncio.Event, *, period_s: float) -> None:
    """Until `stop`: gRPC health says SERVING exactly while a prompt would be served."""
    while not stop.is_set():
        await server.set_serving(conductor.not_ready() is None)
        try:
            async with asyncio.timeout(period_s):
                await stop.wait()
        except TimeoutError:
            continue


def _keep_out_of_collections() -> None:
    """What lives as long as the process is not looked at again by the collector, which stops the event loop meanwhile."""
    gc.collect()
    gc.freeze()


def _boot_id() -> str:
    return secrets.token_hex(8)


def _record(config: ConductorConfig, conductor: Conductor, grpc_port: int, http_port: int, boot_id: str) -> NodeRecord:
    return NodeRecord(
        node_id=config.node.node_id,
        role="conductor",
        address=f"{config.node.host}:{grpc_port}",
        http_address=f"{config.node.host}:{http_port}",
        boot_id=boot_id,
        host_id=config.node.resolve_host_id(),
        pid=os.getpid(),
        load={"active": float(conductor.num_active), "queued_s": conductor.queued_s},
    )


if __name__ == "__main__":
    sys.exit(main())
