from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from deploy.config import load_cluster_config, settable_tree
from moontide.config import to_tree
from moontide.errors import ConfigError


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("prefil.chunk_tokens=256", "did you mean prefill"),
        ("prefill.chunk_token=256", "did you mean prefill.chunk_tokens"),
        ("prefill.num_stages=3", "--stages"),
        ("registry.url=redis://elsewhere:1/0", "decided by the launcher"),
        ("prefill=3", "is a section"),
        ("deploy.launcher=slurm", "ray, process"),
        ("deploy.stages=0", "at least 1"),
        ("deploy.stages=two", "type int"),
        ("deploy.http_port=70000", "no TCP port"),
        ("deploy.grpc_port=8000", "choose ports an odd number apart"),
        ("deploy.ready_timeout_s=0", "above 0"),
        ("conductor.indexer_port=99999", "conductor.indexer_port=99999 is no TCP port"),
        ("model.dtype=int8", "float32"),
        ("chunk_tokens", "not of the form"),
    ],
)
def test_wrong_setting_is_refused_with_the_way_out(override: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        load_cluster_config(overrides=[override])


def test_file_is_refused_where_it_sets_what_the_plan_decides(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("kvstore: {master_rpc: 'elsewhere:1'}\n")
    with pytest.raises(ConfigError, match=r"cluster.yaml: kvstore.master_rpc"):
        load_cluster_config(path=path)


def test_override_wins_over_file_and_file_over_default(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("deploy: {stages: 3, decode: 2}\n")
    config = load_cluster_config(path=path, overrides=["deploy.stages=4"])
    assert (config.deploy.stages, config.deploy.decode, config.deploy.conductors) == (4, 2, 1)


def test_printed_config_is_a_config_file(tmp_path: Path) -> None:
    config = load_cluster_config(overrides=["prefill.chunk_tokens=128", "deploy.stages=3"])
    path = tmp_path / "printed.yaml"
    path.write_text(yaml.safe_dump(settable_tree(to_tree(config))))
    assert load_cluster_config(path=path) == config


def test_odd_ports_apart_or_far_apart_are_fine() -> None:
    load_cluster_config(overrides=["deploy.http_port=9000", "deploy.grpc_port=9010", "deploy.conductors=5"])
    with pytest.raises(ConfigError, match="meet"):
        load_cluster_config(overrides=["deploy.http_port=9000", "deploy.grpc_port=9008", "deploy.conductors=5"])


@pytest.mark.parametrize("drain", ["conductor.drain_s", "decode.drain_timeout_s", "kvstore.drain_s"])
def test_no_process_is_killed_while_it_drains(drain: str) -> None:
    assert load_cluster_config(overrides=[f"{drain}=600"]).stop_timeout_s > 600
