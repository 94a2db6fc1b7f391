"""One tiny model for all tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers.utils import logging as transformers_logging

from tests.fakes.tiny_models import tiny_model_dir


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir("llama", tmp_path_factory.mktemp("prefill-models"))
