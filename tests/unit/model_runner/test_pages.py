"""PageAllocator never gives one page to two."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from model_runner.pages import OutOfPages, PageAllocator

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
