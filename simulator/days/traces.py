"""Job traces, real (Helios "Venus") or generated.

A trace states who requested how many GPUs when, and how long each job ran. Dates are moved by whole weeks
towards the present, so weekdays and hours stay the same. The real trace has no `class_`. It is derived from
size and name.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fleetcast.fleet.events import JobClass
from fleetcast.fleet.requests import Gang

DEFAULT_AT = "2020-05-12T20:25"
VENUS = Path("jobs") / "venus" / "venus_gpu_jobs.parquet"
WEEK_MS = 7 * 86_400_000
HOUR_MS = 3_600_000
RUSH_STEP_MS = 600_000
POOL = "train"  # the queue of jobs that no team owns
LONGEST_RUN_S = 172_800.0  # Venus clamps run times at 48 h; so does the generator

# Shape of Venus in the four weeks before 12 May 2020: shares of job sizes, submissions by hour and by weekday.
_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80)
_SIZE_SHARES = (0.435, 0.040, 0.090, 0.323, 0.046, 0.020, 0.034, 0.006, 0.004, 0.002)
_HOURLY = (38, 26, 24, 14, 11, 8, 7, 9, 16, 34, 57, 63, 48, 55, 64, 69, 72, 72, 51, 54, 55, 55, 49, 46)
_WEEKDAY = (1.05, 1.05, 1.15, 1.15, 0.95, 0.75, 0.80)


@dataclass(frozen=True, slots=True)
class TraceJob:
    """One job of a trace. It requests `gpus` at `submit_ms`, and runs for `run_s` without disturbance.

    pool: the nodes on which it may run, "" for any. gang: the sizes of an elastic job, None for a fixed size.
    """

    job: str
    submit_ms: int
    run_s: float
    gpus: int
    user: str
    class_: JobClass
    queue: str = POOL
    pool: str = ""
    gang: Gang | None = None

    def compute_gang_shape(self, gpus_per_node: int) -> tuple[int, int]:
        """Return (members, GPUs of each member)."""
        return choose_gang_shape(self.gpus, gpus_per_node)


@dataclass(frozen=True, slots=True)
class JobTrace:
    """A trace in columns of equal length n, sorted by `submit_ms`. The columns never change.

    start_ms: when the live part begins. skipped: the number of jobs too large for the fleet. note: a sentence
    about the source.
    """

    job: tuple[str, ...]
    submit_ms: NDArray[np.int64]  # (n,)
    run_s: NDArray[np.float64]  # (n,)
    gpus: NDArray[np.int32]  # (n,)
    user: tuple[str, ...]
    class_: tuple[JobClass, ...]
    start_ms: int
    source: str
    note: str
    skipped: int = 0
    queue: tuple[str, ...] = ()  # (n,), or nothing: all in one
    pool: str = ""  # of all jobs

    def __len__(self) -> int:
        return len(self.job)

    def __iter__(self) -> Iterator[TraceJob]:
        return (self.get_job(index) for index in range(len(self)))

    def get_job(self, index: int) -> TraceJob:
        return TraceJob(
            self.job[index],
            int(self.submit_ms[index]),
            float(self.run_s[index]),
            int(self.gpus[index]),
            self.user[index],
            self.class_[index],
            self.queue[index] if self.queue else POOL,
            self.pool,
        )

    def select_jobs(self, mask: NDArray[np.bool_]) -> list[TraceJob]:
        """Return the jobs that a mask (n,) selects, in order of submission."""
        return [self.get_job(int(index)) for index in np.flatnonzero(mask)]


def choose_gang_shape(gpus: int, gpus_per_node: int) -> tuple[int, int]:
    """Return (members, GPUs of each): the fewest equal members that fit on nodes of `gpus_per_node`.

    >>> choose_gang_shape(4, 8), choose_gang_shape(64, 8), choose_gang_shape(12, 8)
    ((1, 4), (8, 8), (2, 6))
    """
    members = -(-gpus // gpus_per_node)
    while gpus % members:
        members += 1
    return members, gpus // members


def load_trace(
    data: Path, *, nodes: int, gpus_per_node: int, now_ms: int, at: str = DEFAULT_AT, seed: int = 0, rush_h: int = 0
) -> JobTrace:
    """Return the Venus trace below `data`, or else a generated trace.

    Its live part begins at `at` (ISO, UTC).

    rush_h: number of hours after the start during which the demand stays above the fleet's size. The Venus trace
    almost always fits its fleet, so generated jobs are added to it. Raises ValueError for an invalid `at`.
    """
    at_ms = parse_time_ms(at)
    start_ms = shift_start_ms(at_ms, now_ms)
    path = data / VENUS
    capacity = nodes * gpus_per_node
    if path.is_file():
        trace = _make_venus_trace(pd.read_parquet(path), start_ms - at_ms, start_ms)
        trace = _extend_with_rush(trace, capacity, seed, rush_h) if rush_h else trace
    else:
        note = f"FLEETCAST_DATA not found at {data}: using the seeded generator"
        trace = replace(generate_trace(capacity, start_ms=start_ms, seed=seed, rush_h=rush_h), note=note)
    return drop_oversized_jobs(trace, nodes=nodes, gpus_per_node=gpus_per_node)


def parse_time_ms(text: str) -> int:
    """Convert an ISO time to Unix ms. A time without a zone is in UTC."""
    time = datetime.fromisoformat(text)
    return int((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1000)


def shift_start_ms(at_ms: int, now_ms: int) -> int:
    """Return the latest time up to `now_ms` that is a whole number of weeks from `at_ms`.

    >>> (shift_start_ms(1000, WEEK_MS * 3 + 999) - 1000) // WEEK_MS
    2
    """
    return at_ms + (now_ms - at_ms) // WEEK_MS * WEEK_MS


def drop_oversized_jobs(trace: JobTrace, *, nodes: int, gpus_per_node: int) -> JobTrace:
    """Return the trace without jobs that this fleet can never hold. `skipped` counts them."""
    shapes = {gpus: choose_gang_shape(gpus, gpus_per_node)[0] for gpus in np.unique(trace.gpus).tolist()}
    fits = np.array([shapes[gpus] <= nodes for gpus in trace.gpus.tolist()], bool)
    if bool(fits.all()):
        return trace
    fitting = np.flatnonzero(fits).tolist()
    return replace(
        trace,
        job=tuple(trace.job[row] for row in fitting),
        submit_ms=trace.submit_ms[fitting],
        run_s=trace.run_s[fitting],
        gpus=trace.gpus[fitting],
        user=tuple(trace.user[row] for row in fitting),
        class_=tuple(trace.class_[row] for row in fitting),
        queue=tuple(trace.queue[row] for row in fitting) if trace.queue else (),
        skipped=trace.skipped + len(trace) - len(fitting),
    )


def _make_venus_trace(table: pd.DataFrame, shift_ms: int, start_ms: int) -> JobTrace:
    table = table.sort_values("submit_time", kind="stable")
    gpus = table["gpu_count"].to_numpy(np.int32)
    submit_ms = table["submit_time"].to_numpy("datetime64[ms]").astype(np.int64) + shift_ms
    jobs = tuple(name.replace("#", "-") for name in table["job_id"].astype(str))
    users = table["user"].astype(str).tolist() if "user" in table else [""] * len(table)
    return JobTrace(
        job=jobs,
        submit_ms=submit_ms,
        run_s=np.maximum(table["service_sec"].to_numpy(np.float64), 1.0),
        gpus=gpus,
        user=tuple(users),
        class_=tuple(map(_choose_class, jobs, gpus.tolist())),
        start_ms=start_ms,
        source="venus",
        note=f"jobs are the Helios Venus trace ({len(table):,} GPU jobs of 2020, shifted by whole weeks)",
    )


def _choose_class(job: str, gpus: int) -> JobClass:
    """Choose a job's class by its size. For small jobs a hash of the name decides, so runs agree."""
    if gpus >= 8:
        return "training"
    draw = zlib.crc32(job.encode()) % 100
    if gpus >= 2:
        return "inference" if draw < 25 else "fine_tuning"
    return "interactive" if draw < 15 else "inference" if draw < 30 else "batch"


def generate_trace(
    capacity_gpus: int, *, start_ms: int, seed: int, days_before: int = 30, days_after: int = 14, rush_h: int = 0
) -> JobTrace:
    """Generate a trace like Venus for a fleet of any size, with more demand than GPUs at `start_ms`.

    Submissions come in bursts by hour and weekday, and run times are heavy-tailed. The load is half the
    capacity until a last rush. For `rush_h` hours after the start, the jobs would need more GPUs than
    the fleet has even if none of them had to wait. So there is always a queue, whatever engine places
    the jobs.
    """
    rng = np.random.default_rng(seed)
    begin_ms = start_ms - days_before * 24 * HOUR_MS
    submit_ms = _draw_submit_times(rng, begin_ms, days_before + days_after, jobs_per_day=0.72 * capacity_gpus)
    gpus = _draw_sizes(rng, len(submit_ms), capacity_gpus)
    run_s = _draw_run_times(rng, len(submit_ms))
    submit_ms, run_s, gpus = _add_rushes(rng, submit_ms, run_s, gpus, start_ms, capacity_gpus, rush_h)
    order = np.argsort(submit_ms, kind="stable")
    jobs = tuple(f"g{seed}-{number:06d}" for number in range(len(order)))
    users = rng.zipf(1.6, len(order)).clip(max=60)
    return JobTrace(
        job=jobs,
        submit_ms=submit_ms[order],
        run_s=run_s[order],
        gpus=gpus[order],
        user=tuple(f"u{number:02d}" for number in users.tolist()),
        class_=tuple(map(_choose_class, jobs, gpus[order].tolist())),
        start_ms=start_ms,
        source="generator",
        note=f"jobs come from the seeded generator (seed {seed})",
    )


def _draw_submit_times(rng: np.random.Generator, begin_ms: int, days: int, jobs_per_day: float) -> NDArray[np.int64]:
    """Draw (n,) int64 sorted submit times in Unix ms: bursts of jobs in a Poisson process by hour.

    A burst has a geometric number of jobs.
    """
    hours = begin_ms + HOUR_MS * np.arange(days * 24, dtype=np.int64)
    of_day = (hours // HOUR_MS % 24).astype(int)
    weekday = ((hours // (24 * HOUR_MS) + 3) % 7).astype(int)  # 1 January 1970 was a Thursday
    rate = np.array(_HOURLY, float)[of_day] / np.sum(_HOURLY) * np.array(_WEEKDAY)[weekday] * jobs_per_day
    burst = 2.5
    starts = np.repeat(hours, rng.poisson(rate / burst))
    times = starts + rng.integers(0, HOUR_MS, len(starts))
    sizes = rng.geometric(1 / burst, len(times))
    spaced = np.repeat(times, sizes) + rng.integers(0, 120_000, int(sizes.sum()))
    return np.sort(spaced).astype(np.int64)


def _draw_sizes(rng: np.random.Generator, n: int, capacity_gpus: int) -> NDArray[np.int32]:
    sizes = np.array(_SIZES, np.int32)
    shares = np.where(sizes <= capacity_gpus, _SIZE_SHARES, 0.0)
    return rng.choice(sizes, n, p=shares / shares.sum())


def _draw_run_times(rng: np.random.Generator, n: int) -> NDArray[np.float64]:
    """Draw (n,) float64 run times in seconds.

    About three quarters run for minutes (log-normal), the rest for hours to days.
    """
    body = rng.lognormal(np.log(180.0), 1.5, n)
    tail = rng.lognormal(np.log(9000.0), 1.7, n)
    return np.clip(np.where(rng.random(n) < 0.77, body, tail), 1.0, LONGEST_RUN_S)


def _extend_with_rush(trace: JobTrace, capacity_gpus: int, seed: int, rush_h: int) -> JobTrace:
    """Return the trace with more jobs, which keep demand above the fleet's capacity for `rush_h` hours."""
    rng = np.random.default_rng([seed, rush_h])
    columns = (trace.submit_ms, trace.run_s, trace.gpus)
    submit_ms, run_s, gpus = _add_rushes(rng, *columns, trace.start_ms, capacity_gpus, rush_h)
    order = np.argsort(submit_ms, kind="stable")
    more = tuple(f"rush-{number:06d}" for number in range(len(submit_ms) - len(trace)))
    jobs, users = trace.job + more, trace.user + ("rush",) * len(more)
    classes = trace.class_ + tuple(map(_choose_class, more, gpus[len(trace) :].tolist()))
    return replace(
        trace,
        job=tuple(jobs[row] for row in order),
        submit_ms=submit_ms[order],
        run_s=run_s[order],
        gpus=gpus[order],
        user=tuple(users[row] for row in order),
        class_=tuple(classes[row] for row in order),
        note=f"{trace.note}, and {len(more):,} generated jobs so that a queue stands for {rush_h} h of fleet time",
    )


def _add_rushes(
    rng: np.random.Generator,
    submit_ms: NDArray[np.int64],
    run_s: NDArray[np.float64],
    gpus: NDArray[np.int32],
    start_ms: int,
    capacity_gpus: int,
    rush_h: int,
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int32]]:
    """Append generated jobs: a rush before the start, and one for each step of the `rush_h` hours after the start.

    Returns (submit_ms, run_s, gpus).
    """
    at_ms, span_ms = start_ms, 5 * HOUR_MS
    for _ in range(1 + rush_h * HOUR_MS // RUSH_STEP_MS):
        rush = _draw_rush(rng, submit_ms, run_s, gpus, at_ms, span_ms, capacity_gpus)
        submit_ms = np.concatenate([submit_ms, rush[0]])
        run_s, gpus = np.concatenate([run_s, rush[1]]), np.concatenate([gpus, rush[2]])
        at_ms, span_ms = at_ms + RUSH_STEP_MS, RUSH_STEP_MS
    return submit_ms, run_s, gpus


def _draw_rush(
    rng: np.random.Generator,
    submit_ms: NDArray[np.int64],
    run_s: NDArray[np.float64],
    gpus: NDArray[np.int32],
    at_ms: int,
    span_ms: int,
    capacity_gpus: int,
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int32]]:
    """Draw further jobs that raise the demand at a time to 1.15 of the capacity.

    Returns (submit_ms, run_s, gpus). The jobs are submitted in the `span_ms` before that time.
    """
    alive = (submit_ms <= at_ms) & (submit_ms + run_s * 1000 > at_ms)
    missing = int(1.15 * capacity_gpus) - int(gpus[alive].sum())
    sizes: list[int] = []
    while missing > 0:
        sizes.append(int(_draw_sizes(rng, 1, min(capacity_gpus, max(8, capacity_gpus // 8)))[0]))
        missing -= sizes[-1]
    ago_ms = rng.integers(0, span_ms, len(sizes))
    runs = ago_ms / 1000 + rng.uniform(1800.0, 8 * 3600.0, len(sizes))
    return at_ms - ago_ms, runs, np.array(sizes, np.int32)
