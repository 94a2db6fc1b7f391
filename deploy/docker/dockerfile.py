"""Reads a Dockerfile and a .dockerignore as far as ours use them (pure)."""

from __future__ import annotations

import fnmatch
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

KNOWN = frozenset(
    {"ARG", "FROM", "RUN", "ENV", "WORKDIR", "COPY", "LABEL", "VOLUME", "USER", "HEALTHCHECK", "STOPSIGNAL", "CMD"}
)
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))")


@dataclass(frozen=True)
class Instruction:
    word: str
    """In upper case."""
    text: str
    """What follows it, continued lines joined by a space."""


@dataclass(frozen=True)
class Stage:
    name: str
    base: str
    """Name of a stage, or of an image."""
    instructions: tuple[Instruction, ...]

    def all(self, word: str) -> list[str]:
        return [i.text for i in self.instructions if i.word == word]


def parse(text: str) -> tuple[list[Instruction], dict[str, Stage]]:
    """(what stands before the first FROM, stages by name)."""
    head: list[Instruction] = []
    stages: dict[str, Stage] = {}
    name, base = "", ""
    body: list[Instruction] = []
    for instruction in _instructions(text):
        if instruction.word == "FROM":
            if name:
                stages[name] = Stage(name, base, tuple(body))
            base, _as, name = instruction.text.split()
            body = []
        elif name:
            body.append(instruction)
        else:
            head.append(instruction)
    stages[name] = Stage(name, base, tuple(body))
    return head, stages


def lineage(stages: Mapping[str, Stage], target: str) -> list[Stage]:
    """The target and what it is built upon, the oldest first."""
    found: list[Stage] = []
    while target in stages:
        found.insert(0, stages[target])
        target = stages[target].base
    return found


def copied_from(stages: Mapping[str, Stage], target: str) -> list[str]:
    """Stages that the target takes files from."""
    texts = [text for stage in lineage(stages, target) for text in stage.all("COPY")]
    return [words[0].removeprefix("--from=") for words in map(str.split, texts) if words[0].startswith("--from=")]


def environment(chain: Sequence[Stage], inherited: Mapping[str, str]) -> dict[str, str]:
    """What ENV makes of `inherited`."""
    env = dict(inherited)
    for stage in chain:
        for text in stage.all("ENV"):
            pairs = [word.partition("=") for word in shlex.split(text)]
            env.update({name: substitute(value, env) for name, _equals, value in pairs})
    return env


def substitute(text: str, values: Mapping[str, str]) -> str:
    """Replace $NAME, ${NAME} and ${NAME:-default}; what is unknown and has no default becomes empty."""
    return _VARIABLE.sub(lambda m: values.get(m[1] or m[3]) or m[2] or "", text)


def context_files(root: Path, ignore: str) -> set[str]:
    """Files of the build context, relative to `root`: what the patterns of a .dockerignore leave; the last that matches decides."""
    patterns = [line.strip() for line in ignore.splitlines() if line.strip() and not line.startswith("#")]
    wanted = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
    files: set[str] = set()
    for top in wanted:
        path = root / top
        found = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
        files.update(name for p in found if not _is_ignored(name := str(p.relative_to(root)), patterns))
    return files


def _is_ignored(name: str, patterns: Sequence[str]) -> bool:
    parts = name.split("/")
    prefixes = ["/".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
    ignored = False
    for pattern in patterns:
        bare = pattern.lstrip("!").rstrip("/")
        if any(_matches(prefix, bare) for prefix in prefixes):
            ignored = not pattern.startswith("!")
    return ignored


def _matches(name: str, pattern: str) -> bool:
    if pattern == "**":
        return True
    if pattern.startswith("**/"):
        return fnmatch.fnmatchcase(name.rpartition("/")[2], pattern[3:])
    return name.count("/") == pattern.count("/") and fnmatch.fnmatchcase(name, pattern)


def _instructions(text: str) -> list[Instruction]:
    joined: list[str] = []
    continues = False
    for line in text.splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        body = line.strip().removesuffix("\\").strip()
        if continues:
            joined[-1] += " " + body
        else:
            joined.append(body)
        continues = line.rstrip().endswith("\\")
    words = [line.partition(" ") for line in joined]
    return [Instruction(word.upper(), rest.strip()) for word, _space, rest in words]
