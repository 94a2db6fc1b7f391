"""What is installed in an image is pinned."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from deploy.docker import lock
from deploy.docker.requirements import requirements

DOCKER = lock.ROOT / "deploy" / "docker"


def test_every_requirement_of_each_target_is_pinned() -> None:
    pinned = lock.pins(lock.ROOT / "constraints.txt", DOCKER / "constraints-cuda.txt")
    for extras in lock.EXTRAS.values():
        wanted = {lock.package_name(text) for text in requirements(lock.ROOT / "pyproject.toml", extras)}
        assert wanted <= pinned.keys()


def test_lock_adds_to_the_constraints_and_contradicts_none() -> None:
    locked = lock.pins(DOCKER / "lock.txt")
    assert {"huggingface-hub", "aiosignal", "setuptools"} <= locked.keys()  # of transformers, aiohttp, torch
    assert locked.keys() & lock.pins(lock.ROOT / "constraints.txt").keys() == set()


def test_closure_follows_extras_and_markers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def install(name: str, *requires: str) -> None:
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        lines = [
            "Metadata-Version: 2.1",
            f"Name: {name}",
            "Version: 1.0+local",
            *(f"Requires-Dist: {r}" for r in requires),
        ]
        (folder / "METADATA").write_text("\n".join(lines) + "\n")

    install("fake_top", "fake-old; python_version < '3'", "fake-extra; extra == 'more'", "fake-base[some]")
    install("fake_base", "fake-top", "fake-deep; extra == 'some'")
    install("fake_deep")
    install("fake_extra")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert lock.closure(["fake-top"]) == {"fake-top": "1.0", "fake-base": "1.0", "fake-deep": "1.0"}
    assert "fake-extra" in lock.closure(["fake-top[more]"])


def test_what_the_constraints_name_is_left_out() -> None:
    assert lock.render({"b": "2", "a": "1", "named": "3"}, {"named": "3"}).splitlines()[1:] == ["a==1", "b==2"]
