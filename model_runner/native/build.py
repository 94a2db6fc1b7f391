"""Compiles kernels.cpp."""

from pathlib import Path

from moontide import native_build

SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = (
    "-march=x86-64-v4",
    "-mavx512bf16",
    # Else the compiler fuses a product and a sum in one inlined copy of a function and not in another: two results.
    "-ffp-contract=off",
    "-fopenmp",
)


def build_library() -> Path:
    """Path of the compiled kernels; compiles them (about three seconds) if nobody has yet. Raises: BuildFailed."""
    return native_build.build_library(SOURCE, flags=FLAGS)
