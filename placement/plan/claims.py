"""A rule that drops the reservation of the queue's head for one pass if the sampled futures contradict it.

Here such a reservation is called a claim. GPUs that idle for a head that will not start in time are lost
to all jobs. So a claim that holds in fewer than `LEAST_P` of the futures is dropped for one pass. After
`MOST_DROPS` drops the claim is firm, so that later requests cannot pass the head for ever.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

LEAST_P = 0.2
MOST_DROPS = 2  # of one request


@dataclass(slots=True)
class Claims:
    """The number of times that each waiting request's claim was dropped, and the claim to drop next."""

    _drops: dict[str, int] = field(default_factory=dict)
    _doubted: str = ""

    def record_hold_probability(self, request_id: str, holds_p: float | None) -> None:
        """Record the probability that the head starts by its shadow time.

        holds_p: the share of sampled futures in which it does. None if the futures do not include the head.
        """
        self._doubted = request_id if holds_p is not None and holds_p < LEAST_P else ""

    def choose_dropped_claim(self, waiting: Iterable[str]) -> str:
        """Return the id of the request whose claim is dropped in the next pass, or "" if no claim is dropped.

        A claim is dropped at most once for each recorded probability. waiting: ids of the waiting requests.
        """
        request_id, self._doubted = self._doubted, ""
        if self._drops:
            still = set(waiting)
            self._drops = {name: drops for name, drops in self._drops.items() if name in still}
        drops = self._drops.get(request_id, 0)
        if not request_id or drops >= MOST_DROPS:
            return ""
        self._drops[request_id] = drops + 1
        return request_id
