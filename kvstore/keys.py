"""Keys of stored objects, and back. Only letters, digits and `/ _ - : .`, so that a key needs no escaping in a URL or a list.

b/<layout digest, 16 hex>/<layer group>/<block hash, 64 hex>/<holder>     a full block; shared by all requests
p/<request id>/<epoch>/<layer group>                                      the last, partial block of one request; never shared

The holder is the node id of the store process that accounts the block. Two hosts that hold one block hold two objects, so that each
may evict its own (docs/decisions/006-replicas.md).
"""

import re
from dataclasses import dataclass

from kvstore.block import BLOCK_HASH_BYTES, BlockHash
from moontide.errors import BadRequest, ConfigError

LOCAL_NODE_ID = "local"
"""Of the store node in runs of one process."""
_LAYOUT_TAG_BYTES = 8
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_NODE_ID = _REQUEST_ID
_BLOCK_KEY = re.compile(
    rf"b/([0-9a-f]{{{2 * _LAYOUT_TAG_BYTES}}})/(\d+)/([0-9a-f]{{{2 * BLOCK_HASH_BYTES}}})/({_NODE_ID.pattern})"
)
_PARTIAL_KEY = re.compile(rf"p/({_REQUEST_ID.pattern})/(\d+)/(\d+)")


@dataclass(frozen=True, kw_only=True)
class BlockKey:
    layout_tag: bytes
    """The first bytes of the layout digest; the whole digest is inside `block_hash` and in the trailer."""
    group_idx: int
    block_hash: BlockHash
    holder: str


@dataclass(frozen=True, kw_only=True)
class PartialKey:
    request_id: str
    epoch: int
    group_idx: int


def check_request_id(request_id: str) -> None:
    """Raise BadRequest for an id that cannot be part of a key."""
    if not _REQUEST_ID.fullmatch(request_id):
        raise BadRequest(
            f"request_id={request_id[:140]!r} cannot name objects; use 1 to 128 letters, digits, '_', '-', ':' or '.'"
        )


def check_node_id(node_id: str) -> None:
    """Raise ConfigError for a name that cannot be part of a key."""
    if not _NODE_ID.fullmatch(node_id):
        raise ConfigError(
            f"node.node_id={node_id[:140]!r} cannot name objects; use 1 to 128 letters, digits, '_', '-', ':' or '.'"
        )


def block_key(layout_digest: bytes, group_idx: int, block_hash: BlockHash, holder: str) -> str:
    return f"b/{layout_digest[:_LAYOUT_TAG_BYTES].hex()}/{group_idx}/{block_hash.hex()}/{holder}"


def partial_key(request_id: str, epoch: int, group_idx: int) -> str:
    check_request_id(request_id)
    return f"p/{request_id}/{epoch}/{group_idx}"


def parse_key(key: str) -> BlockKey | PartialKey | None:
    """Return what a key names, None if it is no key of ours."""
    if match := _BLOCK_KEY.fullmatch(key):
        tag, group_idx, block_hash, holder = match.groups()
        return BlockKey(
            layout_tag=bytes.fromhex(tag),
            group_idx=int(group_idx),
            block_hash=BlockHash(bytes.fromhex(block_hash)),
            holder=holder,
        )
    if match := _PARTIAL_KEY.fullmatch(key):
        request_id, epoch, group_idx = match.groups()
        return PartialKey(request_id=request_id, epoch=int(epoch), group_idx=int(group_idx))
    return None
