"""The Dockerfile keeps the rules, and each rule finds what breaks it."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.docker import dockerfile, lint, reading
from deploy.docker.report import Coverage

TEXT = (reading.HERE / "Dockerfile").read_text()
APT = "curl ibverbs-providers libcurl4"


def broken(text: str) -> dict[str, list[str]]:
    """Rule -> what breaks it, of the rules that are broken."""
    head, stages = dockerfile.parse(text)
    found = lint.rules(lint.global_args(head), stages, reading.BUILD_TOOLS, version="0.1.0")
    return {rule: problems for rule, problems in found if problems}


def test_our_dockerfile_keeps_every_rule() -> None:
    assert broken(TEXT) == {}


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("COPY . /src", "ADD https://example.org/src.tar /src", "every instruction is known"),
        ("python:3.11-slim-bookworm", "python:latest", "base images have a tag"),
        ("python:3.11-slim-bookworm", "python", "base images have a tag"),
        ("--no-install-recommends \\\n      curl", "curl", "apt-get leaves no lists"),
        (" && rm -rf /var/lib/apt/lists/*", "", "apt-get leaves no lists"),
        ("apt-get update \\\n && ", "", "apt-get leaves no lists"),
        ("DEBIAN_FRONTEND=noninteractive ", "", "apt-get leaves no lists"),
        ("--no-cache-dir -c constraints.txt --no-deps --index-url", "-c constraints.txt --no-deps --index-url", "pip keeps"),
        ("--no-cache-dir -c constraints.txt --no-deps llm", "--no-cache-dir --no-deps llm", "pip keeps"),
        ("RUN python -m venv", "RUN cd /opt && python -m venv", "no sudo"),
        ("RUN python -m venv", "RUN curl http://example.org | sh && python -m venv", "no sudo"),
        ("WORKDIR /src", "WORKDIR src", "WORKDIR is absolute"),
        ('CMD ["moontide", "--help"]', "CMD moontide --help", "CMD is a list"),
        ("ARG REVISION=unknown", "ARG INDEX_PASSWORD", "neither ARG nor ENV"),
        ("USER 10001:10001\n# Whoever", "USER 0:0\n# Whoever", "cpu: USER"),
        ("USER 10001:10001\n# Read", "# Read", "cuda: USER"),
        ("HEALTHCHECK", "# HEALTHCHECK", "cpu: has HEALTHCHECK"),
        ("STOPSIGNAL SIGTERM", "", "cpu: has HEALTHCHECK"),
        ('image.version="0.1.0"', 'image.version="0.2.0"', "cpu: has its OCI labels"),
        ('image.licenses="Apache-2.0"', 'image.licenses=""', "cpu: has its OCI labels"),
        (APT, f"gcc {APT}", "cpu: no build tools"),
        ("COPY --from=build-cpu", "COPY", "cpu: takes files"),
    ],
)  # fmt: skip
def test_rule_finds_what_breaks_it(old: str, new: str, rule: str) -> None:
    assert old in TEXT
    found = broken(TEXT.replace(old, new))
    assert any(name.startswith(rule) for name in found), found


def test_instructions_are_read_with_their_continued_lines() -> None:
    head, stages = dockerfile.parse(
        "ARG BASE=debian:12\nFROM ${BASE} AS one\nRUN a \\\n # not this \n && b\nENV A=1 B=$A\nFROM one AS two\nCOPY --from=one /x /y\n"
    )
    assert lint.global_args(head) == {"BASE": "debian:12"}
    assert stages["one"].all("RUN") == ["a && b"]
    assert [stage.name for stage in dockerfile.lineage(stages, "two")] == ["one", "two"]
    assert dockerfile.copied_from(stages, "two") == ["one"]
    assert dockerfile.environment([stages["one"]], {"A": "0"}) == {"A": "1", "B": "0"}


def test_last_pattern_of_dockerignore_decides(tmp_path: Path) -> None:
    for name in ("code/a.py", "code/b.log", "code/sub/c.log", "other/d.py", "keep.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).touch()
    assert dockerfile.context_files(tmp_path, "**\n!code\n!keep.txt\n**/*.log\n") == {"code/a.py", "keep.txt"}


def test_every_instruction_is_exercised_or_listed_with_a_reason() -> None:
    _head, stages = dockerfile.parse(TEXT)
    coverage = Coverage(stages)
    every = sum(len(stage.instructions) for stage in stages.values())
    assert len(list(coverage.left())) == every
    coverage.exercised_words(dockerfile.lineage(stages, "cpu"), ("ENV", "USER"))
    left = list(coverage.left())
    assert {(name, i.word) for name, i in left if i.word in ("ENV", "USER")} == {("cuda", "ENV"), ("cuda", "USER")}
