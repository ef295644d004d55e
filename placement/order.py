"""The order of requests within a leaf of the queue: who is next.

`fifo`      first come, first served
`shortest`  the least area, GPUs x run time, first. Area and not time alone: what a job costs the others is the room
            that it takes times how long (Smith's rule; Hu et al., "QSSF", SC 2021). Who has waited as long as its bound
            comes first, by arrival, until somebody is the head (`placement.backfill`). A bound, not a discount of the
            key by the wait, which would make everybody wait.

A user who cuts a job into small ones gains by that within a leaf: users as leaves, and what they are charged, stand
against it.

The run time of the area is the user's limit, a day where there is none: then GPUs alone order. `fleetcast evaluate
queue` plays forecasts beside it.
"""

DAY_S = 86_400.0


def area(gpus: float, limit_s: float | None) -> float:
    """GPU-seconds that a request may take.

    >>> area(8, 60.0), area(8, None)
    (480.0, 691200.0)
    """
    return gpus * (DAY_S if limit_s is None else limit_s)
