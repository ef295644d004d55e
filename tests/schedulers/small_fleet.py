"""An outlook of a few nodes, for tests."""

import numpy as np

from schedulers.ratings import Outlook


def outlook(risk: dict[str, float], free: int = 8, **more: object) -> Outlook:
    """Nodes of 8 GPUs; the risk is that of the next hour, and grows by 0.1 with each further horizon."""
    n = len(risk)
    hour = np.array(list(risk.values()))
    values = {
        "rows": {name: row for row, name in enumerate(risk)},
        "risk": np.stack([hour + 0.1 * step for step in range(4)]),
        "state": np.zeros(n, np.int8),
        "gpus": np.full(n, 8),
        "free": np.full(n, free),
    }
    return Outlook(**(values | more))  # type: ignore[arg-type]
