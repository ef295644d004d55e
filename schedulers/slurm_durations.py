"""Run times of jobs by user and name, for Slurm's job_submit plugin: p50 and p90 in minutes.

They come from the run-time model's forecast for the newest job of that user and name, made at its
submission. The model prefers ended jobs of the same user and name to all others. A forecast that
was cut off at the job's limit is not used.

    key USER NAME   field minutes   p50, p90, and the day (since 1970) on which such a job was last seen
    key ""          field until     the Unix time in seconds from which the rows are invalid
"""

import math
from collections.abc import Iterator, Mapping

from fleetcast.schedulers.adapter import Seen, Verb, Write, withdraw_fields
from fleetcast.schedulers.weather import JobOutlook, Weather

MINUTES, UNTIL, FILE = "minutes", "until", ""
VALID_S = 4 * 3600  # renewed at half of it
DAY_MS = 86_400_000
RENEWED_DAYS, RETENTION_DAYS = 7, 90
MOST_NAMES = 20_000
SHARE = 0.2  # a quantile that moved by less stays
CAPPED = 0.99


class JobDurations:
    """The adapter `slurm_durations`, which writes forecast run times for Slurm's job_submit plugin.

    Without fresh jobs the rows stay, but become invalid.
    """

    verbs: Mapping[str, Verb] = {}
    fields = frozenset({MINUTES, UNTIL})

    def wishes(self, weather: Weather | None, seen: Seen) -> Iterator[Write]:
        if weather is None:
            yield from withdraw_fields(seen, self.fields, "withdrawn")
        elif weather.jobs is None:
            yield from withdraw_fields(seen, (UNTIL,), "the jobs are not known now")
        else:
            yield from _extend_validity(seen.get(FILE, {}).get(UNTIL), weather.now_ms // 1000)
            yield from _write_rows(_find_newest_forecasts(weather.jobs), seen, weather.now_ms // DAY_MS)


def _extend_validity(held: str | None, now_s: int) -> Iterator[Write]:
    left_s = int(held) - now_s if held is not None and held.isdecimal() else 0
    if not VALID_S / 2 <= left_s <= VALID_S:
        yield Write(FILE, UNTIL, str(now_s + VALID_S), held, "the rows are fresh", 1000)


def _find_newest_forecasts(jobs: Mapping[str, JobOutlook]) -> dict[str, tuple[int, int]]:
    """Return "USER NAME" → (p50, p90) in minutes, from the job that waits or was the last to start."""
    order = sorted(jobs.values(), key=lambda job: job.started_ms or math.inf)
    return {f"{job.user} {job.name}": minutes for job in order if (minutes := _read_run_minutes(job)) is not None}


def _read_run_minutes(job: JobOutlook) -> tuple[int, int] | None:
    p50_s, p90_s = job.run_p50_s, job.run_p90_s
    if not job.name or not job.user or " " in job.user or p50_s is None or p90_s is None:
        return None
    if job.limit_s is not None and p90_s >= CAPPED * job.limit_s:
        return None
    return max(1, math.ceil(p50_s / 60)), max(1, math.ceil(p90_s / 60))


def _write_rows(minutes: Mapping[str, tuple[int, int]], seen: Seen, today: int) -> Iterator[Write]:
    held = {key: values[MINUTES] for key, values in seen.items() if MINUTES in values}
    wanted = held | {
        key: f"{p50} {p90} {today}"
        for key, (p50, p90) in minutes.items()
        if _must_rewrite(held.get(key), p50, p90, today)
    }
    newest = sorted(wanted, key=lambda key: (-_parse_day(wanted[key]), key))[:MOST_NAMES]
    fresh = {key for key in newest if _parse_day(wanted[key]) > today - RETENTION_DAYS}
    for key, value in wanted.items():
        if key in fresh and value != held.get(key):
            yield Write(key, MINUTES, value, held.get(key), "the forecast of the newest job")
        elif key not in fresh and key in held:
            yield Write(key, MINUTES, None, held[key], "no such job for long")


def _must_rewrite(held: str | None, p50: int, p90: int, today: int) -> bool:
    """Return whether new run times differ enough from the written ones, or whether the written ones are old.

    >>> [_must_rewrite("60 90 100", *new) for new in ((60, 90, 101), (70, 100, 101), (80, 90, 101), (60, 90, 107))]
    [False, False, True, True]
    """
    numbers = [int(word) for word in held.split() if word.isdecimal()] if held else []
    if len(numbers) != 3:
        return True
    moved = any(abs(new - old) > max(1, SHARE * old) for old, new in zip(numbers, (p50, p90), strict=False))
    return moved or today - numbers[2] >= RENEWED_DAYS


def _parse_day(value: str) -> int:
    word = value.rpartition(" ")[2]
    return int(word) if word.isdecimal() else 0
