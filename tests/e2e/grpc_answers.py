"""Prompts of token ids through the public gRPC API, and the whole answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from moontide.client import GenerateOptions, MoontideClient, Usage
from moontide.sampling_params import SampledToken
from moontide.timeline import TtftParts


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a client got for one prompt."""

    request_id: str
    tokens: list[SampledToken]
    text: str
    finish_reason: str
    usage: Usage
    ttft_parts: TtftParts

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]


def greedy(max_tokens: int) -> GenerateOptions:
    return GenerateOptions(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=0)


async def ask(client: MoontideClient, prompt: Sequence[int], options: GenerateOptions) -> Answer:
    chunks = [chunk async for chunk in client.generate(prompt, params=options)]
    (parts,) = [chunk.ttft_parts for chunk in chunks if chunk.ttft_parts is not None]
    last = chunks[-1]
    assert last.usage is not None
    return Answer(
        request_id=last.request_id,
        tokens=[token for chunk in chunks for token in chunk.tokens],
        text="".join(chunk.text for chunk in chunks),
        finish_reason=last.finish_reason,
        usage=last.usage,
        ttft_parts=parts,
    )


async def ask_all(client: MoontideClient, prompts: Sequence[Sequence[int]], options: GenerateOptions) -> list[Answer]:
    """All at once."""
    return list(await asyncio.gather(*(ask(client, prompt, options) for prompt in prompts)))
