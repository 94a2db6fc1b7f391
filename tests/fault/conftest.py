"""One cluster for the whole folder. What the tests kill starts again by itself; every test begins when all is ready and nothing is held."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.cluster import RunningCluster, running_cluster
from tests.e2e.oracle import GreedyOracle
from tests.fault.harness import SETTINGS, Bench, fault_model_dir


@pytest.fixture(scope="package")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fault_model_dir(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="package")
def oracle(model_dir: Path) -> Iterator[GreedyOracle]:
    """Computes on one thread: more, beside a cluster on the same cores, are far slower than one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield GreedyOracle(model_dir)
    torch.set_num_threads(before)


@pytest.fixture(scope="package")
def shared_bench(model_dir: Path) -> Iterator[Bench]:
    with running_cluster(model=model_dir, stages=2, conductors=2, settings=SETTINGS) as cluster:
        bench = Bench(cluster)
        try:
            yield bench
        finally:
            bench.close()


@pytest.fixture
def bench(shared_bench: Bench, request: pytest.FixtureRequest) -> Iterator[Bench]:
    """The shared cluster, steady before and after the test. When a test fails, the ends of all logs are shown."""
    shared_bench.cluster.wait_ready()
    shared_bench.wait_idle()
    failed_before = request.session.testsfailed
    yield shared_bench
    if request.session.testsfailed != failed_before:
        shared_bench.cluster.print_logs()


@pytest.fixture
def cluster(bench: Bench) -> RunningCluster:
    return bench.cluster
