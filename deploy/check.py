"""`make check-deploy`: everything that is deployed, against the tools that read it.

    chart | rules | dashboards | images | live     each a program of its own; its lines as they come, then one line per part and a sum

`live` starts clusters, breaks them on purpose under the eyes of a real Prometheus, and takes most of the time.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
PROMETHEUS = Path("deploy/prometheus")
PACKAGE_OF = {"promtool": "prometheus", "prometheus": "prometheus"}
"""Program -> Debian package."""


@dataclass(frozen=True)
class Part:
    """Commands that check one thing; all of them run, whatever the ones before said."""

    name: str
    commands: tuple[tuple[str, ...], ...]
    needs: tuple[str, ...] = ()
    """Programs that pip does not bring."""


def parts() -> tuple[Part, ...]:
    python = (sys.executable, "-m")
    tests = sorted(str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / PROMETHEUS / "tests").glob("*.yaml"))
    return (
        Part("chart", ((*python, "deploy.check_chart"),)),
        Part(
            "rules",
            (
                ("promtool", "check", "rules", str(PROMETHEUS / "rules.yaml")),
                ("promtool", "check", "config", str(PROMETHEUS / "prometheus.yaml")),
                ("promtool", "test", "rules", *tests),
            ),
            needs=("promtool",),
        ),
        Part("dashboards", ((*python, "deploy.grafana.build", "--check"),)),
        Part("images", ((*python, "deploy.docker.check_image"),)),
        Part(
            "live",
            ((*python, "pytest", "-v", "--no-header", "-p", "no:cacheprovider", "tests/deploy/live"),),
            needs=("prometheus",),
        ),
    )


def run_part(part: Part) -> bool:
    """Run its commands in turn; whether all of them were content."""
    missing = [program for program in part.needs if shutil.which(program) is None]
    if missing:
        print(f"FAILED  {missing[0]} is not installed: apt-get install {PACKAGE_OF[missing[0]]}", flush=True)
        return False
    codes = [subprocess.run(command, cwd=REPOSITORY).returncode for command in part.commands]
    return not any(codes)


def main(argv: Sequence[str] | None = None) -> int:
    known = {part.name: part for part in parts()}
    parser = argparse.ArgumentParser(prog="python -m deploy.check", description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"only these: {', '.join(known)}")
    chosen = parser.parse_args(argv).parts or list(known)
    unknown = [name for name in chosen if name not in known]
    if unknown:
        parser.error(f"there is no part {unknown[0]}; choose from {', '.join(known)}")
    verdicts: dict[str, tuple[bool, float]] = {}
    for name in chosen:
        print(f"=== {name}", flush=True)
        began_s = time.monotonic()
        verdicts[name] = run_part(known[name]), time.monotonic() - began_s
    print("=== summary")
    for name, (passed, seconds) in verdicts.items():
        print(f"{'ok' if passed else 'FAILED':7} {name} ({seconds:.0f} s)")
    num_failed = sum(not passed for passed, _ in verdicts.values())
    print(f"{len(verdicts) - num_failed} parts passed, {num_failed} failed")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
