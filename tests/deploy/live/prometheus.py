"""A real Prometheus that scrapes a cluster of this test.

with running_prometheus(cluster, folder, rules=scaled_rules(folder)) as prometheus:
    prometheus.query("up"), prometheus.firing(), prometheus.wait_firing("MoontideNoDecode", timeout_s=20)
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from moontide.config import free_port
from tests.cluster import RunningCluster, wait_for

PROGRAM = "prometheus"
SCRAPE_INTERVAL_S = 1
WINDOW_SCALE = 0.02
"""Of staged runs: an hour becomes 72 s, five minutes 6 s, a minute 1.2 s."""
START_TIMEOUT_S = 30.0
CALL_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Sample:
    """One series of an instant query."""

    labels: Mapping[str, str]
    value: float


class Prometheus:
    """Handle of a running one."""

    def __init__(self, address: str, scrape_interval_s: float) -> None:
        self.address = address
        """host:port."""
        self._scrape_interval_s = scrape_interval_s

    def query(self, expr: str, *, time_s: float | None = None) -> list[Sample]:
        """The value of every series, now or at a Unix time. Raises: AssertionError with what Prometheus says of a wrong expression."""
        found = self._get("query", query=expr, **({} if time_s is None else {"time": time_s}))
        if found["resultType"] == "scalar":
            return [Sample({}, float(found["result"][1]))]
        return [Sample(series["metric"], float(series["value"][1])) for series in found["result"]]

    def query_range(
        self, expr: str, *, start_s: float, end_s: float, step_s: float
    ) -> list[tuple[Mapping[str, str], list[tuple[float, float]]]]:
        """(labels, [(unix time, value)]) of every series."""
        found = self._get("query_range", query=expr, start=start_s, end=end_s, step=step_s)
        return [
            (series["metric"], [(when, float(value)) for when, value in series["values"]]) for series in found["result"]
        ]

    def series(self, matcher: str = '{__name__=~".+"}', *, job: str = "moontide") -> set[tuple[tuple[str, str], ...]]:
        """The label sets of all series of a job that had a sample within the last minute, each sorted by label."""
        selector = matcher.rstrip("}") + f',job="{job}"' + "}"
        found = self._get("series", **{"match[]": selector}, start=time.time() - 60)
        return {tuple(sorted(labels.items())) for labels in found}

    def firing(self) -> set[str]:
        """Names of the alerts that fire."""
        return {alert["labels"]["alertname"] for alert in self.alerts() if alert["state"] == "firing"}

    def alerts(self) -> list[dict[str, Any]]:
        """All that are pending or firing: labels, annotations, state."""
        alerts: list[dict[str, Any]] = self._get("alerts")["alerts"]
        return alerts

    def rules(self) -> list[dict[str, Any]]:
        """Every rule with its health, its last error and, for alerts, its state."""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def wait_firing(self, name: str, timeout_s: float) -> dict[str, Any]:
        """Until that alert fires; returns it with labels and annotations."""
        wait_for(lambda: name in self.firing(), f"{name} fires", timeout_s)
        return next(alert for alert in self.alerts() if alert["labels"]["alertname"] == name)

    def wait_resolved(self, name: str, timeout_s: float) -> None:
        """Until that alert does not fire any more."""
        wait_for(lambda: name not in self.firing(), f"{name} is over", timeout_s)

    def wait_scrapes(self, number: int) -> None:
        """Time enough for so many scrapes of every target."""
        time.sleep((number + 0.5) * self._scrape_interval_s)

    def ready(self) -> bool:
        try:
            urllib.request.urlopen(f"http://{self.address}/-/ready", timeout=1.0).close()
        except OSError:
            return False
        return True

    def _get(self, path: str, **parameters: Any) -> Any:
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=CALL_TIMEOUT_S) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path} {parameters}: {json.load(error)['error']}") from error


@contextmanager
def running_prometheus(
    cluster: RunningCluster,
    folder: Path,
    *,
    rules: Path | None = None,
    scrape_interval_s: float = SCRAPE_INTERVAL_S,
) -> Iterator[Prometheus]:
    """One that scrapes every process of `cluster` and evaluates `rules`; its data and its log lie in `folder`."""
    program = shutil.which(PROGRAM)
    assert program, f"{PROGRAM} is not installed: apt-get install prometheus"
    address = f"127.0.0.1:{free_port()}"
    config = folder / "prometheus.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "global": {"scrape_interval": f"{scrape_interval_s:g}s", "evaluation_interval": "1s"},
                "rule_files": [str(rules)] if rules else [],
                "scrape_configs": [
                    {"job_name": "moontide", "file_sd_configs": [{"files": [str(cluster.scrape_targets)]}]}
                ],
            }
        )
    )
    argv = [
        program,
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address={address}",
        "--log.level=warn",
    ]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT)
        try:
            prometheus = Prometheus(address, scrape_interval_s)
            wait_for(prometheus.ready, "Prometheus is ready", START_TIMEOUT_S)
            wait_for(lambda: bool(prometheus.query("up")), "Prometheus has scraped", START_TIMEOUT_S)
            yield prometheus
        finally:
            process.terminate()
            process.wait(10.0)


def scaled_rules(folder: Path, *options: str, window_scale: float = WINDOW_SCALE) -> Path:
    """The rules of deploy/prometheus with every window scaled. `options`: more of the generator's, such as --ttft-slo-s 0.5."""
    path = folder / "rules.yaml"
    argv: Sequence[str] = (
        sys.executable, "-m", "deploy.prometheus.rules", "--window-scale", str(window_scale), *options,
    )  # fmt: skip
    path.write_text(subprocess.run(argv, check=True, capture_output=True, text=True).stdout)
    return path
