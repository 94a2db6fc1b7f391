"""`python -m kvstore`: the store process of this host. Exit code 0 after a drain, 2 for a wrong setting, 1 when its segment is lost."""

import sys
from collections.abc import Sequence

from kvstore.config import KvStoreConfig
from kvstore.service import serve
from moontide.config import load_service_config, to_tree
from moontide.errors import MoontideError
from moontide.log import get_logger, setup_logging
from moontide.service import run_service

log = get_logger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    config = load_service_config(KvStoreConfig, argv, "The store process of one host: owns its segment of the KV pool.")
    setup_logging(config.node.node_id)
    log.info("config", host=config.node.host, **to_tree(config.kvstore))
    try:
        return run_service(lambda stop: serve(config, stop))
    except MoontideError as error:
        log.error("store lost", error=str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main())
