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


class PrefixPages:
    """Pages with reference counts, whose full blocks stay findable by name after their last user has gone.

        in use (1 or more users) --release--> named: kept, oldest first out | unnamed: free

    A page with a name is never written again, so several prompts may read it. Names are hashes that cover the whole prefix.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._users: dict[int, int] = {}
        self._kept: dict[int, None] = {}
        """Named pages without a user, the next one to be given away first."""
        self._page_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Pages that `take` can hand out: those that nobody uses."""
        return len(self._free) + len(self._kept)

    def take(self, num_pages: int, *, names: Sequence[bytes] = ()) -> tuple[list[int], int]:
        """Take `num_pages` pages, the first of them those that hold the leading `names`, if they are here.

        Returns: the pages and how many of the first ones hold their block already.
        Raises: OutOfPages if too few are free; nothing is taken then.
        """
        found = self._find(names[:num_pages])
        num_new = num_pages - len(found)
        num_idle = sum(page in self._kept for page in found)
        if num_new > self.num_free - num_idle:
            raise OutOfPages(
                f"{num_new} pages are wanted and {self.num_free - num_idle} of {self.num_pages} are free; free some first"
            )
        for page in found:
            self._kept.pop(page, None)
            self._users[page] = self._users.get(page, 0) + 1
        pages = found + [self._take_free() for _ in range(num_new)]
        self._users.update(dict.fromkeys(pages[len(found) :], 1))
        return pages, len(found)

    def release(self, pages: Sequence[int], *, names: Sequence[bytes] = ()) -> None:
        """Give pages back; the first ones hold complete blocks of these names, which are kept while there is room."""
        assert len(set(pages)) == len(pages), f"a page is freed twice: {pages}"
        assert all(page in self._users for page in pages), f"release of pages not in use: {pages}"
        # The end of a prompt first: it is of use to the fewest others, and a prefix has to stay contiguous.
        for idx in reversed(range(len(pages))):
            page = pages[idx]
            if idx < len(names) and page not in self._name_of and names[idx] not in self._page_of:
                self._page_of[names[idx]], self._name_of[page] = page, names[idx]
            self._users[page] -= 1
            if not self._users[page]:
                del self._users[page]
                if page in self._name_of:
                    self._kept[page] = None
                else:
                    self._free.append(page)

    def check_invariants(self) -> None:
        """Every page is free, kept or in use, exactly once; names and pages agree."""
        places = [*self._free, *self._kept, *self._users]
        assert sorted(places) == list(range(self.num_pages)), "a page is lost, or in two places"
        assert {page: name for name, page in self._page_of.items()} == self._name_of, "names and pages differ"
        assert not self._name_of.keys() & set(self._free), "a free page has a name"
        assert self._kept.keys() <= self._name_of.keys(), "a kept page has no name"

    def _find(self, names: Sequence[bytes]) -> list[int]:
        found: list[int] = []
        for name in names:
            page = self._page_of.get(name)
            if page is None:
                break
            found.append(page)
        return found

    def _take_free(self) -> int:
        if self._free:
            return self._free.pop()
        page = next(iter(self._kept))
        del self._kept[page]
        del self._page_of[self._name_of.pop(page)]
        return page
