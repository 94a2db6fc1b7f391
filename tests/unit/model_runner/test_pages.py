"""PageAllocator never gives one page to two."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from model_runner.pages import OutOfPages, PageAllocator, PrefixPages

NUM_PAGES = 12


class AllocatorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(NUM_PAGES)
        self.held: list[list[int]] = []

    @rule(n=st.integers(0, NUM_PAGES + 1))
    def allocate(self, n: int) -> None:
        free = self.allocator.num_free
        if n > free:
            with pytest.raises(OutOfPages, match=f"{free} of {NUM_PAGES} are free"):
                self.allocator.allocate(n)
            return
        pages = self.allocator.allocate(n)
        assert len(pages) == n
        self.held.append(pages)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.held:
            self.allocator.free(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @invariant()
    def every_page_is_held_once_or_free(self) -> None:
        self.allocator.check_invariants()
        pages = [page for held in self.held for page in held]
        assert len(pages) == len(set(pages)) == NUM_PAGES - self.allocator.num_free


TestAllocator = AllocatorMachine.TestCase


def test_page_that_is_freed_twice_is_a_bug() -> None:
    allocator = PageAllocator(3)
    pages = allocator.allocate(2)
    allocator.free(pages)
    with pytest.raises(AssertionError, match="not in use"):
        allocator.free(pages)
    pages = allocator.allocate(1)
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.free(pages * 2)


# PrefixPages: shared, named and counted.


def test_named_pages_are_found_again_and_shared() -> None:
    pages = PrefixPages(6)
    first, held = pages.take(3, names=[b"a", b"b"])
    assert held == 0
    pages.release(first, names=[b"a", b"b"])
    assert pages.num_free == 6
    second, held = pages.take(3, names=[b"a", b"b", b"c"])
    assert held == 2
    assert second[:2] == first[:2]
    third, held = pages.take(3, names=[b"a", b"x"])
    assert (third[0], held) == (first[0], 1), "two prompts read one page"
    assert pages.num_free == 1
    pages.release(second)
    pages.release(third, names=[b"a", b"x"])
    pages.check_invariants()
    assert pages.take(2, names=[b"a", b"x"])[1] == 2


def test_oldest_and_deepest_blocks_make_room_first() -> None:
    pages = PrefixPages(4)
    old, _ = pages.take(2)
    pages.release(old, names=[b"a", b"b"])
    new, _ = pages.take(2)
    pages.release(new, names=[b"c", b"d"])
    taken, _ = pages.take(1)
    assert taken == [old[1]], "the end of the oldest prompt"
    assert pages.take(1, names=[b"a"])[1] == 1
    pages.check_invariants()


def test_too_few_pages_take_nothing() -> None:
    pages = PrefixPages(3)
    kept, _ = pages.take(2)
    pages.release(kept, names=[b"a", b"b"])
    with pytest.raises(OutOfPages):
        pages.take(4, names=[b"a", b"b"])
    assert pages.num_free == 3
    pages.check_invariants()


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3), st.booleans()), max_size=40))
def test_page_counts_add_up_whatever_happens(moves: list[tuple[int, int, bool]]) -> None:
    """Each move takes pages for one of four prompts, and then perhaps gives back the oldest ones in use."""
    pages = PrefixPages(12)
    in_use: list[tuple[list[int], list[bytes]]] = []
    for num_pages, prompt, is_release in moves:
        names = [b"%d/%d" % (prompt, idx) for idx in range(num_pages)]
        try:
            taken, held = pages.take(num_pages, names=names)
        except OutOfPages:
            continue
        own = set(taken[held:])
        assert all(own.isdisjoint(other) for other, _ in in_use), "a page was written under its reader"
        in_use.append((taken, names))
        if is_release:
            old, old_names = in_use.pop(0)
            pages.release(old, names=old_names)
        pages.check_invariants()
    for taken, names in in_use:
        pages.release(taken, names=names)
    pages.check_invariants()
    assert pages.num_free == 12
