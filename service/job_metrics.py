"""What jobs make of the fleet, as Prometheus sees it: gang risk, checkpoints, load peaks, sessions that do nothing.

Made once in MADE_EVERY_MS from what was told of jobs last; how far jobs are from their best checkpoint interval is
renewed for RENEWED jobs a tick, in turn. Bounded: GANGS_SHOWN gangs and ROWS_SHOWN rows of the rest, the gravest of
each; `fleetcast_job_metrics_left_out` says how many were not shown.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import msgspec
import numpy as np

from fleet.jobs import JobAttempt
from fleet.shared_domains import hazard_within
from fleet.topology import Level, Topology
from models.checkpointing import ettr, plan_of
from models.gang_risk import FAIL, GangRisk, gang_risk
from models.node_risk import base_hazard
from models.scores import RISK_HORIZONS_S
from models.utilisation import VERDICTS
from service.board import Section
from service.exposition import Page, span
from service.publish import Tick

GANGS_SHOWN, ROWS_SHOWN = 20, 50
RENEWED = 50  # each is the risk of a gang: a tenth of a millisecond and more
TOLD = ("doc.utilisation", "doc.spikes")
MADE_EVERY_MS = 60_000
HOUR_S, DAY_S = 3600, 86_400
USUAL = 1 - np.exp(-np.stack([base_hazard(horizon_s) for horizon_s in RISK_HORIZONS_S], axis=1))  # (kind, horizon)
DOING_NOTHING = ("idle", "abandoned")

Rows = Sequence[Mapping[str, Any]]
Attempt = tuple[str, int]
PrintOf = Callable[[JobAttempt], Mapping[str, Any] | None]


class Interval(NamedTuple):
    """Between a job's checkpoints. ratio: over the best one; lost: share of its time that it loses against that one."""

    ratio: float
    lost: float


class JobMetrics:
    """`page`: bytes that are made anew now and then."""

    def __init__(self) -> None:
        self._made_ms: int | None = None
        self._page = b""
        self._intervals = Intervals()

    def page(self, tick: Tick, sections: Iterable[Section], print_of: PrintOf) -> bytes:
        """sections: what fingerprints published last. print_of: the fingerprint of a job; None where there is none."""
        self._intervals.renew(tick, print_of)
        if self._made_ms is None or not 0 <= tick.now_ms - self._made_ms < MADE_EVERY_MS:
            told = {section.name: section.data for section in sections if section.name in TOLD}
            read = {name: msgspec.json.decode(data) for name, data in told.items() if isinstance(data, bytes)}
            self._made_ms, self._page = tick.now_ms, job_page(tick, read, self._intervals.of)
        return self._page


class Intervals:
    """`of`: attempt -> how far its checkpoints are from their best interval; of jobs whose turn has come, in turn."""

    def __init__(self) -> None:
        self.of: dict[Attempt, Interval] = {}
        self._turn: Iterator[JobAttempt] = iter(())
        self._places: tuple[Topology | None, dict[str, int]] = (None, {})

    def renew(self, tick: Tick, print_of: PrintOf) -> None:
        """Of the next RENEWED jobs that tell what their checkpoints take, and no others'."""
        if self._places[0] is not tick.topology:
            self._places = tick.topology, {name: row for row, name in enumerate(tick.topology.names)}
        left = RENEWED
        for attempt in self._turn:
            left -= self._look(attempt, tick, print_of(attempt))
            if not left:
                return
        running = {(attempt.job, attempt.attempt) for attempt in tick.running}
        self.of = {key: told for key, told in self.of.items() if key in running}
        self._turn = iter(tick.running)

    def _look(self, attempt: JobAttempt, tick: Tick, seen: Mapping[str, Any] | None) -> bool:
        """Whether it cost a risk of its nodes; where it was not looked at just now, what is known of it stays."""
        if seen is None:
            return False
        rows, key = self._places[1], (attempt.job, attempt.attempt)
        cost_s, every_s = seen.get("checkpoint_cost_s"), seen.get("checkpoint_every_s")
        members = [name for name in attempt.hosts if name in rows]
        if not cost_s or not every_s or not members:
            self.of.pop(key, None)
            return False
        rate = _risk_of(members, tick, rows, DAY_S).hazard
        plan = plan_of(cost_s, rate)
        self.of[key] = Interval(every_s / plan.interval_s, plan.expected_ettr - ettr(every_s, cost_s, rate))
        return True


def job_page(tick: Tick, told: Mapping[str, Any], intervals: Mapping[Attempt, Interval]) -> bytes:
    """told: what is named in TOLD, decoded; any may be missing."""
    page = Page()
    left = {
        "gangs": _add_gangs(page, tick),
        "checkpoints": _add_checkpoints(page, tick, intervals),
        "idle_jobs": _add_use(page, told.get("doc.utilisation", [])),
        "spikes": _add_spikes(page, told.get("doc.spikes", [])),
    }
    rows = [({"what": what}, count) for what, count in left.items()]
    page.gauge("job_metrics_left_out", "Rows without series of their own, beyond the bound of this page.", rows)
    return page.encode()


def _add_gangs(page: Page, tick: Tick) -> int:
    """Returns how many gangs are left out."""
    rows = {name: row for row, name in enumerate(tick.topology.names)}
    gangs = [attempt for attempt in tick.running if len(attempt.hosts) > 1]
    shown = _riskiest(gangs, tick, rows)[:GANGS_SHOWN]
    found = [(attempt, *_interrupted(attempt, tick, rows)) for attempt in shown]
    page.gauge(
        "gang_interruption_probability",
        "Probability that a running gang is interrupted within the horizon, and its weakest node.",
        [({"job_id": attempt.job, "weakest": weakest, "horizon": span(HOUR_S)}, p) for attempt, p, weakest in found],
    )
    return len(gangs) - len(shown)


def _riskiest(gangs: Sequence[JobAttempt], tick: Tick, rows: Mapping[str, int]) -> list[JobAttempt]:
    """By what their members' hazards within an hour add up to; of equal ones the larger first."""
    values = tick.risk.values
    hazard = hazard_within(np.where(np.isfinite(values), values, USUAL[:, :, None]), RISK_HORIZONS_S, HOUR_S)[FAIL]
    members = [[rows[name] for name in attempt.hosts if name in rows] for attempt in gangs]
    of = np.repeat(np.arange(len(gangs)), np.array([len(at) for at in members], np.intp))
    at = np.fromiter(chain.from_iterable(members), np.intp)
    sums = np.bincount(of, hazard[at], minlength=len(gangs)).tolist()
    order = sorted(range(len(gangs)), key=lambda row: (-sums[row], -gangs[row].gpus, gangs[row].job))
    return [gangs[row] for row in order]


def _interrupted(attempt: JobAttempt, tick: Tick, rows: Mapping[str, int]) -> tuple[float | None, str]:
    """Within an hour, and the weakest node."""
    members = [name for name in attempt.hosts if name in rows]
    if not members:
        return None, ""
    found = _risk_of(members, tick, rows, HOUR_S)
    return found.p_interrupted, members[found.weakest]


def _risk_of(members: Sequence[str], tick: Tick, rows: Mapping[str, int], duration_s: float) -> GangRisk:
    """Of known nodes together, with what their domains share."""
    at = np.array([rows[name] for name in members])
    topology = tick.topology
    powers = [topology.nodes[row].power_domain for row in at.tolist()]
    domains: list[tuple[str, list[str]]] = [("power", powers)]
    for level, of in (("rack", Level.RACK), ("rail", Level.RAIL_GROUP)):
        names = (*topology.domain_names[of], "")  # the last is of -1
        domains.append((level, [names[index] for index in topology.domain[of][at].tolist()]))
    return gang_risk(tick.risk.values[:, :, at], domains, duration_s, USUAL)


def _add_checkpoints(page: Page, tick: Tick, intervals: Mapping[Attempt, Interval]) -> int:
    """How far jobs are from their best interval, where both are known. Returns how many are left out."""
    known = [(attempt.job, intervals.get((attempt.job, attempt.attempt))) for attempt in tick.running]
    found = [(told.lost, told.ratio, job) for job, told in known if told is not None]
    shown = sorted(found, reverse=True)[:ROWS_SHOWN]
    page.gauge(
        "checkpoint_interval_ratio",
        "Interval between a job's checkpoints over the best one for its nodes' risk and its checkpoints' cost.",
        [({"job_id": job}, ratio) for _, ratio, job in shown],
    )
    page.gauge(
        "checkpoint_lost_time_ratio",
        "Share of a job's time that its interval loses against the best one.",
        [({"job_id": job}, max(0.0, lost)) for lost, _, job in shown],
    )
    return len(found) - len(shown)


def _add_use(page: Page, uses: Rows) -> int:
    """Returns how many jobs that do nothing are left out."""
    gpus = dict.fromkeys(VERDICTS, 0)
    for row in uses:
        gpus[row["verdict"] if row["verdict"] in gpus else "unknown"] += row["gpus"]
    page.gauge(
        "job_use_gpus",
        "GPUs of running jobs that were looked at, by what they do with them.",
        [({"verdict": verdict}, count) for verdict, count in gpus.items()],
    )
    nothing = [row for row in uses if row["verdict"] in DOING_NOTHING]
    shown = sorted(nothing, key=lambda row: (-row["gpus"] * (row["idle_s"] or 0.0), row["job"]))[:ROWS_SHOWN]
    page.gauge(
        "idle_job_gpus",
        "GPUs that a job holds and does nothing with.",
        [({"job_id": row["job"], "verdict": row["verdict"]}, row["gpus"]) for row in shown],
    )
    page.gauge(
        "idle_job_seconds",
        "Since when it does nothing, at least.",
        [({"job_id": row["job"], "verdict": row["verdict"]}, row["idle_s"]) for row in shown],
    )
    return len(nothing) - len(shown)


def _add_spikes(page: Page, spikes: Rows) -> int:
    """Returns how many are left out; without a capacity a peak has no ratio."""
    known = [row for row in spikes if row.get("capacity")]
    shown = sorted(known, key=lambda row: -row["p90"] / row["capacity"])[:ROWS_SHOWN]
    page.gauge(
        "spike_load_ratio",
        "Highest load of the next 15 minutes (p90) over what the domain can take.",
        [
            ({key: str(row[key]) for key in ("domain_kind", "domain", "quantity")}, row["p90"] / row["capacity"])
            for row in shown
        ],
    )
    return len(known) - len(shown)
