"""The data that models are fitted on: demand panels and jobs, from public sets or an archive."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.errors import ConfigError, FleetcastError
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.ingest.archive.files import ArchiveFiles
from fleetcast.ingest.archive.read import ArchiveSpan
from fleetcast.models.forecast import Panel
from fleetcast.training.sets.demand_sets import DemandSet, set_known_capacity
from fleetcast.training.sets.demand_sets import read_panels as read_public_panels
from fleetcast.training.sets.job_sets import SHORTEST_S, HistoryJobs
from fleetcast.training.sets.job_sets import read_jobs as read_public_jobs
from fleetcast.training.sites.archive_history import ArchiveHistory, read_history

Say = Callable[[str], None]
Found = TypeVar("Found")

LAST_MS = 2**53  # beyond any clock
ARCHIVE = "archive"
LEAST_BINS = 2 * 144


@dataclass(frozen=True)
class TrainingInputs:
    """The source of a training's data: a data folder or an archive.

    sets: the names of the sets to use, empty for all. Only data up to `until_ms` are used.
    """

    data: Path | None = None
    archive: str | None = None
    sets: tuple[str, ...] = ()
    until_ms: int = LAST_MS
    fleet_gpus: int = 0  # of the topology; 0 without one
    say: Say = print

    def __post_init__(self) -> None:
        if (self.data is None) == (self.archive is None):
            raise ConfigError("name one of --data FOLDER (data sets) and --archive URL (what this site has archived)")
        if self.data is not None and not self.data.is_dir():
            raise ConfigError(f"--data {self.data}: no such folder; `fleetcast data list` shows what is there")

    @cached_property
    def history(self) -> ArchiveHistory:
        """The archive's history. The archive is read only once."""
        span = ArchiveSpan(0, self.until_ms)
        history = read_history(ArchiveFiles(self.archive or ""), span, fleet_gpus=self.fleet_gpus, say=self.say)
        for reason, count in sorted(history.bad.items()):
            self.say(f"skipped {count:,} events of the archive: {reason}")
        return history

    def read_panels(self) -> list[DemandSet]:
        """Read the demand panels. Raises FleetcastError if there are none."""
        if self.data is None:
            found = [DemandSet(ARCHIVE, panel, panel.bins) for panel in self.history.panels]
        else:
            found = read_public_panels(self.data, None, self.say, self._is_wanted)
        cut = [DemandSet(row.dataset, panel, panel.bins) for row in found if (panel := self._cut_panel(row.panel)).bins]
        long = [row for row in cut if row.panel.bins >= LEAST_BINS]
        for row in cut:
            if row not in long:
                self.say(f"skipped {row.dataset} {row.panel.target}: {row.panel.bins} bins, less than two days")
        return self._require_any(long, "series of demand (demand/…, serving/…, or jobs/… with starts)")

    def read_jobs(self) -> list[tuple[str, HistoryJobs]]:
        """Read the job histories by name. Raises FleetcastError if there are none.

        Starts and ends after `until_ms` count as unknown.
        """
        if self.data is None:
            return self._require_any([(ARCHIVE, make_job_table(self.history.attempts))], "jobs")
        from fleetcast.training.sets.data_folders import list_set_names

        found = []
        for name in list_set_names(self.data):
            if name.startswith("jobs/") and self._is_wanted(name):
                table, skipped = read_public_jobs(self.data / name)
                for reason, count in sorted(skipped.items()):
                    self.say(f"skipped {count:,} rows of {name}: {reason}")
                found.append((name, table if self.until_ms == LAST_MS else table.select_known_at(self.until_ms / 1000)))
        return self._require_any([row for row in found if len(row[1])], "job histories (jobs/…)")

    def _cut_panel(self, panel: Panel) -> Panel:
        """Return the panel with only the bins that had ended by `until_ms`."""
        bins = min(panel.bins, max(0, (self.until_ms - panel.first_ms) // (panel.bin_s * 1000)))
        return set_known_capacity(panel.until(bins), bins)

    def _is_wanted(self, name: str) -> bool:
        return not self.sets or any(name == one or name.rpartition("/")[2] == one for one in self.sets)

    def _require_any(self, found: list[Found], what: str) -> list[Found]:
        if found:
            return found
        where = self.archive if self.data is None else self.data
        sets = f" among {', '.join(self.sets)}" if self.sets else ""
        raise FleetcastError(f"{where}: no {what}{sets}, or too little of it, before the given moment")


def make_job_table(attempts: Sequence[JobAttempt]) -> HistoryJobs:
    """Return the attempts that requested GPUs, as a job history.

    The start of a waiting attempt is inf. A running attempt has no end.

    Attempts that ended before they began are left out. Preempted attempts are left out too, because their run
    time only says when they were stopped.
    """
    rows = [row for row in attempts if row.gpus > 0 and _is_usable(row)]
    rows.sort(key=lambda row: (_find_arrival_ms(row) or 0, row.job, row.attempt))
    asked = [row.submission for row in rows]
    submit_s = _make_number_column([(_find_arrival_ms(row) or 0) / 1000 for row in rows])
    start_s = _make_number_column([np.inf if row.started_ms is None else row.started_ms / 1000 for row in rows])
    end_s = _make_number_column([None if row.over_ms is None else row.over_ms / 1000 for row in rows])
    over = {"finished": 0.0, "": np.nan}
    return HistoryJobs(
        job=_make_name_column([f"{row.job}/{row.attempt}" for row in rows]),
        submit_s=submit_s,
        start_s=np.maximum(start_s, submit_s),
        run_s=np.where(np.isfinite(start_s), np.maximum(end_s - start_s, SHORTEST_S), np.nan),
        gpus=_make_number_column([row.gpus for row in rows]),
        user=_make_name_column([one.user if one else "" for one in asked]),
        group=_make_name_column([one.group if one else "" for one in asked]),
        name=_make_name_column([one.name if one else "" for one in asked]),
        queue=_make_name_column([row.queue for row in rows]),
        cpus=_make_number_column([one.cpus if one else None for one in asked]),
        limit_s=_make_number_column([one.limit_s if one else None for one in asked]),
        failed=_make_number_column([over.get(row.outcome, 1.0) for row in rows]),
    )


def _is_usable(attempt: JobAttempt) -> bool:
    begin_ms, end_ms = attempt.started_ms, attempt.over_ms
    backwards = begin_ms is not None and end_ms is not None and end_ms < begin_ms
    return attempt.outcome != "preempted" and _find_arrival_ms(attempt) is not None and not backwards


def _find_arrival_ms(attempt: JobAttempt) -> int | None:
    return attempt.started_ms if attempt.submitted_ms is None else attempt.submitted_ms


def _make_number_column(values: Sequence[float | None]) -> NDArray[np.float64]:
    return np.array([np.nan if value is None else value for value in values], np.float64)


def _make_name_column(values: Sequence[str]) -> NDArray[np.object_]:
    return np.array(values, object)


def parse_moment_ms(option: str, text: str | None) -> int:
    """Convert a date, or seconds on a set's own clock, into milliseconds. Without a text, return LAST_MS.

    A date is in UTC unless it has a zone, and becomes Unix milliseconds. option: the option's name, for
    errors.

    >>> parse_moment_ms("--until", "1970-01-01T00:01"), parse_moment_ms("--until", "6000000")
    (60000, 6000000000)
    """
    if text is None:
        return LAST_MS
    try:
        if text.replace(".", "", 1).isdigit() and "-" not in text:
            return round(float(text) * 1000)
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"{option} {text!r}: expected a date such as 2026-11-01T08:00, or seconds") from None
    return round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)
