"""A rule that drops claims of waiting requests for one pass if the sampled futures contradict them.

GPUs that idle for a request that will not start in time are lost to all jobs. So a claim that holds in fewer than
`LEAST_P` of the futures is dropped for one pass. After `MOST_DROPS` drops the claim is firm, so that later requests
cannot pass the request for ever.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

LEAST_P = 0.2
MOST_DROPS = 2  # of one request


@dataclass(slots=True)
class DroppedClaims:
    """The number of times that each waiting request's claim was dropped, and the claims to drop next."""

    _drops: dict[str, int] = field(default_factory=dict)
    _doubted: frozenset[str] = frozenset()

    def record_hold_probabilities(self, holds_p: Mapping[str, float | None]) -> None:
        """Record the probability that each request with a claim starts by the start of its claim.

        holds_p: request_id → the share of sampled futures in which it does. None if the futures do not include it.
        """
        self._doubted = frozenset(name for name, p in holds_p.items() if p is not None and p < LEAST_P)

    def choose_dropped_claims(self, waiting: Iterable[str]) -> frozenset[str]:
        """Return the ids of the requests whose claims are dropped in the next pass.

        A claim is dropped at most once for each recorded probability. waiting: ids of the waiting requests.
        """
        doubted, self._doubted = self._doubted, frozenset()
        if self._drops:
            still = set(waiting)
            self._drops = {name: drops for name, drops in self._drops.items() if name in still}
        dropped = frozenset(name for name in doubted if self._drops.get(name, 0) < MOST_DROPS)
        self._drops |= {name: self._drops.get(name, 0) + 1 for name in dropped}
        return dropped
