"""From the settings of a stage to a running one: model, layout, store, pages, weights, step times."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import torch
from prometheus_client import CollectorRegistry

from kvstore.client import StoreClient, StoreNodeClient
from kvstore.node import StoreNode
from kvstore.transfer.base import Transfer
from kvstore.transfer.mooncake import attach
from model_runner.kv_cache import PagedKVCache
from model_runner.load import load_runner
from model_runner.model_source import describe_model
from model_runner.profile import measured_model
from model_runner.runner import StageRunner
from model_runner.stage import MEASURED, parse_layer_split
from moontide.metrics import HealthServer
from moontide.tls import Tls
from prefill_node.config import PrefillNodeConfig
from prefill_node.measured_split import MeasuredSplit
from prefill_node.prefix_copy import Copier
from prefill_node.stage import Stage


async def start_stage(
    config: PrefillNodeConfig,
    *,
    transfer: Transfer | None = None,
    store_node: StoreNode | None = None,
    copier: Copier | None = None,
) -> Stage:
    """Load the model's stage and start it; the caller closes it.

    Args:
        transfer: for the pages and the store; None attaches to this host's store process. The caller closes what it gives.
        store_node: the same for reservations and seals.
        copier: the same for copies from other hosts; none are made where only `store_node` is given.
    Raises: ConfigError (ModelError for the model), OSError for ports in use.
    """
    torch.set_num_threads(config.model.threads)
    tls = Tls.load(config.tls)
    async with AsyncExitStack() as opened:
        # It answers while the weights are read: a supervisor that hears nothing for a minute takes the process for dead.
        registry = CollectorRegistry()
        health = HealthServer(registry, lambda: "the model is being loaded")
        opened.push_async_callback(health.close)
        http_port = await health.start(config.node.host, config.node.http_port)
        described = await asyncio.to_thread(describe_model, config.model, config.kv)
        info, layout = described.info, described.layout
        measured_split, layer_split = None, config.prefill.layer_split
        if layer_split == MEASURED:
            measured_split = MeasuredSplit(
                config.registry,
                group_id=config.prefill.group_id,
                layout_digest=layout.digest(),
                num_stages=config.prefill.num_stages,
            )
            layer_split = await measured_split.read()
        split = parse_layer_split(
            layer_split, info.num_layers, config.prefill.num_stages, layer_group=layout.layer_group
        )
        spec = split[config.prefill.stage_idx]
        num_pages = config.prefill.resolve_num_pages(max_context=info.max_context, block_tokens=layout.block_tokens)
        arena_bytes = PagedKVCache.arena_bytes(layout, spec, num_pages)
        if transfer is None:
            transfer = await attach(config.store, arena_bytes=arena_bytes)
            opened.callback(transfer.close)
        if store_node is None:
            store_node = copier = StoreNodeClient(config.store.service_address, tls=tls)
            opened.push_async_callback(store_node.close)
        arena = transfer.allocate(arena_bytes)
        runner = await asyncio.to_thread(
            load_runner, config.model, described, spec, num_pages=num_pages, arena=arena.buffer
        )
        step_model = runner.step_model
        if isinstance(runner, StageRunner) and config.prefill.chunking == "equal-time":
            step_model = await asyncio.to_thread(
                measured_model, runner, config.model, layout, chunk_tokens=config.prefill.chunk_tokens
            )
        stage = Stage(
            config,
            described,
            runner,
            StoreClient(transfer, layout, registry=registry),
            layout=layout,
            split=split,
            measured_split=measured_split,
            step_model=step_model,
            transfer=transfer,
            store_node=store_node,
            copier=copier,
            tls=tls,
            registry=registry,
            health=health,
            http_address=f"{config.node.host}:{http_port}",
            resources=opened.pop_all(),
        )
    await stage.start()
    return stage
