"""Row numbers for a caller bound to queues: they begin at 1 and count only the caller's own rows.

The rows are decisions and audit lines. The ledger numbers the rows of all tenants together, so its
numbers would reveal how many rows other tenants have. The owner of each row is read from the ledger
once. Later reads add only new rows, so finding a caller's rows needs no search.
"""

import asyncio
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.requests import PlacementRequest
from fleetcast.placement.ledger.ledger import Ledger

BATCH = 2000  # rows read in one step of the event loop
DECISIONS = "SELECT cursor, body FROM decisions WHERE cursor > ? ORDER BY cursor LIMIT ?"
LINES = """
SELECT audit_id, coalesce(decisions.body, queue.body, actions.body) FROM audit
LEFT JOIN decisions USING (request_id) LEFT JOIN queue ON queue.request_id = audit.request_id
LEFT JOIN actions ON actions.action_id = audit.request_id
WHERE audit_id > ? ORDER BY audit_id LIMIT ?
"""


class _Owner(msgspec.Struct, frozen=True):
    """The fields of a request that determine its queue."""

    queue: str = "default"
    tenant: str = ""
    user: str = ""


_decode = msgspec.json.Decoder(_Owner).decode


class OwnNumbers:
    """The ledger's row numbers of all decisions or all audit lines, grouped by owner.

    `query`: selects the row numbers in order, with the body of each row's request.
    """

    def __init__(self, ledger: Ledger, query: str) -> None:
        self._ledger, self._query = ledger, query
        self._by_owner: dict[_Owner, array[int]] = defaultdict(lambda: array("q"))
        self._read_to = 0

    async def find_numbers(self, sees: Callable[[PlacementRequest], bool]) -> NDArray[np.int64]:
        """Return the ledger's numbers of the rows that a caller may see, in order: (k,) int64.

        sees: returns whether the caller may see a request.
        """
        while self._read_batch():
            await asyncio.sleep(0)  # others are answered in between
        own = [numbers for owner, numbers in self._by_owner.items() if sees(_make_owner_request(owner))]
        return np.sort(np.concatenate([np.array(numbers, np.int64) for numbers in own] or [np.empty(0, np.int64)]))

    def _read_batch(self) -> bool:
        """Read a batch of new rows, and return whether there may be more."""
        rows = self._ledger.read_rows(self._query, [self._read_to, BATCH])
        for number, body in rows:
            if (owner := _decode_owner(body)) is not None:
                self._by_owner[owner].append(number)
            self._read_to = number
        return len(rows) == BATCH


def _decode_owner(body: Any) -> _Owner | None:
    """Decode the owner of a row. Returns None for a damaged row, or a row without a request.

    A bound caller sees no row without an owner.
    """
    try:
        return _decode(body) if body is not None else None
    except (msgspec.MsgspecError, TypeError, UnicodeDecodeError):
        return None


def _make_owner_request(owner: _Owner) -> PlacementRequest:
    return PlacementRequest(request_id="-", queue=owner.queue, tenant=owner.tenant, user=owner.user)


def find_ledger_number(own: NDArray[np.int64], count: int) -> int:
    """Return the ledger's number of a caller's `count`th row. If it has fewer rows, return its last number.

    Returns 0 if `count` is 0 or the caller has no rows. own: (k,) the ledger's numbers of the caller's rows.
    """
    return int(own[min(count, len(own)) - 1]) if count and len(own) else 0


def find_own_numbers(own: NDArray[np.int64], numbers: Sequence[int]) -> list[int]:
    """Convert the ledger's row numbers into the caller's own numbers, which begin at 1.

    own: (k,) the ledger's numbers of all rows of the caller.
    """
    return [int(place) + 1 for place in np.searchsorted(own, np.asarray(numbers, np.int64))]
