"""The frame around every service process: event loop, signals, drain.

SIGTERM or SIGINT asks for a drain; a second one ends the process at once.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress

import uvloop

from moontide.errors import ConfigError
from moontide.log import get_logger

log = get_logger(__name__)

Serve = Callable[[asyncio.Event], Awaitable[None]]
"""Runs a service until the event is set, then drains and closes it."""


def run_service(serve: Serve) -> int:
    """Run `serve` on a fresh event loop in this (main) thread; returns the exit code.

    A ConfigError or OSError (a port in use) at start is printed as one line, not as a traceback.
    """
    try:
        uvloop.run(_run(serve))
    except ConfigError as error:
        log.error("cannot start", error=str(error))
        return 2
    except OSError as error:
        way_out = "; choose another port, or 0 for a free one" if error.errno == errno.EADDRINUSE else ""
        log.error("cannot start", error=f"{error}{way_out}")
        return 1
    return 0


async def _run(serve: Serve) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(1)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        with suppress(NotImplementedError):
            loop.add_signal_handler(number, on_signal)
    await serve(stop)
