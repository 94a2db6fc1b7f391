"""How a node makes itself known: a record under a lease in Redis or Valkey, renewed by heartbeats.

Keys: `moontide:node:{node_id}` holds the JSON of a NodeRecord and expires with the lease. When Redis goes away the node goes on and
announces itself again once it is back.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field

import redis.asyncio as redis
from redis.exceptions import RedisError

from moontide.config import RegistryConfig
from moontide.log import get_logger

NODE_KEY_PREFIX = "moontide:node:"
_KEYS_PER_READ = 512

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
    keys = [key async for key in connection.scan_iter(match=NODE_KEY_PREFIX + "*", count=_KEYS_PER_READ)]
    records = []
    for text in await connection.mget(keys) if keys else []:
        if text is None:
            continue  # it expired between the two reads
        try:
            records.append(NodeRecord.from_json(str(text)))
        except (TypeError, json.JSONDecodeError) as error:
            log.warning("unreadable node record left out", error=str(error))
    return records


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
