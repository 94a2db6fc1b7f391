from __future__ import annotations

from collections.abc import Mapping, Sequence

from conductor.hot_blocks import HALF_LIFE_S, MAX_PREFIXES, Heat, Replication
from kvstore.block import BlockHash

ROOT = BlockHash(b"root" * 8)
SEND_S = 0.01
"""Of one block."""


def chain(name: str, num_blocks: int) -> list[BlockHash]:
    return [BlockHash(f"{name} {position}".encode().ljust(32)) for position in range(num_blocks)]


class Stores:
    """Which store holds how many leading blocks of a chain."""

    def __init__(self, **holdings: Sequence[BlockHash]) -> None:
        self._holdings = {node_id: set(hashes) for node_id, hashes in holdings.items()}

    def hit_blocks(self, hashes: Sequence[BlockHash]) -> Mapping[str, int]:
        def leading(held: set[BlockHash]) -> int:
            return next((i for i, each in enumerate(hashes) if each not in held), len(hashes))

        return {node_id: num for node_id, held in self._holdings.items() if (num := leading(held))}


def asked(heat: Heat, hashes: Sequence[BlockHash], hit_blocks: int, *, times: int, until_s: float = 0.0) -> None:
    for number in range(times):
        heat.note(ROOT, hashes, hit_blocks, until_s - (times - 1 - number) * 0.1)


def replications(heat: Heat, stores: Stores, fill: Mapping[str, float], now_s: float = 0.0) -> list[Replication]:
    return heat.replications(stores.hit_blocks, fill, block_send_s=SEND_S, now_s=now_s)


def test_a_prefix_that_keeps_its_holder_busy_goes_to_the_emptiest_other_store() -> None:
    document = chain("document", 16)
    heat = Heat()
    asked(heat, document, 16, times=300)
    (wanted,) = replications(heat, Stores(a=document), {"a": 0.1, "b": 0.9, "c": 0.5})[:1]
    assert wanted == Replication(root=ROOT, hashes=tuple(document), store_id="c")


def test_what_is_shared_is_copied_and_not_what_follows_it() -> None:
    shared = chain("shared", 8)
    heat = Heat()
    own: list[BlockHash] = []
    for number in range(1000):
        own = [*shared, *chain(f"question {number}", 8)]
        heat.note(ROOT, own, 16, number * 0.1)
    wanted = replications(heat, Stores(a=own), {"a": 0.0, "b": 0.0}, now_s=100.0)
    assert [each.hashes for each in wanted] == [tuple(shared)]


def test_cold_prefixes_and_light_ones_stay_where_they_are() -> None:
    document = chain("document", 16)
    heat = Heat()
    asked(heat, document, 16, times=300)
    stores, fill = Stores(a=document), {"a": 0.0, "b": 0.0}
    assert replications(heat, stores, fill)
    assert not replications(heat, stores, fill, now_s=20 * HALF_LIFE_S), "nobody has asked for it for long"
    light = Heat()
    asked(light, document, 1, times=300)
    assert not replications(light, stores, fill), "one block is sent in no time"


def test_copies_stop_at_what_the_heat_asks_for_and_prefixes_nobody_holds_are_none() -> None:
    document = chain("document", 16)
    heat = Heat()
    asked(heat, document, 16, times=200)
    fill = dict.fromkeys("abcdefgh", 0.0)
    held: dict[str, Sequence[BlockHash]] = {"a": document}
    while wanted := replications(heat, Stores(**held), fill):
        held |= {each.store_id: each.hashes for each in wanted}
    num_copies = sum(len(hashes) == len(document) for hashes in held.values())
    rate_per_s = 10.0
    assert 1 < num_copies <= rate_per_s * len(document) * SEND_S / 0.3 + 1
    assert not replications(heat, Stores(), fill)


def test_one_copy_at_a_time_goes_to_each_store() -> None:
    heat = Heat()
    documents = [chain(f"document {number}", 16) for number in range(5)]
    for document in documents:
        asked(heat, document, 16, times=300)
    held = [block for document in documents for block in document]
    wanted = replications(heat, Stores(a=held), {"a": 0.0, "b": 0.0, "c": 0.0})
    assert sorted(each.store_id for each in wanted) == ["b", "c"]


def test_memory_is_bounded() -> None:
    heat = Heat()
    for number in range(MAX_PREFIXES):
        heat.note(ROOT, chain(f"prompt {number}", 4), 4, float(number))
    assert len(heat) == MAX_PREFIXES
