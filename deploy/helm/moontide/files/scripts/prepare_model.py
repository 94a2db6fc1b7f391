"""Unpack the built-in model into the cache, and name its directory by a link that settings can point at."""

import sys
from pathlib import Path

from model_runner.builtin_model import prepare


def main(link: Path) -> None:
    if not link.is_symlink():
        link.symlink_to(prepare())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
