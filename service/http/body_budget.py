"""A memory budget that the bodies of all requests share, both as sent and as unpacked.

Each request has a lease, which counts the bytes of its body. The request's endpoint releases the lease.
"""

import math
import threading
from collections.abc import Callable

from fleetcast.service.http.problems import Problem

RETRY_AFTER_S = 5
CLOSING = {"connection": "close"}  # a rest of the body that was not read is no next request


class BodyBudget:
    """A budget of `limit_bytes` for all leases together.

    Its methods may be called from several threads. `refused` is called for each refusal.
    """

    def __init__(self, limit_bytes: float = math.inf, refused: Callable[[], None] = lambda: None) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.refused = refused
        self._lock = threading.Lock()

    def make_lease(self) -> "Lease":
        return Lease(self)

    def try_reserve_bytes(self, size_bytes: int) -> bool:
        """Reserve bytes of the budget. Returns False if there is not enough room."""
        with self._lock:
            if self.used_bytes + size_bytes > self.limit_bytes:
                return False
            self.used_bytes += size_bytes
            return True

    def return_bytes(self, size_bytes: int) -> None:
        with self._lock:
            self.used_bytes -= size_bytes


class Lease:
    """The bytes of the budget that one request's body uses.

    A lease cannot grow after `release`. So a thread that still unpacks the body fails and ends.
    """

    def __init__(self, budget: BodyBudget) -> None:
        self.budget = budget
        self.size_bytes = 0
        self._released = False
        self._lock = threading.Lock()

    def grow(self, size_bytes: int) -> None:
        """Reserve more bytes of the budget.

        Raises problem 413 if the body is larger than the whole budget. Raises problem 503 if other bodies use
        the room.
        """
        with self._lock:
            wanted_bytes = self.size_bytes + size_bytes
            if not self._released and self.budget.try_reserve_bytes(size_bytes):
                self.size_bytes = wanted_bytes
                return
        self.budget.refused()
        if wanted_bytes > self.budget.limit_bytes:
            detail = (
                f"the body takes {wanted_bytes} bytes, at most {self.budget.limit_bytes} are accepted of all together"
            )
            raise Problem(413, "too_large", detail, headers=CLOSING)
        detail = f"the bodies of other requests take up the {self.budget.limit_bytes} bytes that there are: try again"
        raise Problem(503, "busy", detail, headers={"retry-after": str(RETRY_AFTER_S), **CLOSING})

    def release(self) -> None:
        """Return all bytes to the budget. A second call changes nothing."""
        with self._lock:
            self.budget.return_bytes(self.size_bytes)
            self.size_bytes, self._released = 0, True
