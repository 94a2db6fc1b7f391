"""A cluster under load with a Prometheus beside it, for tests that break it: which alerts fire, after how long, and what is said meanwhile.

with staged(live, "MoontideNoDecode") as stage:
    ...break...
    stage.wait_firing("MoontideNoDecode")
    stage.walk("MoontideNoDecode", "Look at")
    ...mend...
    stage.wait_resolved("MoontideNoDecode")
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import yaml

from deploy.prometheus.rules import RULES_FILE
from tests.cluster import RunningCluster, wait_for
from tests.deploy.live.prometheus import Prometheus
from tests.deploy.live.runbook import Runbook, Site, Step
from tests.fault.harness import Bench, Call

TEXT_IDS = range(3, 259)
"""Of a paced model."""
FIRE_TIMEOUT_S = 40.0
RESOLVE_TIMEOUT_S = 90.0
FIRING = 'ALERTS{alertstate="firing"}'


class Load:
    """Requests at an even pace, whatever becomes of them."""

    def __init__(self, bench: Bench, *, per_s: float, prompt_tokens: int, max_tokens: int, timeout_s: float) -> None:
        self._bench = bench
        self._period_s = 1 / per_s
        self._prompt_tokens, self._max_tokens, self._timeout_s = prompt_tokens, max_tokens, timeout_s
        self._random = random.Random(6)
        self._calls: deque[Call] = deque(maxlen=256)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._ending.set()
        self._thread.join()

    @property
    def served(self) -> list[str]:
        """Ids of the latest requests that were answered, oldest first."""
        return [call.request_id for call in list(self._calls) if call.is_over and call.error is None]

    def errors(self, since_s: float) -> list[str]:
        """Of requests that began after this moment of the monotonic clock."""
        calls = [call for call in list(self._calls) if call.began_s > since_s]
        return [f"{call.error.code}: {call.error}" for call in calls if call.error is not None]

    def _run(self) -> None:
        number = 0
        while not self._ending.wait(self._period_s):
            number += 1
            prompt = self._random.choices(TEXT_IDS, k=self._prompt_tokens)
            self._calls.append(
                self._bench.start(f"load-{number}", prompt, max_tokens=self._max_tokens, timeout_s=self._timeout_s)
            )


@dataclass(frozen=True, kw_only=True)
class Live:
    """What the tests of a module share."""

    bench: Bench
    prometheus: Prometheus
    load: Load

    @property
    def cluster(self) -> RunningCluster:
        return self.bench.cluster

    def http(self, name: str) -> str:
        """host:port of /ready."""
        return self.cluster.service_address(name)

    def grpc(self, store: str) -> str:
        """host:port of a store process' service."""
        node = self.cluster.spec(store).config["node"]
        return f"{node['host']}:{node['grpc_port']}"

    def critical(self) -> set[str]:
        """Critical alerts that fire or are about to."""
        return {
            alert["labels"]["alertname"]
            for alert in self.prometheus.alerts()
            if alert["labels"]["severity"] == "critical"
        }


@dataclass(kw_only=True)
class Stage:
    """One fault, from just before it on."""

    live: Live
    alerts: tuple[str, ...]
    """What is to fire; the first is about the cause."""
    began_s: float = field(default_factory=time.time)
    began_monotonic_s: float = field(default_factory=time.monotonic)
    mended_s: float | None = None
    _log_sizes: Mapping[str, int]

    def wait_firing(self, name: str, about: str = "") -> None:
        """Until that alert fires, for `about` if that is given, and says what a person needs."""
        wait_for(
            lambda: any(about in str(alert) for alert in self._firing(name)),
            f"{name} fires for {about or 'all'}",
            FIRE_TIMEOUT_S,
        )
        alert = next(alert for alert in self._firing(name) if about in str(alert))
        assert about in alert["annotations"]["summary"], f"the summary does not name {about}: {alert}"
        judge_alert(alert)

    def mended(self) -> None:
        """The fault is over."""
        self.mended_s = time.time()

    def wait_resolved(self, *names: str) -> None:
        for name in names or self.alerts:
            self.live.prometheus.wait_resolved(name, RESOLVE_TIMEOUT_S)
            assert self.mended_s is not None
            print(f"  {name} is over {time.time() - self.mended_s:.0f} s after the fault")

    def walk(self, alert: str, section: str, *, instance: str = "", **places: str) -> list[Step]:
        """Do what the page says. `places`: placeholders, with `__` for `:`; `instance`: a process in the place of INSTANCE."""
        live = self.live
        known = {
            "HOST:8000": live.cluster.http_address,
            "HOST:8001": live.cluster.grpc_address,
            "HOST:PORT": live.cluster.store_address,
            "MASTER:9003": live.cluster.master_http_address,
            "URL": live.cluster.registry_url,
            "REQUEST_ID": live.load.served[-1],
            "INSTANCE": live.http(instance) if instance else "",
        }
        known |= {name.replace("__", ":"): place for name, place in places.items()}
        return Runbook(alert).walk(section, Site(prometheus=live.prometheus, places=known, instance=instance))

    def check_log_lines(self, alert: str, *, other_causes: tuple[str, ...] = ()) -> None:
        """Every log line that the page names was written, apart from those that belong to other causes."""
        wanted = set(Runbook(alert).log_lines)
        assert set(other_causes) <= wanted, f"{alert} names {wanted}"
        new = self.new_log()
        missing = {line for line in wanted - set(other_causes) if f" {line} " not in new}
        assert not missing, f"log lines of {alert} that nobody wrote: {missing}"

    def new_log(self) -> str:
        """What all processes have written since the beginning."""
        cluster = self.live.cluster
        return "\n".join(cluster.log(name)[size:] for name, size in self._log_sizes.items())

    def errors(self) -> list[str]:
        """Of requests that began since then."""
        return self.live.load.errors(self.began_monotonic_s)

    def fired(self) -> dict[str, tuple[str, float]]:
        """Alert -> its severity, and after how many seconds it began to fire. What fired at the beginning is left out."""
        found: dict[str, tuple[str, float]] = {}
        series = self.live.prometheus.query_range(FIRING, start_s=self.began_s, end_s=time.time(), step_s=0.5)
        for labels, values in series:
            name, after_s = labels["alertname"], values[0][0] - self.began_s
            if after_s > 0.5 and (name not in found or after_s < found[name][1]):
                found[name] = (labels["severity"], after_s)
        return dict(sorted(found.items(), key=lambda item: item[1][1]))

    def judge(self) -> None:
        """The fault's alerts fired, no critical one that its pages do not expect, and what fired with the first is quiet because of it."""
        fired = self.fired()
        print(
            f"  {self.alerts[0]}: " + ", ".join(f"{name} after {after_s:.0f} s" for name, (_, after_s) in fired.items())
        )
        assert set(self.alerts) <= set(fired), fired
        expected = set(self.alerts).union(*(Runbook(name).companions for name in self.alerts))
        critical = {name for name, (severity, _) in fired.items() if severity == "critical"}
        assert critical <= expected, f"critical alerts that no page of the fault names: {critical - expected}"
        severity = {name: severity for name, (severity, _) in fired.items()}
        loud = {
            name
            for name in critical | set(self.alerts[1:])
            if name != self.alerts[0] and not any(quiet_because_of(name, severity[name], other) for other in fired)
        }
        assert not loud, f"neither inhibited nor listed in the README: {loud}"

    def _firing(self, name: str) -> list[dict[str, Any]]:
        return [
            alert
            for alert in self.live.prometheus.alerts()
            if alert["labels"]["alertname"] == name and alert["state"] == "firing"
        ]


def judge_alert(alert: Mapping[str, Any]) -> None:
    """Whoever gets it knows whose it is, how urgent, what is wrong, and where the page is."""
    labels, annotations = alert["labels"], alert["annotations"]
    assert labels["severity"] in ("critical", "warning"), alert
    assert labels["owner"] in ("serving", "platform"), alert
    for text in annotations.values():
        assert text, alert
        assert not re.search(r"\{\{|<no value>|  | of $| for $|^ ", text), alert
    assert annotations["runbook_url"].endswith(f"/{labels['alertname']}.md"), alert
    assert Runbook(labels["alertname"]).text


@contextmanager
def staged(live: Live, *alerts: str) -> Iterator[Stage]:
    """Everything is well at the beginning, a fault is staged inside, and at the end everything that fired is judged."""
    live.cluster.wait_ready()
    wait_for(lambda: not live.critical(), "no critical alert fires", RESOLVE_TIMEOUT_S)
    wait_for(lambda: not live.prometheus.firing().intersection(alerts), f"none of {alerts} fires", RESOLVE_TIMEOUT_S)
    stage = Stage(
        live=live, alerts=alerts, _log_sizes={name: len(live.cluster.log(name)) for name in live.cluster.names()}
    )
    yield stage
    stage.judge()


def quiet_because_of(name: str, severity: str, source: str) -> bool:
    """Whether alertmanager.yaml inhibits an alert while `source` fires, or the README says why it is loud all the same."""
    if source == name:
        return False
    config = yaml.safe_load((RULES_FILE.parent / "alertmanager.yaml").read_text())
    for rule in config["inhibit_rules"]:
        target = {"alertname": name, "severity": severity}
        if _matches(rule["source_matchers"], {"alertname": source}) and _matches(rule["target_matchers"], target):
            return True
    rows = re.findall(
        r"^\| (`Moontide.*?) with (`Moontide.*?) \|", (RULES_FILE.parent / "README.md").read_text(), re.MULTILINE
    )
    return any(f"`{name}`" in targets and f"`{source}`" in sources for targets, sources in rows)


def _matches(matchers: list[str], labels: Mapping[str, str]) -> bool:
    for matcher in matchers:
        found = re.fullmatch(r'(\w+)(=~|=)"(.*)"', matcher)
        assert found, f"{matcher} is no matcher"
        label, operator, value = found.groups()
        if label in labels and not re.fullmatch(value if operator == "=~" else re.escape(value), labels[label]):
            return False
    return True
