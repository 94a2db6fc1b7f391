"""What the fault tests share: calls that run beside the test, looks into every node's books, and processes that are frozen for a while.

Tests are plain functions that break things while calls run; the calls live on one event loop in a thread.
"""

from __future__ import annotations

import asyncio
import http.client
import os
import signal
import threading
import time
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, ExitStack, aclosing, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

from kvstore.client import StoreNodeClient
from kvstore.layout import KVLayout
from kvstore.pool import PoolStats
from moontide import rpc
from moontide.client import ClusterInfo, GeneratedChunk, GenerateOptions, MoontideClient
from moontide.errors import MoontideError
from moontide.sampling_params import SampledToken
from moontide.timeline import Timeline
from moontide_proto.v1 import decode_pb2, decode_pb2_grpc, moontide_pb2, prefill_pb2, prefill_pb2_grpc
from tests.cluster import RunningCluster, wait_for
from tests.fakes.tiny_models import VOCAB_SIZE, tiny_model_dir

FIRST_TEXT_ID = 3
CALL_TIMEOUT_S = 10.0
OBJECT_LEASE_S = 2.0
"""An object that was read resists removal for so long: deploy.object_lease_s."""
RESERVATION_LEASE_S = 3.0
"""What a dead conductor had reserved is kept for so long: conductor.lease_s, prefill.lease_s."""
PARTIAL_GONE_S = max(OBJECT_LEASE_S, RESERVATION_LEASE_S) + 5.0
"""The promised bound: a request's partial block is gone so long after its end. Its removal waits for the lease of the last read, or, when
nobody is left to release it, for that of the reservation; they run at the same time."""
LAST_LOOK_S = 16.0
"""After a request's end the store looks for late objects of it for so long."""
PEER_TIMEOUT_S = 2.0
DECODE_PAGES = 100
BLOCK_TOKENS = 64
CHUNK_TOKENS = 128
SETTINGS = (
    "kvstore.pool_bytes=268435456",
    f"kv.block_tokens={BLOCK_TOKENS}",
    "kv.layer_group=1",
    f"prefill.chunk_tokens={CHUNK_TOKENS}",
    "prefill.chunking=fixed",
    "prefill.num_pages=160",
    "prefill.heartbeat_s=0.5",
    f"prefill.peer_timeout_s={PEER_TIMEOUT_S}",
    f"prefill.lease_s={RESERVATION_LEASE_S}",
    f"conductor.lease_s={RESERVATION_LEASE_S}",
    f"deploy.object_lease_s={OBJECT_LEASE_S}",
    f"decode.num_pages={DECODE_PAGES}",
    "conductor.local_prefill=false",  # what breaks are the phases of a prompt that a group prefills
)
STAGES = ("prefill-0-stage-0", "prefill-0-stage-1")

T = TypeVar("T")


def fault_model_dir(root: Path) -> Path:
    """Large enough that a prompt of some thousand tokens computes for a second or two."""
    return tiny_model_dir("llama", root, hidden_size=256, intermediate_size=768)


def random_prompt(length: int, *, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST_TEXT_ID, VOCAB_SIZE, (length,), generator=generator).tolist()


class Call:
    """One request in flight. What has arrived so far can be looked at from the test's thread."""

    def __init__(self, request_id: str, prompt: Sequence[int]) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.tokens: list[SampledToken] = []
        self.finish_reason = ""
        self.error: MoontideError | None = None
        self.began_s = time.monotonic()
        self.ended_s: float | None = None
        self._future: Future[None] | None = None

    async def run(self, chunks: AsyncGenerator[GeneratedChunk, None]) -> None:
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    self.tokens.extend(chunk.tokens)
                    self.finish_reason = chunk.finish_reason or self.finish_reason
        except MoontideError as error:
            self.error = error
        finally:
            self.ended_s = time.monotonic()

    def started(self, future: Future[None]) -> None:
        self._future = future

    def cancel(self) -> None:
        """Hang up; returns when the call is over on this side."""
        assert self._future is not None
        self._future.cancel()
        wait_for(lambda: self.is_over, f"{self.request_id} is cancelled", CALL_TIMEOUT_S)

    @property
    def is_over(self) -> bool:
        return self.ended_s is not None

    def wait(self, timeout_s: float) -> None:
        wait_for(lambda: self.is_over, f"{self.request_id} ends", timeout_s)

    def wait_tokens(self, num_tokens: int, timeout_s: float = 30.0) -> None:
        wait_for(
            lambda: len(self.tokens) >= num_tokens or self.is_over,
            f"{num_tokens} tokens of {self.request_id}",
            timeout_s,
        )
        assert not self.is_over, (
            f"over after {len(self.tokens)} tokens, error {self.error!r}: too short to be disturbed"
        )


class Bench:
    """A cluster, the calls to it, and its books."""

    def __init__(self, cluster: RunningCluster) -> None:
        self.cluster = cluster
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="calls", daemon=True)
        self._thread.start()
        self._clients = [self.run(_connect(address)) for address in cluster.conductor_addresses]
        self._client = self._clients[0]

    def close(self) -> None:
        for client in self._clients:
            self.run(client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the calls' loop and wait for it."""
        return self.spawn(work).result(60.0)

    @contextmanager
    def opened(self, manager: AbstractAsyncContextManager[T]) -> Iterator[T]:
        """An async context manager whose life is on the calls' loop."""
        value = self.run(manager.__aenter__())
        try:
            yield value
        finally:
            self.run(manager.__aexit__(None, None, None))

    def spawn(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def start(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        max_tokens: int = 16,
        timeout_s: float = 90.0,
        temperature: float = 0.0,
        conductor: int = 0,
        key: str = "",
        ttft_slo_s: float | None = None,
    ) -> Call:
        """Begin a request of `max_tokens` tokens, greedy unless told otherwise; `key` is its idempotency key."""
        call = Call(request_id, prompt)
        params = GenerateOptions(
            max_tokens=max_tokens, temperature=temperature, ignore_eos=True, logprobs=0, timeout_s=timeout_s
        )
        chunks = self._clients[conductor].generate(
            prompt, params=params, request_id=request_id, idempotency_key=key, ttft_slo_s=ttft_slo_s
        )
        call.started(self.spawn(call.run(chunks)))
        return call

    def timeline(self, request_id: str) -> Timeline | None:
        return self.run(self._client.timeline(request_id))

    def explain(self, request_id: str) -> moontide_pb2.Explanation | None:
        return self.run(self._client.explain(request_id))

    def status(self, conductor: int = 0) -> ClusterInfo:
        return self.run(self._clients[conductor].status())

    def set_role(self, node_ids: Sequence[str], role: str) -> list[str]:
        """Raises: RoleRefused."""
        return self.run(self._client.set_role(node_ids, role))

    def prefill(self, conductor: int = 0) -> prefill_pb2.PrefillStatus:
        """Raises: MoontideError while there is no group."""
        return self.run(_prefill_status(self._address("prefill", conductor)))

    def decode(self, conductor: int = 0) -> decode_pb2.DecodeStatus:
        return self.run(_decode_status(self._address("decode", conductor)))

    def store(self) -> PoolStats:
        return self.run(_store_stats(self.cluster.store_address))

    def retries(self, conductor: int = 0) -> float:
        """Attempts after a failure, of all requests of this conductor so far; a node that declined has not failed."""
        samples = self.cluster.metrics(f"conductor-{conductor}").items()
        return sum(
            value for name, value in samples if name.startswith("conductor_retries_total") and "Declined" not in name
        )

    def keys(self, prefix: str) -> list[str]:
        """Objects that the store's master knows."""
        connection = http.client.HTTPConnection(self.cluster.master_http_address, timeout=CALL_TIMEOUT_S)
        try:
            connection.request("GET", "/get_all_keys")
            response = connection.getresponse()
            keys = response.read().decode().split()
        finally:
            connection.close()
        assert response.status == 200
        return [key for key in keys if key.startswith(prefix)]

    def partial_keys(self, request_id: str = "") -> list[str]:
        """Objects of partial blocks, of one request or of all."""
        return self.keys(f"p/{request_id}")

    def wait_completed(self, call: Call) -> None:
        """Until the conductor knows that the prompt is sealed: the spans of every stage come with that news, and with nothing before it."""
        wait_for(lambda: "stage 0" in self._tracks(call), f"prefill of {call.request_id} is complete")

    def wait_books_agree(self, layout: KVLayout) -> None:
        """Until nothing is held and the store's master lists exactly the objects that the pool counts: those of its sealed blocks.

        What a slow writer put after its request's end is found at the store's last look, 16 s after that.
        """
        self.wait_idle()

        def agree() -> bool:
            stats, num_objects = self.store(), len(self.keys("b/") + self.keys("p/"))
            assert stats.used_bytes == stats.sealed_blocks * layout.block_bytes <= stats.capacity_bytes, stats
            return num_objects == stats.sealed_blocks * layout.num_groups

        wait_for(agree, "the pool counts every object", LAST_LOOK_S + 5.0)

    def wait_idle(self, timeout_s: float = 30.0) -> None:
        """Until nothing is held for any request on any node.

        The longest way back is the object lease: what decode has just read resists its removal for that long.
        """
        last: list[str] = []

        def is_idle() -> bool:
            last[:] = self._held()
            return not last

        try:
            wait_for(is_idle, "nothing is held", timeout_s)
        except AssertionError as error:
            raise AssertionError(f"still held after {timeout_s} s: {'; '.join(last)}") from error

    def _held(self) -> list[str]:
        """What is not back to the start, in words."""
        try:
            active = sum(self.status(idx).active_requests for idx in range(len(self._clients)))
        except MoontideError as error:
            return [f"{type(error).__name__}: {error}"]
        return [f"conductor requests {active}"] * (active > 0) + self.held_by_nodes()

    def held_by_nodes(self, conductor: int = 0) -> list[str]:
        """What nodes and store hold for requests, in words; where they are is asked of this conductor."""
        try:
            prefill, decode, store = self.prefill(conductor), self.decode(conductor), self.store()
        except (MoontideError, LookupError) as error:
            return [f"{type(error).__name__}: {error}"]
        held = {
            "prefill waiting": prefill.waiting,
            "prefill running": prefill.running,
            "prefill queued tokens": prefill.queued_tokens,
            "prefill pages": prefill.num_pages - prefill.free_pages,
            "prefill open puts": prefill.open_puts,
            "prefill steps": prefill.in_flight_steps,
            "prefill reservations": prefill.reservations,
            "decode waiting": decode.waiting,
            "decode pulling": decode.pulling,
            "decode running": decode.running,
            "decode pages": decode.num_pages - decode.free_pages,
            "store reservations": store.reservations,
            "store pins": store.pinned_blocks,
            "store removals": store.objects_to_remove,
            "partial objects": len(self.partial_keys()),
        }
        return [f"{name} {number}" for name, number in held.items() if number]

    def _tracks(self, call: Call) -> set[str]:
        assert not call.is_over, f"{call.request_id} is over: {call.error!r}"
        timeline = self.timeline(call.request_id)
        return {span.track for span in timeline.spans} if timeline is not None else set()

    def _address(self, role: str, conductor: int) -> str:
        """Raises: LookupError while no node of that role is alive."""
        for node in self.status(conductor).nodes:
            if node.role == role and node.alive:
                return node.address
        raise LookupError(f"no {role} is alive")


@contextmanager
def frozen(cluster: RunningCluster, *names: str) -> Iterator[None]:
    """These processes stand still inside the `with`; one that is killed there is none of ours any more."""
    pids = {name: cluster.kill(name, signal.SIGSTOP) for name in names}
    try:
        yield
    finally:
        for name, pid in pids.items():
            if cluster.pid(name) == pid:
                cluster.cont(name)


def data_client_pid(cluster: RunningCluster, store: str = "kvstore-0") -> int:
    """The process that owns the segment, the child of the store process."""
    pid = cluster.pid(store)
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


@contextmanager
def frozen_data_client(cluster: RunningCluster, store: str = "kvstore-0") -> Iterator[int]:
    """The process that owns the segment stands still inside the `with`, unless it is killed there; yields its id."""
    pid = data_client_pid(cluster, store)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield pid
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextmanager
def killed_for_long(cluster: RunningCluster, *names: str) -> Iterator[None]:
    """These processes are dead inside the `with`: what is started in their place is frozen before it can do anything."""
    old = {name: cluster.kill(name) for name in names}
    with ExitStack() as stack:
        for name in names:
            wait_for(lambda name=name: cluster.pid(name) not in (None, old[name]), f"{name} is started again")
            stack.enter_context(frozen(cluster, name))
        yield


async def _connect(address: str) -> MoontideClient:
    return MoontideClient(address)


async def _prefill_status(address: str) -> prefill_pb2.PrefillStatus:
    async with rpc.open_channel(address) as channel:
        stub = prefill_pb2_grpc.PrefillStub(channel)
        return await rpc.call(
            stub.GetStatus, prefill_pb2.PrefillStatusRequest(), timeout_s=CALL_TIMEOUT_S, peer="prefill"
        )


async def _decode_status(address: str) -> decode_pb2.DecodeStatus:
    async with rpc.open_channel(address) as channel:
        stub = decode_pb2_grpc.DecodeStub(channel)
        return await rpc.call(stub.GetStatus, decode_pb2.DecodeStatusRequest(), timeout_s=CALL_TIMEOUT_S, peer="decode")


async def _store_stats(address: str) -> PoolStats:
    client = StoreNodeClient(address, timeout_s=CALL_TIMEOUT_S)
    try:
        return await client.stats()
    finally:
        await client.close()
