"""Statistics of a play: waits by size and queue, use and shares over time, fairness and its price."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.placement.play.replay import Floats, Trace
from fleetcast.training.judges.played import PlayResult, PlayScene
from fleetcast.training.judges.queue import compute_jain_index

BINS, DAY_S = 160, 86_400.0
MOST_LINES = 5  # methods over time
MOST_QUEUES = 9
OURS = "ours"
SIZES = ((1, 1), (2, 4), (5, 8), (9, 64), (65, None))  # GPUs of a job, from and to


class WaitSummary(msgspec.Struct, frozen=True):
    """A summary of the waits, in seconds, of the jobs of one size class or queue."""

    name: str
    jobs: int
    mean_s: float
    p50_s: float
    p99_s: float
    max_s: float


class PlayNumbers(msgspec.Struct, frozen=True):
    """The statistics of one method's play.

    utilisation: the share of all GPUs in use from the first arrival to the last. jain: Jain's index over
    users. jain_queues: Jain's index over queues. An index over fewer than two is None. seconds, pass_ms: CPU time.
    """

    method: str
    wait: WaitSummary
    utilisation: float
    jain: float | None
    jain_queues: float | None
    by_size: list[WaitSummary]
    by_queue: list[WaitSummary]
    passes: int
    seconds: float
    pass_ms: float | None


class UseOverTime(msgspec.Struct, frozen=True):
    """The use of GPUs over the time of the play, as shares of all GPUs in `BINS` equal parts of it.

    days: (bin,) the middle of each part since the first arrival. use: method → (bin,) share. shares: queue → (bin,)
    share in the play of `shares_of`, for the queues with most jobs.
    """

    days: list[float]
    use: dict[str, list[float]]
    shares_of: str
    shares: dict[str, list[float]]


def measure_use_over_time(scene: PlayScene, starts: Mapping[str, Floats]) -> UseOverTime:
    """Return the use of GPUs by each method, and the shares of the largest queues.

    starts: method → (job,) start times. The shares are those of `ours`, or of the first method if `ours` was not
    played.
    """
    trace = scene.trace
    edges_s = np.linspace(trace.submit_s[0], find_last_arrival_s(trace), BINS + 1)
    main = OURS if OURS in starts else next(iter(starts))
    queue = np.array(list_job_queues(scene))
    names, jobs = np.unique(queue, return_counts=True)
    largest = names[np.argsort(-jobs, kind="stable")][:MOST_QUEUES].tolist()

    def measure(method: str, rows: NDArray[np.bool_] | None = None) -> list[float]:
        held = measure_held_gpus(edges_s, trace, starts[method], rows)
        return [round(value, 4) for value in (held / scene.gpus).tolist()]

    return UseOverTime(
        days=((edges_s[:-1] + np.diff(edges_s) / 2 - edges_s[0]) / DAY_S).round(4).tolist(),
        use={method: measure(method) for method in [*starts][:MOST_LINES]},
        shares_of=main,
        shares={name: measure(main, queue == name) for name in largest},
    )


def compute_play_numbers(scene: PlayScene, played: PlayResult) -> PlayNumbers:
    """Return the statistics of one method's play."""
    trace = scene.trace
    wait_s, gpus = played.start_s - np.array(trace.submit_s), np.array(trace.gpus)
    queue, every = np.array(list_job_queues(scene)), np.ones(len(trace), bool)
    sizes = {_format_size_range(low, high): (gpus >= low) & (gpus <= (high or np.inf)) for low, high in SIZES}
    used = measure_held_gpus(np.array([trace.submit_s[0], find_last_arrival_s(trace)]), trace, played.start_s)
    by_queue = replace(trace, user=queue.tolist())
    return PlayNumbers(
        method=played.method,
        wait=_summarise_waits("all", wait_s),
        utilisation=round(float(used[0]) / scene.gpus, 4),
        jain=compute_jain_index(trace, played.start_s, every),
        jain_queues=compute_jain_index(by_queue, played.start_s, every),
        by_size=[_summarise_waits(name, wait_s[rows]) for name, rows in sizes.items() if rows.any()],
        by_queue=[_summarise_waits(name, wait_s[queue == name]) for name in sorted(set(queue.tolist()))],
        passes=played.passes,
        seconds=round(played.seconds, 3),
        pass_ms=round(1000 * played.seconds / played.passes, 3) if played.passes else None,
    )


def list_job_queues(scene: PlayScene) -> list[str]:
    """Return (job,) the queue that each job counts towards."""
    return [scene.find_own_queue(job) for job in range(len(scene.trace))]


def find_last_arrival_s(trace: Trace) -> float:
    """Return the time of the last arrival in seconds, but at least a second after the first arrival."""
    return max(trace.submit_s[-1], trace.submit_s[0] + 1.0)


def measure_held_gpus(
    edges_s: NDArray[np.float64], trace: Trace, start_s: Floats, rows: NDArray[np.bool_] | None = None
) -> Floats:
    """Return (edges − 1,) the mean number of GPUs that jobs hold between two neighbouring times of `edges_s`.

    rows: (job,) the jobs that count. None for all jobs.
    """
    some = np.ones(len(trace), bool) if rows is None else rows
    begin, gpus = start_s[some], np.array(trace.gpus, np.float64)[some]
    at = np.concatenate([begin, begin + np.array(trace.run_s)[some], edges_s])
    change = np.concatenate([gpus, -gpus, np.zeros(len(edges_s))])
    order = np.argsort(at, kind="stable")
    level, moments = np.cumsum(change[order]), at[order]
    area = np.concatenate([[0.0], np.cumsum(level[:-1] * np.diff(moments))])
    return np.diff(area[np.searchsorted(moments, edges_s)]) / np.diff(edges_s)


def describe_fairness_price(found: Sequence[PlayNumbers]) -> str:
    """Describe in a sentence how much longer the mean wait is with the queue file than with one queue.

    Returns "" if `ours` or `one_queue` was not played.
    """
    mean = {one.method: one.wait.mean_s for one in found}
    if not {"ours", "one_queue"} <= mean.keys():
        return ""
    more = mean["ours"] - mean["one_queue"]
    said = f"{mean['ours']:,.0f} s with the queues, {mean['one_queue']:,.0f} s as one queue"
    return f"the price of fairness in mean wait: {more:+,.0f} s ({said})"


def _summarise_waits(name: str, wait_s: Floats) -> WaitSummary:
    p50, p99 = np.quantile(wait_s, (0.5, 0.99))
    numbers = (float(wait_s.mean()), float(p50), float(p99), float(wait_s.max()))
    return WaitSummary(name, len(wait_s), *(round(value, 1) for value in numbers))


def _format_size_range(low: int, high: int | None) -> str:
    """Format a range of job sizes in GPUs as words.

    >>> _format_size_range(1, 1), _format_size_range(2, 4), _format_size_range(65, None)
    ('1', '2 to 4', '65 or more')
    """
    if high is None:
        return f"{low} or more"
    return str(low) if low == high else f"{low} to {high}"
