"""`python -m prefill_node`: one stage of a prefill group."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from moontide.config import load_service_config, shown_tree
from moontide.errors import MoontideError
from moontide.log import get_logger, setup_logging
from moontide.roles import run_program
from moontide.service import run_service
from prefill_node.config import PrefillNodeConfig
from prefill_node.start import start_stage

_GRACE_S = 10.0
"""Longest wait at the end for open requests."""

log = get_logger(__name__)


async def serve(config: PrefillNodeConfig, stop: asyncio.Event) -> None:
    """Run one stage until `stop`, or until it is to change its role. Raises: what ended it before; RoleChange at the end."""
    stage = await start_stage(config)
    try:
        ends = [asyncio.create_task(event.wait()) for event in (stop, stage.switch.leaving)]
        failing = asyncio.create_task(stage.wait_failed())
        await asyncio.wait((*ends, failing), return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        if failing.done():
            failing.result()
        failing.cancel()
    finally:
        is_asked = stop.is_set() or stage.switch.leaving.is_set()
        await stage.close(grace_s=_GRACE_S if is_asked else 0.0)
    stage.switch.raise_if_leaving()


def main(argv: Sequence[str] | None = None) -> int:
    """Raises: RoleChange when the process is to go on as a decode instance."""
    config = load_service_config(PrefillNodeConfig, argv, "One stage of a Moontide prefill group.")
    setup_logging(config.node.node_id)
    log.info("starting", config=shown_tree(config))
    try:
        return run_service(lambda stop: serve(config, stop))
    except MoontideError as error:
        log.error("stage ended", error=str(error))
        # Not `return`: the interpreter would wait for a thread that hangs.
        os._exit(1)


if __name__ == "__main__":
    run_program(main)
