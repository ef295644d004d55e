"""When the first entries of the queue should start, as quantiles.

The queue is played in order, without backfill, three times: with all run times at their p10, at their p50 and at
their p90. That all jobs are fast, or all slow, at once is rarer than one in ten, so the interval is rather too wide.
"""

from collections.abc import Mapping, Sequence

from placement.engine import decide
from placement.options import Options
from placement.queue import Waiting, in_order
from placement.timeline import Release, Running, RunTimes, Timeline, place, releases
from placement.view import ClusterView

QUANTILES = (0.1, 0.5, 0.9)
ENTRIES = 8


def start_times(
    queue: Sequence[Waiting],
    view: ClusterView,
    running: Mapping[str, Running],
    run_times: RunTimes,
    options: Options,
) -> dict[str, tuple[int, int, int]]:
    """request_id → start_ms at p10, p50, p90 for the first entries; what never fits is left out."""
    entries = in_order(queue)[:ENTRIES]
    paths = [_play(entries, view, running, run_times, options, q) for q in QUANTILES]
    found = {}
    for request_id in paths[0].keys() & paths[1].keys() & paths[2].keys():
        low, middle, high = sorted(path[request_id] for path in paths)
        found[request_id] = (low, middle, high)
    return found


def _play(
    entries: Sequence[Waiting],
    view: ClusterView,
    running: Mapping[str, Running],
    run_times: RunTimes,
    options: Options,
    q: float,
) -> dict[str, int]:
    """request_id → start_ms when every run time is at its quantile `q`."""
    timeline = Timeline(view, releases(view, running, run_times, options.now_ms, q))
    now_ms = options.now_ms
    starts: dict[str, int] = {}
    for entry in entries:
        request = entry.request
        step = timeline.first_fit(request, options)
        if step is None:
            continue
        then = timeline.at(step)
        now_ms = max(now_ms, timeline.ahead[step - 1].end_ms if step else now_ms)
        starts[request.request_id] = now_ms
        after = place(then, request, decide(request, then, options).ranks)
        own = (after.holders.ravel() == len(after.jobs) - 1).nonzero()[0]
        run_s = run_times.run_s(len(own), q, limit_s=request.limit_s)
        ahead = [*timeline.ahead[step:], Release(request.job_name, now_ms + round(run_s * 1000), own)]
        timeline = Timeline(after, sorted(ahead, key=lambda release: (release.end_ms, release.job)))
    return starts
