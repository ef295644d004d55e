"""The demand and the jobs of a site, replayed from its archive through the code that serves.

    archive ─ a day of events at a time ─ JobFold: DemandSeries ─ its bins, before they leave the window ─ Panel
                                          └──── the state of each attempt ─ rows of a job table

Bins are read just before they leave the service's own window. So a panel has the same values as the live series
had.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fleetcast.features.demand_series import BINS, TARGETS, DemandSeries, Target
from fleetcast.features.job_fold import JobFold
from fleetcast.features.pool_inventory import EVERYTHING
from fleetcast.fleet.clock import format_moment
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import FleetcastError
from fleetcast.fleet.events import Checkpoint, JobEvent, NodeEvent, Phase, Step
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.samples import EntityKind
from fleetcast.ingest.archive.files import DAY_MS, ArchiveFiles, parse_day_ms
from fleetcast.ingest.archive.read import ArchiveSpan, find_newest_ms, read_events, read_samples
from fleetcast.ingest.archive.rows import NameLookups, make_row_lookup
from fleetcast.models.forecast import Panel

Array = NDArray[np.float64]

BIN_S = 600
COVARIATES: tuple[Target, ...] = ("running", "queued", "arriving")  # what the service has, and no more
CHECK_INTERVAL_MS = 900_000
REST_MS = 2 * DAY_MS
RETENTION_MS = 35 * DAY_MS  # what a pipeline remembers of jobs that are over
ALL_TIME = ArchiveSpan(0, 2**53)


@dataclass(slots=True)
class JobReplay:
    """A replay of job events through the code with which a pipeline processes them.

    attempts: the state of each attempt, including those that the pipeline has forgotten.
    """

    fold: JobFold = field(default_factory=lambda: JobFold(learns_runs=False))
    attempts: dict[tuple[str, int], JobAttempt] = field(default_factory=dict)

    def apply_event(self, event: JobEvent) -> None:
        """Apply one event. Events that change neither demand nor durations are ignored."""
        if isinstance(event, (Step, Phase, Checkpoint)):
            return
        for changed in self.fold.apply(event):
            self.attempts[changed.job, changed.attempt] = changed

    def forget_old_jobs(self, now_ms: int) -> None:
        """Forget jobs that ended long ago, as the service does. Their attempts remain in `attempts`."""
        for attempt in self.fold.pack_old_attempts(now_ms - REST_MS, now_ms - RETENTION_MS):
            attempt.events.clear()  # the packed copy has them; this one is for the job table


@dataclass(frozen=True, slots=True)
class ArchiveHistory:
    """The demand and the job attempts of a site, read from its archive.

    panels: one for each target, with a series for each queue and "all". attempts: by time of arrival.
    bad: reason → number of unreadable events.
    """

    panels: tuple[Panel, ...]
    attempts: tuple[JobAttempt, ...]
    end_ms: int
    bad: Mapping[str, int]


def read_history(
    files: ArchiveFiles,
    span: ArchiveSpan = ALL_TIME,
    *,
    bin_s: int = BIN_S,
    fleet_gpus: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> ArchiveHistory:
    """Read the jobs of an archive in a time span, as demand in full bins and as attempts.

    fleet_gpus: the GPUs that any queue may use. If it is 0, the GPUs that sent samples just before the
    end are counted. A level is that at the end of its bin, and arrivals are summed over the bin. Raises
    FleetcastError if there are no job events.
    """
    bin_ms, bad = bin_s * 1000, dict[str, int]()
    replay, parts = JobReplay(), list[_Window]()
    first_bin = end_bin = -1
    newest = min(find_newest_ms(files), span.end_ms)
    for day, events in _read_days(files, span, bad):
        for event in events:
            if first_bin < 0:
                first_bin = end_bin = event.time_ms // bin_ms
            while event.time_ms >= (end_bin + BINS[bin_s]) * bin_ms:
                parts.append(_read_window(replay.fold.demand, end_bin, BINS[bin_s], bin_s))
                end_bin += BINS[bin_s]
            replay.apply_event(event)
            newest = max(newest, event.time_ms)
        replay.forget_old_jobs(parse_day_ms(day) + DAY_MS)
        say(f"{day}: {len(events):,} events, {len(replay.attempts):,} attempts so far")
    if first_bin < 0:
        first = next((events[0].time_ms for _, events in _read_days(files, ALL_TIME, {}) if events), None)
        if first is not None:
            raise FleetcastError(f"{files.url}: no job events before --until; the first is at {format_moment(first)}")
        raise FleetcastError(
            f"{files.url}: no job events there; name the archive of a Fleetcast that receives job events"
        )
    while (left := newest // bin_ms - end_bin) > 0:
        parts.append(_read_window(replay.fold.demand, end_bin, min(left, BINS[bin_s]), bin_s))
        end_bin += min(left, BINS[bin_s])
    attempts = sorted(replay.attempts.values(), key=_make_arrival_key)
    panels = (
        _make_panels(parts, first_bin * bin_ms, bin_s, fleet_gpus or count_gpus_at_time(files, newest)) if parts else ()
    )
    return ArchiveHistory(panels, tuple(attempts), newest, bad)


def count_gpus_at_time(files: ArchiveFiles, time_ms: int) -> int:
    """Count the GPUs that sent samples just before a moment."""
    entities = Entities()
    span = ArchiveSpan(time_ms - CHECK_INTERVAL_MS, time_ms + 1)
    read_samples(files, span, NameLookups(make_row_lookup(entities)), [("kind", "==", EntityKind.GPU.value)])
    return len(entities[EntityKind.GPU])


def _read_days(files: ArchiveFiles, span: ArchiveSpan, bad: dict[str, int]) -> Iterator[tuple[str, list[JobEvent]]]:
    """Yield each day with its job events, in order of time."""
    days = sorted({name.day for name in span.list_files(files, "events")})
    for day in days:
        first_ms = max(span.first_ms, parse_day_ms(day))
        events, unread = read_events(
            files, ArchiveSpan(first_ms, min(span.end_ms, parse_day_ms(day) + DAY_MS), span.block)
        )
        for error in unread:
            bad[error.reason] = bad.get(error.reason, 0) + 1
        yield day, [event for event in events if not isinstance(event, NodeEvent)]


def _make_arrival_key(attempt: JobAttempt) -> tuple[int, str, int]:
    times = (attempt.submitted_ms, attempt.started_ms, attempt.ended_ms)
    return min((time_ms for time_ms in times if time_ms is not None), default=0), attempt.job, attempt.attempt


_Window = dict[str, dict[Target, Array]]  # queue -> target -> (bin,)


def _read_window(demand: DemandSeries, first_bin: int, bins: int, bin_s: int) -> _Window:
    """Return queue → target → (bin,) values, for `bins` full bins from `first_bin` on."""
    return {
        queue: {target: collect_full_bins(demand, queue, target, first_bin, bins, bin_s) for target in TARGETS}
        for queue in demand.list_queues()
    }


def collect_full_bins(demand: DemandSeries, queue: str, target: Target, first_bin: int, bins: int, bin_s: int) -> Array:
    """Return (bin,) the values of one series in full bins.

    A series of levels also has a value for the bin in progress, which is left out.
    """
    now_ms = (first_bin + bins) * bin_s * 1000
    if target in ("arriving", "arriving_jobs"):
        return demand.read_series(queue, target, now_ms, bin_s, bins)
    return demand.read_series(queue, target, now_ms, bin_s, bins + 1)[:-1]


def _make_panels(parts: Iterable[_Window], first_ms: int, bin_s: int, fleet_gpus: int) -> tuple[Panel, ...]:
    """Join consecutive windows into panels. Before a queue appears, its values are zero."""
    windows = list(parts)
    names = (*sorted({queue for window in windows for queue in window} - {EVERYTHING}), EVERYTHING)
    values: dict[Target, Array] = {
        target: np.stack([np.concatenate([_find_series(window, name, target) for window in windows]) for name in names])
        for target in TARGETS
    }
    ceilings = np.full(len(names), fleet_gpus or np.nan)
    known: dict[str, Array] = {target: values[target] for target in COVARIATES}
    return tuple(
        Panel(
            target,
            names,
            bin_s,
            first_ms,
            values[target],
            ceilings if target == "running" else np.full(len(names), np.nan),
            known,
        )
        for target in TARGETS
    )


def _find_series(window: _Window, queue: str, target: Target) -> Array:
    return window[queue][target] if queue in window else np.zeros(len(window[EVERYTHING][target]))
