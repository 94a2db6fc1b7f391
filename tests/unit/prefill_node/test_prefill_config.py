"""PrefillNodeConfig: wrong settings are refused by name, with the way out."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.access import KvConfig, StoreAccessConfig
from model_runner.config import ModelConfig
from moontide.config import NodeConfig, RegistryConfig
from moontide.errors import ConfigError
from prefill_node.config import PrefillConfig, PrefillNodeConfig


def make_prefill(**changes: Any) -> PrefillConfig:
    settings: dict[str, Any] = {"group_id": "g", "stage_idx": 0, "num_stages": 2, "control_address": "127.0.0.1:7000"}
    return PrefillConfig(**{**settings, **changes})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"group_id": ""}, "group_id is empty"),
        ({"num_stages": 0}, "num_stages=0"),
        ({"stage_idx": 2}, "stage_idx=2"),
        ({"chunk_tokens": 0}, "chunk_tokens=0"),
        ({"slack": -1}, "slack=-1"),
        ({"push": "sometimes"}, "push='sometimes' is unknown; choose one of auto, layer-wise"),
        ({"max_push_bytes": 0}, "max_push_bytes=0"),
        ({"heartbeat_s": 0.0}, "heartbeat_s"),
        ({"peer_timeout_s": 1.5}, "twice prefill.heartbeat_s"),
        ({"control_address": "here"}, "write host:port"),
        ({"control_address": "127.0.0.1:0"}, "write host:port"),
        ({"link_port": 70_000}, "link_port=70000"),
    ],
)
def test_wrong_setting_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make_prefill(**changes)


def make_node(**changes: Any) -> PrefillNodeConfig:
    return PrefillNodeConfig(
        node=NodeConfig(node_id="n"),
        registry=RegistryConfig(url="redis://127.0.0.1:1/0"),
        model=ModelConfig(),
        kv=KvConfig(block_tokens=64),
        store=StoreAccessConfig(master_rpc="-", master_http="-", client_address="-", service_address="-"),
        prefill=make_prefill(**changes),
    )


def test_chunk_must_be_a_multiple_of_the_block() -> None:
    with pytest.raises(ConfigError, match=r"chunk_tokens=100 is no multiple of kv.block_tokens=64; try 64"):
        make_node(chunk_tokens=100)


def test_a_measured_split_needs_measured_steps() -> None:
    make_node(layer_split="measured")
    with pytest.raises(ConfigError, match=r"layer_split=measured needs step times.* use equal-time"):
        make_node(layer_split="measured", chunking="fixed")


def test_pages_default_to_two_full_contexts() -> None:
    assert make_prefill().resolve_num_pages(max_context=8192, block_tokens=64) == 256
    assert make_prefill(num_pages=7).resolve_num_pages(max_context=8192, block_tokens=64) == 7


def test_pipeline_depth_is_stages_and_slack() -> None:
    assert make_prefill(slack=1).max_in_flight_steps == 3
