"""Prometheus registry, shared buckets, and the small HTTP server with /metrics, /live and /ready that every service has."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

LATENCY_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1280.0, 2560.0,
)  # fmt: skip
"""From one RPC on loopback to a 1M-token prompt."""
ERROR_BUCKETS = (-0.5, -0.2, -0.1, -0.05, -0.02, 0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Predicted over measured, minus 1."""


def start_at_zero(metric: Counter | Gauge | Histogram, *values: str) -> None:
    """Show the values of a label before the first event: a series that appears with its first event hides it from `rate` and `increase`."""
    for value in values:
        metric.labels(value)


NotReady = Callable[[], str | None]
"""Returns why the service cannot serve now, or None when it can."""


class HealthServer:
    """Serves /metrics, /live (the process answers) and /ready (200 only when the service can do its work, else 503 with the reason)."""

    def __init__(self, registry: CollectorRegistry, not_ready: NotReady) -> None:
        self._registry = registry
        self.not_ready = not_ready
        self._runner: web.AppRunner | None = None
        # They are a series more for every counter and histogram, with its time of birth.
        disable_created_metrics()  # type: ignore[no-untyped-call]

    def routes(self) -> list[web.RouteDef]:
        """For a service that mounts them into its own HTTP server."""
        return [
            web.get("/metrics", self._metrics),
            web.get("/live", self._live),
            web.get("/ready", self._ready),
        ]

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises: OSError when the port is taken."""
        app = web.Application()
        app.add_routes(self.routes())
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        return int(self._runner.addresses[0][1])

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _live(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _ready(self, _request: web.Request) -> web.Response:
        reason = self.not_ready()
        return web.Response(text="ok\n") if reason is None else web.Response(status=503, text=f"{reason}\n")
