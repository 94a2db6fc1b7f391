"""From the settings of a stage to a running one: model, layout, store, pages, weights."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import AsyncExitStack

import torch
from prometheus_client import CollectorRegistry

from kvstore.client import StoreClient, StoreNodeClient
from kvstore.layout import KVLayout, choose_layer_group
from kvstore.node import StoreNode
from kvstore.transfer.base import StoreUnavailable, Transfer
from kvstore.transfer.mooncake import MooncakeTransfer
from model_runner.kv_cache import PagedKVCache
from model_runner.model_source import ModelInfo, ModelSource, load_model_info, resolve_model
from model_runner.runner import StageRunner
from model_runner.stage import default_dtype, split_layers
from moontide.errors import ConfigError
from moontide.log import get_logger
from prefill_node.config import PrefillNodeConfig
from prefill_node.stage import Stage

_ATTACH_TIMEOUT_S = 60.0
"""Longest wait at start for this host's store process."""

log = get_logger(__name__)


async def start_stage(
    config: PrefillNodeConfig, *, transfer: Transfer | None = None, store_node: StoreNode | None = None
) -> Stage:
    """Load the model's stage and start it; the caller closes it.

    Args:
        transfer: for the pages and the store; None attaches to this host's store process. The caller closes what it gives.
        store_node: the same for reservations and seals.
    Raises: ConfigError (ModelError for the model), OSError for ports in use.
    """
    torch.set_num_threads(config.model.threads)
    source, info, layout = await asyncio.to_thread(_describe_model, config)
    spec = split_layers(info.num_layers, config.prefill.num_stages, layer_group=layout.layer_group)[
        config.prefill.stage_idx
    ]
    num_pages = config.prefill.resolve_num_pages(max_context=info.max_context, block_tokens=layout.block_tokens)
    arena_bytes = PagedKVCache.arena_bytes(layout, spec, num_pages)
    async with AsyncExitStack() as opened:
        if transfer is None:
            transfer = await _attach(config, arena_bytes)
            opened.callback(transfer.close)
        if store_node is None:
            store_node = StoreNodeClient(config.store.service_address)
            opened.push_async_callback(store_node.close)
        arena = transfer.allocate(arena_bytes)
        runner = await asyncio.to_thread(
            StageRunner.load,
            source,
            spec,
            dtype=info.dtype,
            layout=layout,
            num_pages=num_pages,
            device=config.model.device,
            arena=arena.buffer,
        )
        registry = CollectorRegistry()
        stage = Stage(
            config,
            runner,
            StoreClient(transfer, layout, registry=registry),
            layout=layout,
            transfer=transfer,
            store_node=store_node,
            registry=registry,
            resources=opened.pop_all(),
        )
    await stage.start()
    return stage


def _describe_model(config: PrefillNodeConfig) -> tuple[ModelSource, ModelInfo, KVLayout]:
    dtype = default_dtype(config.model.device) if config.model.dtype == "auto" else config.model.dtype
    source = resolve_model(config.model.name, load_format=config.model.load_format)
    info = load_model_info(source, dtype=dtype)
    layout = KVLayout(
        model_fingerprint=info.fingerprint,
        num_layers=info.num_layers,
        num_planes=info.num_planes,
        num_kv_heads=info.num_kv_heads,
        head_dim=info.head_dim,
        dtype=dtype,
        block_tokens=config.kv.block_tokens,
        layer_group=1,
    )
    layer_group = config.kv.layer_group or choose_layer_group(info.num_layers, layout.layer_bytes)
    return source, info, dataclasses.replace(layout, layer_group=layer_group)


async def _attach(config: PrefillNodeConfig, arena_bytes: int) -> Transfer:
    """Attach to this host's store process, which may still be on its way up."""
    try:
        async with asyncio.timeout(_ATTACH_TIMEOUT_S):
            while True:
                try:
                    return await asyncio.to_thread(
                        MooncakeTransfer,
                        client_address=config.store.client_address,
                        master_http=config.store.master_http,
                        arena_bytes=arena_bytes,
                    )
                except StoreUnavailable as error:
                    log.info("waiting for the store", reason=str(error))
                    await asyncio.sleep(1.0)
    except TimeoutError as error:
        raise ConfigError(
            f"no store process answers at store.client_address={config.store.client_address} within {_ATTACH_TIMEOUT_S} s; "
            "start `python -m kvstore` on this host, or correct the address"
        ) from error
