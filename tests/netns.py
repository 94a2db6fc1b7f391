"""Two network namespaces joined by a link of known rate and delay, for tests and benchmarks. Needs root.

    with shaped_link(rate_bits_s=1e9, delay_s=0.005) as link:
        subprocess.run(link.near.argv(["ping", "-c", "1", link.far.address]), check=True)

A relay (this file as a program) holds both namespaces and carries every packet between their TUN devices; `tc netem` would do
the same, but many kernels are built without it. Packets are never lost: a sender that is too fast finds its device's queue full.
The namespaces have no names, so nothing is left of them when the relay and the processes inside are gone, and these die with
whoever started them. SIGSTOP to `link.relay_pid` cuts the link, SIGCONT mends it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO

_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_MTU = 65_000
"""Large, so that the relay has few packets to carry: 2,000 in a second at 1 Gb/s."""
_NEAR, _FAR = "10.99.0.1", "10.99.0.2"
_CONTROL = 0
"""Standard input of the relay: a line per new rate."""
_LONGEST_BACKLOG_S = 0.01
"""Of packets that wait for their turn on the wire; beyond it they wait in the sender's device."""


@dataclass(frozen=True)
class Side:
    address: str
    """IPv4 address that the other side reaches."""
    namespace: str
    """Path of the network namespace."""

    def argv(self, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` on this side; it keeps its process id and is killed when the starting thread ends."""
        return ["nsenter", f"--net={self.namespace}", "setpriv", "--pdeathsig", "KILL", *command]


@dataclass(frozen=True)
class ShapedLink:
    near: Side
    far: Side
    relay_pid: int
    control: IO[str]

    def set_rate(self, rate_bits_s: float) -> None:
        """Change the rate of both directions, for packets that are not on the wire yet."""
        self.control.write(f"{rate_bits_s}\n")
        self.control.flush()


def why_unavailable() -> str | None:
    """Why this machine cannot make a shaped link; None: it can. For `pytest.mark.skipif`."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not os.path.exists("/dev/net/tun"):
        return "there is no /dev/net/tun"
    missing = [program for program in ("ip", "nsenter", "setpriv") if shutil.which(program) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    probe = subprocess.run(["nsenter", "--net=/proc/self/ns/net", "unshare", "--net", "true"], capture_output=True)
    return None if probe.returncode == 0 else f"namespaces are refused: {probe.stderr.decode().strip()}"


@contextmanager
def shaped_link(*, rate_bits_s: float, delay_s: float) -> Iterator[ShapedLink]:
    """A link of `rate_bits_s` in each direction, on which a bit takes `delay_s` one way.

    Must be entered in the main thread: the relay dies with the thread that started it.
    """
    relay = subprocess.Popen(
        [sys.executable, __file__, str(rate_bits_s), str(delay_s), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert relay.stdin is not None
        assert relay.stdout is not None
        namespaces = relay.stdout.readline().split()
        assert namespaces, "the relay ended; its message is above"
        near, far = namespaces
        yield ShapedLink(Side(_NEAR, near), Side(_FAR, far), relay.pid, relay.stdin)
    finally:
        relay.kill()
        relay.communicate()


class _Direction:
    """Packets on their way from one device to the other."""

    def __init__(self, source: int, target: int, *, rate_bits_s: float, delay_s: float) -> None:
        self.source = source
        self._target = target
        self.rate_bits_s = rate_bits_s
        self._delay_s = delay_s
        self._wire_free_s = 0.0
        self._on_the_way: deque[tuple[float, bytes]] = deque()
        """(arrival, packet)."""

    @property
    def next_s(self) -> float | None:
        """When there is something to do apart from reading."""
        times = [self._on_the_way[0][0]] if self._on_the_way else []
        if not self.takes_more:
            times.append(self._wire_free_s - _LONGEST_BACKLOG_S)
        return min(times, default=None)

    @property
    def takes_more(self) -> bool:
        return self._wire_free_s - time.monotonic() <= _LONGEST_BACKLOG_S

    def read(self) -> None:
        packet = os.read(self.source, _MTU)
        self._wire_free_s = max(self._wire_free_s, time.monotonic()) + 8 * len(packet) / self.rate_bits_s
        self._on_the_way.append((self._wire_free_s + self._delay_s, packet))

    def deliver(self) -> None:
        while self._on_the_way and self._on_the_way[0][0] <= time.monotonic():
            os.write(self._target, self._on_the_way.popleft()[1])


def _relay(rate_bits_s: float, delay_s: float, starter_pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != starter_pid:
        return
    with suppress(PermissionError):  # a container may lack the right; the link is then as late as the machine is busy
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    near_device, near = _new_namespace(libc, _NEAR)
    far_device, far = _new_namespace(libc, _FAR)
    print(f"/proc/{os.getpid()}/fd/{near} /proc/{os.getpid()}/fd/{far}", flush=True)
    directions = [
        _Direction(source, target, rate_bits_s=rate_bits_s, delay_s=delay_s)
        for source, target in ((near_device, far_device), (far_device, near_device))
    ]
    while True:
        next_s = min((each.next_s for each in directions if each.next_s is not None), default=None)
        wait_s = None if next_s is None else max(0.0, next_s - time.monotonic())
        sources = [each.source for each in directions if each.takes_more]
        readable, _, _ = select.select([_CONTROL, *sources], [], [], wait_s)
        if _CONTROL in readable:
            lines = os.read(_CONTROL, 4096).split()
            if not lines:
                return
            for each in directions:
                each.rate_bits_s = float(lines[-1])
        for each in directions:
            if each.source in readable:
                each.read()
            each.deliver()


def _new_namespace(libc: ctypes.CDLL, address: str) -> tuple[int, int]:
    """Enter a new network namespace; returns (its TUN device, the namespace) as file descriptors."""
    if libc.unshare(_CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "cannot make a network namespace")
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"wire", _IFF_TUN | _IFF_NO_PI))
    for arguments in (
        ["link", "set", "lo", "up"],
        ["address", "add", f"{address}/24", "dev", "wire"],
        ["link", "set", "wire", "mtu", str(_MTU), "up"],
    ):
        subprocess.run(["ip", *arguments], check=True)
    return device, os.open("/proc/self/ns/net", os.O_RDONLY)


if __name__ == "__main__":
    _relay(float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
