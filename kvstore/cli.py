"""`python -m kvstore stats|ls|verify|evict`: an operator's look into a store process that runs.

Exit codes: 0 done; 1 failed, or `verify` found bad blocks; 2 wrong option.
"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc.aio

from kvstore.block import BLOCK_HASH_BYTES
from kvstore.config import check_address
from kvstore.index import split_hashes
from moontide import rpc
from moontide.errors import ConfigError, MoontideError, NodeLost
from moontide.tls import Tls, add_client_arguments, client_config
from moontide_proto.v1 import kvstore_pb2 as pb
from moontide_proto.v1 import kvstore_pb2_grpc as pb_grpc


@dataclass(frozen=True)
class Answer:
    """What a command prints: `data` with --json, else `text`."""

    data: dict[str, Any]
    text: str
    is_bad: bool = False


Command: TypeAlias = Callable[[pb_grpc.KvStoreStub, argparse.Namespace], Awaitable[Answer]]


def main(argv: Sequence[str]) -> int:
    """Run one command; returns the exit code."""
    args = parser().parse_args(argv)
    try:
        check_address("--address", args.address)
        answer = asyncio.run(ask(args))
        print(json.dumps(answer.data) if args.json else answer.text, flush=True)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except MoontideError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output is gone, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return int(answer.is_bad)


async def ask(args: argparse.Namespace) -> Answer:
    """What the store process at `args.address` answers. Raises: MoontideError."""
    command: Command = COMMANDS[args.command]
    async with rpc.open_channel(args.address, Tls.load(client_config(args), serves=False)) as channel:
        try:
            return await command(pb_grpc.KvStoreStub(channel), args)  # type: ignore[no-untyped-call]
        except grpc.aio.AioRpcError as error:
            raised = rpc.from_rpc_error(error, f"kvstore {args.address}")
            if isinstance(raised, NodeLost) and not rpc.names_error(error):
                raised = NodeLost(f"{raised}; give the gRPC address of a store process that runs (`moontide status`)")
            raise raised from error


async def stats(stub: pb_grpc.KvStoreStub, args: argparse.Namespace) -> Answer:
    """What the store process holds."""
    reply: pb.KvStoreStats = await stub.GetStats(pb.KvStoreStatsRequest(), timeout=args.timeout)
    data = {field.name: getattr(reply, field.name) for field in pb.KvStoreStats.DESCRIPTOR.fields}
    rows = [
        ["node", reply.node_id],
        ["boot", reply.boot_id],
        ["pool", _share(reply.used_bytes, reply.capacity_bytes)],
        ["sealed blocks", f"{reply.sealed_blocks:,} ({reply.replica_blocks:,} copied from other hosts)"],
        ["pinned blocks", f"{reply.pinned_blocks:,} by {reply.reservations:,} reservations"],
        ["objects to remove", f"{reply.objects_to_remove:,}"],
        ["SSD", _ssd(reply)],
    ]
    return Answer(data, _table(rows))


async def ls(stub: pb_grpc.KvStoreStub, args: argparse.Namespace) -> Answer:
    """Blocks, in the order of arrival."""
    blocks = []
    rows = [["block", "parent", "size", "tier", "state", "pins", "uses", "idle"]]
    async for block in stub.ListBlocks(pb.ListBlocksRequest(max_blocks=args.limit), timeout=args.timeout):
        blocks.append(
            {
                "hash": block.hash.hex(),
                "parent_hash": block.parent_hash.hex(),
                "num_bytes": block.num_bytes,
                "tier": block.tier,
                "is_sealed": block.is_sealed,
                "references": block.references,
                "uses": block.uses,
                "idle_s": round(block.idle_s, 3),
            }
        )
        rows.append(
            [
                block.hash.hex(),
                block.parent_hash.hex()[:8],
                _size(block.num_bytes),
                block.tier,
                "sealed" if block.is_sealed else "open",
                str(block.references),
                str(block.uses),
                f"{block.idle_s:.0f} s",
            ]
        )
    return Answer({"blocks": blocks}, _table(rows) if blocks else "no blocks")


async def verify(stub: pb_grpc.KvStoreStub, args: argparse.Namespace) -> Answer:
    """Read sealed blocks back and compare them with their checksums."""
    request = pb.VerifyRequest(max_blocks=args.limit, drop_damaged=args.drop_damaged)
    reply: pb.VerifyReply = await stub.Verify(request, timeout=args.timeout)
    bad = [block_hash.hex() for block_hash in split_hashes(reply.bad_hashes)]
    data = {
        "num_blocks": reply.num_blocks,
        "num_missing": reply.num_missing,
        "num_damaged": reply.num_damaged,
        "num_unread": reply.num_unread,
        "bad_hashes": bad,
    }
    text = (
        f"{reply.num_blocks:,} blocks read, {reply.num_missing:,} missing, {reply.num_damaged:,} damaged, "
        f"{reply.num_unread:,} not readable"
    )
    return Answer(data, "\n".join([text, *bad]), is_bad=bool(bad))


async def evict(stub: pb_grpc.KvStoreStub, args: argparse.Namespace) -> Answer:
    """Drop blocks that nobody uses; other hosts stop counting on them first."""
    request = pb.EvictRequest(block_hashes=b"".join(args.block), num_bytes=args.bytes or 0)
    reply: pb.EvictReply = await stub.Evict(request, timeout=args.timeout)
    data = {"num_blocks": reply.num_blocks, "num_bytes": reply.num_bytes, "num_pinned": reply.num_pinned}
    text = f"{reply.num_blocks:,} blocks evicted ({_size(reply.num_bytes)})"
    return Answer(data, text + (f", {reply.num_pinned:,} stay because requests use them" if reply.num_pinned else ""))


COMMANDS: dict[str, Command] = {"stats": stats, "ls": ls, "verify": verify, "evict": evict}
_TIMEOUT_S = {"stats": 10.0, "ls": 60.0, "verify": 3600.0, "evict": 60.0}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    root = argparse.ArgumentParser(prog="python -m kvstore", description="Look into a store process that runs.")
    commands = root.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        one = commands.add_parser(name, help=command.__doc__, description=command.__doc__)
        one.add_argument("--address", required=True, metavar="HOST:PORT", help="gRPC address of the store process")
        add_client_arguments(one)
        one.add_argument("--json", action="store_true", help="print one JSON object")
        one.add_argument(
            "--timeout",
            type=_seconds,
            default=_TIMEOUT_S[name],
            metavar="SECONDS",
            help="longest wait (default %(default)s)",
        )
        if name in ("ls", "verify"):
            default = 100 if name == "ls" else 0
            one.add_argument(
                "--limit", type=_count, default=default, metavar="N", help="most blocks, 0: all (default %(default)s)"
            )
        if name == "verify":
            one.add_argument(
                "--drop-damaged", action="store_true", help="evict what is missing or damaged, and all that follows it"
            )
        if name == "evict":
            which = one.add_mutually_exclusive_group(required=True)
            which.add_argument("--bytes", type=_count, metavar="N", help="the coldest blocks, N bytes or more")
            which.add_argument(
                "--block",
                type=_block_hash,
                action="append",
                default=[],
                metavar="HASH",
                help="this block and all that follow it; may be repeated",
            )
    return root


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 0 or more")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no time; give seconds above 0")
    return seconds


def _block_hash(text: str) -> bytes:
    try:
        block_hash = bytes.fromhex(text)
    except ValueError:
        block_hash = b""
    if len(block_hash) != BLOCK_HASH_BYTES:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no block; give all {2 * BLOCK_HASH_BYTES} hex digits that ls shows"
        )
    return block_hash


def _ssd(reply: pb.KvStoreStats) -> str:
    if not reply.ssd_capacity_bytes:
        return "none"
    return f"{_share(reply.ssd_used_bytes, reply.ssd_capacity_bytes)}, {reply.ssd_blocks:,} blocks"


def _share(used_bytes: int, capacity_bytes: int) -> str:
    return f"{_size(used_bytes)} of {_size(capacity_bytes)} ({used_bytes / max(1, capacity_bytes):.0%})"


def _size(num_bytes: int) -> str:
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{num_bytes} B" if unit == "B" else f"{size:.1f} {unit}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
