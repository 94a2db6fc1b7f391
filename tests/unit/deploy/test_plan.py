from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from deploy.config import load_cluster_config
from deploy.local import CONFIG_CLASSES, scrape_targets
from deploy.plan import Binaries, ClusterPlan, fixed_ports, plan_cluster
from moontide.config import build

BINARIES = Binaries(valkey_server=Path("/bin/valkey-server"), mooncake_master=Path("/bin/mooncake_master"))


def make_plan(*overrides: str) -> ClusterPlan:
    ports = itertools.count(20_000)
    return plan_cluster(
        load_cluster_config(overrides=overrides),
        model_dir=Path("/models/tiny"),
        model_id="tiny",
        run_dir=Path("/tmp/run"),
        binaries=BINARIES,
        free_port=lambda: next(ports),
    )


def test_every_process_of_the_shape_is_planned_once() -> None:
    plan = make_plan("deploy.stages=3", "deploy.prefill_groups=2", "deploy.decode=2", "deploy.conductors=2")
    assert [spec.name for spec in plan.processes] == [
        "valkey", "mooncake-master", "kvstore-0",
        "prefill-0-stage-0", "prefill-0-stage-1", "prefill-0-stage-2",
        "prefill-1-stage-0", "prefill-1-stage-1", "prefill-1-stage-2",
        "decode-0", "decode-1", "conductor-0", "conductor-1",
    ]  # fmt: skip


def test_services_accept_their_planned_settings() -> None:
    for spec in make_plan("deploy.stages=2").processes:
        if spec.module:
            build(CONFIG_CLASSES[spec.role], spec.config)


def test_every_service_gets_the_certificates_by_absolute_path() -> None:
    overrides = ("tls.cert_file=pki/tls.crt", "tls.key_file=/pki/tls.key", "tls.ca_file=/pki/ca.crt")
    plan = make_plan(*overrides, "tls.server_name=inside")
    sections = [spec.config["tls"] for spec in plan.processes if spec.module]
    assert len(sections) == 5
    assert all(section == sections[0] for section in sections)
    assert sections[0]["cert_file"] == str(Path("pki/tls.crt").absolute())
    assert (sections[0]["key_file"], sections[0]["server_name"]) == ("/pki/tls.key", "inside")
    assert [spec.name for spec in plan.processes if spec.serves_https] == ["conductor-0"]
    schemes = {
        target["labels"]["instance"]: target["labels"].get("__scheme__") for target in scrape_targets(plan.processes)
    }
    assert [name for name, scheme in schemes.items() if scheme == "https"] == ["conductor-0"]
    assert not any(spec.serves_https for spec in make_plan().processes)


def test_each_store_process_gets_its_own_directory_on_the_ssd() -> None:
    def ssd_dirs(*overrides: str) -> list[str]:
        return [spec.config["kvstore"]["ssd_dir"] for spec in make_plan(*overrides).processes if spec.role == "kvstore"]

    assert ssd_dirs("kvstore.ssd_dir=/mnt/ssd") == ["/mnt/ssd/kvstore-0"]
    assert ssd_dirs("kvstore.ssd_dir=ssd") == [str(Path("ssd").absolute() / "kvstore-0")]
    assert ssd_dirs() == [""]


def test_stages_of_a_group_meet_at_one_control_address_and_groups_do_not() -> None:
    plan = make_plan("deploy.stages=2", "deploy.prefill_groups=2")
    addresses: dict[str, set[str]] = {}
    for spec in plan.processes:
        if spec.role == "prefill":
            addresses.setdefault(spec.group, set()).add(spec.config["prefill"]["control_address"])
    assert [len(found) for found in addresses.values()] == [1, 1]
    assert len(set.union(*addresses.values())) == 2


def test_no_port_is_given_twice() -> None:
    plan = make_plan("deploy.prefill_groups=2", "deploy.decode=2", "deploy.http_port=0", "deploy.grpc_port=0")
    http = [spec.http_address for spec in plan.processes if spec.http_address]
    others = [address for spec in plan.processes for address in spec.listens_on]
    others += [conductor.grpc for conductor in plan.conductors] + [plan.store_address]
    control = {spec.config["prefill"]["control_address"] for spec in plan.processes if spec.role == "prefill"}
    found = http + others + list(control)
    assert len(set(found)) == len(found)


def test_everything_listens_on_loopback() -> None:
    plan = make_plan()
    assert all(spec.config["node"]["host"] == "127.0.0.1" for spec in plan.processes if spec.module)
    valkey, master = plan.spec("valkey").argv, plan.spec("mooncake-master").argv
    assert valkey[valkey.index("--bind") + 1] == "127.0.0.1"
    assert {"--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1", "--enable_http_metadata_server=false"} <= set(master)


def test_conductors_take_every_second_port_from_the_chosen_one() -> None:
    config = load_cluster_config(overrides=["deploy.conductors=2", "deploy.http_port=9100", "deploy.grpc_port=9101"])
    assert list(fixed_ports(config)) == [
        ("--http-port", 9100), ("--grpc-port", 9101), ("--http-port", 9102), ("--grpc-port", 9103)
    ]  # fmt: skip
    plan = make_plan("deploy.conductors=2", "deploy.http_port=9100", "deploy.grpc_port=9101")
    assert [c.http for c in plan.conductors] == ["127.0.0.1:9100", "127.0.0.1:9102"]
    assert [c.grpc for c in plan.conductors] == ["127.0.0.1:9101", "127.0.0.1:9103"]


def test_address_that_only_one_process_can_have_goes_to_the_first_conductor() -> None:
    overrides = (
        "deploy.conductors=2", "conductor.indexer_port=13333", "conductor.kv_event_endpoint=tcp://127.0.0.1:5557"
    )  # fmt: skip
    plan = make_plan(*overrides)
    first, second = (plan.spec(name).config["conductor"] for name in ("conductor-0", "conductor-1"))
    assert (first["indexer_port"], first["kv_event_endpoint"]) == (13333, "tcp://127.0.0.1:5557")
    assert (second["indexer_port"], second["kv_event_endpoint"]) == (None, "")
    build(CONFIG_CLASSES["conductor"], plan.spec("conductor-1").config)
    assert ("conductor.indexer_port", 13333) in fixed_ports(load_cluster_config(overrides=overrides))


def test_settings_reach_their_service() -> None:
    plan = make_plan(
        "prefill.chunk_tokens=256", "decode.max_batch=3", "kvstore.pool_bytes=33554432", "kv.block_tokens=32"
    )
    assert plan.spec("prefill-0-stage-1").config["prefill"]["chunk_tokens"] == 256
    assert plan.spec("decode-0").config["decode"]["max_batch"] == 3
    assert plan.spec("kvstore-0").config["kvstore"]["pool_bytes"] == 33554432
    assert (
        plan.spec("decode-0").config["kv"]["block_tokens"]
        == plan.spec("prefill-0-stage-0").config["kv"]["block_tokens"]
        == 32
    )


@pytest.mark.parametrize(("overrides", "name"), [((), "tiny"), (("conductor.served_model_name=mine",), "mine")])
def test_served_name_is_the_models_unless_chosen(overrides: tuple[str, ...], name: str) -> None:
    settings = make_plan(*overrides).spec("conductor-0").config["conductor"]
    assert settings["served_model_name"] == name
    assert settings["model_dir"] == "/models/tiny"


def test_thread_count_is_stated_for_every_service() -> None:
    plan = make_plan("model.threads=2")
    assert all(spec.env["OMP_NUM_THREADS"] == "2" for spec in plan.processes if spec.module)
