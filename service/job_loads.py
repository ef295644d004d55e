"""What running jobs put on racks, power domains, rail groups and stores: `/v1/spikes` from their windows."""

from collections.abc import Mapping

import numpy as np

from features.episodes import episodes
from features.job_window import JobWindow
from fleet.jobs import JobAttempt
from fleet.topology import Level, Topology
from models.renewal import next_of
from models.spikes import Burst, Domain, Load
from service.expected_load import RECENT_S, series_of

UNNAMED = "unnamed"


def shares_of(attempt: JobAttempt, topology: Topology, rows: Mapping[str, int]) -> dict[Domain, float]:
    """Which part of an attempt's nodes lies in each domain; rows: node name -> row."""
    found: dict[Domain, float] = {}
    hosts = [rows[host] for host in attempt.hosts if host in rows]
    for row in hosts:
        for domain in _domains(topology, row):
            found[domain] = found.get(domain, 0.0) + 1 / len(hosts)
    return found


def _domains(topology: Topology, row: int) -> list[Domain]:
    found = []
    for kind, level in (("rack", Level.RACK), ("rail", Level.RAIL_GROUP)):
        at = int(topology.domain[level][row])
        if at >= 0:
            found.append((kind, topology.domain_names[level][at]))
    power = topology.nodes[row].power_domain
    return [*found, ("power", power)] if power else found


def load_of(attempt: JobAttempt, window: JobWindow | None, shares: Mapping[Domain, float], now_ms: int) -> Load:
    """The load of one attempt, from its last ten minutes and its checkpoints; window: one that speaks for all of it."""
    readings = {}
    if window is not None:
        lately = max(1, round(RECENT_S / window.interval_s))
        series = series_of(window)
        named = {"power_w": series["power_w"], "sent_bytes_per_s": series["ib_tx_bytes_per_s"]}
        readings = {name: values[-lately:][np.isfinite(values[-lately:])] for name, values in named.items()}
    return Load(attempt.job, shares, readings, _burst(attempt, now_ms))


def _burst(attempt: JobAttempt, now_ms: int) -> Burst | None:
    """None where its checkpoints do not tell when the next one is, how long they take and how much they write.

    Bytes are those of the whole gang, over the time from its first rank's beginning to its last one's end.
    """
    told = episodes(attempt.checkpoints)
    upcoming = next_of(np.array([one.begin_ms for one in told], np.int64), now_ms)
    whole = [(one.lasts_s, one.bytes) for one in told if one.lasts_s is not None and one.bytes]
    if upcoming is None or not whole:
        return None
    lasts_s, written = (float(np.median(column)) for column in zip(*whole, strict=True))
    lasts_s = max(lasts_s, 1.0)
    target = next((edge.target for edge in reversed(attempt.checkpoints) if edge.target), UNNAMED)
    return Burst(upcoming, lasts_s, written / lasts_s, target)


def rail_capacity(topology: Topology) -> dict[Domain, float]:
    """Bytes/s that the adapters of a rail group can send together; of groups whose adapters all tell theirs."""
    level = Level.RAIL_GROUP
    known: dict[Domain, float] = {}
    for at, name in enumerate(topology.domain_names[level]):
        speeds = [
            device.bytes_per_s
            for row in np.flatnonzero(topology.domain[level] == at).tolist()
            for device in topology.devices(row)
        ]
        if speeds and all(speeds):
            known["rail", name] = sum(speeds)
    return known
