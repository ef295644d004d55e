"""The order of requests within a leaf of the queue tree.

`fifo`      first come, first served
`shortest`  the smallest area, GPUs x run time, first. The order uses the area rather than the time alone,
            because a job takes room from the others for its whole run time (Smith's rule; Hu et al., "QSSF",
            SC 2021). A request that has waited as long as its bound comes first, by arrival, until there is a
            head (`fleetcast.placement.play.backfill`). If waits discounted the key instead, every request
            would have to wait.

A user can gain within a leaf by cutting a job into small ones. Charges, and one leaf for each user,
counteract this.

The run time in the area is the user's limit, or a day without one. If no request has a limit, GPUs
alone decide the order. `fleetcast evaluate queue` compares this with forecasts of the run time.
"""

DAY_S = 86_400.0


def compute_area(gpus: float, limit_s: float | None) -> float:
    """Return the GPU-seconds that a request may use: its GPUs times its limit, or a day without a limit.

    >>> compute_area(8, 60.0), compute_area(8, None)
    (480.0, 691200.0)
    """
    return gpus * (DAY_S if limit_s is None else limit_s)
