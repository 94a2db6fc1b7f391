"""Links: what arrives is what was sent, and anything that the log does not expect is an error of that link."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch

from prefill_node.link import ExpectedTensor, LinkError, LinkListener, LinkReceiver, LinkSender, tensor_bytes

EXPECTED = ExpectedTensor(
    epoch=5, seq=3, request_ids=["a"], first_tokens=[64], num_tokens=4, hidden_size=6, dtype="bfloat16"
)
TIMEOUT_S = 5.0


def hidden() -> torch.Tensor:
    return torch.arange(24, dtype=torch.float32).reshape(4, 6).to(torch.bfloat16)


@asynccontextmanager
async def linked(epoch: int = 5) -> AsyncIterator[tuple[LinkSender, LinkReceiver]]:
    listener = LinkListener(from_stage_idx=0, handshake_timeout_s=TIMEOUT_S)
    port = listener.start("127.0.0.1", 0)
    sender = receiver = None
    try:
        sender = await LinkSender.connect("127.0.0.1", port, stage_idx=0, epoch=epoch, timeout_s=TIMEOUT_S)
        receiver = await listener.connection(epoch, timeout_s=TIMEOUT_S)
        yield sender, receiver
    finally:
        for link in (sender, receiver):
            if link is not None:
                link.close()
        await listener.close()


async def receive(receiver: LinkReceiver, expected: ExpectedTensor) -> torch.Tensor:
    async with asyncio.timeout(TIMEOUT_S):
        header, payload_bytes = await receiver.next_header()
        return await receiver.payload(header, payload_bytes, expected, timeout_s=TIMEOUT_S)


async def test_tensors_arrive_bit_equal_and_in_order() -> None:
    async with linked() as (sender, receiver):
        for seq in (3, 4):
            expected = dataclasses.replace(EXPECTED, seq=seq)
            await sender.send(expected, tensor_bytes(hidden() * seq), timeout_s=TIMEOUT_S)
        for seq in (3, 4):
            arrived = await receive(receiver, dataclasses.replace(EXPECTED, seq=seq))
            assert arrived.dtype is torch.bfloat16
            assert torch.equal(arrived, hidden() * seq)


async def test_tensor_larger_than_the_socket_buffers_arrives() -> None:
    large = torch.randn(4096, 1024)
    expected = dataclasses.replace(EXPECTED, num_tokens=4096, hidden_size=1024, dtype="float32")
    async with linked() as (sender, receiver):
        _, arrived = await asyncio.gather(
            sender.send(expected, tensor_bytes(large), timeout_s=TIMEOUT_S), receive(receiver, expected)
        )
    assert torch.equal(arrived, large)


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": 4},
        {"seq": 2},
        {"seq": 4},
        {"request_ids": ["b"]},
        {"first_tokens": [0]},
        {"num_tokens": 2, "hidden_size": 12},
        {"dtype": "float32"},
    ],
    ids=str,
)
async def test_header_that_the_log_does_not_expect_is_an_error(change: dict[str, object]) -> None:
    async with linked() as (sender, receiver):
        await sender.send(dataclasses.replace(EXPECTED, **change), tensor_bytes(hidden()), timeout_s=TIMEOUT_S)
        with pytest.raises(LinkError, match="the log expects epoch 5 step 3"):
            await receive(receiver, EXPECTED)


async def test_payload_of_another_length_is_an_error() -> None:
    async with linked() as (sender, receiver):
        await sender.send(EXPECTED, tensor_bytes(hidden())[:-2], timeout_s=TIMEOUT_S)
        with pytest.raises(LinkError, match="46 bytes; 48 expected"):
            await receive(receiver, EXPECTED)


async def test_closed_link_is_an_error_also_while_idle() -> None:
    async with linked() as (sender, receiver):
        waiting = asyncio.create_task(receive(receiver, EXPECTED))
        await asyncio.sleep(0)
        sender.close()
        with pytest.raises(LinkError, match="closed the link"):
            await waiting


async def test_link_that_breaks_within_a_tensor_is_an_error() -> None:
    async with linked() as (sender, receiver):
        loop = asyncio.get_running_loop()
        header = EXPECTED.header().SerializeToString()
        frame = len(header).to_bytes(4, "little") + (48).to_bytes(8, "little") + header + b"\0" * 20
        await loop.sock_sendall(sender._connection, frame)
        sender.close()
        with pytest.raises(LinkError, match="closed the link"):
            await receive(receiver, EXPECTED)


async def test_peer_that_reads_nothing_is_an_error_of_the_sender() -> None:
    large = torch.zeros(8192, 4096)
    expected = dataclasses.replace(EXPECTED, num_tokens=8192, hidden_size=4096, dtype="float32")
    async with linked() as (sender, _):
        with pytest.raises(LinkError, match="takes nothing"):
            await sender.send(expected, tensor_bytes(large), timeout_s=0.2)


async def test_listener_gives_the_connection_of_the_epoch_and_drops_older_ones() -> None:
    listener = LinkListener(from_stage_idx=0, handshake_timeout_s=TIMEOUT_S)
    port = listener.start("127.0.0.1", 0)
    senders = [
        await LinkSender.connect("127.0.0.1", port, stage_idx=0, epoch=epoch, timeout_s=TIMEOUT_S) for epoch in (5, 6)
    ]
    receiver = await listener.connection(6, timeout_s=TIMEOUT_S)
    await senders[1].send(EXPECTED, tensor_bytes(hidden()), timeout_s=TIMEOUT_S)
    assert torch.equal(await receive(receiver, EXPECTED), hidden())
    with pytest.raises(LinkError, match="did not open"):
        await listener.connection(5, timeout_s=0.01)
    for link in (*senders, receiver):
        link.close()
    await listener.close()


async def test_stranger_on_the_link_port_is_dropped_and_the_stage_still_gets_in() -> None:
    listener = LinkListener(from_stage_idx=0, handshake_timeout_s=TIMEOUT_S)
    port = listener.start("127.0.0.1", 0)
    loop = asyncio.get_running_loop()
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.setblocking(False)
        await loop.sock_sendall(stranger, b"GET / HTTP/1.1\r\n\r\n")
        async with asyncio.timeout(TIMEOUT_S):
            with pytest.raises((AssertionError, ConnectionResetError)):
                assert await loop.sock_recv(stranger, 1), "closed"
    sender = await LinkSender.connect("127.0.0.1", port, stage_idx=0, epoch=1, timeout_s=TIMEOUT_S)
    receiver = await listener.connection(1, timeout_s=TIMEOUT_S)
    sender.close()
    receiver.close()
    await listener.close()


async def test_next_stage_that_is_not_there_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with pytest.raises(LinkError, match="cannot open the link"):
        await LinkSender.connect("127.0.0.1", port, stage_idx=0, epoch=1, timeout_s=TIMEOUT_S)


async def test_failed_accept_does_not_end_the_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    accept, failures = loop.sock_accept, [OSError("Too many open files"), ConnectionAbortedError("gone")]

    async def sometimes(listening: socket.socket) -> tuple[socket.socket, object]:
        if failures:
            raise failures.pop()
        return await accept(listening)

    monkeypatch.setattr(loop, "sock_accept", sometimes)
    async with linked() as (sender, receiver):
        await sender.send(EXPECTED, tensor_bytes(hidden()), timeout_s=TIMEOUT_S)
        assert torch.equal(await receive(receiver, EXPECTED), hidden())
    assert not failures
