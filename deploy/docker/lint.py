"""What a Dockerfile should be like, as far as it can be read (pure).

DL and a number: the rule of hadolint (https://github.com/hadolint/hadolint).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping

from deploy.docker.dockerfile import KNOWN, Instruction, Stage, copied_from, lineage, substitute

BUILD_TOOLS = frozenset(
    {"build-essential", "clang", "cmake", "g++", "gcc", "git", "make", "ninja-build", "python3-dev"}
)
LABELS = (
    "title", "description", "version", "revision", "licenses", "base.name",
)  # fmt: skip
"""Annotations of the OCI image specification (https://github.com/opencontainers/image-spec), each after org.opencontainers.image."""
_SECRET = re.compile(r"(PASSWORD|PASSWD|SECRET|TOKEN|API_?KEY|CREDENTIAL)", re.IGNORECASE)
_LABEL = re.compile(r'([\w.]+)="((?:[^"\\]|\\.)*)"')


def rules(
    args: Mapping[str, str], stages: Mapping[str, Stage], targets: Mapping[str, frozenset[str]], *, version: str
) -> Iterator[tuple[str, list[str]]]:
    """(rule, what breaks it). `args`: those before the first FROM; `targets`: what ends up as image, with the build tools it may hold."""
    every = [(stage, i) for stage in stages.values() for i in stage.instructions]
    runs = [i.text for _stage, i in every if i.word == "RUN"]
    yield "every instruction is known (no ADD, DL3020)", sorted({i.word for _stage, i in every} - KNOWN)
    yield "base images have a tag, which is not latest (DL3006, DL3007)", _loose_bases(args, stages)
    yield (
        "apt-get leaves no lists, takes no recommended packages, asks nothing (DL3009, DL3014, DL3015)",
        _careless_apt(runs),
    )
    yield "pip keeps no cache and takes pinned versions only (DL3042, DL3013)", _careless_pip(runs)
    yield (
        "no sudo, no cd, no pipe (DL3004, DL3003, DL4006)",
        [r for r in runs if re.search(r"\bsudo\b|\bcd\b|[^|]\|[^|]", r)],
    )
    yield (
        "WORKDIR is absolute (DL3000)",
        [i.text for _s, i in every if i.word == "WORKDIR" and not i.text.startswith("/")],
    )
    yield "CMD is a list (DL3025)", [i.text for _s, i in every if i.word == "CMD" and not _is_list(i.text)]
    yield (
        "neither ARG nor ENV names a secret",
        [i.text for _stage, i in every if i.word in ("ARG", "ENV") and _SECRET.search(i.text)],
    )
    for target, tools in targets.items():
        yield from _target_rules(stages, target, tools, version)


def labels(stages: Mapping[str, Stage], target: str) -> dict[str, str]:
    texts = [text for stage in lineage(stages, target) for text in stage.all("LABEL")]
    return {name: value for text in texts for name, value in _LABEL.findall(text)}


def _target_rules(
    stages: Mapping[str, Stage], target: str, tools: frozenset[str], version: str
) -> Iterator[tuple[str, list[str]]]:
    chain = lineage(stages, target)

    def last(word: str) -> str | None:
        texts = [text for stage in chain for text in stage.all(word)]
        return texts[-1] if texts else None

    user = last("USER") or ""
    numeric = re.fullmatch(r"(\d+):(\d+)", user)
    yield f"{target}: USER is a number other than 0 (DL3002)", [] if numeric and int(numeric[1]) else [user or "none"]
    missing = [word for word in ("HEALTHCHECK", "STOPSIGNAL", "CMD") if last(word) is None]
    yield f"{target}: has HEALTHCHECK, STOPSIGNAL and CMD", missing
    has = labels(stages, target)
    wrong = [name for name in LABELS if not has.get(f"org.opencontainers.image.{name}")]
    if has.get("org.opencontainers.image.version") != version:
        wrong.append(f"version is not {version}")
    yield f"{target}: has its OCI labels", wrong
    installed = {package for stage in chain for text in stage.all("RUN") for package in apt_packages(text)}
    yield (
        f"{target}: no build tools{' but ' + ', '.join(sorted(tools)) if tools else ''}",
        sorted((installed & BUILD_TOOLS) ^ tools),
    )
    local = [text for stage in chain for text in stage.all("COPY") if not text.startswith("--from=")]
    strange = [name for name in copied_from(stages, target) if name not in stages]
    yield f"{target}: takes files from build stages only", local + strange


def apt_packages(run: str) -> list[str]:
    """Debian packages that a RUN instruction installs."""
    commands = [command.split() for command in run.split("&&")]
    installs = [words[words.index("install") + 1 :] for words in commands if {"apt-get", "install"} <= set(words)]
    return [word for words in installs for word in words if not word.startswith("-")]


def _loose_bases(args: Mapping[str, str], stages: Mapping[str, Stage]) -> list[str]:
    found = []
    for stage in stages.values():
        image = substitute(stage.base, args)
        if stage.base in stages or "@sha256:" in image:
            continue
        tag = image.rpartition("/")[2].partition(":")[2]
        if tag in ("", "latest"):
            found.append(image or stage.base)
    return found


def _careless_apt(runs: list[str]) -> list[str]:
    wanted: tuple[Callable[[str], bool], ...] = (
        lambda run: run.startswith("apt-get update"),
        lambda run: "DEBIAN_FRONTEND=noninteractive" in run,
        lambda run: " -y " in run,
        lambda run: "--no-install-recommends" in run,
        lambda run: run.endswith("rm -rf /var/lib/apt/lists/*"),
    )
    uses = [run for run in runs if re.search(r"\bapt(-get)?\b", run.replace("/var/lib/apt/", ""))]
    return [run for run in uses if not all(holds(run) for holds in wanted)]


def _careless_pip(runs: list[str]) -> list[str]:
    commands = [command.strip() for run in runs for command in run.split("&&")]
    installs = [command for command in commands if re.match(r"(python -m )?pip install\b", command)]
    return [
        command
        for command in installs
        if "--no-cache-dir" not in command
        or not ("-c constraints.txt" in command or {"--no-deps", "--no-build-isolation", "."} <= set(command.split()))
    ]


def _is_list(text: str) -> bool:
    try:
        return isinstance(json.loads(text), list)
    except ValueError:
        return False


def global_args(head: list[Instruction]) -> dict[str, str]:
    """Defaults of the ARG instructions before the first FROM."""
    return {name: value for name, _equals, value in (i.text.partition("=") for i in head if i.word == "ARG")}
