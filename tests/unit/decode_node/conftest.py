"""One tiny model for all tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvstore.transfer.memory import MemoryStore
from model_runner import kv_fetch
from tests.fakes.tiny_models import tiny_model_dir
from tests.unit.decode_node.decode_rig import Prefill


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir("llama", tmp_path_factory.mktemp("decode-models"))


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(1 << 30)


@pytest.fixture
def prefill(model_dir: Path, store: MemoryStore) -> Prefill:
    return Prefill(model_dir, store)


@pytest.fixture
def group_per_get(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny layer groups share no get, as large ones do not."""
    monkeypatch.setattr(kv_fetch, "MIN_CALL_BYTES", 1)
