"""prefill.layer_split=measured: the group splits the layers by what its stages have measured, and keeps that in the registry.

start: the kept split, or an even one -> the group forms, speeds are known -> a better one: keep it and end -> start again
"""

from __future__ import annotations

from redis.exceptions import RedisError

from model_runner.stage import StageSpec, format_layer_split
from moontide.config import RegistryConfig
from moontide.errors import NodeLost
from moontide.log import get_logger
from moontide.registry import connect
from prefill_node.balance import UnevenStages

WORTH_A_RESTART = 0.05
"""A split that saves less of the slowest stage's time is not worth loading the weights again."""

log = get_logger(__name__)


class MeasuredSplit:
    """What the registry keeps for one group, model and number of stages."""

    def __init__(self, registry: RegistryConfig, *, group_id: str, layout_digest: bytes, num_stages: int) -> None:
        self._registry = registry
        self._key = f"moontide:layer-split:{group_id}:{layout_digest.hex()[:16]}:{num_stages}"

    async def read(self) -> str:
        """Value for `prefill.layer_split`; empty when nothing is kept, or the registry is away."""
        client = connect(self._registry)
        try:
            kept = await client.get(self._key)
            return str(kept or "")
        except (RedisError, OSError) as error:
            log.warning("kept layer split not read", reason=str(error))
            return ""
        finally:
            await client.aclose()

    async def check(self, split: list[StageSpec]) -> None:
        """Raises: NodeLost when another split is kept than this stage has loaded."""
        kept, mine = await self.read(), format_layer_split(split)
        if kept and kept != mine:
            raise NodeLost(f"the layers are split anew, {kept} instead of {mine}; this stage has to start again")

    async def improve(self, split: list[StageSpec], uneven: UnevenStages | None) -> None:
        """Keep the better split, if there is one. Raises: NodeLost then, which ends this stage; its group follows."""
        if uneven is None or uneven.better_split is None or uneven.gain < WORTH_A_RESTART:
            return
        client = connect(self._registry)
        try:
            await client.set(self._key, uneven.better_split)
        except (RedisError, OSError) as error:
            log.warning("better layer split not kept", reason=str(error))
            return
        finally:
            await client.aclose()
        await self.check(split)
