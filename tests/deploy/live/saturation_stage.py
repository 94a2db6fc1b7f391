"""What the tests of SLO and saturation alerts share: a steady flow of requests, processes that stand still by turns, and a stage on which
alerts are watched and their runbooks are walked through.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from kvstore import cli as kvstore_cli
from tests.cluster import RunningCluster, wait_for
from tests.deploy.live.prometheus import Prometheus
from tests.deploy.live.runbook import Runbook, Site
from tests.fault.harness import Bench, Call

FIRST_ID, NUM_IDS = 3, 259
"""Token ids of text of the paced models."""
FIRE_TIMEOUT_S = 60.0
RESOLVE_TIMEOUT_S = 100.0
CRITICAL_FIRING = 'ALERTS{alertstate="firing",severity="critical"}'
_numbers = itertools.count()


def prompt_of(num_tokens: int) -> list[int]:
    """Random text; no two share a block."""
    return random.choices(range(FIRST_ID, NUM_IDS), k=num_tokens)


class Flow:
    """Requests of one kind, sent at an even pace while the `with` lasts; what is open then is cancelled unless told otherwise."""

    def __init__(
        self,
        bench: Bench,
        *,
        per_s: float,
        prompt_tokens: int,
        max_tokens: int = 1,
        ttft_slo_s: float | None = None,
    ) -> None:
        self._bench = bench
        self._period_s = 1 / per_s
        self._prompt_tokens, self._max_tokens, self._ttft_slo_s = prompt_tokens, max_tokens, ttft_slo_s
        self.calls: list[Call] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flow", daemon=True)

    def __enter__(self) -> Flow:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._is_over.set()
        self._thread.join()
        for call in self.calls:
            if not call.is_over:
                call.cancel()

    @property
    def answered(self) -> list[Call]:
        return [call for call in list(self.calls) if call.is_over and call.error is None]

    @property
    def refused(self) -> list[Call]:
        return [call for call in list(self.calls) if call.error is not None]

    def _run(self) -> None:
        next_s = time.monotonic()
        while not self._is_over.wait(max(0.0, next_s - time.monotonic())):
            next_s += self._period_s
            call = self._bench.start(
                f"flow-{next(_numbers)}",
                prompt_of(self._prompt_tokens),
                max_tokens=self._max_tokens,
                ttft_slo_s=self._ttft_slo_s,
            )
            self.calls.append(call)


@contextmanager
def standing_still(*pids: int, stopped_s: float, running_s: float) -> Iterator[None]:
    """These processes are stopped and continued by turns inside the `with`."""
    is_over = threading.Event()

    def send(number: int) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def turns() -> None:
        while not is_over.is_set():
            send(signal.SIGSTOP)
            is_over.wait(stopped_s)
            send(signal.SIGCONT)
            is_over.wait(running_s)

    thread = threading.Thread(target=turns, name="turns", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@dataclass(kw_only=True)
class Stage:
    """A cluster that is watched by a Prometheus with scaled rules."""

    bench: Bench
    prometheus: Prometheus
    began_s: float = field(default_factory=time.monotonic)

    @property
    def cluster(self) -> RunningCluster:
        return self.bench.cluster

    def begin(self) -> None:
        """Times in what is printed count from now."""
        self.began_s = time.monotonic()

    def wait_firing(self, *names: str, timeout_s: float = FIRE_TIMEOUT_S) -> None:
        """Until all of them fire. Each says what it is about and which page helps."""
        found: dict[str, dict[str, Any]] = {}

        def all_fire() -> bool:
            for alert in self.prometheus.alerts():
                name = alert["labels"]["alertname"]
                if alert["state"] == "firing" and name in names and name not in found:
                    found[name] = alert
                    self.say(f"{name} fires: {alert['annotations']['summary']}")
            return set(names) <= set(found)

        try:
            wait_for(all_fire, f"{', '.join(names)} fire", timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}; these do: {sorted(self.prometheus.firing())}") from error
        for name, alert in found.items():
            texts = alert["annotations"]
            assert texts["runbook_url"].endswith(f"{name}.md")
            assert not any("{{" in text or "<no value>" in text for text in texts.values()), texts

    def wait_resolved(self, *names: str, timeout_s: float = RESOLVE_TIMEOUT_S) -> None:
        left = set(names)

        def all_over() -> bool:
            for name in left - self.prometheus.firing():
                self.say(f"{name} is over")
                left.discard(name)
            return not left

        wait_for(all_over, f"{', '.join(names)} are over", timeout_s)

    def assert_quiet(self) -> None:
        firing = self.prometheus.firing()
        assert not firing, firing

    def assert_critical(self, *names: str) -> None:
        """Since `begin` no other critical alerts fired."""
        window_s = int(time.monotonic() - self.began_s) + 1
        fired = self.prometheus.query(f"max_over_time({CRITICAL_FIRING}[{window_s}s])")
        assert {sample.labels["alertname"] for sample in fired} <= set(names)

    def walk(self, section: str, *alerts: str, **places: str) -> None:
        """Run what this section of these pages tells to run."""
        site = Site(
            prometheus=self.prometheus,
            places={
                "HOST:8001": self.cluster.grpc_address,
                "HOST:PORT": self.cluster.store_address,
                "MASTER:9003": self.cluster.master_http_address,
                **places,
            },
        )
        for alert in alerts:
            Runbook(alert).walk(section, site)

    def find_in_log(self, process: str, alert: str) -> None:
        """The lines that the alert's page tells to look for are in the log of that process."""
        lines = self.cluster.log(process).splitlines()
        for message in Runbook(alert).log_lines:
            found = [line for line in lines if message in line]
            assert found, f"{message!r} is not in the log of {process}"
            print(f"  {alert}: {found[-1]}")

    def kvstore(self, *argv: str) -> None:
        """A command of `python -m kvstore` for the store process."""
        assert kvstore_cli.main([*argv, "--address", self.cluster.store_address]) == 0

    def say(self, what: str) -> None:
        """With the time since `begin`."""
        print(f"{time.monotonic() - self.began_s:6.1f} s  {what}")
