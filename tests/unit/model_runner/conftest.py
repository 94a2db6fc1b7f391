"""Tiny models are made once per session."""

from pathlib import Path

import pytest
import torch
from transformers.utils import logging as transformers_logging

from model_runner.native.build import build_library
from model_runner.native.kernels import NativeKernels
from tests.native_kernels import why_absent


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()


@pytest.fixture(scope="session")
def tiny_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny-models")


@pytest.fixture(scope="session")
def native() -> NativeKernels:
    """The compiled kernels. A compiler that refuses them fails the tests; a CPU or machine without them skips."""
    if (reason := why_absent()) is not None:
        pytest.skip(f"native kernels: {reason}; the cases with torch test the same claims")
    return NativeKernels(build_library())


@pytest.fixture(params=["torch", "native", "native without AMX"])
def kernels(request: pytest.FixtureRequest) -> NativeKernels | None:
    """All ways to compute: None is torch."""
    if request.param == "torch":
        return None
    native: NativeKernels = request.getfixturevalue("native")
    if request.param == "native":
        return native
    if native.instructions != "amx":
        pytest.skip("the CPU has no AMX: see the case above")
    return NativeKernels(build_library(), use_amx=False)
