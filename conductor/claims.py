"""Who makes the answer to a request with an idempotency key: one claim per key in Redis, shared by all conductors.

Key: `moontide:answer:{name}`, JSON of a Claim, gone when answers of its time are no longer kept. It holds neither the idempotency key nor
anything of the prompt or the answer: names and fingerprints are made with the key, which only the client has.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NewType

from redis.exceptions import RedisError

from conductor.validation import GenerateParams, Prompt, TokenPrompt
from moontide.config import RegistryConfig
from moontide.registry import connect, raise_if_cancelled

CLAIM_KEY_PREFIX = "moontide:answer:"
_CLAIMS_PER_BATCH = 256
_REPLACE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return 1
"""
_DROP = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end return 1"

ClaimName = NewType("ClaimName", str)


class RegistryAway(Exception):
    """Redis does not answer: nobody can be asked who has a claim."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One conductor process makes, or has made, the answer."""

    node_id: str
    boot_id: str
    address: str
    """host:port of its gRPC service."""
    request_id: str
    seed: int
    """Of every attempt at this answer, whoever makes it."""
    fingerprint: str

    def is_of(self, other: Claim) -> bool:
        """Whether the same process made both."""
        return (self.node_id, self.boot_id) == (other.node_id, other.boot_id)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Claim:
        return cls(**json.loads(text))


class ClaimBook:
    """The claims in Redis. Every method raises RegistryAway when Redis does not answer."""

    def __init__(self, config: RegistryConfig, *, claim_s: float) -> None:
        self._redis = connect(config)
        self._claim_ms = int(claim_s * 1000)

    async def close(self) -> None:
        await self._redis.aclose()

    async def take(self, name: ClaimName, claim: Claim) -> Claim | None:
        """Claim it. Returns: None, or the claim that stands instead."""
        key, text = CLAIM_KEY_PREFIX + name, claim.to_json()
        held = await self._ask(self._redis.set(key, text, px=self._claim_ms, nx=True, get=True))
        return None if held is None else Claim.from_json(held)

    async def replace(self, name: ClaimName, old: Claim, new: Claim) -> bool:
        """Take over a claim; False when `old` no longer stands."""
        args = (CLAIM_KEY_PREFIX + name, old.to_json(), new.to_json(), str(self._claim_ms))
        return bool(await self._ask(self._redis.eval(_REPLACE, 1, *args)))

    async def drop(self, name: ClaimName, claim: Claim) -> None:
        """Give up a claim if it still stands."""
        await self._ask(self._redis.eval(_DROP, 1, CLAIM_KEY_PREFIX + name, claim.to_json()))

    async def put_back(self, claims: Mapping[ClaimName, Claim]) -> None:
        """Enter claims that Redis may have lost; one that stands there is left alone."""
        names = list(claims)
        for start in range(0, len(names), _CLAIMS_PER_BATCH):
            batch = self._redis.pipeline(transaction=False)
            for name in names[start : start + _CLAIMS_PER_BATCH]:
                batch.set(CLAIM_KEY_PREFIX + name, claims[name].to_json(), px=self._claim_ms, nx=True)
            await self._ask(batch.execute())

    async def run_id(self) -> str:
        """Another one means that Redis was restarted and may have lost everything."""
        info = await self._ask(self._redis.info("server"))
        return str(info["run_id"])

    async def _ask(self, operation: Any) -> Any:
        try:
            return await operation
        except (RedisError, OSError) as error:
            raise RegistryAway(str(error)) from error
        finally:
            raise_if_cancelled()


def attach_token(key: str, tenant: str) -> bytes:
    """The right to read an answer: whoever has the idempotency key can make it, whoever reads Redis cannot."""
    return hmac.digest(_key_bytes(key), b"attach " + tenant.encode(), "sha256")


def claim_name(token: bytes) -> ClaimName:
    return ClaimName(hashlib.sha256(token).hexdigest())


def fingerprint(key: str, prompt: Prompt, params: GenerateParams) -> str:
    """Equal for requests that ask for the same answer; how long the client waits is no part of it.

    Defaults are left out, so that a conductor that knows more parameters comes to the same.
    """
    digest = hmac.new(_key_bytes(key), digestmod="sha256")
    if isinstance(prompt, TokenPrompt):
        digest.update(b"tokens " + prompt.token_ids.astype("<u4").tobytes())
    else:
        digest.update(f"{type(prompt).__name__} {json.dumps(dataclasses.asdict(prompt))}".encode())
    asked = {
        f.name: value
        for f in dataclasses.fields(params)
        if f.name != "timeout_s" and (value := getattr(params, f.name)) != f.default
    }
    digest.update(json.dumps(asked, sort_keys=True).encode())
    return digest.hexdigest()


def _key_bytes(key: str) -> bytes:
    """What the client sent: in a header any bytes, which aiohttp decodes so."""
    return key.encode(errors="surrogateescape")
