"""The shapes of the newest requests. Placements leave room for these shapes."""

from fleetcast.placement.ledger.ledger import Ledger
from fleetcast.placement.machines.shapes import RecentShapes, ShapeDemand, make_member_shape, make_shape_demand

MAX_REQUESTS = 2000  # requests that are remembered
FEWEST = 50  # below it nothing is packed for
SOON, LATE = 10, 500  # changes of the ledger until it is made anew: a quarter of the requests, within these


class RecentDemand:
    """The demand of the newest decided and waiting requests in the ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._known: ShapeDemand | None = None
        self._models: tuple[str, ...] = ()
        self._next = 0  # the ledger's version from which on it is made anew
        self._requests = 0

    def __len__(self) -> int:
        """Return the number of requests behind the demand."""
        return self._requests

    def get_demand(self, models: tuple[str, ...]) -> ShapeDemand | None:
        """Return the demand for GPUs of these models, or None if there are too few requests."""
        if self._ledger.version >= self._next or models != self._models:
            self._models = models
            self._known = self._compute_demand()
            self._next = self._ledger.version + min(max(self._requests // 4, SOON), LATE)
        return self._known

    def _compute_demand(self) -> ShapeDemand | None:
        recent = RecentShapes(MAX_REQUESTS)
        waiting = [entry.request for entry in self._ledger.list_queue_entries()]
        for request in (*self._ledger.read_newest_requests(MAX_REQUESTS), *waiting[:MAX_REQUESTS]):
            recent.add(make_member_shape(request), request.members.desired)
        self._requests = len(recent)
        return make_shape_demand(recent.count_members(), self._models) if self._requests >= FEWEST else None
