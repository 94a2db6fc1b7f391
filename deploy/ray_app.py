"""Ray places and supervises the nodes: one placement group per prefill group with an actor per stage, one actor per decode and conductor.

A process of its own (`python -m deploy.ray_app PLAN.json`) is the driver. An actor runs one service in its main thread, just as
`python -m <service>` does, and logs to the same file; when it dies Ray starts it again. The service's own way to end tells what to do:

    exit code 2   its settings are wrong: the driver ends with code 2, if it is the node's first start
    anything else the actor's process ends, and Ray starts another one
    RoleChange    the actor's process ends, and Ray starts another one, which runs the program of the other role
    SIGTERM       drain; the driver sends it, conductors first
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
import yaml
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from moontide.errors import ConfigError
from moontide.log import get_logger, setup_logging
from moontide.roles import MODULES, RoleChange, Successor

PLACE_TIMEOUT_S = 60.0
STEADY_S = 10.0
RESTART_DELAY_S = 1.0
OBJECT_STORE_BYTES = 80 * 1024 * 1024
"""Ray's smallest: nothing of ours travels through it."""
EXIT_CONFIG_ERROR = 2

log = get_logger(__name__)


class NodeActor:
    """One service process. Ray calls `run` again after every restart."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._spec = spec
        os.environ.update(spec["env"])
        fd = os.open(spec["log_path"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.close(fd)
        with Path(spec["pid_path"]).open("a") as pids:
            pids.write(f"{os.getpid()}\n")

    def run(self) -> int:
        """Serve until SIGTERM or, at the first start, a wrong setting; returns the exit code, 0 or 2.

        Any other end is the end of this process.
        """
        began_s = time.monotonic()
        module, config_path = self._program()
        try:
            code = run_module(module, ["--config", str(config_path)])
        except RoleChange as change:
            self._keep(change.successor)
            os._exit(1)  # Ray starts another process, which finds what was kept: an actor cannot become another program
        if code == EXIT_CONFIG_ERROR and str(config_path) != self._spec["config_path"]:
            config_path.unlink()  # what does not start in the other role goes on in its own
            os._exit(1)
        if code == 0 or (code == EXIT_CONFIG_ERROR and not self._is_restart()):
            return code
        if time.monotonic() - began_s < STEADY_S:
            time.sleep(RESTART_DELAY_S)
        os._exit(1)

    def _is_restart(self) -> bool:
        """Whether the node ran before, so that its settings were right and what is wrong with them now (a port, a file) may pass."""
        return len(started_pids(Path(self._spec["pid_path"]))) > 1

    def _program(self) -> tuple[str, Path]:
        """Module and config of the role that this node has now."""
        for module, path in self._switched().items():
            if path.exists():
                return module, path
        return self._spec["module"], Path(self._spec["config_path"])

    def _keep(self, successor: Successor) -> None:
        switched = self._switched()
        for path in switched.values():
            path.unlink(missing_ok=True)
        if successor.settings.get("home"):
            switched[successor.module].write_text(yaml.safe_dump(dict(successor.settings), sort_keys=False))

    def _switched(self) -> dict[str, Path]:
        """Where the config of a role is that the node was not deployed in, by the role's module."""
        return {module: Path(self._spec["config_path"]).with_suffix(f".{module}.yaml") for module in MODULES.values()}


def run_module(module: str, arguments: Sequence[str]) -> int:
    """What `python -m module arguments` would do; returns its exit code. Raises: RoleChange, where that would go on as another program."""
    try:
        return int(importlib.import_module(f"{module}.__main__").main(arguments))
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except RoleChange:
        raise
    except Exception:
        log.exception("service ended", module=module)
        return 1


class Driver:
    """Owns the Ray cluster of one plan."""

    def __init__(self, plan: Mapping[str, Any]) -> None:
        self._plan = plan
        self._stopping = False
        self._actors: dict[str, Any] = {}
        self._runs: dict[Any, str] = {}

    def start(self) -> None:
        """Start Ray and every actor.

        Raises: ConfigError without a GPU for each that needs one, ray.exceptions.RayError when Ray cannot place them.
        """
        specs = self._plan["actors"]
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            num_cpus=len(specs),
            object_store_memory=OBJECT_STORE_BYTES,
            _node_ip_address="127.0.0.1",
            _temp_dir=self._plan["ray_dir"],
        )
        log.info("ray runs", directory=self._plan["ray_dir"])
        present = ray.cluster_resources()  # type: ignore[no-untyped-call]
        check_gpus(specs, num_present=int(present.get("GPU", 0)))
        groups: dict[str, list[Mapping[str, Any]]] = {}
        for spec in specs:
            groups.setdefault(spec["group"], []).append(spec)
        placed = {name: self._place(members) for name, members in groups.items()}
        ray.get([group.ready() for group in placed.values()], timeout=PLACE_TIMEOUT_S)
        for name, members in groups.items():
            for bundle_idx, spec in enumerate(members):
                self._actors[spec["name"]] = self._actor(spec, placed[name], bundle_idx)
                self._run(spec["name"])

    def supervise(self) -> int:
        """Until `stop` or a wrong setting; returns the exit code."""
        while not self._stopping:
            done, _ = ray.wait(list(self._runs), timeout=0.5)
            for ref in done:
                name = self._runs.pop(ref)
                code = self._result(name, ref)
                if self._stopping:
                    return 0
                if code == EXIT_CONFIG_ERROR:
                    log.error("node refused its settings", node=name)
                    return EXIT_CONFIG_ERROR
                log.warning("node ended", node=name, code=code)
                ray.kill(self._actors[name], no_restart=False)
                self._run(name)
        return 0

    def request_stop(self, *_signal: object) -> None:
        self._stopping = True

    def drain(self) -> None:
        """SIGTERM to conductors, then to the other nodes, each within the time limit."""
        self._drain([spec for spec in self._plan["actors"] if spec["role"] == "conductor"])
        self._drain([spec for spec in self._plan["actors"] if spec["role"] != "conductor"])

    def _drain(self, specs: Sequence[Mapping[str, Any]]) -> None:
        pids = {spec["name"]: current_pid(Path(spec["pid_path"])) for spec in specs}
        for pid in pids.values():
            if pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        give_up_s = time.monotonic() + self._plan["stop_timeout_s"]
        while pids and time.monotonic() < give_up_s:
            done, _ = ray.wait(list(self._runs), num_returns=len(self._runs), timeout=0.1)
            drained = {self._runs[ref] for ref in done}
            for name, pid in list(pids.items()):
                if name in drained or pid is None or not Path(f"/proc/{pid}").exists():
                    del pids[name]
        for spec in specs:
            ray.kill(self._actors[spec["name"]], no_restart=True)

    def _place(self, members: Sequence[Mapping[str, Any]]) -> PlacementGroup:
        bundles = [{"CPU": 1.0} | ({"GPU": float(s["num_gpus"])} if s["num_gpus"] else {}) for s in members]
        group: PlacementGroup = placement_group(bundles)
        return group

    def _actor(self, spec: Mapping[str, Any], group: PlacementGroup, bundle_idx: int) -> Any:
        options = {
            "name": spec["name"],
            "num_cpus": 1,
            "num_gpus": spec["num_gpus"],
            "max_restarts": -1,
            "max_task_retries": -1,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=bundle_idx
            ),
        }
        return ray.remote(NodeActor).options(**options).remote(dict(spec))

    def _run(self, name: str) -> None:
        self._runs[self._actors[name].run.remote()] = name

    def _result(self, name: str, ref: Any) -> int:
        try:
            return int(ray.get(ref))
        except ray.exceptions.RayError as error:
            log.warning("actor failed", node=name, error=str(error))
            return 1


def check_gpus(specs: Sequence[Mapping[str, Any]], *, num_present: int) -> None:
    """Raises: ConfigError when there are fewer GPUs than actors that need one: Ray would wait for them for ever."""
    needed = sum(int(spec["num_gpus"]) for spec in specs)
    if needed > num_present:
        raise ConfigError(
            f"prefill stages and decode instances need {needed} GPUs, one each, and Ray sees {num_present}; choose fewer with "
            "--stages, --prefill-groups, --decode, or --launcher process, where they share a GPU, or --set model.device=cpu"
        )


def started_pids(pid_path: Path) -> list[int]:
    """Process ids of a node's starts, oldest first."""
    return [int(line) for line in pid_path.read_text().split()] if pid_path.exists() else []


def current_pid(pid_path: Path) -> int | None:
    """The last line of the file, None before the first start."""
    pids = started_pids(pid_path)
    return pids[-1] if pids else None


def main(argv: Sequence[str]) -> int:
    setup_logging("ray")
    driver = Driver(json.loads(Path(argv[0]).read_text()))
    try:
        driver.start()
    except ConfigError as error:
        log.error("cannot start", error=str(error))
        ray.shutdown()
        return EXIT_CONFIG_ERROR
    # Ray installs its own handler for SIGTERM in `init`.
    signal.signal(signal.SIGTERM, driver.request_stop)
    code = driver.supervise()
    if code == 0:
        driver.drain()
    ray.shutdown()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
