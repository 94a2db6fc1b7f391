"""Structured log lines: one line per event, ids as fields, readable at full load.

2026-01-31T12:00:00.123 INFO  prefill-0 request accepted request_id=r1 tokens=6000
"""

from __future__ import annotations

import logging
import sys
from typing import Any


class Logger:
    """A logger whose keyword arguments become `key=value` fields; `bind` fixes some of them."""

    def __init__(self, name: str, fields: dict[str, Any] | None = None) -> None:
        self._logger = logging.getLogger(name)
        self._fields = fields or {}

    def bind(self, **fields: Any) -> Logger:
        return Logger(self._logger.name, {**self._fields, **fields})

    def debug(self, event: str, **fields: Any) -> None:
        self._emit(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._emit(logging.INFO, event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._emit(logging.WARNING, event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._emit(logging.ERROR, event, fields)

    def exception(self, event: str, **fields: Any) -> None:
        """As `error`, with the traceback of the exception being handled."""
        self._emit(logging.ERROR, event, fields, exc_info=True)

    def _emit(self, level: int, event: str, fields: dict[str, Any], *, exc_info: bool = False) -> None:
        if self._logger.isEnabledFor(level):
            pairs = "".join(f" {key}={_show(value)}" for key, value in {**self._fields, **fields}.items())
            self._logger.log(level, "%s%s", event, pairs, exc_info=exc_info)


def get_logger(name: str) -> Logger:
    return Logger(name)


def setup_logging(node_id: str, *, level: int = logging.INFO) -> None:
    """Send log lines of this process to stderr, each with the node's id."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s.%(msecs)03d %(levelname)-7s {node_id} %(message)s", "%Y-%m-%dT%H:%M:%S")
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)


def _show(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return repr(text) if " " in text or not text else text
