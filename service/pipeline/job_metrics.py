"""Prometheus metrics of jobs: gang risk, checkpoints, load peaks, and idle jobs.

The page is made once in MADE_EVERY_MS. Each tick renews the checkpoint intervals of at most RENEWED jobs,
in turn. The worst rows of each kind have series (GANGS_SHOWN, ROWS_SHOWN).
`fleetcast_job_metrics_left_out` counts the others.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import msgspec
import numpy as np

from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.shared_domains import interpolate_hazard
from fleetcast.fleet.topology import Level
from fleetcast.models.jobs.checkpointing import compute_ettr, make_checkpoint_plan
from fleetcast.models.jobs.utilisation import VERDICTS
from fleetcast.models.risk.gang_risk import FAIL, GangRisk, compute_gang_risk
from fleetcast.models.risk.scores import RISK_HORIZONS_S
from fleetcast.service.answers.fingerprints import Fingerprint
from fleetcast.service.board.board import Section
from fleetcast.service.exposition import Page, format_horizon
from fleetcast.service.pipeline.tick import Tick

GANGS_SHOWN, ROWS_SHOWN = 20, 50
RENEWED = 50  # each is the risk of a gang: a tenth of a millisecond and more
EXAMINED = 1000  # jobs of which it is asked in a tick whether they have a fingerprint
READ = ("doc.utilisation", "doc.spikes")
MADE_EVERY_MS = 60_000
HOUR_S, DAY_S = 3600, 86_400
DOING_NOTHING = ("idle", "abandoned")

Rows = Sequence[Mapping[str, Any]]
Attempt = tuple[str, int]
PrintOf = Callable[[JobAttempt], Fingerprint | None]


class CheckpointInterval(NamedTuple):
    """The interval between a job's checkpoints, compared with the best one.

    ratio: the interval divided by the best one. lost: the share of the job's time that is lost because the
    interval is not the best one.
    """

    ratio: float
    lost: float


class JobMetrics:
    """The maker of the page of job metrics. It renews the page once in MADE_EVERY_MS."""

    def __init__(self) -> None:
        self._made_ms: int | None = None
        self._page = b""
        self._intervals = RenewedIntervals()

    def renew_page(self, tick: Tick, sections: Iterable[Section], print_of: PrintOf) -> bytes:
        """Return the page of job metrics. Renew it first if that is due.

        sections: the latest sections of the fingerprints. print_of: returns the fingerprint of a job, or None.
        """
        self._intervals.renew(tick, print_of)
        if self._made_ms is None or not 0 <= tick.now_ms - self._made_ms < MADE_EVERY_MS:
            documents = {section.name: section.data for section in sections if section.name in READ}
            read = {name: msgspec.json.decode(data) for name, data in documents.items() if isinstance(data, bytes)}
            self._made_ms, self._page = tick.now_ms, make_job_page(tick, read, self._intervals.of)
        return self._page


class RenewedIntervals:
    """A cache that compares the checkpoint intervals of running jobs with the best ones, a few jobs in each call.

    `of`: attempt → the result of its last comparison.
    """

    def __init__(self) -> None:
        self.of: dict[Attempt, CheckpointInterval] = {}
        self._turn: Iterator[JobAttempt] = iter(())

    def renew(self, tick: Tick, print_of: PrintOf) -> None:
        """Renew the next RENEWED jobs whose fingerprints have a checkpoint interval and a checkpoint cost.

        Each call examines at most EXAMINED jobs.
        """
        left, examined = RENEWED, 0
        for attempt in islice(self._turn, EXAMINED):
            left, examined = left - self._renew_interval(attempt, tick, print_of(attempt)), examined + 1
            if not left:
                return
        if examined == EXAMINED:
            return
        running = {(attempt.job, attempt.attempt) for attempt in tick.events.running}
        self.of = {key: interval for key, interval in self.of.items() if key in running}
        self._turn = iter(tick.events.running)

    def _renew_interval(self, attempt: JobAttempt, tick: Tick, seen: Fingerprint | None) -> bool:
        """Renew the interval of one attempt. Returns whether a gang risk was computed.

        Without a fingerprint, the last interval stays.
        """
        if seen is None:
            return False
        key = attempt.job, attempt.attempt
        cost_s, every_s = seen.checkpoint_cost_s, seen.checkpoint_every_s
        members = [name for name in attempt.hosts if name in tick.rows]
        if not cost_s or not every_s or not members:
            self.of.pop(key, None)
            return False
        rate = _compute_gang_risk(members, tick, DAY_S).hazard
        plan = make_checkpoint_plan(cost_s, rate)
        self.of[key] = CheckpointInterval(
            every_s / plan.interval_s, plan.expected_ettr - compute_ettr(every_s, cost_s, rate)
        )
        return True


def make_job_page(tick: Tick, documents: Mapping[str, Any], intervals: Mapping[Attempt, CheckpointInterval]) -> bytes:
    """Make the page of job metrics.

    documents: the decoded documents by name (READ). Any of them may be missing.
    """
    page = Page()
    left = {
        "gangs": _add_gang_metrics(page, tick),
        "checkpoints": _add_checkpoint_metrics(page, tick, intervals),
        "idle_jobs": _add_idle_jobs(page, documents.get("doc.utilisation", [])),
        "spikes": _add_load_peaks(page, documents.get("doc.spikes", [])),
    }
    rows = [({"what": what}, count) for what, count in left.items()]
    page.add_gauge("job_metrics_left_out", "Rows without series of their own, beyond the bound of this page.", rows)
    return page.encode()


def _add_gang_metrics(page: Page, tick: Tick) -> int:
    """Add the metrics of gangs. Returns how many gangs are left out."""
    gangs = [attempt for attempt in tick.events.running if len(attempt.hosts) > 1]
    shown = _sort_by_risk(gangs, tick)[:GANGS_SHOWN]
    found = [(attempt, *_find_interruption_risk(attempt, tick)) for attempt in shown]
    page.add_gauge(
        "gang_interruption_probability",
        "Probability that a running gang is interrupted within the horizon, and its weakest node.",
        [
            ({"job_id": attempt.job, "weakest": weakest, "horizon": format_horizon(HOUR_S)}, p)
            for attempt, p, weakest in found
        ],
    )
    return len(gangs) - len(shown)


def _sort_by_risk(gangs: Sequence[JobAttempt], tick: Tick) -> list[JobAttempt]:
    """Sort gangs by the sum of their members' hazards within an hour, the highest first.

    If the sums are equal, the larger gang comes first.
    """
    values = tick.fleet.risk.values
    hazard = interpolate_hazard(
        np.where(np.isfinite(values), values, tick.usual_risk[:, :, None]), RISK_HORIZONS_S, HOUR_S
    )[FAIL]
    members = [[tick.rows[name] for name in attempt.hosts if name in tick.rows] for attempt in gangs]
    of = np.repeat(np.arange(len(gangs)), np.array([len(at) for at in members], np.intp))
    at = np.fromiter(chain.from_iterable(members), np.intp)
    sums = np.bincount(of, hazard[at], minlength=len(gangs)).tolist()
    order = sorted(range(len(gangs)), key=lambda row: (-sums[row], -gangs[row].gpus, gangs[row].job))
    return [gangs[row] for row in order]


def _find_interruption_risk(attempt: JobAttempt, tick: Tick) -> tuple[float | None, str]:
    """Return the probability that the gang is interrupted within an hour, and its weakest node.

    Returns (None, "") if no member is known.
    """
    members = [name for name in attempt.hosts if name in tick.rows]
    if not members:
        return None, ""
    found = _compute_gang_risk(members, tick, HOUR_S)
    return found.p_interrupted, members[found.weakest]


def _compute_gang_risk(members: Sequence[str], tick: Tick, duration_s: float) -> GangRisk:
    """Return the joint risk of known nodes, including faults that their domains share."""
    at = np.array([tick.rows[name] for name in members])
    topology = tick.topology
    powers = [topology.nodes[row].power_domain for row in at.tolist()]
    domains: list[tuple[str, list[str]]] = [("power", powers)]
    for level, of in (("rack", Level.RACK), ("rail", Level.RAIL_GROUP)):
        names = (*topology.domain_names[of], "")  # the last is of -1
        domains.append((level, [names[index] for index in topology.domain[of][at].tolist()]))
    return compute_gang_risk(tick.fleet.risk.values[:, :, at], domains, duration_s, tick.usual_risk)


def _add_checkpoint_metrics(page: Page, tick: Tick, intervals: Mapping[Attempt, CheckpointInterval]) -> int:
    """Add each known checkpoint interval compared with the best one. Returns how many are left out."""
    known = [(attempt.job, intervals.get((attempt.job, attempt.attempt))) for attempt in tick.events.running]
    found = [(interval.lost, interval.ratio, job) for job, interval in known if interval is not None]
    shown = sorted(found, reverse=True)[:ROWS_SHOWN]
    page.add_gauge(
        "checkpoint_interval_ratio",
        "Interval between a job's checkpoints over the best one for its nodes' risk and its checkpoints' cost.",
        [({"job_id": job}, ratio) for _, ratio, job in shown],
    )
    page.add_gauge(
        "checkpoint_lost_time_ratio",
        "Share of a job's time that its interval loses against the best one.",
        [({"job_id": job}, max(0.0, lost)) for lost, _, job in shown],
    )
    return len(found) - len(shown)


def _add_idle_jobs(page: Page, uses: Rows) -> int:
    """Add the metrics of idle jobs. Returns how many idle jobs are left out."""
    gpus = dict.fromkeys(VERDICTS, 0)
    for row in uses:
        gpus[row["verdict"] if row["verdict"] in gpus else "unknown"] += row["gpus"]
    page.add_gauge(
        "job_use_gpus",
        "GPUs of running jobs that were looked at, by what they do with them.",
        [({"verdict": verdict}, count) for verdict, count in gpus.items()],
    )
    nothing = [row for row in uses if row["verdict"] in DOING_NOTHING]
    shown = sorted(nothing, key=lambda row: (-row["gpus"] * (row["idle_s"] or 0.0), row["job"]))[:ROWS_SHOWN]
    page.add_gauge(
        "idle_job_gpus",
        "GPUs that a job holds and does nothing with.",
        [({"job_id": row["job"], "verdict": row["verdict"]}, row["gpus"]) for row in shown],
    )
    page.add_gauge(
        "idle_job_seconds",
        "Since when it does nothing, at least.",
        [({"job_id": row["job"], "verdict": row["verdict"]}, row["idle_s"]) for row in shown],
    )
    return len(nothing) - len(shown)


def _add_load_peaks(page: Page, spikes: Rows) -> int:
    """Add the metrics of load peaks. Returns how many peaks are left out.

    A peak without a known capacity has no ratio.
    """
    known = [row for row in spikes if row.get("capacity")]
    shown = sorted(known, key=lambda row: -row["p90"] / row["capacity"])[:ROWS_SHOWN]
    page.add_gauge(
        "spike_load_ratio",
        "Highest load of the next 15 minutes (p90) over what the domain can take.",
        [
            ({key: str(row[key]) for key in ("domain_kind", "domain", "quantity")}, row["p90"] / row["capacity"])
            for row in shown
        ],
    )
    return len(known) - len(shown)
