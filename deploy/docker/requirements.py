"""Prints the dependencies of pyproject.toml with those of the extras that are named, so that an image can install them before the code.

python deploy/docker/requirements.py [EXTRA ...]
"""

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path, extras: list[str]) -> list[str]:
    """One requirement an entry. Raises: KeyError for an unknown extra."""
    project = tomllib.loads(pyproject.read_text())["project"]
    return [*project["dependencies"], *(r for extra in extras for r in project["optional-dependencies"][extra])]


if __name__ == "__main__":
    print("\n".join(requirements(Path("pyproject.toml"), sys.argv[1:])))
