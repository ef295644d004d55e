"""The timeline of each node. It stores only changes, so hours of many nodes take little space.

    scores    the probabilities of faults, each time one of them changes noticeably
    signals   a period in which the same reason holds, with its values
    actions   a recommended action, from its begin to its end
    states    a state (ok, degraded, drained, …), from its begin to its end
    stays     an attempt of a job, from its start to its end

Node events are in the node table. Each list is bounded. Older scores and values are thinned out. In the
other lists, the oldest entries are dropped.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.events import NodeEvent
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.nodes import NodeRecord
from fleetcast.fleet.placements import RunningPlaces
from fleetcast.fleet.requests import RankPlacement
from fleetcast.fleet.stateful import Dump, Stateful
from fleetcast.models.risk.scores import RISK_HORIZONS_S, HardReason, Reason
from fleetcast.service.board.board import Section
from fleetcast.service.pipeline import documents
from fleetcast.service.pipeline.capability import Capability
from fleetcast.service.pipeline.publish import encode, make_pieces_sections
from fleetcast.service.pipeline.tick import Tick

SECTION = "timeline.node"
HORIZONS_S = (3600, 86_400)
MOST_STEPS, MOST_POINTS, MOST_SPELLS, MOST_STAYS = 128, 16, 32, 48
RETENTION_MS = 7 * 86_400_000
PAUSE_MS = 60_000  # a signal that is back so soon is the same one
SHORTEST_STEP, SHARE_OF_STEP = 0.005, 0.15  # of a probability: as much as moves a row of the console's ranking
LEAST_MOVE = 0.03  # of a value, beside its usual one
AGES = frozenset({"age_s", "silent_s", "frozen_s", "fault_age_s"})  # grow by themselves: told each time they double

_AT = [RISK_HORIZONS_S.index(horizon_s) for horizon_s in HORIZONS_S]
Item = TypeVar("Item")


class Spell(msgspec.Struct, gc=False):
    """A period in which the same reason for a node's risk held.

    points: [Unix ms, value] where the value changed. share: the reason's part of the node's hazard, from 0
    to 1, at the last change of the value.
    """

    feature: str
    entity: str
    unit: str
    sentence: str
    usual: float | None
    share: float
    fault: bool
    began_ms: int
    ended_ms: int | None
    points: list[tuple[int, float]]


class PastSpan(msgspec.Struct, gc=False):
    """A period in which a node had the same recommended action or the same state.

    `code` names the action or state. `sentence` gives the reason for an action. It is empty for a state.
    """

    code: str
    sentence: str
    began_ms: int
    ended_ms: int | None


class Stay(msgspec.Struct, gc=False):
    """The time that an attempt of a job spent on a node.

    gpus: the number of GPUs that it held there, or None if no event named them.
    """

    job: str
    attempt: int
    gpus: int | None
    began_ms: int
    ended_ms: int | None
    outcome: str


class NodePast(msgspec.Struct):
    """The timeline of one node.

    steps: [Unix ms, probability at each of HORIZONS_S]. The probability belongs to the most likely kind of
    risk. It is None if unknown.
    """

    began_ms: int
    steps: list[tuple[int, list[float | None]]] = []
    signals: list[Spell] = []
    actions: list[PastSpan] = []
    states: list[PastSpan] = []
    stays: list[Stay] = []


class PublishedTimeline(NodePast):
    """The timeline of one node in the form that the board publishes, with the node's events."""

    node: str = ""
    events: Sequence[NodeEvent] = ()


Attempt = tuple[str, int]
Placed = tuple[tuple[RankPlacement, ...], tuple[str, ...]]


class NodePasts(Capability, Stateful):
    """The timelines of all nodes of a fleet.

    `make_sections`, `dump` and `shift_times` must not run at the same time.
    """

    def __init__(self) -> None:
        self.of: dict[str, NodePast] = {}
        self._last = np.zeros((len(HORIZONS_S), 0))
        self._codes = np.zeros(0, np.int8)
        self._active: set[str] = set()  # nodes with a signal or an action that goes on
        self._placed: dict[Attempt, Placed] = {}  # of what runs
        self._places: RunningPlaces | None = None  # at the last tick
        self._on: dict[Attempt, set[str]] = {}  # nodes of stays that go on
        self._ended: set[Attempt] = set()
        self._records: dict[str, NodeRecord] = {}
        self._pieces: dict[str, bytes] = {}
        self._names: tuple[str, ...] = ()

    def dump(self) -> Dump:
        """Pack all timelines into one array, because copying so many objects would take longer."""
        return None, {"pasts": np.frombuffer(msgspec.msgpack.encode(self.of), np.uint8)}

    def load(self, about: None, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Restore the result of `dump` into an empty object.

        Raises msgspec.MsgspecError if it is invalid.
        """
        self.of = msgspec.msgpack.decode(arrays["pasts"].tobytes(), type=dict[str, NodePast])
        for name, past in self.of.items():
            open_ones = [row for row in past.signals if row.ended_ms is None]
            if open_ones or any(row.ended_ms is None for row in past.actions):
                self._active.add(name)
            for stay in past.stays:
                if stay.ended_ms is None:
                    self._on.setdefault((stay.job, stay.attempt), set()).add(name)

    def record_gap(self, since_ms: int) -> None:
        """Record that nothing was observed from `since_ms` until the next tick.

        Call this after `load`.
        """
        for past in self.of.values():
            _begin_span(past.states, "unknown", "", since_ms)
            nothing: list[float | None] = [None] * len(HORIZONS_S)
            _append_and_thin(past.steps, (since_ms, nothing), MOST_STEPS)

    def shift_times(self, by_ms: int) -> None:
        """Shift the times of all scores by `by_ms` after the clock was set.

        The times of signals, actions and states in progress shift, too. Everything else stays.
        """
        for past in self.of.values():
            past.began_ms += by_ms
            past.steps = [(time_ms + by_ms, step) for time_ms, step in past.steps]
            rows: list[Spell | PastSpan] = [*past.signals, *past.actions, *past.states]
            for row in rows:
                if row.ended_ms is None:
                    row.began_ms += by_ms
            for spell in past.signals:
                if spell.ended_ms is None:
                    spell.points = [(time_ms + by_ms, value) for time_ms, value in spell.points]
        self._pieces = {}

    def make_sections(self, tick: Tick) -> list[Section]:
        """Add a tick to the timelines, and return their sections. Returns [] if no timeline changed."""
        changed = self._observe_tick(tick)
        names = tick.topology.names
        missing = [name for name in names if name not in self._pieces]
        if not changed and not missing and names == self._names:
            return []
        self._names = names
        for name in {*changed, *missing}:
            self._pieces[name] = self._encode_node_past(name, tick.now_ms)
        parts = make_pieces_sections(SECTION, [self._pieces[name] for name in names])
        return [Section(name, part, tick.now_ms) for name, part in parts.items()]

    def _encode_node_past(self, name: str, now_ms: int) -> bytes:
        past = self.of[name]
        _drop_old_entries(past, now_ms - RETENTION_MS)
        record = self._records.get(name)
        fields = {field: getattr(past, field) for field in NodePast.__struct_fields__}
        return encode(PublishedTimeline(**fields, node=name, events=record.events if record else ()))

    def _observe_tick(self, tick: Tick) -> set[str]:
        """Add a tick to all timelines. Returns the names of the nodes whose timelines changed."""
        for name in tick.topology.names:
            if name not in self.of:
                self.of[name] = NodePast(tick.now_ms)
        changed = (
            self._observe_scores(tick)
            | self._observe_states(tick)
            | self._observe_reasons(tick)
            | self._observe_jobs(tick)
        )
        for name, record in tick.events.nodes.items():
            if self._records.get(name) is not record and name in self.of:
                changed.add(name)
        self._records = dict(tick.events.nodes)
        return changed

    def _observe_scores(self, tick: Tick) -> set[str]:
        worst = np.nan_to_num(tick.fleet.risk.values[:, _AT, :], nan=-1.0).max(axis=0)
        before = np.full_like(worst, -2.0)
        before[:, : self._last.shape[1]] = self._last[:, : worst.shape[1]]
        moved = np.abs(worst - before) > np.maximum(SHORTEST_STEP, SHARE_OF_STEP * np.maximum(before, 0.0))
        rows = np.flatnonzero((moved | ((worst < 0) != (before < 0))).any(axis=0))
        before[:, rows] = worst[:, rows]
        self._last = before
        names = tick.topology.names
        for row in rows.tolist():
            step = [documents.round_probability(p) if p >= 0 else None for p in worst[:, row].tolist()]
            _append_and_thin(self.of[names[row]].steps, (tick.now_ms, step), MOST_STEPS)
        return {names[row] for row in rows.tolist()}

    def _observe_states(self, tick: Tick) -> set[str]:
        codes = tick.state_codes
        before = np.full(len(codes), -1, np.int8)
        before[: len(self._codes)] = self._codes[: len(codes)]
        self._codes = codes
        changed = [tick.topology.names[row] for row in np.flatnonzero(codes != before).tolist()]
        for row in np.flatnonzero(codes != before).tolist():
            _begin_span(self.of[tick.topology.names[row]].states, documents.STATES[codes[row]], "", tick.now_ms)
        return set(changed)

    def _observe_reasons(self, tick: Tick) -> set[str]:
        names, now_ms = tick.topology.names, tick.now_ms
        reasons = {names[row]: given for row, given in tick.fleet.risk.reasons.items()}
        actions = {names[row]: action for row, action in tick.fleet.risk.actions.items()}
        changed = set()
        for name in reasons.keys() | (self._active & self.of.keys()):
            past, action = self.of[name], actions.get(name, documents.NO_ACTION)
            span = _begin_span(past.actions, action.code, action.sentence, now_ms)
            if _update_signals(past.signals, reasons.get(name, ()), now_ms) or span:
                changed.add(name)
        self._active = set(reasons)
        return changed

    def _observe_jobs(self, tick: Tick) -> set[str]:
        changed: set[str] = set()
        ended = {(row.job, row.attempt): row for row in tick.events.ended}
        if tick.events.placements is not self._places:
            changed |= self._update_stays(tick, ended)
            self._places = tick.events.placements
        for key in ended.keys() - self._ended:  # among them what came and went between two ticks
            changed |= self._add_past_stays(ended[key])
        self._ended = set(ended)
        return changed

    def _update_stays(self, tick: Tick, ended: Mapping[Attempt, JobAttempt]) -> set[str]:
        """Begin and end the stays of attempts that started, moved or ended since the last tick.

        Returns the names of the nodes whose timelines changed.
        """
        changed: set[str] = set()
        running = {(row.job, row.attempt): row for row in tick.events.running}
        for key, row in running.items():
            known = self._placed.get(key)
            if known is None or known[0] is not row.ranks or known[1] is not row.nodes:
                changed |= self._begin_attempt_stays(row, tick.now_ms)
                self._placed[key] = (row.ranks, row.nodes)
        self._placed = {key: self._placed[key] for key in running}
        for key in [key for key in self._on if key not in running]:
            over = ended.get(key)
            over_ms = over.over_ms if over is not None else None
            at_ms = tick.now_ms if over_ms is None else over_ms
            changed |= self._end_attempt_stays(key, self._on[key], at_ms, over.state if over is not None else "")
        return changed

    def _begin_attempt_stays(self, attempt: JobAttempt, now_ms: int) -> set[str]:
        """Begin stays on the nodes where an attempt runs now, and end its stays on nodes that it left.

        Returns the names of these nodes.
        """
        key, gpus = (attempt.job, attempt.attempt), _count_attempt_gpus(attempt)
        before = self._on.get(key, set())
        new = {name for name in gpus.keys() - before if name in self.of}
        for name in new:
            began_ms = now_ms if before else attempt.started_ms or now_ms
            _append_stay(self.of[name].stays, Stay(*key, gpus[name], began_ms, None, ""))
        gone = self._end_attempt_stays(key, before - gpus.keys(), now_ms, "moved")
        self._on[key] = (before & gpus.keys()) | new
        return new | gone

    def _add_past_stays(self, attempt: JobAttempt) -> set[str]:
        """Add the stays of an ended attempt to the nodes that have no record of it. Returns the names of the nodes."""
        key, began_ms, over_ms = (attempt.job, attempt.attempt), attempt.started_ms, attempt.over_ms
        if began_ms is None or over_ms is None:
            return set()
        changed = set()
        for name, count in _count_attempt_gpus(attempt).items():
            past = self.of.get(name)
            if past is not None and all((stay.job, stay.attempt) != key for stay in past.stays):
                _append_stay(past.stays, Stay(*key, count, began_ms, over_ms, attempt.state))
                changed.add(name)
        return changed

    def _end_attempt_stays(self, key: Attempt, names: set[str], at_ms: int, outcome: str) -> set[str]:
        for name in names:
            for stay in self.of[name].stays:
                if (stay.job, stay.attempt) == key and stay.ended_ms is None:
                    stay.ended_ms, stay.outcome = max(at_ms, stay.began_ms), outcome
        left = self._on.get(key, set()) - names
        if left:
            self._on[key] = left
        else:
            self._on.pop(key, None)
        return set(names)


def _append_stay(stays: list[Stay], stay: Stay) -> None:
    """Append a stay. Beyond MOST_STAYS, drop the oldest ended stay, or else the oldest stay."""
    stays.append(stay)
    if len(stays) > MOST_STAYS:
        stays.remove(min(stays, key=lambda row: (row.ended_ms is None, row.began_ms)))


def _count_attempt_gpus(attempt: JobAttempt) -> dict[str, int | None]:
    """Return node → the number of GPUs that an attempt holds there, or None if no event named them."""
    if not attempt.ranks:
        return dict.fromkeys(attempt.nodes)
    counts: dict[str, int | None] = {}
    for rank in attempt.ranks:
        counts[rank.node] = (counts.get(rank.node) or 0) + len(rank.gpus)
    return counts


def _update_signals(signals: list[Spell], reasons: Sequence[Reason], now_ms: int) -> bool:
    """Update the signals to the current reasons. Returns whether anything changed."""
    latest = {(spell.feature, spell.entity): spell for spell in signals}
    given = {(reason.feature, reason.entity): reason for reason in reversed(reasons)}  # the first of two is the firmer
    changed = False
    for key, reason in given.items():
        spell = latest.get(key)
        other = spell is not None and _is_new_signal(spell, reason)
        if other and spell is not None and spell.ended_ms is None:
            spell.ended_ms = now_ms
        if spell is None or other or (spell.ended_ms is not None and spell.ended_ms < now_ms - PAUSE_MS):
            signals.append(_begin_spell(reason, now_ms, spell.ended_ms if spell is not None and other else None))
            changed = True
        else:
            changed |= _continue_spell(spell, reason, now_ms)
    for key, spell in latest.items():
        if spell.ended_ms is None and key not in given:
            spell.ended_ms = now_ms
            changed = True
    if len(signals) > MOST_SPELLS:
        oldest = min(signals, key=lambda row: (row.ended_ms is None, row.began_ms))
        signals.remove(oldest)
    return changed


def _is_new_signal(spell: Spell, reason: Reason) -> bool:
    """Return whether a reason with the same metric begins a new signal.

    It does if its code is another one, or if it is hard and the old reason was not.
    """
    is_code = reason.unit == "code" and spell.points[-1][1] != reason.value
    return is_code or (isinstance(reason, HardReason) and not spell.fault)


def _begin_spell(reason: Reason, now_ms: int, after_ms: int | None) -> Spell:
    """Begin a spell for a reason. after_ms: the end of the spell that it replaces, or None if there is none."""
    began_ms = max(min(reason.since_ms or now_ms, now_ms), after_ms or 0)
    said = (reason.feature, reason.entity, reason.unit, reason.sentence, reason.usual, reason.share)
    return Spell(*said, isinstance(reason, HardReason), began_ms, None, [(now_ms, reason.value)])


def _continue_spell(spell: Spell, reason: Reason, now_ms: int) -> bool:
    """Continue a spell with the reason's present values.

    Returns whether the spell had ended before, or its value changed noticeably.
    """
    was_over, last = spell.ended_ms is not None, spell.points[-1][1]
    spell.ended_ms = None
    scale = max(abs(last), abs(reason.value), abs(reason.usual or 0.0))
    if abs(reason.value - last) <= (0.5 if reason.feature in AGES else LEAST_MOVE) * scale:
        return was_over
    spell.sentence, spell.usual, spell.share = reason.sentence, reason.usual, reason.share
    _append_and_thin(spell.points, (now_ms, reason.value), MOST_POINTS)
    return True


def _begin_span(spans: list[PastSpan], code: str, sentence: str, now_ms: int) -> bool:
    """If the code differs, end the last span and begin another. Returns whether anything changed.

    The code for "no action" ends the last span and begins none.
    """
    last = spans[-1] if spans else None
    if last is not None and last.ended_ms is None:
        if last.code == code:
            return False
        last.ended_ms = now_ms
    elif code == documents.NO_ACTION.code:
        return False
    if code != documents.NO_ACTION.code:
        spans.append(PastSpan(code, sentence, now_ms, None))
        del spans[:-MOST_SPELLS]
    return True


def _append_and_thin(rows: list[Item], row: Item, most: int) -> None:
    """Append a row. Beyond `most` rows, drop every second row of the older half, except the first row."""
    rows.append(row)
    if len(rows) > most:
        half = len(rows) // 2
        del rows[1:half:2]


def _drop_old_entries(past: NodePast, before_ms: int) -> None:
    """Drop everything that had ended before `before_ms`."""
    tables: tuple[list[Any], ...] = (past.signals, past.actions, past.states, past.stays)
    for rows in tables:
        rows[:] = [row for row in rows if row.ended_ms is None or row.ended_ms >= before_ms]
    while len(past.steps) > 1 and past.steps[1][0] < before_ms:
        del past.steps[0]
