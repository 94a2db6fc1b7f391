"""`python -m kvstore`: the store process of this host. Exit code 0 after a drain, 2 for a wrong setting, 1 when its segment is lost.

With stats, ls, verify or evict as first argument it looks into one that runs: see cli.py.
"""

import sys
from collections.abc import Sequence

from kvstore import cli
from kvstore.config import KvStoreConfig
from kvstore.service import serve
from moontide.config import load_service_config, shown_tree
from moontide.errors import MoontideError
from moontide.log import get_logger, setup_logging
from moontide.service import run_service

log = get_logger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in cli.COMMANDS:
        return cli.main(argv)
    config = load_service_config(
        KvStoreConfig,
        argv,
        f"The store process of one host: owns its segment of the KV pool. `{'|'.join(cli.COMMANDS)} --help`: look into one that runs.",
    )
    setup_logging(config.node.node_id)
    log.info("config", host=config.node.host, **shown_tree(config.kvstore))
    try:
        return run_service(lambda stop: serve(config, stop))
    except MoontideError as error:
        log.error("store lost", error=str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main())
