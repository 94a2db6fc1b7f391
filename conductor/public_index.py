"""What other systems see of the prefix index, and it of them: KV events in and out, and the indexer API, each where the config names it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from conductor.config import ConductorSettings
from conductor.prefix_index import PrefixIndex
from conductor.registry import Node
from conductor.view import layout_of
from kvstore.index import KvEntry
from kvstore.layout import KVLayout
from moontide.errors import ConfigError
from moontide.log import get_logger
from moontide.tls import Tls

if TYPE_CHECKING:
    from conductor.kv_event_sockets import KnownTokens

Nodes = Callable[[], Sequence[Node]]

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class PublicIndex:
    """The ends that the conductor has to feed."""

    tell: Callable[[KvEntry], Awaitable[None]] | None = None
    """Wants every KV event; None: nobody listens."""
    known_tokens: KnownTokens | None = None
    """Wants the tokens of every prompt; None: no event tells them."""


@asynccontextmanager
async def open_public_index(
    settings: ConductorSettings, *, host: str, index: PrefixIndex, nodes: Nodes, tls: Tls | None = None
) -> AsyncIterator[PublicIndex]:
    """Open what `settings` names, on `host`; `nodes` returns what the registry knows.

    Raises: ConfigError when a library is missing or an address is taken.
    """
    if not settings.kv_event_sources and not settings.kv_event_endpoint and settings.indexer_port is None:
        yield PublicIndex()
        return
    try:
        # Only who uses it needs these libraries.
        from conductor.indexer_api import IndexerApi
        from conductor.kv_event_sockets import EventEndpoint, EventPublisher, ForeignEvents, KnownTokens
    except ImportError as error:
        raise ConfigError(
            f"conductor.kv_event_sources, kv_event_endpoint and indexer_port need {error.name}, which is not installed; "
            "pip install 'moontide[kv-events]'"
        ) from error

    def layout() -> KVLayout | None:
        return served_layout(nodes())

    async with AsyncExitStack() as opened:
        others = PrefixIndex()
        known_tokens, tell = None, None
        if settings.kv_event_sources:
            foreign = ForeignEvents(others, [EventEndpoint.parse(text) for text in settings.kv_event_sources])
            opened.push_async_callback(foreign.close)
            foreign.start()
        if settings.kv_event_endpoint:
            known_tokens = KnownTokens() if settings.kv_event_token_ids else None
            publisher = EventPublisher(
                settings.kv_event_endpoint,
                model_name=settings.served_model_name,
                layout=layout,
                tokens=known_tokens,
            )
            opened.callback(publisher.close)
            tell = publisher.tell
            log.info("kv events told", address=publisher.address, with_token_ids=settings.kv_event_token_ids)
        if settings.indexer_port is not None:
            api = IndexerApi(
                index,
                others,
                model_name=settings.served_model_name,
                layout=layout,
                max_body_bytes=settings.max_body_bytes,
            )
            opened.push_async_callback(api.close)
            log.info("indexer api", port=await api.start(host, settings.indexer_port, tls))
        yield PublicIndex(tell=tell, known_tokens=known_tokens)


def served_layout(nodes: Sequence[Node]) -> KVLayout | None:
    """The one that most live nodes have."""
    texts = [node.record.layout_json for node in nodes if node.alive and node.record.layout_json]
    return layout_of(max(sorted(set(texts)), key=texts.count)) if texts else None
