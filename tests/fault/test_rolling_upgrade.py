"""Every process is replaced under load, the way Kubernetes does it: no request fails, every answer is right, what is drained ends in time.

There are two of everything here; test_replacing_the_only_one.py has one. Run with -s to see how long clients paused at each step.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import wait_for
from tests.e2e.oracle import GreedyOracle
from tests.fault.harness import CHUNK_TOKENS, DECODE_PAGES, Bench
from tests.fault.rolling import (
    CLOSE_S,
    CONDUCTOR_DRAIN_S,
    DECODE_DRAIN_S,
    GROUPS,
    PREFILL_GRACE_S,
    STORE_DRAIN_S,
    add_group,
    rolling,
    rolling_bench,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def wide(model_dir: Path) -> Iterator[Bench]:
    """Two of everything that can be there twice, on two hosts."""
    with rolling_bench(model_dir, prefill_groups=2, decode=2, hosts=2) as bench:
        yield bench


def test_conductors_one_by_one(wide: Bench, oracle: GreedyOracle) -> None:
    with rolling(wide, oracle, seed=1, title="conductors, one by one") as roll:
        for idx in (0, 1):
            roll.replace_conductor(idx, grace_s=CONDUCTOR_DRAIN_S + CLOSE_S)
            roll.wait_served()
    for idx in (0, 1):
        assert "requests cut off" not in wide.cluster.log(f"conductor-{idx}")


def test_decode_instances_one_by_one_with_other_settings(wide: Bench, oracle: GreedyOracle) -> None:
    with rolling(wide, oracle, seed=2, title="decode instances, one by one") as roll:
        for name in ("decode-0", "decode-1"):
            wide.cluster.reconfigure(name, decode={"num_pages": DECODE_PAGES + 20, "max_batch": 16})
            roll.replace(name, grace_s=DECODE_DRAIN_S + CLOSE_S)
            roll.wait_served()
    assert wide.cluster.metrics("decode-0")["decode_pages"] == DECODE_PAGES + 20


def test_prefill_groups_one_by_one_with_other_settings(wide: Bench, oracle: GreedyOracle) -> None:
    with rolling(wide, oracle, seed=3, title="prefill groups, one by one") as roll:
        for stages in GROUPS:
            for name in stages:
                wide.cluster.reconfigure(name, prefill={"chunk_tokens": 2 * CHUNK_TOKENS, "num_pages": 200})
            roll.replace(*stages, grace_s=PREFILL_GRACE_S)
            roll.wait_served()
    assert wide.cluster.metrics("prefill-1-stage-0")["prefill_num_pages"] == 200


def test_store_processes_one_by_one(wide: Bench, oracle: GreedyOracle) -> None:
    with rolling(wide, oracle, seed=4, title="store processes, one by one") as roll:
        for name in ("kvstore-0", "kvstore-1"):
            roll.replace(name, grace_s=STORE_DRAIN_S + CLOSE_S)
            roll.wait_served()


def test_master_and_registry(wide: Bench, oracle: GreedyOracle) -> None:
    with rolling(wide, oracle, seed=5, title="master, then registry") as roll:
        for name in ("mooncake-master", "valkey"):
            roll.replace(name, grace_s=CLOSE_S)
            wide.cluster.wait_ready()
            roll.wait_served()


def test_one_of_each_role_at_once(wide: Bench, oracle: GreedyOracle) -> None:
    """As when a release changes all: the first group goes, and the store process of the host on which the second one is, so that for a
    while nothing can be served."""
    with rolling(wide, oracle, seed=7, title="one of each role at once") as roll:
        roll.replace("decode-0", *GROUPS[0], "kvstore-1", grace_s=STORE_DRAIN_S + CLOSE_S)
        wide.cluster.wait_ready()
        roll.wait_served()


def test_new_names_take_over_while_the_old_ones_are_still_there(wide: Bench, oracle: GreedyOracle) -> None:
    """As Deployments and groups that surge: old and new side by side, then the old ones go for good."""
    cluster = wide.cluster
    with rolling(wide, oracle, seed=6, title="a decode instance and a group under new names") as roll:
        cluster.add("decode-2", like="decode-0")
        stages = add_group(cluster, "prefill-2", like=GROUPS[0])
        wait_for(lambda: all(cluster.is_ready(name) for name in ("decode-2", *stages)), "the new ones are ready")
        roll.wait_served()
        roll.retire("decode-0", grace_s=DECODE_DRAIN_S + CLOSE_S)
        roll.retire(*GROUPS[0], grace_s=PREFILL_GRACE_S)
        roll.wait_served()
    assert "drained" in cluster.log("decode-0")
    assert all(" closed" in cluster.log(name) for name in GROUPS[0])
