"""Exercises Dockerfile and compose.yaml where there is no container engine: `python -m deploy.docker.check_image`, as root.

1. Reads both and checks what can be read: rules for Dockerfiles, context, pins, the schema of compose files, ports, health checks, order.
2. Checks that the Debian packages are those that Mooncake's programs link to.
3. With --install, runs the instructions of the build stages and of the image, as they stand, each in a root directory made for it; it
   asks the package index and takes minutes and gigabytes. With --debian DIR these are Debians made by debootstrap, in which the apt-get
   instructions run, too; else this machine's /usr is shown read-only. Without --install, the environment that runs this program stands
   for the installed one, and its versions are compared with the pinned ones.
4. Starts the services of compose.yaml with their own commands, settings and health checks: each as the image's user without
   capabilities, with a read-only root, a /tmp of its own and the declared volumes, in one network namespace. Sends a prompt, ends each
   with SIGTERM.
5. With --index, asks the package index whether it has what the CUDA image pins.

One line per check, one per instruction or key that was not exercised, with the reason; ends with code 1 when a check fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.docker import compose, dockerfile, lint
from deploy.docker.build import Build, borrow_environment, check_compiled, check_installed, new_sandbox
from deploy.docker.dockerfile import Instruction, Stage
from deploy.docker.reading import (
    HERE,
    check_compose,
    check_context,
    check_dockerfile,
    check_index,
    check_pins,
    check_system_packages,
    check_wiring,
)
from deploy.docker.report import Coverage, Report
from deploy.docker.sandbox import INSIDE, Container, Sandbox, is_inside, isolate_network, remove, run_inside
from deploy.docker.services import NOT_EXERCISED, Services


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    args = _parser().parse_args(words)
    if os.geteuid():
        print("check_image: namespaces and mounts are for root", file=sys.stderr)
        return 2
    if not is_inside(words):
        scratch = Path(tempfile.mkdtemp(prefix="moontide-image-"))
        try:
            return run_inside(words, scratch, network=args.install is not None or args.index)
        finally:
            remove(scratch)

    report = Report()
    head, stages = dockerfile.parse((HERE / "Dockerfile").read_text())
    tree = compose.load(HERE / "compose.yaml")
    coverage = Coverage(stages)
    check_dockerfile(report, head, stages)
    check_context(report, stages)
    check_pins(report)
    check_compose(report, tree)
    check_system_packages(report, stages)
    if args.index:
        check_index(report)
    coverage.exercised_words(list(stages.values()), ("LABEL",))
    _Exercise(report, coverage, stages, tree, args).run(lint.global_args(head))
    _list_what_was_not_exercised(report, coverage, args)
    print(f"{report.passed} checks passed, {report.failed} failed")
    return 1 if report.failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Exercise Dockerfile and compose.yaml without a container engine.")
    parser.add_argument("--install", choices=("cpu", "cuda"), help="run the instructions of this target; gigabytes")
    parser.add_argument(
        "--debian",
        type=Path,
        metavar="DIR",
        help="with --install: in copies of a Debian, which debootstrap makes there",
    )
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE", help="as for docker build")
    parser.add_argument("--index", action="store_true", help="ask the package index for what the CUDA image pins")
    parser.add_argument("--only", action="append", default=[], metavar="SERVICE", help="start these and what they need")
    parser.add_argument(INSIDE, type=Path, help=argparse.SUPPRESS)
    return parser


@dataclass
class _Exercise:
    """Makes the image of the target, looks at it, starts the services of compose.yaml from it."""

    report: Report
    coverage: Coverage
    stages: Mapping[str, Stage]
    tree: Mapping[str, Any]
    args: argparse.Namespace

    def run(self, global_args: Mapping[str, str]) -> None:
        scratch, target = self.args.inside, self.args.install or "cpu"
        chain = dockerfile.lineage(self.stages, target)
        sandbox = new_sandbox(scratch / "image", self.args.debian if self.args.install else None)
        sandbox.env = dockerfile.environment(chain, {"PATH": sandbox.python_path})
        if self.args.install is None:
            borrow_environment(self.report, sandbox)
        elif not self._build(sandbox, scratch, global_args):
            return
        folder = scratch / "services"
        folder.mkdir()
        health = _last(chain, "HEALTHCHECK").partition("CMD ")[2]
        services = Services(sandbox, self.tree["services"], image_health=health, folder=folder, directory=HERE)
        services.make_mount_points()
        sandbox.freeze()
        isolate_network()
        self._check_root(sandbox, services, chain)
        if target == "cpu":  # the programs of the other one need a driver
            self._run_compose(services)
            self.coverage.exercised_words(chain, ("ENV", "WORKDIR", "VOLUME", "USER", "HEALTHCHECK", "STOPSIGNAL"))

    def _build(self, sandbox: Sandbox, scratch: Path, global_args: Mapping[str, str]) -> bool:
        args = {**global_args, **dict(text.split("=", 1) for text in self.args.build_arg)}
        building = new_sandbox(scratch / "build", self.args.debian)
        if not Build(self.report, self.coverage, args).image(sandbox, building, self.stages, self.args.install):
            return False
        check_installed(self.report, sandbox, self.args.install)
        return True

    def _check_root(self, sandbox: Sandbox, services: Services, chain: Sequence[Stage]) -> None:
        problem = _writable_problem(sandbox, services)
        self.report.check("root: nothing can be written but volumes and /tmp", problem)
        command = json.loads(_last(chain, "CMD"))
        done = sandbox.run(command, Container(tmpfs=("/tmp",)), timeout_s=60)
        self.report.check(f"CMD {' '.join(command)}", done.stderr[-500:] if done.returncode else "")
        self.coverage.exercised_words(chain, ("CMD",))
        if self.args.install:
            check_compiled(self.report, sandbox)

    def _run_compose(self, services: Services) -> None:
        declared = self.tree["services"]
        settings = {}
        for name in declared:
            found, problem = services.settings(name)
            if problem or found is not None:
                self.report.check(f"{name}: takes its settings", problem)
            if found is not None:
                settings[name] = found
        check_wiring(self.report, self.tree, settings)
        address = declared["host"]["networks"]["default"]["ipv4_address"]
        for words in (["link", "set", "lo", "up"], ["addr", "add", f"{address}/32", "dev", "lo"]):
            subprocess.run(["ip", *words], check=True)
        front = settings["conductor"]["node"]
        _run_services(self.report, services, self.args.only or list(declared), f"{front['host']}:{front['http_port']}")


def _last(chain: Sequence[Stage], word: str) -> str:
    """Text of the instruction that counts."""
    return [text for stage in chain for text in stage.all(word)][-1]


def _writable_problem(sandbox: Sandbox, services: Services) -> str:
    """As a service with a volume and /tmp sees it."""
    places = "/ /etc /usr /opt/moontide /var /etc/moontide /models"
    script = (
        f"for d in {places}; do touch $d/.written 2>/dev/null && echo $d; done; "
        "touch /var/cache/moontide/.written /tmp/.written; rm /var/cache/moontide/.written"
    )
    done = sandbox.run(["sh", "-c", script], services.container("kvstore"), timeout_s=10)
    return done.stdout.strip() or done.stderr.strip()


def _run_services(report: Report, services: Services, wanted: Sequence[str], front: str) -> None:
    """Start in the order of compose, ask for health, send a prompt to `front`, end in the reverse order."""
    order = services.in_order(wanted)
    healthy: set[str] = set()

    def is_healthy(name: str) -> bool:
        if name not in healthy:
            problem = services.health_problem(name)
            if not report.check(f"{name}: healthy as the image's user with a read-only root", problem):
                return False
            healthy.add(name)
        return True

    try:
        for name in order:
            if not all(is_healthy(needed) for needed in services.healthy_before(name)):
                return
            services.start(name)
        if not all(is_healthy(name) for name in order):
            return
        answer = None
        if "conductor" in order:
            report.check("a prompt is answered", _prompt_problem(services, front))
            answer = _start_answer(front)
        for name in reversed(order):
            report.check(f"{name}: ends at SIGTERM within its grace period", services.stop_problem(name))
        if answer is not None:
            rest = answer.communicate()[0]
            whole = answer.returncode == 0 and "[DONE]" in rest
            report.check("an answer that was under way at the first SIGTERM is whole", "" if whole else rest[-300:])
    finally:
        services.kill_all()


def _prompt_problem(services: Services, front: str) -> str:
    done = subprocess.run(_curl(front, max_tokens=4), capture_output=True, text=True, check=False)
    if done.returncode:
        return f"{done.stderr.strip()}\n{services.tail('conductor')}"
    return "" if json.loads(done.stdout)["choices"][0]["text"] else "the answer is empty"


def _start_answer(front: str) -> subprocess.Popen[str]:
    """A streamed answer whose first line is there."""
    curl = subprocess.Popen(_curl(front, max_tokens=100, stream=True), stdout=subprocess.PIPE, text=True)
    assert curl.stdout is not None
    curl.stdout.readline()
    return curl


def _curl(front: str, **options: Any) -> list[str]:
    body = json.dumps({"model": "smollm2", "prompt": "The tide comes in and", **options})
    url = f"http://{front}/v1/completions"
    return ["curl", "-fsS", "-N", "-m", "120", url, "-H", "Content-Type: application/json", "-d", body]


def _list_what_was_not_exercised(report: Report, coverage: Coverage, args: argparse.Namespace) -> None:
    for name, instruction in coverage.left():
        report.note("not", f"{name}: {instruction.word} {instruction.text[:60]}: {_why_not(name, instruction, args)}")
    for key, reason in NOT_EXERCISED.items():
        report.note("not", f"compose: {key}: {reason}")
    report.note("not", "FROM: there is no registry; Debian or this machine's files stand for the base image")
    report.note("not", "compose.cuda.yaml: read only; there is no container engine that hands out GPUs")


def _why_not(stage: str, instruction: Instruction, args: argparse.Namespace) -> str:
    target = next((name for name in ("cpu", "cuda") if name in stage), args.install or "cpu")
    if args.install != target:
        return f"only with --install {target}, which takes gigabytes and minutes"
    if "apt-get" in instruction.text:
        return "only with --debian; the packages are compared with what programs link to"
    return "the programs of this image need a driver and are not started"


if __name__ == "__main__":
    sys.exit(main())
