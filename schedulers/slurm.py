"""The adapter `slurm`: marks nodes by risk and jobs by start.

    drain     a node in the band high. Only a fresh low band or an operator ends the drain
    feature   risk_low, risk_elevated or risk_high, in addition to the features that others set
    extra     "risk_level" 0, 1 or 2 in the JSON of Extra, for `--extra "risk_level<2"` (from Slurm 23.11 on)
    comment   the expected start of a job that waits

A drain and a comment are ours if they begin with `[fleetcast]`. The executor `slurm` acts on running jobs.
"""

import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, tzinfo
from typing import NamedTuple

import numpy as np

from fleetcast.schedulers.adapter import Seen, Verb, Write, withdraw_fields
from fleetcast.schedulers.bands import HIGH, LEVELS, LOW
from fleetcast.schedulers.weather import Outlook, StartOutlook, Weather

OURS = "[fleetcast]"
THEIRS = "theirs: "  # before a field of ours that another owner holds
JOB = "job "  # before the id of a job; other keys are nodes
DRAIN, FEATURE, EXTRA, COMMENT = "drain", "feature", "extra", "comment"
PENDING = "pending"  # of a job that waits, in what a port reads
FEATURES = tuple(f"risk_{band}" for band in LEVELS)
FEWEST_MS, SHARE = 300_000, 0.1  # a start that moved less, in milliseconds or as a share of the wait, stays
_STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d")


class SlurmSettings(NamedTuple):
    """The settings of a site. prefix: the prefix that Fleetcast adds to Slurm's job ids.

    zone: the time zone of the times in comments.
    """

    drain: bool = True
    features: bool = True
    extra: bool = False
    comments: bool = False
    prefix: str = ""
    zone: tzinfo = UTC


COSTS = {DRAIN: 900}  # of leaving it there: a node that no job gets


class SlurmMarks:
    """The adapter `slurm`, which marks Slurm's nodes by risk and its jobs by expected start.

    A key is the name of a node, or `job ` and the id of a job.
    """

    verbs: Mapping[str, Verb] = {}
    fields = frozenset({DRAIN, FEATURE, EXTRA, COMMENT})

    def __init__(self, aims: SlurmSettings | None = None) -> None:
        self._aims = aims or SlurmSettings()

    def wishes(self, weather: Weather | None, seen: Seen) -> Iterator[Write]:
        if weather is None:
            yield from withdraw_fields(seen, self.fields, "withdrawn", COSTS)
            return
        for key, values in seen.items():
            if key.startswith(JOB):
                yield from self._mark_job(key, values, weather)
            else:
                yield from self._mark_node(key, values, weather.nodes)

    def _mark_node(self, name: str, values: Mapping[str, str], nodes: Outlook | None) -> Iterator[Write]:
        if nodes is None or name not in nodes.rows:
            why = "there is no forecast now" if nodes is None else "no forecast knows this node"
            yield from withdraw_fields({name: values}, (FEATURE, EXTRA), why)
            return
        row = nodes.rows[name]
        p = float(nodes.risk[0, row])
        if np.isnan(p):
            return
        aims, band = self._aims, LEVELS[nodes.level[row]]
        held = {field: values.get(field) for field in (DRAIN, FEATURE, EXTRA)}
        wanted = dict(held)
        if band == LOW:
            wanted[DRAIN] = None
        elif band == HIGH and aims.drain and held[DRAIN] is None:
            wanted[DRAIN] = f"{OURS} p_fail_1h={p:.2f} cause={_format_cause(nodes.causes.get(name, 'high_risk'))}"
        wanted[FEATURE] = f"risk_{band}" if aims.features else None
        wanted[EXTRA] = str(nodes.level[row]) if aims.extra else None
        why = f"risk {p:.0%} within 1 h" + (f": {nodes.reasons[name]}" if name in nodes.reasons else "")
        for field, value in wanted.items():
            if value != held[field] and THEIRS + field not in values:
                yield Write(name, field, value, held[field], why, int(1000 * p))

    def _mark_job(self, key: str, values: Mapping[str, str], weather: Weather) -> Iterator[Write]:
        name, held = self._aims.prefix + key.removeprefix(JOB), values.get(COMMENT)
        start = weather.starts.get(name) if weather.starts and self._aims.comments and PENDING in values else None
        if start is None or start.p50_ms is None:
            yield from withdraw_fields({key: values}, (COMMENT,), "its start is not known, or it has started")
        elif THEIRS + COMMENT not in values:
            comment = self._format_comment(start.p50_ms, start)
            if held is None or self._has_time_moved(held, comment, weather.now_ms):
                yield Write(key, COMMENT, comment, held, start.why)

    def _format_comment(self, p50_ms: int, start: StartOutlook) -> str:
        late = "" if start.p90_ms is None else f" (p90 {self._format_minute(start.p90_ms)})"
        return f"{OURS} start {self._format_minute(p50_ms)}{late}"

    def _format_minute(self, time_ms: int) -> str:
        return datetime.fromtimestamp(time_ms // 60_000 * 60, self._aims.zone).strftime("%Y-%m-%dT%H:%M")

    def _has_time_moved(self, held: str, comment: str, now_ms: int) -> bool:
        """Return whether a time in the comment has moved by more than a share of the remaining wait."""
        before, after = self._parse_times(held), self._parse_times(comment)
        if len(before) != len(after):
            return True
        pairs = zip(before, after, strict=True)
        return any(abs(new - old) > max(FEWEST_MS, SHARE * (new - now_ms)) for old, new in pairs)

    def _parse_times(self, comment: str) -> list[float]:
        stamps = (datetime.strptime(text, "%Y-%m-%dT%H:%M") for text in _STAMP.findall(comment) if _is_valid_time(text))
        return [stamp.replace(tzinfo=self._aims.zone).timestamp() * 1000 for stamp in stamps]


def _format_cause(cause: str) -> str:
    r"""Format a cause as one word that Slurm accepts.

    >>> _format_cause("sm_clock_mhz"), _format_cause("a b\n"), _format_cause("é")
    ('sm_clock_mhz', 'a_b', 'high_risk')
    """
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", cause).strip("_") or "high_risk"


def _is_valid_time(text: str) -> bool:
    try:
        return bool(datetime.strptime(text, "%Y-%m-%dT%H:%M"))
    except ValueError:
        return False
