"""The figures of the examples with GPUs: model, pages and containers fit on the device and the host that each example names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest

from deploy.check_chart import CHART, EXAMPLES
from moontide.config import read_yaml

DEVICE_BYTES = 141e9
"""H200."""
DEVICE_ROOM_BYTES = 15e9
"""For activations, logits and what the runtime takes."""
HOST_GIB = 1536
PROCESS_GIB = 16
MASTER_BYTES_PER_OBJECT = 905
SMALLEST_OBJECT_BYTES = 192 << 10


@dataclass(frozen=True, kw_only=True)
class Model:
    """Of its config.json, in bfloat16."""

    parameters: float
    layers: int
    kv_heads: int
    head_dim: int

    @property
    def layer_bytes_per_token(self) -> int:
        return 2 * self.kv_heads * self.head_dim * 2


MODELS = {
    "one-node-8-gpu": Model(parameters=32.8e9, layers=64, kv_heads=8, head_dim=128),  # Qwen3-32B
    "multi-node-4p4d-rdma": Model(
        parameters=30.5e9, layers=48, kv_heads=4, head_dim=128
    ),  # Qwen3-30B-A3B-Instruct-2507
}
HOSTS = {"one-node-8-gpu": 1, "multi-node-4p4d-rdma": 8}


def example(name: str) -> dict[str, Any]:
    def merged(below: Any, above: Any) -> Any:
        if not isinstance(below, dict) or not isinstance(above, dict):
            return above
        return below | {key: merged(below.get(key), value) for key, value in above.items()}

    values: dict[str, Any] = merged(read_yaml(CHART / "values.yaml"), read_yaml(EXAMPLES / f"{name}.yaml"))
    return values


def gib(quantity: str) -> float:
    number = re.fullmatch(r"(\d+)Gi", quantity)
    assert number, quantity
    return float(number[1])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_stages", ["deployed", "one"])
def test_weights_and_pages_fit_on_the_device(name: str, num_stages: str) -> None:
    """Also those of a decode instance that becomes a prefill group of one stage."""
    model, values = MODELS[name], example(name)
    stages = values["prefill"]["stages"] if num_stages == "deployed" else 1
    page_bytes = values["kv"]["block_tokens"] * model.layer_bytes_per_token * model.layers
    for role, parts in (("prefill", stages), ("decode", 1)):
        pages_bytes = values[role]["settings"]["num_pages"] * page_bytes / parts
        assert 2 * model.parameters / parts + pages_bytes + DEVICE_ROOM_BYTES < DEVICE_BYTES, role
        assert pages_bytes / 2**30 + PROCESS_GIB < gib(values[role]["resources"]["limits"]["memory"]), role


@pytest.mark.parametrize("name", MODELS)
def test_pods_of_a_host_fit_into_its_memory(name: str) -> None:
    values = example(name)
    store = values["kvstore"]["poolGiB"] + values["kvstore"]["overheadGiB"]
    containers = {"prefill": values["prefill"]["stagesPerPod"], "decode": values["decode"]["instancesPerPod"]}
    limits = {role: each * gib(values[role]["resources"]["limits"]["memory"]) for role, each in containers.items()}
    assert store + (sum(limits.values()) if HOSTS[name] == 1 else max(limits.values())) < HOST_GIB


@pytest.mark.parametrize("name", MODELS)
def test_the_master_has_room_for_the_objects_of_a_full_pool(name: str) -> None:
    model, values = MODELS[name], example(name)
    object_bytes = values["kv"]["block_tokens"] * model.layer_bytes_per_token
    assert object_bytes >= SMALLEST_OBJECT_BYTES, "kv.layer_group=0 takes one layer"
    num_objects = HOSTS[name] * values["kvstore"]["poolGiB"] * 2**30 / object_bytes
    master_bytes = gib(values["mooncakeMaster"]["resources"]["requests"]["memory"]) * 2**30
    assert num_objects * MASTER_BYTES_PER_OBJECT < 0.9 * master_bytes
