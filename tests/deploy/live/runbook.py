"""A runbook page, and the walk through it: what it tells a person to look at is asked of a cluster and a Prometheus that run.

page = Runbook("MoontideNoDecode")
page.walk("Look at", site)               every query and every command of that section, as written; returns what each printed
page.quotes("no such ...")         whether the page has the words that were really seen
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from deploy import cli as moontide_cli
from kvstore import cli as kvstore_cli
from tests.deploy.live.prometheus import Prometheus

PAGES = Path(__file__).resolve().parents[3] / "docs" / "runbooks"
HTTP_TIMEOUT_S = 3.0
SERIES = re.compile(
    r"\b(?:(?:conductor|prefill|decode|kvstore)_[a-z0-9_]+|moontide:[a-z0-9_:]+)(?:\{[^}]*\})?|\bup\{[^}]*\}"
)
"""Selectors. A bare `up` is what `moontide status` says of a node."""
_NO_SETTING = re.compile(r"^(?:conductor|prefill|decode|kvstore|deploy|registry|kv)\.\w+")
_HISTOGRAM_SUFFIX = "_bucket"


@dataclass(frozen=True, kw_only=True)
class Site:
    """What the placeholders of a page stand for here."""

    prometheus: Prometheus
    places: Mapping[str, str] = field(default_factory=dict)
    """Placeholder -> address, such as `HOST:8001` -> the gRPC address of a conductor."""
    instance: str = ""
    """What INSTANCE is in a query: the label of a process."""


@dataclass(frozen=True)
class Step:
    """One command or query of a page."""

    written: str
    said: str
    code: int
    """Exit code or HTTP status; of a query the number of series; -1 where nobody answered."""


class Runbook:
    def __init__(self, alert: str) -> None:
        self.path = PAGES / f"{alert}.md"
        self.text = self.path.read_text()
        self._sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", self.text, re.MULTILINE | re.DOTALL))

    def section(self, name: str) -> str:
        return self._sections[name]

    def spans(self, section: str) -> list[str]:
        """What stands in backticks there."""
        return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", self._sections[section])]

    @property
    def companions(self) -> set[str]:
        """Alerts that the page says to have fired with this one when it was staged."""
        return set(re.findall(r"Moontide[A-Z]\w+", self._sections.get("Staged", "")))

    @property
    def log_lines(self) -> list[str]:
        """Messages that the page tells to look for."""
        text = " ".join(self.text.split())
        return re.findall(r"log line\s+`([^`]+)`", text, re.IGNORECASE)

    def quotes(self, seen: str) -> bool:
        """Whether some words in backticks, with `...` for any text, are part of what was seen."""
        quotes = [quote for section in self._sections for quote in self.spans(section) if " " in quote]
        return any(re.search(".+".join(map(re.escape, quote.split("..."))), seen) for quote in quotes)

    def walk(self, section: str, site: Site) -> list[Step]:
        """Do what the section says, in its order. AssertionError for a command that is none, a query that Prometheus refuses, or a
        selector without a series."""
        steps = []
        for span in self.spans(section):
            run = _runner(span)
            if run is not None:
                step = run(span, site)
                steps.append(step)
                print(f"  {self.path.stem} / {section}: {step.written}\n    -> {step.code} {step.said.strip()[:1500]}")
        return steps


def _runner(span: str) -> Callable[[str, Site], Step] | None:
    """Who does it; None for what is no command and no query, and for what changes the cluster for good."""
    if span.startswith("moontide role"):
        return None
    for beginning, run in _COMMANDS.items():
        if span.startswith(beginning):
            return run
    if SERIES.search(span) and not _NO_SETTING.match(span):
        return _query
    return None


def _query(span: str, site: Site) -> Step:
    expr = _placed(span, replace(site, places={**site.places, "INSTANCE": site.instance}))
    for selector in SERIES.findall(expr):
        seen = [f"count_over_time({selector}[5m])"]
        if "{" not in selector:
            seen.append(f"count_over_time({selector}{_HISTOGRAM_SUFFIX}[5m])")
        assert any(site.prometheus.query(each) for each in seen), f"{selector} of `{span}` has no series"
    found = site.prometheus.query(expr)
    lines = [f"{dict(sample.labels)} {sample.value:g}" for sample in found]
    return Step(span, "\n".join(lines), len(found))


def _curl(span: str, site: Site) -> Step:
    (url,) = shlex.split(_placed(span, site))[1:]
    try:
        with urllib.request.urlopen(url, timeout=HTTP_TIMEOUT_S) as answer:
            return Step(span, answer.read().decode(), answer.status)
    except urllib.error.HTTPError as error:
        return Step(span, error.read().decode(), error.code)
    except OSError as error:
        return Step(span, f"no answer: {error}", -1)


def _cli(span: str, site: Site) -> Step:
    """In this process: a start of Python for each takes longer than the command."""
    argv = shlex.split(_placed(span, site))
    if argv[0] == "moontide" and "--address" not in argv:
        argv += ["--address", site.places["HOST:8001"]]
    run = (lambda: moontide_cli.main(argv[1:])) if argv[0] == "moontide" else (lambda: kvstore_cli.main(argv[3:]))
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = run()
        except SystemExit as end:
            code = int(end.code or 0)
    assert code != 2, f"`{span}` is no command: {err.getvalue()}"
    return Step(span, out.getvalue() + err.getvalue(), code)


def _ping(span: str, site: Site) -> Step:
    host, _, port = _placed("URL", site).partition("://")[2].partition("/")[0].rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=HTTP_TIMEOUT_S) as connection:
            connection.sendall(b"PING\r\n")
            return Step(span, connection.recv(100).decode(), 0)
    except OSError as error:
        return Step(span, f"no answer: {error}", -1)


def _print_config(span: str, site: Site) -> Step:
    argv = shlex.split(_placed(span, site))
    done = subprocess.run([sys.executable, *argv[1:]], capture_output=True, text=True, timeout=60.0, check=False)
    return Step(span, done.stdout + done.stderr, done.returncode)


_COMMANDS: dict[str, Callable[[str, Site], Step]] = {
    "moontide ": _cli,
    "python -m kvstore": _cli,
    "python -m conductor": _print_config,
    "curl ": _curl,
    "redis-cli ": _ping,
}


def _placed(span: str, site: Site) -> str:
    """Longer placeholders first: one may be part of another."""
    for placeholder in sorted(site.places, key=len, reverse=True):
        span = re.sub(rf"(?<![A-Z:0-9]){re.escape(placeholder)}(?![A-Z:0-9])", site.places[placeholder], span)
    return span
