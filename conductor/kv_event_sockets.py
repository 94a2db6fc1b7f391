"""KV events of other engines in, and those of our stores out, over ZMQ sockets (kv_event_formats.py says in which shapes).

Frames of a message: topic, number of the batch (8 bytes, big-endian), batch. A number that is not the next one means that something was
lost: what is known of that source is forgotten, and grows again with what it stores from then on.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import zmq
import zmq.asyncio

from conductor.kv_event_formats import ForeignHolder, pack_batch, parse_batch, standard_event
from conductor.prefix_index import PrefixIndex
from kvstore.block import BlockHash
from kvstore.index import KvEntry, Stored, split_hashes
from kvstore.layout import KVLayout
from moontide.errors import ConfigError
from moontide.log import get_logger

MAX_KNOWN_BLOCKS = 65_536
"""Blocks whose tokens are remembered for events that tell them."""

log = get_logger(__name__)


@dataclass(frozen=True)
class EventEndpoint:
    """A publisher of KV events, as `conductor.kv_event_sources` names it: INSTANCE=tcp://host:port."""

    instance_id: str
    address: str

    @classmethod
    def parse(cls, text: str) -> EventEndpoint:
        """Raises: ConfigError."""
        instance_id, _, address = text.partition("=")
        if not instance_id or "://" not in address:
            raise ConfigError(
                f"conductor.kv_event_sources: {text!r} names no publisher; write INSTANCE=tcp://host:port"
            )
        return cls(instance_id, address)


class ForeignEvents:
    """Follows publishers into one index, each under its instance id."""

    def __init__(self, index: PrefixIndex, endpoints: Sequence[EventEndpoint]) -> None:
        self._index = index
        self._endpoints = endpoints
        self._context = zmq.asyncio.Context()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._follow(each), name=f"kv events of {each.instance_id}") for each in self._endpoints
        ]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.destroy(linger=0)

    async def _follow(self, endpoint: EventEndpoint) -> None:
        holder = ForeignHolder(self._index, endpoint.instance_id)
        last_number: int | None = None
        with self._context.socket(zmq.SUB) as socket:
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            socket.connect(endpoint.address)
            while True:
                frames = await socket.recv_multipart()
                try:
                    _, number_bytes, payload = frames
                    number, events = int.from_bytes(number_bytes, "big"), parse_batch(payload)
                    if last_number is not None and number != last_number + 1:
                        log.warning("kv events lost", source=endpoint.instance_id, after=last_number, next=number)
                        holder.clear()
                    for event in events:
                        holder.apply(event)
                except Exception as error:
                    # Whatever a foreign process sends, the next batch is read; its number then tells that this one is missing.
                    log.warning("unreadable kv events left out", source=endpoint.instance_id, error=repr(error))
                    continue
                last_number = number


class KnownTokens:
    """Tokens of the blocks of recent prompts, so that events can tell them. Only where that is switched on."""

    def __init__(self, max_blocks: int = MAX_KNOWN_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._tokens: OrderedDict[BlockHash, npt.NDArray[np.uint32]] = OrderedDict()

    def note(self, hashes: Sequence[BlockHash], token_ids: npt.NDArray[np.uint32], *, block_tokens: int) -> None:
        """The prompt whose full blocks have these hashes."""
        for idx, block_hash in enumerate(hashes):
            # A copy: a view would keep the whole prompt.
            self._tokens[block_hash] = token_ids[idx * block_tokens : (idx + 1) * block_tokens].copy()
            self._tokens.move_to_end(block_hash)
        while len(self._tokens) > self._max_blocks:
            self._tokens.popitem(last=False)

    def of(self, hashes: Sequence[BlockHash]) -> list[int] | None:
        """Tokens of blocks that follow each other; None unless all are known."""
        found = [self._tokens.get(each) for each in hashes]
        known = [tokens for tokens in found if tokens is not None]
        return np.concatenate(known).tolist() if known and len(known) == len(found) else None


class EventPublisher:
    """Tells what our store processes hold, as this conductor hears it."""

    def __init__(
        self,
        endpoint: str,
        *,
        model_name: str,
        layout: Callable[[], KVLayout | None],
        tokens: KnownTokens | None,
    ) -> None:
        """
        Args:
            endpoint: ZMQ address to bind.
            layout: of what the stores hold; None while no node is there, and then nothing is told.
            tokens: None: token ids are not told.
        Raises: ConfigError if it cannot be bound.
        """
        self._model_name = model_name
        self._layout = layout
        self._tokens = tokens
        self._number = 0
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PUB)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"conductor.kv_event_endpoint={endpoint!r} cannot be bound ({error}); use tcp://host:port of this machine"
            ) from error

    @property
    def address(self) -> str:
        """What to connect to; tells the port that a bind to `:*` took."""
        return str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))

    async def tell(self, entry: KvEntry) -> None:
        layout, token_ids = self._layout(), None
        if layout is None:
            return
        if self._tokens is not None and isinstance(entry.change, Stored):
            token_ids = self._tokens.of(split_hashes(entry.change.packed))
        event = standard_event(
            entry, model_name=self._model_name, block_tokens=layout.block_tokens, token_ids=token_ids
        )
        if event is None:
            return
        batch = pack_batch([event], timestamp_s=time.time())
        await self._socket.send_multipart([b"", self._number.to_bytes(8, "big"), batch])
        self._number += 1

    def close(self) -> None:
        self._context.destroy(linger=0)
