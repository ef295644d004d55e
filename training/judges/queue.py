"""`fleetcast evaluate queue`: how long jobs wait in our order, compared with peers and oracles.

Every policy plays the same jobs through the same plan on the same number of GPUs, without topology
(`fleetcast.placement.play.replay`, EASY backfill). The plan uses the limit, at which a job is
killed. For sets without limits it uses the p90 of ended jobs with the same GPU count. The play
begins `WARM_UP_S` before the end of the train folder, so that the queue is full. Jobs submitted
later are judged. In orders by area, no job overtakes a job that has waited `max_wait_h`. Peers by arrival need
no such bound. On a set without limits, peers that need limits are left out.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleetcast.placement.play.capacity import Capacity, CountAsk, Planned
from fleetcast.placement.play.replay import PlayedMachine, QueuePolicy, Replay, RowScheduler, Trace
from fleetcast.placement.play.rows import NEVER
from fleetcast.placement.play.seen_runs import SeenRuns
from fleetcast.placement.queues.order import compute_area
from fleetcast.training.judges.queue_policies import FixedKeyPolicy, ForecastPolicy, Qssf
from fleetcast.training.judges.queue_simulation import NEVER_S, QueuedJobs, QueueSimulation
from fleetcast.training.judges.start import estimate_capacity
from fleetcast.training.reports.results import ResultRow, Results, compute_interval
from fleetcast.training.sets.job_sets import HistoryJobs, JobHistory, read_job_sets

DAY_S = 86_400
WARM_UP_S = 7 * DAY_S
MONTH_S = 30 * DAY_S
FEWEST_OF_USER = 10
BLOCK = 500  # neighbours in a queue wait alike
MAX_WAIT_H = 24.0
BY_ARRIVAL = frozenset({"fifo", "easy_limits"})
ON_LIMITS = frozenset({"easy_limits", "conservative_limits", "limit_x_cores"})
METHODS = (
    *("ours", "fifo", "easy_limits", "conservative_limits", "limit_x_cores", "gpus_only", "forecast_x_cores"),
    *("qssf", "area_oracle", "sjf_oracle"),
)

LEARNT: Mapping[str, Callable[[Trace, SeenRuns], QueuePolicy]] = {"forecast_x_cores": ForecastPolicy, "qssf": Qssf}

Floats = NDArray[np.float64]
Say = Callable[[str], None]
MachineOf = Callable[[Planned, bool], PlayedMachine[CountAsk]]


@dataclass(frozen=True, slots=True)
class QueueScene:
    """The jobs of one set, prepared for playing.

    judged: (job,) whether the job was submitted after the train folder's end.
    """

    dataset: str
    trace: Trace
    judged: NDArray[np.bool_]
    capacity: int
    max_wait_s: float
    limited: bool

    def make_ask(self, job: int) -> CountAsk | None:
        """Return the GPUs and the time limit of a job. None if the job is larger than the fleet."""
        gpus = self.trace.gpus[job]
        return CountAsk(gpus, self.trace.limit_s[job]) if gpus <= self.capacity else None

    def make_machine(self, planned: Planned, backfills: bool = True) -> Capacity:
        return Capacity(self.capacity, planned, backfills)


def evaluate(
    train: Path, test: Path, seed: int, say: Say, capacity: int | None = None, max_wait_h: float = MAX_WAIT_H
) -> Results:
    """Evaluate the waits of every job history that is in both folders.

    capacity: GPUs or cores, by default the number that `evaluate start` uses.
    """
    results = Results("queue")
    for one in read_job_sets(train, test, results.skipped):
        for reason, count in sorted(one.skipped.items()):
            results.skipped.append(f"{one.dataset}: {count:,} rows: {reason}")
        scene = make_scene(one.own_history, capacity, max_wait_h * 3600)
        say(f"{scene.dataset}: {len(scene.trace):,} jobs on {scene.capacity:,} GPUs or cores")
        for method in METHODS:
            if method in ON_LIMITS and not scene.limited:
                continue
            start_s = play_method(scene, method)
            _judge_method(results, scene, method, start_s, seed)
            say(f"{scene.dataset}: {method}: mean wait {_compute_waits_s(scene, start_s).mean():,.0f} s")
    return results


def make_scene(one: JobHistory, capacity: int | None, max_wait_s: float) -> QueueScene:
    """Return a set's jobs, prepared for playing. The play begins shortly before the end of the train folder."""
    capacity = capacity or estimate_capacity(one.train_jobs)
    rows = np.flatnonzero(one.table.submit_s >= one.train_end_s - WARM_UP_S)
    part = one.table.select_rows(rows)
    limited = float(np.isfinite(part.limit_s).mean()) > 0.5
    return QueueScene(one.dataset, make_trace(part, limited), one.is_judged[rows], capacity, max_wait_s, limited)


def make_trace(table: HistoryJobs, limited: bool = True) -> Trace:
    """Return the jobs of a history as a trace with times in whole seconds.

    If `limited`, a job ends at its time limit at the latest. Otherwise jobs have no time limits.
    """
    limit_s = [float(value) if limited and np.isfinite(value) else None for value in table.limit_s.tolist()]
    run_s = np.maximum(1, np.ceil(np.fmin(table.run_s, table.limit_s if limited else np.inf)))
    return Trace(
        name=table.job.tolist(),
        submit_s=np.floor(table.submit_s).tolist(),
        run_s=run_s.tolist(),
        gpus=np.ceil(table.gpus).astype(np.int64).tolist(),
        limit_s=limit_s,
        user=table.user.tolist(),
        queue=table.queue.tolist(),
    )


def play_method(scene: QueueScene, method: str) -> Floats:
    """Play the scene's jobs by a scheduling method, and return (job,) their start times.

    The start time is NaN for jobs larger than the fleet.
    """
    if method == "conservative_limits":
        return simulate_conservative_backfill(scene.trace, scene.capacity)
    return Replay(
        scene.trace, make_peer_scheduler(scene.trace, method, scene.make_machine, scene.make_ask, scene.max_wait_s)
    ).play()


def make_peer_scheduler(
    trace: Trace, method: str, machine: MachineOf, ask: Callable[[int], CountAsk | None], max_wait_s: float
) -> RowScheduler[CountAsk]:
    """Return a scheduler that starts jobs in a method's order on a machine.

    In orders by area, no job overtakes a job that has waited `max_wait_s`.
    """
    seen = SeenRuns()
    learns = LEARNT.get(method)
    policy = FixedKeyPolicy(trace, seen, _compute_keys(trace, method)) if learns is None else learns(trace, seen)
    bound_s = NEVER if method in BY_ARRIVAL else max_wait_s
    return RowScheduler(trace.submit_s, machine(seen.plan_run_s, method != "fifo"), policy, ask, bound_s)


def _compute_keys(trace: Trace, method: str) -> Sequence[float]:
    gpus, run_s = np.array(trace.gpus, np.float64), np.array(trace.run_s)
    areas = np.array([compute_area(*ask) for ask in zip(trace.gpus, trace.limit_s, strict=True)])
    keys = {"ours": areas, "limit_x_cores": areas, "gpus_only": gpus}
    keys |= {"sjf_oracle": run_s, "area_oracle": run_s * gpus}
    found: list[float] = keys.get(method, np.zeros(len(trace))).tolist()
    return found


def simulate_conservative_backfill(trace: Trace, capacity: int) -> Floats:
    """Return (job,) start times under conservative backfill, where every waiting job has a reservation.

    The plan uses the jobs' limits. The machine is a count of GPUs.
    """
    limit_s = [max(1, int(limit or DAY_S)) for limit in trace.limit_s]
    jobs = QueuedJobs(*(np.array(column, np.int64) for column in (trace.submit_s, trace.gpus, limit_s)))
    state = QueueSimulation(jobs, [int(value) for value in trace.run_s], capacity)
    for job, submit_s in enumerate(jobs.submit_s.tolist()):
        state.advance(submit_s)
        state.submit(job)
    state.advance(NEVER_S)
    return np.array([state.start_s.get(job, np.nan) for job in range(len(trace))], np.float64)


def _compute_waits_s(scene: QueueScene, start_s: Floats, rows: NDArray[np.bool_] | None = None) -> Floats:
    wait_s = (start_s - np.array(scene.trace.submit_s))[scene.judged if rows is None else rows]
    return np.asarray(wait_s[np.isfinite(wait_s)])


def _judge_method(results: Results, scene: QueueScene, method: str, start_s: Floats, seed: int) -> None:
    for series, rows in _list_judged_spans(scene):
        wait_s = _compute_waits_s(scene, start_s, rows)
        if not len(wait_s):
            continue
        value, low, high = compute_interval(wait_s.tolist(), block=BLOCK, seed=seed)
        found: dict[str, tuple[float | None, float | None, float | None]] = {
            "wait_mean_s": (value, low, high),
            "wait_p99_s": (float(np.quantile(wait_s, 0.99)), None, None),
            "wait_max_s": (float(wait_s.max()), None, None),
            "jain": (compute_jain_index(scene.trace, start_s, rows), None, None),
        }
        for metric, numbers in found.items():
            row = ResultRow(scene.dataset, "queue", series, None, method, method, metric, *numbers, len(wait_s))
            results.rows.append(row)


def _list_judged_spans(scene: QueueScene) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    """Yield (name, (job,) mask) of all judged jobs, then of each span of 30 days if there are several."""
    yield "all", scene.judged
    submit_s = np.array(scene.trace.submit_s)
    month = ((submit_s - submit_s[scene.judged].min(initial=NEVER)) // MONTH_S).astype(np.int64)
    last = int(month[scene.judged].max(initial=0))
    for number in range(last + 1 if last else 0):
        yield f"month {number + 1}", scene.judged & (month == number)


def compute_jain_index(trace: Trace, start_s: Floats, rows: NDArray[np.bool_]) -> float | None:
    """Return Jain's index of fairness over users with enough jobs. None for fewer than two such users.

    A user's value is the GPU-seconds in which the user's jobs run, divided by those in which they wait
    or run. An index of 1 means that all users are served alike, and 1/users that one user gets
    everything (Jain et al., 1984).
    """
    user = np.array(trace.user, object)
    gpus, run_s = np.array(trace.gpus, np.float64), np.array(trace.run_s)
    wait_s = start_s - np.array(trace.submit_s)
    good = rows & np.isfinite(wait_s) & (user != "")
    names, who = np.unique(user[good].astype(str), return_inverse=True)
    served = np.bincount(who, (gpus * run_s)[good], len(names))
    there = np.bincount(who, (gpus * (run_s + wait_s))[good], len(names))
    share = (served / np.maximum(there, 1e-9))[np.bincount(who, minlength=len(names)) >= FEWEST_OF_USER]
    return float(share.sum() ** 2 / (len(share) * (share**2).sum())) if len(share) > 1 else None
