"""PageAllocator: which pages of a paged K/V cache are free. Knows nothing of tensors or requests."""

from collections.abc import Sequence

from moontide.errors import NoCapacity


class OutOfPages(NoCapacity):
    """Fewer pages are free, or in a block table, than the work needs."""


class PageAllocator:
    """Hands out page numbers in [0, num_pages). The last pages given back are the first to be used again (warm caches)."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, n: int) -> list[int]:
        """Return `n` pages that nobody else holds. Raises: OutOfPages if fewer are free; nothing is taken then."""
        if n > len(self._free):
            raise OutOfPages(
                f"{n} pages are wanted and {len(self._free)} of {self.num_pages} are free; free some first"
            )
        split = len(self._free) - n
        pages = self._free[split:][::-1]
        del self._free[split:]
        self._used.update(pages)
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Give pages back. Each must be in use: a page that is freed twice would serve two requests at once."""
        assert len(set(pages)) == len(pages), f"a page is freed twice: {pages}"
        assert self._used.issuperset(pages), f"free of pages not in use: {pages}"
        self._used.difference_update(pages)
        self._free.extend(reversed(pages))

    def check_invariants(self) -> None:
        """free + used = total, each page once."""
        assert len(self._free) + len(self._used) == self.num_pages, "a page is lost"
        assert set(self._free) | self._used == set(range(self.num_pages)), "a page is both free and used"
