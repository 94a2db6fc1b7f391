"""Every failure alert fires in a staged failure, says what a person needs, and ends with it; its runbook is walked through meanwhile.

One cluster for all: two hosts, each with a store process, a prefill group of two stages and a decode instance, under load.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from benchmarks.paced_models import write_paced_model
from moontide.config import RegistryConfig, free_port
from moontide.registry import Announcer, NodeRecord
from tests.cluster import running_cluster, wait_for
from tests.deploy.live.faults import Live, Load, staged
from tests.deploy.live.prometheus import running_prometheus, scaled_rules
from tests.deploy.live.runbook import Runbook
from tests.fault.harness import Bench, frozen, frozen_data_client, killed_for_long

pytestmark = pytest.mark.timeout(240)

SETTINGS = (
    "deploy.hosts=2",
    "deploy.object_lease_s=2",
    "registry.heartbeat_s=0.5",
    "registry.lease_s=2",
    "kvstore.pool_bytes=268435456",
    "kv.block_tokens=256",
    "kv.layer_group=4",
    "prefill.chunk_tokens=512",
    "prefill.chunking=fixed",
    "prefill.num_pages=512",
    "prefill.heartbeat_s=0.5",
    "prefill.peer_timeout_s=2",
    "prefill.lease_s=3",
    "decode.num_pages=512",
    "conductor.lease_s=3",
    "conductor.nodes_wait_s=1",
    "conductor.local_prefill=false",
)
SLO_OPTIONS = ("--ttft-slo-s", "20", "--tbt-slo-s", "5")
"""Out of the way: what is lost here comes late too."""
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
TRIES = 5
FLAPS = 4
"""New epochs within half an hour that are too many."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("failures")
    model = write_paced_model(folder, max_context=8192, overhead_s=0.01, token_s=2e-4, pair_s=0.0, decode_step_s=0.02)
    (model.directory / "chat_template.jinja").write_text(TEMPLATE)
    with ExitStack() as stack:
        settings = [*model.settings, *SETTINGS]
        cluster = stack.enter_context(
            running_cluster(model=model.directory, dtype="bfloat16", prefill_groups=2, decode=2, settings=settings)
        )
        bench = Bench(cluster)
        stack.callback(bench.close)
        rules = scaled_rules(folder, *SLO_OPTIONS)
        prometheus = stack.enter_context(running_prometheus(cluster, folder, rules=rules))
        load = stack.enter_context(Load(bench, per_s=4, prompt_tokens=2000, max_tokens=4, timeout_s=12))
        wait_for(lambda: len(load.served) > 5, "the load is served")
        yield Live(bench=bench, prometheus=prometheus, load=load)


@pytest.fixture
def live(shared: Live, request: pytest.FixtureRequest) -> Iterator[Live]:
    failed_before = request.session.testsfailed
    yield shared
    if request.session.testsfailed != failed_before:
        shared.cluster.print_logs()


def test_no_conductor(live: Live) -> None:
    with staged(live, "MoontideNoConductor", "MoontideTargetDown") as stage:
        with killed_for_long(live.cluster, "conductor-0"):
            stage.wait_firing("MoontideNoConductor")
            stage.wait_firing("MoontideTargetDown", "conductor-0")
            is_alive, is_ready, status = stage.walk("MoontideNoConductor", "Look at")
            assert "refused" in is_alive.said
            assert "refused" in is_ready.said
            assert "no cluster answers" in status.said
            (settings,) = stage.walk(
                "MoontideNoConductor", "Do", FILE=str(live.cluster.scrape_targets.with_name("conductor-0.yaml"))
            )
            assert settings.code == 0
        stage.mended()
        stage.wait_resolved()
        assert [step.code for step in stage.walk("MoontideNoConductor", "Verify")] == [200, 0, 1]


def test_no_prefill_group(live: Live) -> None:
    alerts = (
        "MoontideNoPrefillGroup",
        "MoontidePrefillGroupIncomplete",
        "MoontideNodesLost",
        "MoontideErrorRatioHigh",
        "MoontideTargetDown",
    )
    with staged(live, *alerts) as stage:
        leader = live.http("prefill-0-stage-0")
        with killed_for_long(live.cluster, "prefill-0-stage-1", "prefill-1-stage-1"):
            stage.wait_firing("MoontideNoPrefillGroup")
            for group in ("prefill-0", "prefill-1"):
                stage.wait_firing("MoontideTargetDown", f"{group}-stage-1")
                stage.wait_firing("MoontidePrefillGroupIncomplete", f"{group}-stage-0")
            stage.wait_firing("MoontideNodesLost", "prefill")
            stage.wait_firing("MoontideErrorRatioHigh")
            status, complete, ready = stage.walk("MoontideNoPrefillGroup", "Look at", STAGE0__PORT=leader)
            assert status.code == 1
            assert "not ready: no complete prefill group is alive" in status.said
            assert status.said.count("LOST") == 2
            assert complete.said.count(" 0") == 2, "the stages that are left"
            assert ready.code == 503
            assert Runbook("MoontideNoPrefillGroup").quotes(ready.said)
            ready, status = stage.walk("MoontidePrefillGroupIncomplete", "Look at", STAGE0__PORT=leader)
            assert "no stage 1" in ready.said
            stage.walk("MoontideNodesLost", "Look at")
            by_outcome, *_ = stage.walk("MoontideErrorRatioHigh", "Look at")
            assert by_outcome.said.count("NoCapacity") == 1
            assert any("no complete prefill group is alive" in error for error in stage.errors())
        stage.mended()
        stage.wait_resolved()
        stage.check_log_lines("MoontideNoPrefillGroup", other_causes=("stage refused", "stage failed"))
        stage.check_log_lines("MoontideNodesLost")
        stage.check_log_lines("MoontideErrorRatioHigh")
        for alert in alerts[:-1]:
            assert all(step.code >= 0 for step in stage.walk(alert, "Verify"))


def test_no_decode_instance(live: Live) -> None:
    with staged(live, "MoontideNoDecode", "MoontideErrorRatioHigh") as stage:
        with killed_for_long(live.cluster, "decode-0", "decode-1"):
            stage.wait_firing("MoontideNoDecode")
            stage.wait_firing("MoontideErrorRatioHigh")
            status, ready, _ = stage.walk("MoontideNoDecode", "Look at", DECODE__PORT=live.http("decode-0"))
            assert "not ready: no decode instance is alive" in status.said
            assert "refused" in ready.said
            assert any("no decode instance is alive" in error for error in stage.errors())
        stage.mended()
        stage.wait_resolved()
        assert [step.code for step in stage.walk("MoontideNoDecode", "Verify")] == [0, 0, 1]


def test_target_down(live: Live) -> None:
    with staged(live, "MoontideTargetDown") as stage:
        with frozen(live.cluster, "decode-1"):
            stage.wait_firing("MoontideTargetDown", "decode-1")
            alive, status = stage.walk("MoontideTargetDown", "Look at", instance="decode-1")
            assert "timed out" in alive.said
            assert status.said.count("LOST") == 1
        stage.mended()
        stage.wait_resolved()
        assert all(step.code in (1, 200) for step in stage.walk("MoontideTargetDown", "Verify", instance="decode-1"))


def test_store_master_lost(live: Live) -> None:
    store = live.http("kvstore-0")
    with staged(live, "MoontideStoreMasterLost") as stage:
        with killed_for_long(live.cluster, "mooncake-master"):
            stage.wait_firing("MoontideStoreMasterLost")
            stage.wait_firing("MoontideStoreProcessLost")
            health, ready, status = stage.walk("MoontideStoreMasterLost", "Look at", KVSTORE__PORT=store)
            assert health.code == -1
            assert ready.code == 503
            assert Runbook("MoontideStoreMasterLost").quotes(ready.said)
            assert status.said.count("LOST") >= 2, "at least the store processes"
        stage.mended()
        stage.wait_resolved()
        wait_for(lambda: not live.critical(), "all that came of it is over", 90.0)
        stage.check_log_lines("MoontideStoreMasterLost")
        assert [step.code for step in stage.walk("MoontideStoreMasterLost", "Verify")] == [0, 0, 0]


def test_store_process_lost(live: Live) -> None:
    places = {"HOST__PORT": live.grpc("kvstore-1"), "KVSTORE__PORT": live.http("kvstore-1")}
    with staged(live, "MoontideStoreProcessLost", "MoontidePutsFail") as stage:
        with stuck_put(live, "kvstore-1", "prefill-1-stage-0"), killed_for_long(live.cluster, "kvstore-1"):
            stage.wait_firing("MoontideStoreProcessLost", "kvstore-1")
            stage.wait_firing("MoontidePutsFail", "prefill-1-stage")
            status, stats, ready = stage.walk("MoontideStoreProcessLost", "Look at", **places)
            assert "LOST" in status.said
            assert stats.code == 1
            assert "refused" in ready.said
            by_result, *_ = stage.walk("MoontidePutsFail", "Look at", **places)
            assert "'failed'" in by_result.said
            (evicted,) = stage.walk("MoontidePutsFail", "Do", N="1000")
            assert evicted.code == 0
        stage.mended()
        stage.wait_resolved()
        stage.check_log_lines("MoontidePutsFail")
        for alert in stage.alerts:
            assert all(step.code >= 0 for step in stage.walk(alert, "Verify", **places))


def test_store_process_stands_still(live: Live) -> None:
    places = {"HOST__PORT": live.grpc("kvstore-1"), "STAGE__PORT": live.http("prefill-1-stage-0")}
    with staged(live, "MoontideStoreProcessLost", "MoontidePushStalled", "MoontideStoreCallsFail") as stage:
        with stuck_put(live, "kvstore-1", "prefill-1-stage-0"), frozen(live.cluster, "kvstore-1"):
            stage.wait_firing("MoontideStoreProcessLost", "kvstore-1")
            stage.wait_firing("MoontidePushStalled", "prefill-1-stage-0")
            stats, _, ready, *_ = stage.walk("MoontidePushStalled", "Look at", **places)
            assert stats.code == 1
            assert ready.code == 503
            assert Runbook("MoontidePushStalled").quotes(ready.said)
            stage.wait_firing("MoontideStoreCallsFail", "release")
            stage.walk("MoontideStoreCallsFail", "Look at", **places)
        stage.mended()
        stage.wait_resolved()
        stage.check_log_lines("MoontideStoreProcessLost")
        stage.check_log_lines("MoontideStoreCallsFail")
        for alert in stage.alerts[1:]:
            assert all(step.code >= 0 for step in stage.walk(alert, "Verify", **places))


def test_registry_lost(live: Live) -> None:
    with staged(live, "MoontideRegistryLost") as stage:
        with killed_for_long(live.cluster, "valkey"):
            stage.wait_firing("MoontideRegistryLost")
            before = live.load.served[-1]
            ping, status = stage.walk("MoontideRegistryLost", "Look at")
            assert ping.code == -1
            assert status.code == 0
            assert Runbook("MoontideRegistryLost").quotes(status.said)
            wait_for(lambda: live.load.served[-1] != before, "requests are served on the last known state")
        stage.mended()
        stage.wait_resolved()
        stage.check_log_lines("MoontideRegistryLost")
        assert not stage.errors()
        wait_for(lambda: live.cluster.metrics("conductor-0")["conductor_index_nodes_behind"] == 0, "the index is whole")
        live.prometheus.wait_scrapes(1)
        connected, status, behind = stage.walk("MoontideRegistryLost", "Verify")
        assert connected.said.endswith(" 1")
        assert "LOST" not in status.said
        assert behind.said.endswith(" 0")


def test_group_flaps_and_its_requests_are_tried_again(live: Live) -> None:
    leader = "prefill-0-stage-0"
    with staged(live, "MoontidePrefillGroupFlaps", "MoontideRetriesHigh") as stage:
        for _ in range(FLAPS):
            wait_written(live, "conductor-0", f"prefill={leader} ")
            with frozen(live.cluster, "prefill-0-stage-1"):
                wait_for(lambda: not live.cluster.is_ready(leader), "the group is lost")
            wait_for(lambda: live.cluster.is_ready(leader), "the group is there again")
        stage.mended()
        stage.wait_firing("MoontidePrefillGroupFlaps", "prefill-0-stage")
        stage.wait_firing("MoontideRetriesHigh")
        stage.walk("MoontidePrefillGroupFlaps", "Look at")
        reasons, *_ = stage.walk("MoontideRetriesHigh", "Look at")
        assert "NodeLost" in reasons.said
        (verified,) = stage.walk("MoontideRetriesHigh", "Do")
        assert verified.code == 0
        stage.check_log_lines("MoontidePrefillGroupFlaps", other_causes=("stage failed",))
        stage.check_log_lines("MoontideRetriesHigh")
        stage.wait_resolved()
        for alert in stage.alerts:
            stage.walk(alert, "Verify")


def test_index_behind(live: Live) -> None:
    """Last, for the record of a store process whose port is closed goes in the end, which is a lost store process."""
    record = NodeRecord(
        node_id="kvstore-behind",
        role="kvstore",
        address=f"127.0.0.1:{free_port()}",
        http_address="127.0.0.1:1",
        boot_id="behind",
        host_id="host-behind",
    )
    announcer = Announcer(RegistryConfig(url=live.cluster.registry_url, heartbeat_s=0.5, lease_s=2.0), lambda: record)
    with staged(live, "MoontideIndexBehind") as stage:
        live.bench.run(announcer.start())
        try:
            stage.wait_firing("MoontideIndexBehind", "conductor-0")
            snapshots, stats = stage.walk("MoontideIndexBehind", "Look at", HOST__PORT=record.address)
            assert "'failed'" in snapshots.said
            assert stats.code == 1
            stage.check_log_lines("MoontideIndexBehind", other_causes=("kv events are no longer followed",))
        finally:
            live.bench.run(announcer.close())
        stage.mended()
        stage.wait_resolved()
        stage.walk("MoontideIndexBehind", "Verify")


@contextmanager
def stuck_put(live: Live, store: str, stage: str) -> Iterator[None]:
    """The data client of this store process stands still, and a put of this stage 0 waits for it."""
    for _ in range(TRIES):
        wait_written(live, stage, "request accepted")
        with frozen_data_client(live.cluster, store):
            live.prometheus.wait_scrapes(1)  # longer than a heartbeat, with which the gauge moves
            if live.cluster.metrics(stage)["prefill_open_puts"] > 0:
                yield
                return
    raise AssertionError(f"no put of {stage} was on its way to {store}")


def wait_written(live: Live, name: str, text: str) -> None:
    """Until this process logs it again."""
    before = len(live.cluster.log(name))
    wait_for(lambda: text in live.cluster.log(name)[before:], f"{name} logs {text!r}")
