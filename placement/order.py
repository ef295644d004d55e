"""The order of requests within a leaf of the queue: who is next.

`fifo`      first come, first served
`shortest`  the least area, GPUs x run time, first; who has waited as long as its bound goes before all of its priority,
            by arrival. Area and not time alone: what a job costs the others is the room that it takes times how long
            (Smith's rule; Hu et al., "QSSF", SC 2021). The bound is a bound, not a discount of the key by the wait,
            which would make everybody wait.

A user who cuts a job into small ones gains by that within a leaf: users as leaves, and what they are charged, stand
against it.

The run time of the area is whichever of a forecast, the user's limit, and 1 (GPUs alone) last won the contest on the
queue's own past (`placement.contest`). The limit where there is none, and 1, are what a run time is worth nothing for.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from placement.rows import NEVER

OrderName = Literal["fifo", "shortest"]
RunTerm = Literal["forecast", "limit", "one"]
ORDERS: tuple[OrderName, ...] = get_args(OrderName)
RUN_TERMS: tuple[RunTerm, ...] = get_args(RunTerm)
DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Order:
    """How a leaf is ordered. max_wait_s: nobody is passed by others of its priority once it has waited so long."""

    name: OrderName = "fifo"
    max_wait_s: float = DAY_S
    run_term: RunTerm = "limit"

    def key(self, gpus: float, forecast_s: float | None, limit_s: float | None) -> float:
        """What requests of one priority are sorted by before their arrival.

        >>> Order("shortest", run_term="limit").key(8, 60.0, 3600.0)
        28800.0
        """
        return 0.0 if self.name == "fifo" else area(self.run_term, gpus, forecast_s, limit_s)

    def bound_s(self, tolerated_wait_s: float | None = None) -> float:
        """How long a request may be passed by others: what it tolerates, at most `max_wait_s`; first come, for ever."""
        if self.name == "fifo":
            return NEVER
        return self.max_wait_s if tolerated_wait_s is None else min(self.max_wait_s, tolerated_wait_s)


def area(term: RunTerm, gpus: float, forecast_s: float | None, limit_s: float | None) -> float:
    """GPU-seconds by a term; the limit where nothing is forecast, a day where there is no limit either.

    >>> area("one", 8, 60.0, None), area("forecast", 8, None, None)
    (8.0, 691200.0)
    """
    if term == "one":
        return float(gpus)
    limit_s = DAY_S if limit_s is None else limit_s
    return gpus * (limit_s if term == "limit" or forecast_s is None else min(forecast_s, limit_s))
