"""`python -m deploy.docker.lock > deploy/docker/lock.txt`: versions of what the images install beside what constraints.txt names.

They are those of the environment that runs this: pyproject.toml's requirements with the CPU image's extras, and all that these need.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy.docker.requirements import requirements

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = {"cpu": ["cpu", "kv-events", "local"], "cuda": ["cuda13", "kv-events", "local"]}
"""Of pyproject.toml, for each target of the Dockerfile."""
_HEAD = "# Beside constraints.txt, for the images: what their packages need. Made by `python -m deploy.docker.lock`."


def pins(*files: Path) -> dict[str, str]:
    """Normalised name -> version, of the lines NAME==VERSION."""
    found: dict[str, str] = {}
    for file in files:
        for line in file.read_text().splitlines():
            name, equals, version = line.partition("==")
            if equals and not line.startswith("#"):
                found[canonicalize_name(name.strip())] = version.strip()
    return found


def closure(wanted: Iterable[str]) -> dict[str, str]:
    """Installed versions of the requirements and of what they need; without what names a build, such as +cpu.

    Raises: PackageNotFoundError.
    """
    found: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    open_ends = [(Requirement(text), "") for text in wanted]
    while open_ends:
        requirement, extra = open_ends.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        distribution = importlib.metadata.distribution(requirement.name)
        found[name] = distribution.version.partition("+")[0]
        for of_extra in ("", *requirement.extras):
            if (name, of_extra) not in seen:
                seen.add((name, of_extra))
                open_ends += [(Requirement(text), of_extra) for text in distribution.requires or ()]
    return found


def render(versions: Mapping[str, str], named: Mapping[str, str]) -> str:
    """The file: `versions` without those that constraints.txt names."""
    lines = [f"{name}=={version}" for name, version in sorted(versions.items()) if name not in named]
    return "\n".join([_HEAD, *lines]) + "\n"


def package_name(requirement: str) -> str:
    """Normalised name of a requirement."""
    return canonicalize_name(re.split(r"[\[<>=!~; ]", requirement.strip())[0])


if __name__ == "__main__":
    print(render(closure(requirements(ROOT / "pyproject.toml", EXTRAS["cpu"])), pins(ROOT / "constraints.txt")), end="")
