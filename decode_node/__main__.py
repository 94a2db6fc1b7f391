"""`python -m decode_node`: one decode node. Exit code 0 after a drain, 2 for a wrong setting,
1 when the store is not there or has given this process up.
"""

from __future__ import annotations

from collections.abc import Sequence

from decode_node.config import DecodeNodeConfig
from decode_node.service import serve
from moontide.config import load_service_config, shown_tree
from moontide.errors import MoontideError
from moontide.log import get_logger, setup_logging
from moontide.roles import run_program
from moontide.service import run_service

log = get_logger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Raises: RoleChange when the process is to go on as a prefill stage."""
    config = load_service_config(
        DecodeNodeConfig, argv, "A decode node: streams tokens of prompts that others prefilled."
    )
    setup_logging(config.node.node_id)
    log.info("config", **shown_tree(config))
    try:
        return run_service(lambda stop: serve(config, stop))
    except MoontideError as error:
        log.error("decode node ended", error=str(error))
        return 1


if __name__ == "__main__":
    run_program(main)
