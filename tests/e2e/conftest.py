"""What every end-to-end test needs."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    """The references share the cores with a cluster: two busy processes with two threads each are many times slower than with one."""
    torch.set_num_threads(1)
