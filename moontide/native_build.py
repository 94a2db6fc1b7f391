"""Compiles a C++ file at first use and keeps the library in the cache folder.

The file's name holds a digest of source, flags and compiler, so an edited source or another compiler makes a new one
and nothing is ever stale. Several processes may ask at the same time: one compiles, the others wait. A library that was
shipped beside its source, as images without a compiler have it, comes first.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from moontide.config import cache_dir
from moontide.file_lock import locked

_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC")
_COMPILE_TIMEOUT_S = 120.0
_LOCK_TIMEOUT_S = 180.0


class BuildFailed(Exception):
    """The source cannot be compiled here; the message is a reason for people to read."""


def build_library(source: Path, *, flags: Sequence[str] = ()) -> Path:
    """Path of the compiled source; compiles it (seconds) if nobody has yet. `flags` are those beyond a plain library's.

    Raises: BuildFailed.
    """
    shipped = _shipped(source, flags)
    if shipped.exists():
        return shipped
    directory = cache_dir() / "native"
    command = [_compiler(), *_FLAGS, *flags]
    library = directory / f"{source.stem}-{_digest(command, source)}.so"
    if library.exists():
        return library
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with locked(library.with_suffix(".lock"), timeout_s=_LOCK_TIMEOUT_S, error=BuildFailed):
            if not library.exists():
                _compile(command, source, library)
    except OSError as error:
        raise BuildFailed(f"{directory} is not writable ({error})") from error
    return library


def ship_library(source: Path, *, flags: Sequence[str] = ()) -> Path:
    """Compile beside the source, for machines without a compiler: `build_library` finds it while source and flags are the same.

    Raises: BuildFailed.
    """
    library = _shipped(source, flags)
    _compile([_compiler(), *_FLAGS, *flags], source, library)
    return library


def _shipped(source: Path, flags: Sequence[str]) -> Path:
    digest = hashlib.sha256(source.read_bytes() + " ".join((*_FLAGS, *flags)).encode()).hexdigest()[:16]
    return source.with_name(f"{source.stem}-{digest}.so")


def _compiler() -> str:
    compiler = shutil.which("g++")
    if compiler is None:
        raise BuildFailed("there is no g++ on PATH")
    return compiler


def _digest(command: Sequence[str], source: Path) -> str:
    version = _run([command[0], "--version"])
    return hashlib.sha256(source.read_bytes() + " ".join((*command[1:], version)).encode()).hexdigest()[:16]


def _compile(command: Sequence[str], source: Path, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        output = Path(scratch) / library.name
        _run([*command, "-o", str(output), str(source)])
        os.replace(output, library)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=True)
    except subprocess.TimeoutExpired as error:
        raise BuildFailed(f"{command[0]} did not end within {_COMPILE_TIMEOUT_S:.0f} s") from error
    except subprocess.CalledProcessError as error:
        reason = next((line for line in error.stderr.splitlines() if "error" in line), error.stderr.strip())
        raise BuildFailed(f"{command[0]} failed: {reason}") from error
    return done.stdout
