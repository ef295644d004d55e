"""The loads of running jobs on racks, power domains, rail groups and stores, for `/v1/spikes`.

They are computed from the windows of the jobs' readings.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fleetcast.features.episodes import find_episodes
from fleetcast.features.job_window import JobWindow
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.topology import Level, Topology
from fleetcast.models.jobs.level import shift_to_present_level
from fleetcast.models.jobs.renewal import predict_next_beginning
from fleetcast.models.jobs.spikes import Burst, Domain, JobLoad
from fleetcast.models.jobs.template import lock_phase, predict_ahead
from fleetcast.service.answers.fingerprints import ExpectedReading

UNNAMED = "unnamed"
AHEAD_S = (300, 900)
RECENT_S = 600.0
LEVELS = (0.1, 0.5, 0.9)
METRICS = ("power_w", "nvlink_tx_bytes_per_s", "ib_tx_bytes_per_s")

Array = NDArray[np.float64]


def compute_domain_shares(attempt: JobAttempt, topology: Topology, rows: Mapping[str, int]) -> dict[Domain, float]:
    """Return domain → share of the attempt's nodes in this domain. rows: node name → row."""
    found: dict[Domain, float] = {}
    hosts = [rows[host] for host in attempt.hosts if host in rows]
    for row in hosts:
        for domain in _list_domains(topology, row):
            found[domain] = found.get(domain, 0.0) + 1 / len(hosts)
    return found


def _list_domains(topology: Topology, row: int) -> list[Domain]:
    found = []
    for kind, level in (("rack", Level.RACK), ("rail", Level.RAIL_GROUP)):
        at = int(topology.domain[level][row])
        if at >= 0:
            found.append((kind, topology.domain_names[level][at]))
    power = topology.nodes[row].power_domain
    return [*found, ("power", power)] if power else found


def make_job_load(
    attempt: JobAttempt, window: JobWindow | None, shares: Mapping[Domain, float], now_ms: int
) -> JobLoad:
    """Make the load of one attempt from its readings and its next checkpoint.

    The readings are those of the last RECENT_S seconds, shifted to their present level. window: the readings
    of the whole job.
    """
    readings = {}
    if window is not None:
        lately = max(1, round(RECENT_S / window.interval_s))
        series = compute_metric_series(window)
        named = {"power_w": series["power_w"], "sent_bytes_per_s": series["ib_tx_bytes_per_s"]}
        known = {name: values[-lately:][np.isfinite(values[-lately:])] for name, values in named.items()}
        readings = {name: shift_to_present_level(values) for name, values in known.items()}
    return JobLoad(attempt.job, shares, readings, _predict_burst(attempt, now_ms))


def _predict_burst(attempt: JobAttempt, now_ms: int) -> Burst | None:
    """Predict the burst of writes by all ranks at the job's next checkpoint.

    Returns None if its time, its duration or its bytes are unknown.
    """
    reported = find_episodes(attempt.checkpoints)
    upcoming = predict_next_beginning(np.array([one.begin_ms for one in reported], np.int64), now_ms)
    whole = [(one.duration_s, one.bytes) for one in reported if one.duration_s is not None and one.bytes]
    if upcoming is None or not whole:
        return None
    lasts_s, written = (float(np.median(column)) for column in zip(*whole, strict=True))
    lasts_s = max(lasts_s, 1.0)
    target = next((edge.target for edge in reversed(attempt.checkpoints) if edge.target), UNNAMED)
    return Burst(upcoming, lasts_s, written / lasts_s, target)


def sum_rail_capacity(topology: Topology) -> dict[Domain, float]:
    """Return rail group → bytes/s that its network adapters can send together.

    A group is left out if the speed of one of its adapters is unknown.
    """
    level = Level.RAIL_GROUP
    known: dict[Domain, float] = {}
    for at, name in enumerate(topology.domain_names[level]):
        speeds = [
            device.bytes_per_s
            for row in np.flatnonzero(topology.domain[level] == at).tolist()
            for device in topology.find_devices(row)
        ]
        if speeds and all(speeds):
            known["rail", name] = sum(speeds)
    return known


def compute_metric_series(window: JobWindow) -> dict[str, Array]:
    """Return metric in METRICS → its values for the whole job: (slot,).

    Power and NVLink traffic are means over the GPUs that reported, times the number of GPUs that the job
    holds.
    """
    means = {name: window.mean(name) * window.gpus for name in METRICS[:2]}
    return {**means, "ib_tx_bytes_per_s": window.sent.astype(np.float64)}


def forecast_readings(window: JobWindow, period_s: float | None) -> list[ExpectedReading]:
    """Forecast the value of each metric at each horizon. It is not the peak until then.

    period_s: the period of the job, or None. Without a period, the forecast is the present level.
    """
    rows = []
    for metric, values in compute_metric_series(window).items():
        lately = values[-max(1, round(RECENT_S / window.interval_s)) :]
        lately = lately[np.isfinite(lately)]
        if not len(lately):
            continue
        level = np.quantile(shift_to_present_level(lately), LEVELS).tolist()
        lock = lock_phase(values, period_s / window.interval_s) if period_s else None
        for ahead_s in AHEAD_S:
            quantiles = level
            if lock is not None:
                quantiles = predict_ahead(values, lock, ahead_s / window.interval_s, window.interval_s, LEVELS)
            p10, p50, p90 = (round(value, 1) for value in quantiles)
            rows.append(ExpectedReading(metric, ahead_s, "level" if lock is None else "template", p10, p50, p90))
    return rows
