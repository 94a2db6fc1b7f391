"""Damage to stored K/V: a byte of every block that has a certain position, in the memory of a process or in the files of an SSD tier."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from model_runner.paced import paced_kv

LAYER_IDX, POSITION = 3, 17
"""A paced model has the same K/V there in every prompt, and nowhere else."""


def damage_memory(pid: int, *, head_dim: int) -> int:
    """In all memory that the process can write; returns how many bytes are other ones now."""
    pattern = _pattern(head_dim)
    number = 0
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        for start, end in _writable(pid):
            memory.seek(start)
            try:
                data = memory.read(end - start)
            except OSError:
                continue
            for offset in _found(data, pattern):
                memory.seek(start + offset)
                memory.write(bytes([pattern[0] ^ 1]))
                number += 1
    return number


def damage_files(directory: Path, *, head_dim: int) -> int:
    """In all files below it; returns how many bytes are other ones now."""
    pattern = _pattern(head_dim)
    number = 0
    for path in (each for each in directory.rglob("*") if each.is_file()):
        with path.open("r+b") as file:
            for offset in _found(file.read(), pattern):
                file.seek(offset)
                file.write(bytes([pattern[0] ^ 1]))
                number += 1
    return number


def _pattern(head_dim: int) -> bytes:
    kv_H = paced_kv(LAYER_IDX, torch.tensor([POSITION]), head_dim=head_dim)[0].to(torch.bfloat16)
    return bytes(kv_H.view(torch.uint8).numpy())


def _found(data: bytes, pattern: bytes) -> Iterator[int]:
    offset = data.find(pattern)
    while offset >= 0:
        yield offset
        offset = data.find(pattern, offset + len(pattern))


def _writable(pid: int) -> Iterator[tuple[int, int]]:
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        addresses, rights = line.split()[:2]
        if rights.startswith("rw"):
            start, end = (int(part, 16) for part in addresses.split("-"))
            yield start, end
