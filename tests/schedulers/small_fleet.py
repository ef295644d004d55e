"""An outlook and a weather of a few nodes, for tests."""

import numpy as np

from schedulers.bands import BandRule, step_levels
from schedulers.weather import Domains, Outlook, Weather

NOW_MS = 1_760_000_000_000


def outlook(risk: dict[str, float], free: int = 8, **more: object) -> Outlook:
    """Nodes of 8 GPUs; the risk is that of the next hour, and grows by 0.1 with each further horizon."""
    n = len(risk)
    hour = np.array(list(risk.values()))
    values = {
        "rows": {name: row for row, name in enumerate(risk)},
        "risk": np.stack([hour + 0.1 * step for step in range(4)]),
        "level": step_levels(np.zeros(n, np.int8), hour, BandRule()),
        "state": np.zeros(n, np.int8),
        "gpus": np.full(n, 8),
        "free": np.full(n, free),
    }
    return Outlook(**(values | more))  # type: ignore[arg-type]


def domains(**levels: list[str]) -> dict[str, Domains]:
    """By level, the domain of each node; empty: unknown."""
    made: dict[str, Domains] = {}
    for level, of in levels.items():
        names = tuple(sorted(set(of) - {""}))
        made[level] = Domains(names, np.array([names.index(name) if name else -1 for name in of], np.int32))
    return made


def weather(risk: dict[str, float] | None, sequence: int = 1, **more: object) -> Weather:
    """None: a board without scores."""
    nodes = None if risk is None else outlook(risk, **more)  # type: ignore[arg-type]
    return Weather(sequence, NOW_MS, NOW_MS, nodes)
