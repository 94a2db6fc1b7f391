"""Plans of clusters on two hosts, and the picture that benchmarks draw."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.line_chart import Chart
from benchmarks.two_hosts import DATA_CLIENT, LOOPBACK, Host, spread
from deploy.config import load_cluster_config
from deploy.local import CONFIG_CLASSES
from deploy.plan import Binaries, ClusterPlan, plan_cluster
from moontide.config import build

NEAR, FAR = Host("10.99.0.1"), Host("10.99.0.2", ("on-far",))


def plan() -> ClusterPlan:
    ports = itertools.count(20_000)
    return plan_cluster(
        load_cluster_config(overrides=["deploy.stages=2"]),
        model_dir=Path("/models/tiny"),
        model_id="tiny",
        run_dir=Path("/tmp/run"),
        binaries=Binaries(valkey_server=Path("/bin/valkey-server"), mooncake_master=Path("/bin/mooncake_master")),
        free_port=lambda: next(ports),
    )


def spread_store() -> ClusterPlan:
    return spread(plan(), near=NEAR, far=FAR, on_far=("mooncake-master", "kvstore-0", "decode-0"), pool_threads=2)


def test_nothing_of_a_spread_plan_stays_on_loopback() -> None:
    for spec in spread_store().processes:
        assert "127.0.0.1" not in json.dumps([spec.argv, spec.config, spec.listens_on, spec.http_address])


def test_every_process_runs_and_listens_on_its_host_and_finds_the_others() -> None:
    spread_plan = spread_store()
    master = spread_plan.spec("mooncake-master")
    assert master.argv[0] == "on-far"
    assert all(address.startswith(FAR.address) for address in master.listens_on)
    stage = spread_plan.spec("prefill-0-stage-0")
    assert stage.argv[0] != "on-far"
    assert stage.config["node"]["host"] == NEAR.address
    assert stage.config["registry"]["url"].startswith(f"redis://{NEAR.address}:")
    assert stage.config["store"]["master_rpc"] in master.listens_on
    assert spread_plan.store_address.startswith(FAR.address)
    for spec in spread_plan.processes:
        if spec.module:
            build(CONFIG_CLASSES[spec.role], spec.config)


def test_the_host_without_a_store_gets_a_data_client_that_its_processes_attach_to() -> None:
    spread_plan = spread_store()
    (lone,) = spread_plan.spec(DATA_CLIENT).listens_on
    assert lone.startswith(NEAR.address)
    assert spread_plan.spec("prefill-0-stage-1").config["store"]["client_address"] == lone
    assert spread_plan.spec("decode-0").config["store"]["client_address"] != lone
    only_decode = spread(plan(), near=LOOPBACK, far=LOOPBACK, on_far=("decode-0",), pool_threads=2)
    (lone,) = only_decode.spec(DATA_CLIENT).listens_on
    assert only_decode.spec("decode-0").config["store"]["client_address"] == lone
    assert only_decode.spec("prefill-0-stage-0").config["store"]["client_address"] != lone


def test_a_chart_is_xml_and_its_higher_line_is_above() -> None:
    chart = Chart(
        title="a < b", x_label="x", y_label="y", x_values=[1, 2, 4], lines={"low": [0.0, 0.1, -0.02], "high": [0.4, 0.5, 0.6]},
        marks={"5 %": 0.05},
    )  # fmt: skip
    root = ElementTree.fromstring(chart.svg())
    low, high = (line.attrib["points"].split() for line in root.iter("{http://www.w3.org/2000/svg}polyline"))
    assert all(float(a.split(",")[1]) > float(b.split(",")[1]) for a, b in zip(low, high, strict=True))
