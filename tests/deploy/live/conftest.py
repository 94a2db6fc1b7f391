"""What runs here needs a real Prometheus; `make check-deploy` runs it."""

from __future__ import annotations

import shutil

import pytest

from tests.deploy.live.prometheus import PROGRAM


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = pytest.mark.skip(reason=f"{PROGRAM} is not installed: apt-get install prometheus")
    for item in items:
        if item.path.is_relative_to(__file__.rpartition("/")[0]):
            item.add_marker(pytest.mark.slow)
            if shutil.which(PROGRAM) is None:
                item.add_marker(missing)
