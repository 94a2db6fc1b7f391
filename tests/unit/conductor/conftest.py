from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from front import Front, open_front

from tests.fakes.text_model import text_model_dir


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_model_dir(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture
async def front(model_dir: Path) -> AsyncIterator[Front]:
    """A conductor in front of one prefill group and one decode instance."""
    async with open_front(model_dir) as opened:
        yield opened
