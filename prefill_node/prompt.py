"""A request as the group works on it: read from the wire and checked, then carrying what has been reported of it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from kvstore.block import BlockHash, hash_blocks, root_hash
from kvstore.client import BlockRef
from kvstore.keys import check_request_id
from kvstore.layout import KVLayout
from kvstore.pool import RequestKey
from model_runner.model_source import ModelInfo
from moontide.errors import BadRequest, PromptTooLong
from moontide.fair_share import Share
from moontide.sampling_params import SamplingParams
from moontide.token_ids import TokenArray, unpack_token_ids
from moontide_proto.v1 import common_pb2, prefill_pb2, stage_pb2


class Prompt:
    """One attempt of one request on its way through the group, and what has been reported of it."""

    def __init__(
        self,
        *,
        key: RequestKey,
        order: int,
        token_ids: TokenArray,
        root: BlockHash,
        block_hashes: Sequence[BlockHash],
        block_tokens: int,
        sampling: SamplingParams,
        output_idx: int,
        arrived_s: float,
        ttft_slo_s: float | None,
        share: Share,
        copy_blocks: int = 0,
    ) -> None:
        self.key = key
        self.order = order
        """Place in the line of arrivals."""
        self.token_ids = token_ids
        self.root = root
        """Parent of the first block."""
        self.block_hashes = block_hashes
        self.block_tokens = block_tokens
        self.sampling = sampling
        self.output_idx = output_idx
        self.arrived_s = arrived_s
        self.ttft_slo_s = ttft_slo_s
        """Time from its arrival within which the first token is wanted; None: what was predicted decides."""
        self.share = share
        """Whose part of the group's time it uses up."""
        self.copy_blocks = copy_blocks
        """Leading blocks worth copying from another host's store."""
        self.pages: list[int] = []
        self.held_blocks = 0
        """Leading blocks that were in the pages when it took them."""
        self.hit_tokens = 0
        """Leading tokens that need not be computed, as far as that is known."""
        self.num_pages_sent = 0
        self.num_chunks = 0
        self.fetched: asyncio.Future[int]
        """Blocks of the prefix that every stage holds; one future per fetch."""
        self.is_dropping = False
        """Whether its pages are being taken away."""
        self.dropped = asyncio.Event()
        """Its pages are gone; what was computed is in the store."""
        self.first_token: asyncio.Future[common_pb2.Token] = asyncio.get_running_loop().create_future()
        self.predicted_s = 0.0
        """Expected time of what was to be computed at first, alone in the group; 0: no prediction."""
        self.deadline_s = 0.0
        """When its first token is wanted."""
        self.waiting_since_s = arrived_s
        """Since when it has been without pages."""
        self.compute_started_s: float | None = None
        """When stage 0 began with the first chunk; known with the first report of it."""
        self.first_token_s: float | None = None
        self.put_tokens = 0
        """Leading tokens whose objects every stage has put, or tried to."""
        self.failed_puts = 0
        self.puts_changed = asyncio.Event()
        self.spans: list[common_pb2.Span] = []
        self._chunk_numbers: dict[int, int] = {}

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_pages(self) -> int:
        return -(-self.num_tokens // self.block_tokens)

    @property
    def has_partial(self) -> bool:
        return self.num_tokens % self.block_tokens != 0

    def block_refs(self, first_block: int, end_block: int, *, holder: str) -> list[BlockRef]:
        """Names of blocks [first_block, end_block); the one after the last full block is the partial one."""
        names: list[BlockHash | None] = [*self.block_hashes[first_block:end_block]]
        if end_block > len(self.block_hashes):
            names.append(None)
        return [BlockRef(name, self.key.request_id, self.key.epoch, holder) for name in names]

    def number_chunk(self, first_token: int) -> None:
        self._chunk_numbers[first_token] = self.num_chunks
        self.num_chunks += 1

    def add_span(
        self, track: str, *, end_s: float, duration_s: float, chunk: stage_pb2.Chunk | None, predicted_s: float = 0.0
    ) -> None:
        """Note work that ended at `end_s` on this host's clock."""
        span = common_pb2.Span(
            name="fetch" if chunk is None else f"chunk {self._chunk_numbers[chunk.first_token]}",
            track=track,
            start_s=end_s - duration_s - self.arrived_s,
            duration_s=duration_s,
            predicted_s=predicted_s,
        )
        if chunk is not None:
            span.first_token, span.num_tokens = chunk.first_token, chunk.num_tokens
        self.spans.append(span)


def read_prompt(
    message: prefill_pb2.PrefillRequest, *, info: ModelInfo, layout: KVLayout, order: int, arrived_s: float
) -> Prompt:
    """Check a request against the model. Raises: BadRequest, PromptTooLong."""
    check_request_id(message.request_id)
    if not message.timeout_s > 0:
        raise BadRequest(f"timeout_s={message.timeout_s} must be above 0", param="timeout_s")
    if message.HasField("ttft_slo_s") and not message.ttft_slo_s > 0:
        raise BadRequest(f"ttft_slo_s={message.ttft_slo_s} must be above 0", param="ttft_slo_s")
    if not 0 <= message.tenant_weight < math.inf:
        raise BadRequest(
            f"tenant_weight={message.tenant_weight} must be 0, which counts as 1, or a number above",
            param="tenant_weight",
        )
    try:
        token_ids = unpack_token_ids(message.token_ids)
    except ValueError as error:
        raise BadRequest(str(error), param="token_ids") from error
    if not len(token_ids):
        raise BadRequest("the prompt is empty; send at least one token", param="token_ids")
    if len(token_ids) > info.max_context:
        raise PromptTooLong(f"the prompt has {len(token_ids)} tokens; the model's context holds {info.max_context}")
    if token_ids.max() >= info.vocab_size:
        raise BadRequest(
            f"token id {token_ids.max()} is outside of the vocabulary of {info.vocab_size}", param="token_ids"
        )
    root = root_hash(layout.digest(), message.cache_salt)
    block_hashes = hash_blocks(token_ids, block_tokens=layout.block_tokens, root=root)
    return Prompt(
        key=RequestKey(message.request_id, message.epoch),
        order=order,
        token_ids=token_ids,
        root=root,
        block_hashes=block_hashes,
        block_tokens=layout.block_tokens,
        sampling=SamplingParams.from_proto(message.sampling),
        output_idx=message.output_idx,
        arrived_s=arrived_s,
        ttft_slo_s=message.ttft_slo_s if message.HasField("ttft_slo_s") else None,
        share=Share(tenant=message.tenant, priority=message.priority, weight=message.tenant_weight or 1.0),
        copy_blocks=min(message.copy_blocks, len(block_hashes)),
    )
