"""How a node makes itself known: a record under a lease in Redis or Valkey, renewed by heartbeats.

Keys: `moontide:node:{node_id}` holds the JSON of a NodeRecord and expires with the lease; `moontide:nodes` is the set of all node ids.
When Redis goes away the node goes on and announces itself again once it is back.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import redis.asyncio as redis
from redis.exceptions import RedisError

from moontide.config import RegistryConfig
from moontide.log import get_logger

NODE_KEY_PREFIX = "moontide:node:"
NODE_IDS_KEY = "moontide:nodes"
"""Reading it costs what the nodes are; a scan would cost what all keys are, and idempotency keys may be many."""
_LIVE_NODES = """
local live = {}
for _, node_id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  if redis.call('EXISTS', ARGV[1] .. node_id) == 1 then
    live[#live + 1] = ARGV[1] .. node_id
  else
    redis.call('SREM', KEYS[1], node_id)
  end
end
return live
"""

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class NodeRecord:
    """What a node says about itself. `load` changes with every heartbeat, the rest only with a restart."""

    node_id: str
    role: str
    """prefill (stage 0 of a complete group) | decode | kvstore | conductor"""
    address: str
    """host:port of its gRPC service."""
    http_address: str
    """host:port of /metrics, /live, /ready."""
    boot_id: str
    """New with every start of the process."""
    model_id: str = ""
    layout_json: str = ""
    """KVLayout of nodes that hold KV."""
    host_id: str = ""
    """Nodes with the same host_id share one store process."""
    pid: int = 0
    place: dict[str, Any] = field(default_factory=dict)
    """Of a decode instance that may become a prefill stage: its own place in a group, as settings of section `prefill`."""
    load: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> NodeRecord:
        return cls(**json.loads(text))


class Announcer:
    """Keeps one node's record alive.

    `record()` is asked before every heartbeat; None means: not fit to serve now, so the record is withdrawn.
    """

    def __init__(self, config: RegistryConfig, record: Callable[[], NodeRecord | None]) -> None:
        self._config = config
        self._record = record
        self._redis = connect(config)
        self._task: asyncio.Task[None] | None = None
        self._announced: str | None = None
        self.connected = False
        """Whether the last heartbeat reached the registry."""

    async def start(self) -> None:
        """Announce once (a registry that is down is only logged), then keep on in the background."""
        await self._beat()
        self._task = asyncio.create_task(self._run(), name="announcer")

    async def close(self) -> None:
        """Leave the registry; best effort."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._withdraw()
        await self._redis.aclose()

    async def beat_now(self) -> None:
        """Announce a change at once instead of with the next heartbeat."""
        await self._beat()
        raise_if_cancelled()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._config.heartbeat_s)
            await self._beat()
            raise_if_cancelled()

    async def _beat(self) -> None:
        record = self._record()
        if record is None:
            await self._withdraw()
            return
        try:
            await self._redis.set(
                NODE_KEY_PREFIX + record.node_id, record.to_json(), px=int(self._config.lease_s * 1000)
            )
            await self._redis.sadd(NODE_IDS_KEY, record.node_id)
        except (RedisError, OSError) as error:
            self._note(False, str(error))
            return
        self._announced = record.node_id
        self._note(True, "")

    async def _withdraw(self) -> None:
        if self._announced is None:
            return
        try:
            await self._redis.delete(NODE_KEY_PREFIX + self._announced)
            await self._redis.srem(NODE_IDS_KEY, self._announced)
            self._announced = None
        except (RedisError, OSError) as error:
            self._note(False, str(error))

    def _note(self, connected: bool, reason: str) -> None:
        if connected != self.connected:
            (log.info if connected else log.warning)(
                "registry connected" if connected else "registry lost", reason=reason or "none"
            )
        self.connected = connected


async def read_records(connection: redis.Redis) -> list[NodeRecord]:
    """Of all nodes whose lease holds; what cannot be read is left out. Raises: RedisError, OSError."""
    keys = await _node_keys(connection)
    texts = await connection.mget(keys) if keys else []
    return [record for text in texts if (record := _readable(text)) is not None]


async def read_records_with_ages(connection: redis.Redis, *, lease_s: float) -> list[tuple[NodeRecord, float]]:
    """The same, and how many seconds ago each record was written, by what is left of its lease. Raises: RedisError, OSError.

    Args:
        lease_s: that the nodes announce themselves with.
    """
    keys = await _node_keys(connection)
    if not keys:
        return []
    async with connection.pipeline(transaction=False) as pipeline:
        pipeline.mget(keys)
        for key in keys:
            pipeline.pttl(key)
        texts, *left_ms = await pipeline.execute()
    return [
        (record, min(max(lease_s - ms / 1000, 0.0), lease_s))
        for text, ms in zip(texts, left_ms, strict=True)
        if (record := _readable(text)) is not None
    ]


async def _node_keys(connection: redis.Redis) -> list[str]:
    """Of the nodes whose lease holds; the others leave the set."""
    keys: list[str] = await connection.eval(_LIVE_NODES, 1, NODE_IDS_KEY, NODE_KEY_PREFIX)
    return keys


def _readable(text: object) -> NodeRecord | None:
    if text is None:
        return None  # it expired between the two reads
    try:
        return NodeRecord.from_json(str(text))
    except (TypeError, json.JSONDecodeError) as error:
        log.warning("unreadable node record left out", error=str(error))
        return None


def raise_if_cancelled() -> None:
    """Call it in every loop around operations of the Redis client: the client takes a cancellation that arrives during an
    operation for a timeout, tries again and succeeds, and the loop would never end. It can go when the client lets
    cancellations through.

    Raises: asyncio.CancelledError if this task is being cancelled.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def connect(config: RegistryConfig) -> redis.Redis:
    """A client whose every operation ends within two seconds."""
    return redis.Redis.from_url(
        config.url, decode_responses=True, socket_timeout=2.0, socket_connect_timeout=2.0, retry_on_timeout=False
    )
