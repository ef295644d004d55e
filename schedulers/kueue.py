"""The adapter for Kueue's admission checks, which decide whether a workload with quota may start.

The message of the check states the forecast. The adapter writes three fields:

    hold       whether a workload waits for us. Withdrawing it makes the check Ready. "Retry S" gives back the
               quota for S seconds
    note       the message for a workload that waits for quota
    condition  Active of the AdmissionCheck. Without it Kueue admits nothing

Workloads are held only if a gate is configured. With a gate, a workload is held while every block of
nodes is too risky, for at most `hold_s`.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from fleetcast.schedulers.adapter import Seen, Verb, Write, withdraw_fields
from fleetcast.schedulers.safe_room import SafeRoom, SafeRooms, compute_block_risk
from fleetcast.schedulers.weather import Outlook, StartOutlook, Weather

HOLD, NOTE, ACTIVE = "hold", "note", "condition Active"
PENDING, RETRY, SERVING = "Pending", "Retry", "True Serving"
CHECK, WAITS, JOB, GPUS, NODES, HELD = "check", "waits", "job", "gpus", "nodes", "held"  # seen, never written
FORECAST = "forecast: "  # before a note of ours
MIN_CHANGE_MS = 300_000  # a time that moved by less is no news,
MIN_CHANGE_SHARE = 0.2  # nor is one that moved by less than this share of what is left
_STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\dZ")
_WITHDRAWN = "there is no forecast: Fleetcast is withdrawn"
_NO_FORECAST = "there is no forecast now"


@dataclass(frozen=True, slots=True)
class GateRule:
    """The rule that decides at which risk workloads are held back, and for how long.

    `prefix`: the prefix of job names in the source `kubernetes`.
    """

    gate: bool = False
    max_risk: float = 0.5  # of a gang, within 1 h
    level: str = "block"  # of the topology
    retry_s: int = 60
    hold_s: int = 600  # all holds of a workload together
    prefix: str = ""


class WorkloadChecks:
    """The adapter `kueue`, which answers admission checks of workloads.

    A key is a workload (namespace/name) that our check must admit, or one of our checks.
    """

    verbs: Mapping[str, Verb] = {}
    fields = frozenset({HOLD, NOTE, ACTIVE})

    def __init__(self, rule: GateRule = GateRule()) -> None:
        self._rule = rule
        self._rooms: tuple[Outlook | None, SafeRooms] = (None, SafeRooms(Outlook.make_empty(), rule.level))

    def wishes(self, weather: Weather | None, seen: Seen) -> Iterator[Write]:
        """Return the changes that the checks need.

        If the adapter withdraws, a check stays Active. Otherwise Kueue would stop the queues of this check.
        """
        nodes = weather.nodes if weather else None
        for key, values in seen.items():
            if CHECK in values:
                if not values.get(ACTIVE, "").startswith("True"):
                    yield Write(key, ACTIVE, SERVING, values.get(ACTIVE), "Fleetcast answers workloads")
            elif weather is None or nodes is None:
                yield from withdraw_fields({key: values}, (HOLD, NOTE), _NO_FORECAST if weather else _WITHDRAWN)
            elif values.get(HOLD) == PENDING:
                yield self._decide_hold(key, values, weather, nodes)
            elif WAITS in values:
                yield from self._update_start_message(key, values, weather)

    def _decide_hold(self, key: str, values: Mapping[str, str], weather: Weather, nodes: Outlook) -> Write:
        rule, room = self._rule, self._find_safe_room(nodes, int(values.get(GPUS, "0")))
        sentences = [self._describe_job_start(values, weather), _describe_risk(values, nodes, room, rule.level)]
        if rule.gate and room is not None and room.risk > rule.max_risk:
            left_s = rule.hold_s - int(values.get(HELD, "0")) * rule.retry_s
            if left_s > 0:
                why = f"held back, since that is above {rule.max_risk:.0%}"
                value = f"{RETRY} {min(rule.retry_s, left_s)}"
                return Write(key, HOLD, value, PENDING, _join_sentences(*sentences, why), 1000)
            sentences.append(f"held for {rule.hold_s} s, which is the limit")
        return Write(key, HOLD, None, PENDING, _join_sentences(*sentences))

    def _find_safe_room(self, nodes: Outlook, gpus: int) -> SafeRoom | None:
        if self._rooms[0] is not nodes:
            self._rooms = (nodes, SafeRooms(nodes, self._rule.level))
        return self._rooms[1].find_safest_block(gpus)

    def _update_start_message(self, key: str, values: Mapping[str, str], weather: Weather) -> Iterator[Write]:
        """Yield the write of a message with the expected start, if it differs enough from the present message.

        Yields nothing while start times are unknown. The present message then stays, because its times are absolute.
        """
        held = int(values.get(HELD, "0")) if self._rule.gate else 0
        if weather.starts is None and not held:
            return
        back = f"held back, {held} so far, since every {self._rule.level} was too risky" if held else ""
        text = _join_sentences(self._describe_job_start(values, weather), back)
        note, old = FORECAST + text if text else None, values.get(NOTE)
        if note != old and not (note and old and _has_similar_times(note, old, weather.now_ms)):
            yield Write(key, NOTE, note, old, text or "no start is known now")

    def _describe_job_start(self, values: Mapping[str, str], weather: Weather) -> str:
        job, starts = values.get(JOB, ""), weather.starts or {}
        found = starts.get(self._rule.prefix + job) or starts.get(job.rpartition("/")[2])
        return _describe_start(found, weather.now_ms) if found else ""


def _describe_start(start: StartOutlook, now_ms: int) -> str:
    if start.p50_ms is None:
        return ""
    p90 = "" if start.p90_ms is None else f", p90 {_format_minute(max(start.p90_ms, now_ms))}"
    return f"expected start {_format_minute(max(start.p50_ms, now_ms))}{p90}"


def _describe_risk(values: Mapping[str, str], nodes: Outlook, room: SafeRoom | None, level: str) -> str:
    names = tuple(values.get(NODES, "").split())
    risk = compute_block_risk(nodes, names)
    if risk is not None:
        worst = next((f"; {name}: {nodes.reasons[name]}" for name in names if name in nodes.reasons), "")
        return f"risk {risk:.0%} within 1 h on its {len(names)} nodes{worst}"
    if room is not None:
        return f"risk {room.risk:.0%} within 1 h in the safest {level}, {room.block}"
    return "nothing is known of the risk of its nodes"


def _join_sentences(*texts: str) -> str:
    return "; ".join(filter(None, texts))


def _format_minute(time_ms: int) -> str:
    """Format a time in UTC for users, to the minute.

    >>> _format_minute(1_760_000_000_000)
    '2025-10-09T08:53Z'
    """
    return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%MZ")


def _has_similar_times(new: str, old: str, now_ms: int) -> bool:
    """Return whether two messages differ only in their times, and only by a little."""
    if _STAMP.sub("", new) != _STAMP.sub("", old):
        return False
    times = zip(_STAMP.findall(new), _STAMP.findall(old), strict=True)
    return all(
        abs(a - b) <= max(MIN_CHANGE_MS, MIN_CHANGE_SHARE * (a - now_ms))
        for a, b in (map(_parse_time_ms, pair) for pair in times)
    )


def _parse_time_ms(stamp: str) -> int:
    return int(datetime.fromisoformat(stamp).timestamp() * 1000)
