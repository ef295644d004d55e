"""The benefit of the forecasts: one day of jobs and faults with a risk-blind engine and with ours.

The day is simulated with several seeds. Each draws faults by kind at the rates of large fleets (DAY_RATES)
with log-normal durations. 22 % of repaired nodes fail again within a day. A fault has no other precursor
than its own symptoms, which favours the blind arm. A measured DetectionTable states what each fault does and
when it is detected. All arms share the engine. `day.py` describes the model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fleetcast.fleet.topology import Topology
from fleetcast.simulator.days.backfill import BackfilledJob
from fleetcast.simulator.days.day import Arm, DayFault, DaySimulation, FalseAlarm, Losses, Memo
from fleetcast.simulator.days.replay import TraceReplay
from fleetcast.simulator.days.traces import JobTrace
from fleetcast.simulator.faults.detection import INNOCENT, DetectionTable
from fleetcast.simulator.faults.faults import NODE_KINDS
from fleetcast.simulator.faults.magnitudes import DECOY_KINDS, MEDIAN_S, REALISTIC_RATES

DAY_MS = 86_400_000
SEEDS = 16
# Per 1000 node-days. Slow communication met 40 % of multi-node jobs in the field (Greyhound, ATC'25), for 24 minutes;
# a tenth of that is put down to one port: about four a day among 133 nodes.
DAY_RATES: Mapping[str, float] = REALISTIC_RATES | {"slow_nic": 30.0}
DECOYS_PER_DAY = 48
AGAIN_SHARE = 0.22  # of repaired nodes, within a day (InfiniteHBD)
SHORTEST_S = 300.0

RESAMPLES = 4000


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its 95 % percentile bootstrap interval over the seeds.

    The losses of days with faults are skewed, so Student's t would be wrong.
    """

    mean: float
    low: float
    high: float

    @classmethod
    def from_values(cls, values: Sequence[float]) -> "Interval":
        """Return the mean of `values` with its interval.

        >>> Interval.from_values([2.0, 2.0, 2.0])
        Interval(mean=2.0, low=2.0, high=2.0)
        """
        column = np.array(values)
        picks = np.random.default_rng(len(values)).integers(len(values), size=(RESAMPLES, len(values)))
        low, high = np.quantile(column[picks].mean(axis=1), (0.025, 0.975))
        return cls(round(float(column.mean()), 2), round(float(low), 2), round(float(high), 2))

    def as_dict(self) -> dict[str, float]:
        return {"mean": self.mean, "low": self.low, "high": self.high}


def compare_arms(
    trace: JobTrace,
    replay: TraceReplay,
    topology: Topology,
    table: DetectionTable,
    *,
    seed: int = 0,
    seeds: int = SEEDS,
) -> dict[str, Any]:
    """Return the GPU-hours that each arm loses in the day after the start, and the savings.

    The keys are "risk_blind", "ours", "saved", "ours_acting", "saved_acting" and more. Each of these is
    {"mean", "low", "high"}. A saving is the mean of the differences seed by seed. In `ours_acting`, owners also
    act on the risk.
    """
    memo: Memo = {}
    days = [_simulate_arms(trace, replay, topology, table, seed + number, memo) for number in range(seeds)]
    total = {arm: [day[arm].total for day in days] for arm in Arm}
    blind = total[Arm.RISK_BLIND]

    def compute_saving(arm: Arm) -> dict[str, float]:
        return Interval.from_values([one - other for one, other in zip(blind, total[arm], strict=True)]).as_dict()

    return {
        **{arm.value: Interval.from_values(total[arm]).as_dict() for arm in Arm},
        "saved": compute_saving(Arm.RISK_AWARE),
        "saved_acting": compute_saving(Arm.ACTING),
        "seeds": seeds,
        "unit": "GPU-hours of a day",
        "parts": {arm.value: _average_losses([day[arm] for day in days]) for arm in Arm},
        "detection": table.summarise(),
        "false_alarm_share": round(table.false_alarm_share, 3),
    }


def _average_losses(arms: Sequence[Losses]) -> dict[str, float]:
    names = ("slowed", "redone", "restarts", "idle", "killed_jobs")
    return {name: round(float(np.mean([getattr(arm, name) for arm in arms])), 2) for name in names}


def _simulate_arms(
    trace: JobTrace, replay: TraceReplay, topology: Topology, table: DetectionTable, seed: int, memo: Memo
) -> dict[Arm, Losses]:
    """Simulate the same day for every arm, and return the losses of each."""
    cluster = replay.cluster
    assert cluster is not None
    start_ms, end_ms = trace.start_ms, trace.start_ms + DAY_MS
    remaining_s = {row.job.job: row.remaining_s for row in replay.ongoing}
    arrivals = trace.select_jobs((trace.submit_ms >= start_ms) & (trace.submit_ms < end_ms))
    faults, alarms = draw_day(topology, table, start_ms, np.random.default_rng([seed, 6]))

    def get_remaining_s(row: BackfilledJob) -> float:
        return remaining_s[row.job.job]

    def simulate_arm(arm: Arm) -> Losses:
        day = DaySimulation(cluster, topology, start_ms, end_ms, arm=arm, remaining_s=get_remaining_s, memo=memo)
        return day.run(arrivals, faults, alarms)

    return {arm: simulate_arm(arm) for arm in Arm}


def draw_day(
    topology: Topology,
    table: DetectionTable,
    start_ms: int,
    rng: np.random.Generator,
    rates: Mapping[str, float] = DAY_RATES,
) -> tuple[list[DayFault], list[FalseAlarm]]:
    """Draw the faults and the false alarms of one day. rates: faults per 1000 node-days by kind.

    Kinds without a measured fault in the table are left out.
    """
    nodes = len(topology)
    faults: list[DayFault] = []
    for kind, rate in rates.items():
        if not table.faults.get(kind):
            continue
        for _ in range(int(rng.poisson(rate * nodes / 1000))):
            node = int(rng.integers(nodes))
            at_ms = start_ms + int(rng.uniform(0, DAY_MS))
            faults += _draw_fault_with_repeats(topology, table, kind, node, at_ms, start_ms + DAY_MS, rng)
    alarms = _draw_decoy_alarms(nodes, table, start_ms, rng)
    for fault in faults:
        alarms += _draw_false_alarm(nodes, table, INNOCENT, fault.start_ms, rng)
    return sorted(faults, key=lambda fault: fault.start_ms), alarms


def _draw_fault_with_repeats(
    topology: Topology,
    table: DetectionTable,
    kind: str,
    node: int,
    at_ms: int,
    day_end_ms: int,
    rng: np.random.Generator,
) -> list[DayFault]:
    """Draw a fault of a node, and sometimes the same fault again after its repair."""
    gpu = -1 if kind in NODE_KINDS else int(rng.integers(max(1, int(topology.gpus[node]))))
    faults = []
    while at_ms < day_end_ms:
        end_ms = at_ms + int(max(MEDIAN_S[kind] * rng.lognormal(0.0, 0.8), SHORTEST_S) * 1000)
        faults.append(DayFault(node, gpu, at_ms, end_ms, table.draw_sighting(rng, kind)))
        if rng.random() >= AGAIN_SHARE:
            break
        at_ms = end_ms + int(rng.uniform(0, DAY_MS))
    return faults


def _draw_decoy_alarms(nodes: int, table: DetectionTable, start_ms: int, rng: np.random.Generator) -> list[FalseAlarm]:
    """Draw the false alarms that decoys raise.

    A decoy flags its node for a measured duration, which is mostly zero.
    """
    alarms = []
    for kind in DECOY_KINDS:
        for _ in range(int(rng.poisson(DECOYS_PER_DAY / len(DECOY_KINDS)))):
            alarms += _draw_false_alarm(nodes, table, kind, start_ms + int(rng.uniform(0, DAY_MS)), rng)
    return alarms


def _draw_false_alarm(
    nodes: int, table: DetectionTable, kind: str, at_ms: int, rng: np.random.Generator
) -> list[FalseAlarm]:
    measured_s = table.decoys.get(kind, ())
    lasts_s = measured_s[int(rng.integers(len(measured_s)))] if measured_s else 0.0
    node = int(rng.integers(nodes))
    return [FalseAlarm(node, at_ms, at_ms + int(lasts_s * 1000))] if lasts_s > 0 else []
