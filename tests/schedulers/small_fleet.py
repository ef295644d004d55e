"""An outlook and a weather of a few nodes, and the demand for them, for tests."""

import numpy as np

from fleetcast.models.demand.rows import DemandRow
from fleetcast.schedulers.bands import BandRule, compute_next_levels
from fleetcast.schedulers.weather import DemandKey, Domains, JobOutlook, Load, Outlook, StartOutlook, Weather

NOW_MS = 1_760_000_000_000
MINUTE_MS = 60_000


def job(**more: object) -> JobOutlook:
    """A first attempt of somebody's training on two nodes, of which "high" has slowed it down before a checkpoint."""
    values: dict[str, object] = {
        **{"state": "running", "attempt": 1, "queue": "train", "user": "ada", "nodes": ("high", "low"), "gpus": 16},
        **{"started_ms": NOW_MS - 90 * MINUTE_MS, "left_p50_s": 600.0, "left_p90_s": 1200.0},
        **{"run_p50_s": 3600.0, "run_p90_s": 5400.0, "checkpoint_ms": NOW_MS - MINUTE_MS},
        **{"slow_since_ms": NOW_MS - 10 * MINUTE_MS, "culprit": "high", "why": "node high is 1.8 times slower"},
        "name": "train",
    }
    return JobOutlook(**(values | more))  # type: ignore[arg-type]


def start(p50_min: float, p90_min: float | None = None) -> StartOutlook:
    """Of a request at the head of its queue, in minutes from now."""
    p90_ms = None if p90_min is None else int(NOW_MS + p90_min * MINUTE_MS)
    return StartOutlook(None, int(NOW_MS + p50_min * MINUTE_MS), p90_ms, 1, "8 GPUs are free then")


JOBS = {"8": job(), "7": job(state="queued", nodes=(), slow_since_ms=None)}
STARTS = {"7": start(30, 65), "9": start(10)}


def outlook(risk: dict[str, float], free: int = 8, **more: object) -> Outlook:
    """Nodes of 8 GPUs; the risk is that of the next hour, and grows by 0.1 with each further horizon."""
    n = len(risk)
    hour = np.array(list(risk.values()))
    values = {
        "rows": {name: row for row, name in enumerate(risk)},
        "risk": np.stack([hour + 0.1 * step for step in range(4)]),
        "level": compute_next_levels(np.zeros(n, np.int8), hour, BandRule()),
        "state": np.zeros(n, np.int8),
        "gpus": np.full(n, 8),
        "free": np.full(n, free),
    }
    return Outlook(**(values | more))  # type: ignore[arg-type]


def wanted(now: float, *p90: float, issued_ms: int = NOW_MS) -> dict[DemandKey, DemandRow]:
    """The forecast of wanted GPUs in the pool `serve`, a minute, ten and an hour ahead."""
    row = DemandRow(
        queue="serve",
        class_="all",
        group="all",
        target="wanted",
        now=now,
        model="persistence",
        issued_ms=issued_ms,
        horizons_s=[60, 600, 3600][: len(p90)],
        quantiles=[0.5, 0.9],
        values=[[now] * len(p90), list(p90)],
        record=None,
    )
    return {DemandKey("serve", "all", "all", "wanted"): row}


def domains(**levels: list[str]) -> dict[str, Domains]:
    """By level, the domain of each node; empty: unknown."""
    made: dict[str, Domains] = {}
    for level, of in levels.items():
        names = tuple(sorted(set(of) - {""}))
        made[level] = Domains(names, np.array([names.index(name) if name else -1 for name in of], np.int32))
    return made


def weather(risk: dict[str, float] | None, sequence: int = 1, **more: object) -> Weather:
    """None: a board without any forecast. Nodes are as busy as they are risky; the pool `serve` is full, and will want
    a GPU more for each point of risk."""
    if risk is None:
        return Weather(sequence, NOW_MS, NOW_MS)
    now = 8.0 * len(risk)
    demand = wanted(now, now + 100 * float(np.nansum([*risk.values()])))
    busy = load({name: (p, p) for name, p in risk.items()})
    return Weather(sequence, NOW_MS, NOW_MS, outlook(risk, **more), demand, load=busy)  # type: ignore[arg-type]


def load(gpu: dict[str, tuple[float, float]], **hosts: dict[str, float]) -> Load:
    """By name, the median and the p90 of the GPUs' use; those of `cpu` and `memory` are their own p90."""
    rows = {name: row for row, name in enumerate(gpu)}
    known = ([hosts.get(kind, {}).get(name, np.nan) for name in rows] for kind in ("cpu", "memory"))
    return Load(rows, np.array([*gpu.values()]).reshape(-1, 2).T, *(np.array([row, row]) for row in known))
