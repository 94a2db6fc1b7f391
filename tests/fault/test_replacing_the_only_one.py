"""The only process of a role is replaced under load: clients wait for its successor, none fails. Nodes of another layout are left alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from moontide.config import free_port
from tests.cluster import START_TIMEOUT_S, RunningCluster, wait_for
from tests.e2e.oracle import GreedyOracle
from tests.fault.harness import BLOCK_TOKENS, Bench, random_prompt
from tests.fault.rolling import (
    CLOSE_S,
    DECODE_DRAIN_S,
    GROUPS,
    PREFILL_GRACE_S,
    STORE_DRAIN_S,
    add_group,
    rolling,
    rolling_bench,
    wait_nothing_held,
)

OTHER_LAYOUT = {"block_tokens": BLOCK_TOKENS // 2}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def narrow(model_dir: Path) -> Iterator[Bench]:
    """One of everything but the conductor."""
    with rolling_bench(model_dir, prefill_groups=1, decode=1, hosts=1) as bench:
        yield bench


@pytest.mark.parametrize(
    ("names", "grace_s"),
    [
        (GROUPS[0], PREFILL_GRACE_S),
        (("decode-0",), DECODE_DRAIN_S + CLOSE_S),
        (("kvstore-0",), STORE_DRAIN_S + CLOSE_S),
        (("mooncake-master",), CLOSE_S),
        (("valkey",), CLOSE_S),
    ],
    ids=["group", "decode", "store", "master", "registry"],
)
def test_the_only_one_is_replaced(narrow: Bench, oracle: GreedyOracle, names: tuple[str, ...], grace_s: float) -> None:
    """Clients wait for it; a conductor stays ready, so that a load balancer does not leave them without any."""
    with rolling(narrow, oracle, seed=sum(names[0].encode()), title=f"the only {names[0]}") as roll:
        roll.replace(*names, grace_s=grace_s)
        narrow.cluster.wait_ready()
        roll.wait_served()


def test_everything_killed_at_once_comes_back_by_itself(narrow: Bench, oracle: GreedyOracle) -> None:
    """As when all hosts are rebooted: nothing is kept, nothing has to be restored."""
    cluster = narrow.cluster
    pids = {name: cluster.kill(name) for name in cluster.names()}
    wait_for(lambda: all(cluster.pid(name) not in (None, pid) for name, pid in pids.items()), "all have started again")
    cluster.wait_ready(START_TIMEOUT_S)
    with rolling(narrow, oracle, seed=10, title="after everything was killed") as roll:
        roll.wait_served(1)


def test_nodes_of_another_layout_are_never_paired(narrow: Bench, oracle: GreedyOracle) -> None:
    """The layout cannot be rolled: on a store that knows the model in the old one, a new node refuses to start; on a host of its own it
    starts, and nobody uses it."""
    cluster = narrow.cluster
    cluster.add("decode-refused", like="decode-0", kv=OTHER_LAYOUT)
    wait_for(lambda: bool(cluster.exits("decode-refused")), "the node ends")
    assert "this store holds the model in another layout" in cluster.log("decode-refused")
    cluster.remove("decode-refused", timeout_s=CLOSE_S)

    with rolling(narrow, oracle, seed=8, title="nodes of another layout") as roll:
        store = _add_host(cluster, "host-b")
        cluster.add("decode-b", like="decode-0", kv=OTHER_LAYOUT, store=store, node={"host_id": "host-b"})
        stages = add_group(
            cluster, "prefill-b", like=GROUPS[0], kv=OTHER_LAYOUT, store=store, node={"host_id": "host-b"}
        )
        wait_for(lambda: all(cluster.is_ready(name) for name in ("decode-b", *stages)), "the other layout is there")
        wait_for(lambda: {"decode-b", stages[0]} <= {node.node_id for node in narrow.status().nodes}, "and known")
        roll.wait_served()
        call = narrow.start("explained", random_prompt(300, seed=9))
        call.wait(60.0)
        explanation = narrow.explain("explained")
    assert explanation is not None
    dropped = {each.node_id: each.reason for attempt in explanation.attempts for each in attempt.dropped}
    assert set(dropped) == {"decode-b", stages[0]}, "who was there first stays in use"
    assert all("another KV layout" in reason for reason in dropped.values())
    for name in dropped:
        samples = cluster.metrics(name)
        served = sum(
            v for key, v in samples.items() if key.startswith(("decode_requests_total", "prefill_requests_total"))
        )
        assert served == 0, f"{name} was given requests"
    cluster.remove("decode-b", *stages, timeout_s=PREFILL_GRACE_S)
    cluster.remove("kvstore-b", timeout_s=STORE_DRAIN_S)
    wait_nothing_held(cluster)


def _add_host(cluster: RunningCluster, host_id: str) -> dict[str, object]:
    """A store process on a host of its own; returns the section `store` of nodes there."""
    client_port, grpc_port = free_port(), free_port()
    cluster.add(
        "kvstore-b",
        like="kvstore-0",
        kvstore={"client_port": client_port},
        node={"host_id": host_id, "grpc_port": grpc_port},
    )
    wait_for(lambda: cluster.is_ready("kvstore-b"), "the other host's store is ready")
    return {"client_address": f"127.0.0.1:{client_port}", "service_address": f"127.0.0.1:{grpc_port}"}
