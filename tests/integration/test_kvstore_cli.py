"""The operators' commands against a store process over the real Mooncake."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any

from kvstore import cli
from kvstore.keys import block_key
from kvstore.transfer.base import RemoveStatus
from tests.integration.test_kvstore_service import LAYOUT, Service, attached, backend, chain, service


async def ask(of: Service, *argv: str) -> dict[str, Any]:
    return (await cli.ask(cli.parser().parse_args([*argv, "--address", of.record.address]))).data


async def held(of: Service) -> set[bytes]:
    return {bytes.fromhex(block["hash"]) for block in (await ask(of, "ls"))["blocks"]}


def verify_in_a_process(of: Service) -> subprocess.CompletedProcess[bytes]:
    argv = [sys.executable, "-m", "kvstore", "verify", "--address", of.record.address, "--json"]
    return subprocess.run(argv, capture_output=True, timeout=60, check=False)


async def test_operators_see_verify_and_evict_what_a_store_process_holds() -> None:
    with backend() as to, service(to, settings=["kvstore.eviction=lfu"]) as made:
        async with attached(made) as stage:
            (popular,), (once,), (damaged,) = (chain(seed, 1) for seed in (21, 22, 23))
            for request_id, block_hash in (("a", popular), ("b", popular), ("c", once), ("d", damaged)):
                await stage.cache(request_id, [block_hash])
            stats = await ask(made, "stats")
            assert (stats["node_id"], stats["sealed_blocks"]) == ("store-0", 3)
            assert stats["used_bytes"] == 3 * LAYOUT.block_bytes
            assert await held(made) == {popular, once, damaged}

            key = block_key(LAYOUT.digest(), 1, damaged, made.record.node_id)
            assert stage.transfer.remove([key]) == [RemoveStatus.REMOVED]
            done = await asyncio.to_thread(verify_in_a_process, made)
            assert done.returncode == 1, done.stderr
            found = json.loads(done.stdout)
            assert (found["num_blocks"], found["num_missing"], found["bad_hashes"]) == (3, 1, [damaged.hex()])
            await ask(made, "verify", "--drop-damaged")
            assert (await ask(made, "verify"))["num_blocks"] == 2
            assert await held(made) == {popular, once}

            # The setting is lfu: by age alone the other one would go.
            assert (await ask(made, "evict", "--bytes", "1"))["num_blocks"] == 1
            assert await held(made) == {popular}
