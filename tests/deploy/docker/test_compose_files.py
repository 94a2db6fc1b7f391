"""compose.yaml and compose.cuda.yaml: allowed by the specification, confined, and in agreement with the settings of the services."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from deploy.docker import compose, reading
from deploy.docker.sandbox import Sandbox
from deploy.docker.services import NOT_EXERCISED, Services, unknown_keys

DOCKER = reading.HERE
TREE = compose.load(DOCKER / "compose.yaml")
SETTINGS = compose.settings(TREE["services"], DOCKER)
Change = Callable[[dict[str, Any], dict[str, dict[str, Any]]], object]


def schema_errors(document: dict[str, Any]) -> list[str]:
    validator = jsonschema.Draft7Validator(json.loads(reading.SCHEMA.read_text()))
    return [error.message for error in validator.iter_errors(document)]


def wiring_problems(change: Change) -> list[str]:
    tree, settings = copy.deepcopy(TREE), copy.deepcopy(SETTINGS)
    change(tree["services"], settings)
    return compose.wiring_problems(tree["services"], tree["networks"], settings)


@pytest.mark.parametrize("name", ["compose.yaml", "compose.cuda.yaml"])
def test_the_specification_allows_the_file(name: str) -> None:
    assert schema_errors(compose.load(DOCKER / name)) == []


def test_the_schema_refuses_what_the_specification_does_not_know() -> None:
    tree = copy.deepcopy(TREE)
    tree["services"]["decode"]["readonly"] = True
    assert any("readonly" in message for message in schema_errors(tree))


def test_every_service_of_ours_has_settings_that_its_program_takes() -> None:
    assert list(SETTINGS) == ["kvstore", "prefill-stage-0", "prefill-stage-1", "decode", "conductor"]
    assert SETTINGS["prefill-stage-1"]["prefill"]["stage_idx"] == 1
    assert SETTINGS["conductor"]["conductor"]["served_model_name"] == SETTINGS["decode"]["model"]["name"]


def test_services_and_settings_fit_together() -> None:
    assert compose.wiring_problems(TREE["services"], TREE["networks"], SETTINGS) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda _, s: s["decode"]["node"].update(http_port=7111), "127.0.0.1:7111: both"),
        (lambda _, s: s["decode"]["node"].update(grpc_port=0), "decode: a port that nobody knows"),
        (lambda _, s: s["decode"]["store"].update(master_rpc="127.0.0.1:7599"), "nobody listens on store.master_rpc"),
        (lambda _, s: s["kvstore"]["kvstore"].update(client_port=7003), "nobody listens on store.client_address"),
        (lambda _, s: s["conductor"]["registry"].update(url="redis://127.0.0.1:6380/0"), "nobody listens on registry.url"),
        (lambda c, _: c["valkey"]["command"].__setitem__(4, "6380"), "nobody listens on registry.url"),
        (lambda c, _: c["conductor"].update(depends_on=["valkey"]), "conductor: starts before valkey is healthy"),
        (lambda c, _: c["conductor"]["depends_on"].pop("decode"), "conductor: ends after decode"),
        (lambda c, _: c["kvstore"].update(healthcheck={"disable": True}), "decode: starts before kvstore is healthy"),
        (lambda c, _: c["decode"]["environment"].update(HEALTH_URL="http://127.0.0.1:7201/live"), "decode: HEALTH_URL"),
        (lambda c, _: c["conductor"].update(stop_grace_period="20s"), "conductor: is killed after 20 s"),
        (lambda _, s: s["decode"]["decode"].update(drain_timeout_s=60.0), "decode: is killed after 45 s"),
        (lambda _, s: s["prefill-stage-1"]["prefill"].update(stage_idx=0), "stages are not 0 to num_stages - 1"),
        (lambda _, s: s["prefill-stage-1"]["prefill"].update(control_address="127.0.0.1:7101"), "control_address or num_stages"),
        (lambda c, _: c["host"].update(ports=["8000:8000", "127.0.0.1:8001:8001"]), "open to other machines"),
        (lambda c, _: c["host"].update(ports=["127.0.0.1:8000:8080"]), "published are"),
        (lambda c, _: c["host"]["networks"]["default"].update(ipv4_address="10.9.0.2"), "is not in 10.213.27.0/24"),
        (lambda c, _: c["decode"].pop("network_mode"), "decode: has a network of its own"),
        (lambda _, s: s["conductor"]["conductor"].update(served_model_name="other"), "several models"),
        (lambda _, s: s["decode"]["kv"].update(block_tokens=128), "section kv differs"),
        (lambda _, s: s["decode"]["node"].update(host_id="other"), "node.host_id differs"),
        (lambda _, s: s["decode"]["node"].update(node_id="kvstore-0"), "node.node_id is given twice"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(change: Change, problem: str) -> None:
    found = wiring_problems(change)
    assert any(problem in text for text in found), found


@pytest.mark.parametrize("name", TREE["services"])
def test_service_is_confined(name: str) -> None:
    assert compose.confinement_problems(TREE["services"][name]) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"read_only": False}, "read_only"),
        ({"cap_drop": ["NET_RAW"]}, "cap_drop"),
        ({"cap_add": ["SYS_ADMIN"]}, "cap_add"),
        ({"privileged": True}, "privileged"),
        ({"security_opt": []}, "security_opt"),
        ({"user": "root"}, "user root"),
        ({"user": "0:0"}, "user 0:0"),
        ({"volumes": ["./config:/etc/moontide"]}, "./config can be written"),
    ],
)
def test_what_is_not_confined_is_named(change: dict[str, Any], problem: str) -> None:
    assert compose.confinement_problems({**TREE["services"]["decode"], **change}) == [problem]


def test_every_key_is_exercised_or_listed_with_a_reason() -> None:
    assert unknown_keys(TREE["services"]) == []
    assert unknown_keys({"a": {"command": [], "privileged": True}}) == ["privileged"]
    assert all(NOT_EXERCISED.values())


def test_gpu_file_gives_a_device_to_each_service_that_computes() -> None:
    overlay = compose.load(DOCKER / "compose.cuda.yaml")["services"]
    both = compose.load(DOCKER / "compose.yaml", DOCKER / "compose.cuda.yaml", env={"DEVICE": "cuda"})["services"]
    trees = compose.settings(both, DOCKER)
    assert compose.gpu_problems(TREE["services"], overlay, trees) == []
    assert "decode: computes on cpu" in compose.gpu_problems(TREE["services"], overlay, SETTINGS)
    lacking = {name: service for name, service in overlay.items() if name != "decode"}
    assert compose.gpu_problems(TREE["services"], lacking, trees) == ["decode: needs a GPU"]
    twice = {**overlay, "decode": overlay["prefill-stage-0"]}
    assert compose.gpu_problems(TREE["services"], twice, trees) == ["a device is given twice"]


def test_variables_and_overlays_are_read_as_compose_does(tmp_path: Path) -> None:
    below, above = tmp_path / "a.yaml", tmp_path / "b.yaml"
    below.write_text(
        'x-part: 1\nservices: {a: {image: "${IMAGE:-one}", command: ["$$HOME", "${UNSET}"], ports: ["1"]}}\n'
    )
    above.write_text("services: {a: {image: two}, b: {image: three}}\n")
    services = compose.load(below, above, env={"IMAGE": "other"})["services"]
    assert services == {"a": {"image": "two", "command": ["$HOME", ""], "ports": ["1"]}, "b": {"image": "three"}}
    assert compose.load(below, env={"IMAGE": "other"})["services"]["a"]["image"] == "other"
    assert compose.load(below)["services"]["a"]["image"] == "one"


def test_services_start_after_what_they_depend_on(tmp_path: Path) -> None:
    services = Services(
        Sandbox(root=tmp_path, env={}), TREE["services"], image_health="", folder=tmp_path, directory=DOCKER
    )
    assert services.in_order(["kvstore"]) == ["host", "valkey", "mooncake-master", "kvstore"]
    assert services.healthy_before("kvstore") == ["valkey", "mooncake-master"]
    assert services.healthy_before("valkey") == []
    order = services.in_order(list(TREE["services"]))
    assert order[-1] == "conductor"


def test_container_has_the_mounts_of_its_service(tmp_path: Path) -> None:
    services = Services(
        Sandbox(root=tmp_path, env={}), TREE["services"], image_health="", folder=tmp_path, directory=DOCKER
    )
    container = services.container("decode")
    assert (DOCKER / "config", "/etc/moontide", True) in container.mounts
    assert (tmp_path / "cache", "/var/cache/moontide", False) in container.mounts
    assert list(container.tmpfs) == ["/tmp"]
    assert services.container("valkey").user == "999:1000"
    assert services.container("host").mounts == []


@pytest.mark.parametrize(("text", "expected"), [("45s", 45.0), ("1m30s", 90.0), ("500ms", 0.5), ("1h", 3600.0)])
def test_durations(text: str, expected: float) -> None:
    assert compose.seconds(text) == expected
