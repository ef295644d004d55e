"""A reader of pages that have the lines of a known shape in another order.

Some exporters print their metrics in the order of a hash table, which differs at every scrape. The values
of such a page are returned in the order of the shape, so the columns of its samples do not change.
"""

import numpy as np
from numpy.typing import NDArray

from fleetcast.ingest.pages.page_shape import LineRole, PageShape, parse_values
from fleetcast.ingest.tally import SkipRule

_BY_PLACE = (LineRole.REFUSED, SkipRule.REPEATED, SkipRule.INCOMPLETE)  # what they mean depends on other lines
_HASH = ord("#")


class PageOrder:
    """The lines of a shape by prefix, to read a page that has them in another order.

    It reads no page if the meaning of the shape's lines depends on their place.
    """

    def __init__(self, shape: PageShape) -> None:
        self._lines = shape.lines
        self._rows: dict[bytes, int] = {}  # prefix without its blank → row of its value, -1 for one that is not read
        self._order = 0  # hash of the rows of the last page
        prefixes = shape.list_prefixes()
        if any(role in _BY_PLACE or not prefix.endswith(b" ") for prefix, role in prefixes):
            return
        wanted = 0
        for prefix, role in prefixes:
            self._rows[prefix[:-1]] = wanted if role is LineRole.WANTED else -1
            wanted += role is LineRole.WANTED
        self._wanted = wanted
        if len(self._rows) < len(prefixes):
            self._rows = {}

    def forget_order(self) -> None:
        """Forget the order of the last page. Call it after a page in the shape's order."""
        self._order = 0

    def read_values(self, page: bytes) -> NDArray[np.float64] | None:
        """Return (n,) float64, the wanted values of a page in the order of the shape.

        Returns None if the page has other lines or a broken value. Also returns None if the page has the same order as
        the previous page, because a new shape with this order reads the next pages faster.
        """
        if not self._rows:
            return None
        *lines, rest = page.split(b"\n")
        if rest or len(lines) != self._lines:
            return None
        parts = [line.rpartition(b" ") for line in lines if line and line[0] != _HASH]
        known = self._rows.get
        rows = [known(key) for key, _, _ in parts]
        if len(rows) != len(self._rows) or None in rows:
            return None
        if len({key for key, _, _ in parts}) < len(parts):
            return None
        before, self._order = self._order, hash(tuple(key for key, _, _ in parts))
        if before == self._order:
            return None
        at = [row for row in rows if row is not None and row >= 0]
        numbers = parse_values([value for row, (_, _, value) in zip(rows, parts, strict=True) if row != -1])
        if numbers is None:
            return None
        values = np.empty(self._wanted)
        values[at] = numbers
        return values
