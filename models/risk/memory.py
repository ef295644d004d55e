"""RuleMemory: the state of rules between ticks, so that one odd sample raises or clears no signal.

    seen once ──► shown (a reason, action "watch") ──► seen `firm_after` times in a row ──► firm
    firm ──► cleared after `clears_s` of observations against it
         └─► if the rule is not hard: cleared after HOLD_S of pages without evidence (idle, or no metric)

A late page changes nothing: the entity's signals stay as they were. Only a new sample counts as an
observation, so ticks between two scrapes change nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.samples import EntityKind
from fleetcast.models.risk.detectors import Detection
from fleetcast.models.risk.rules import OF_KIND, RULES, Rule
from fleetcast.models.risk.signals import Array, Mask, Times

HOLD_S = 600.0
NEW_SAMPLE_MS = 500
LONGEST_GAP = 2.2  # intervals: a sample after a longer silence says nothing of the time before
EVIDENCE = ("streak", "firm", "against_s", "untold_s", "value", "usual", "strength", "since_ms", "seen_ms")
AFTER = ("firm_after", "shown_after")
EARLY_EVERY_S = 15.0  # between the samples that the rules of early signs count

Places = tuple[NDArray[np.intp], NDArray[np.intp]]  # (pair,) rule and entity, by rule and then by entity


@dataclass(frozen=True, slots=True)
class RaisedSignals:
    """The signals of one kind of entity that are shown now, sorted by rule and then by entity.

    Their evidence is that of their last observation. rule: (row,) index into OF_KIND of this kind. entity:
    (row,).
    """

    rule: NDArray[np.intp]
    entity: NDArray[np.intp]
    firm: Mask
    value: Array
    usual: Array
    strength: Array
    since_ms: Times
    seen_ms: Times


class RuleMemory:
    """The state of all rules for one kind of entity.

    Its arrays are (rule, entity). The rules are in the order of OF_KIND.
    """

    def __init__(self, kind: EntityKind) -> None:
        self.rules = [RULES[row] for row in OF_KIND[kind]]
        shape = (len(self.rules), 0)
        self.streak = np.zeros(shape, np.int32)
        self.firm = np.zeros(shape, bool)
        self.against_s, self.untold_s = np.zeros(shape), np.zeros(shape)
        self.value, self.usual, self.strength = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self.since_ms, self.seen_ms = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self.sample_ms = np.zeros(0, np.int64)  # (entity,)
        self.tick_ms = 0
        self._restored = False
        self._clears_s = np.array([rule.clears_s for rule in self.rules])
        self._hold_s = np.array([np.inf if rule.hard else HOLD_S for rule in self.rules])

    def apply_detections(
        self,
        found: Sequence[Detection],
        age_s: Array,
        now_ms: int,
        interval_s: float,
        answers: Mask | None = None,
    ) -> RaisedSignals:
        """Apply this tick's detections, and return the signals that are shown.

        found: one for each rule, in the order of OF_KIND. age_s: (entity,) seconds since the last sample, NaN for
        none. interval_s: seconds between samples. answers: (node,) whether the node's exporters answer. It is
        required for nodes, because their samples may also report that exporters do not answer.

        Only few pairs of a rule and an entity can change: those that are seen now, or were seen and are not
        cleared.
        """
        self._grow_arrays(len(age_s))
        fresh, gap_s = self._find_new_samples(age_s, now_ms)
        elapsed_s = min(max(now_ms - self.tick_ms, 0) / 1000, 10 * interval_s) if self.tick_ms else 0.0
        self.tick_ms = now_ms
        if answers is None:  # time counts by samples, so it does not where none arrives
            stated_s = read_s = np.where(fresh, np.minimum(gap_s, LONGEST_GAP * interval_s), 0.0)
        else:
            stated_s, read_s = np.full(len(age_s), elapsed_s), np.where(answers, elapsed_s, 0.0)
        at = self._find_active_pairs(found)
        rule, entity = at
        on, telling = (_pick_column(found, name, at, bool) for name in ("on", "telling"))
        streak, firm = self.streak[at], self.firm[at]
        began = on & (streak == 0) & ~firm
        streak = np.where(fresh[entity], np.where(on, streak + 1, np.where(telling, 0, streak)), streak)
        against_s = np.where(on, 0.0, self.against_s[at] + np.where(telling, stated_s[entity], 0.0))
        untold_s = np.where(on | telling, 0.0, self.untold_s[at] + read_s[entity])
        often = np.array([_count_samples_per_evidence(each, interval_s) for each in self.rules])
        need, shown_after = (often * np.array([getattr(each, name) for each in self.rules]) for name in AFTER)
        gone = ~on & ((against_s >= self._clears_s[rule]) | (untold_s >= self._hold_s[rule]))
        firm = (firm & ~gone) | (on & (streak >= need[rule]))
        streak = np.where(gone, 0, streak)
        self.streak[at], self.firm[at], self.against_s[at], self.untold_s[at] = streak, firm, against_s, untold_s
        self._store_evidence(found, at, on, began, now_ms)
        shown = firm | (on & (streak >= shown_after[rule]))
        return self._make_raised_signals((rule[shown], entity[shown]), now_ms)

    def _find_active_pairs(self, found: Sequence[Detection]) -> Places:
        """Return the pairs of a rule and an entity that are seen now, or were seen and are not cleared."""
        active = (self.streak > 0) | self.firm
        for row, seen in enumerate(found):
            active[row] |= seen.on
        rule, entity = np.nonzero(active)
        return rule, entity

    def _grow_arrays(self, entities: int) -> None:
        more = entities - len(self.sample_ms)
        if more > 0:
            for name in EVIDENCE:
                setattr(self, name, np.pad(getattr(self, name), ((0, 0), (0, more))))
            self.sample_ms = np.pad(self.sample_ms, (0, more))

    def _find_new_samples(self, age_s: Array, now_ms: int) -> tuple[Mask, Array]:
        """Return (entity,) whether a sample arrived since the last call, and the seconds between samples.

        The seconds are those from the previous sample to the newest one. Ages leave out our own downtime. In the
        first call after a restart all samples would look new, so none of them counts.
        """
        sample_ms = np.where(np.isfinite(age_s), now_ms - np.nan_to_num(age_s) * 1000, 0).astype(np.int64)
        fresh = sample_ms > self.sample_ms + NEW_SAMPLE_MS
        gap_s = (sample_ms - self.sample_ms) / 1000
        self.sample_ms = np.where(fresh, sample_ms, self.sample_ms)
        if self._restored:
            fresh, self._restored = np.zeros(len(fresh), bool), False
        return fresh, gap_s

    def _store_evidence(self, found: Sequence[Detection], at: Places, on: Mask, began: Mask, now_ms: int) -> None:
        """Store the evidence of the signals whose condition holds now.

        on: (pair,) whether the condition of the pair `at` holds. began: (pair,) whether it has just begun. A condition
        that has just begun gets the time `now_ms` if its start is unknown.
        """
        here = at[0][on], at[1][on]
        for name in ("value", "usual", "strength"):
            getattr(self, name)[here] = _pick_column(found, name, here, np.float64)
        known = _pick_column(found, "since_ms", here, np.int64)
        self.since_ms[here] = np.where(known > 0, known, np.where(began[on], now_ms, self.since_ms[here]))
        self.seen_ms[here] = now_ms

    def _make_raised_signals(self, at: Places, now_ms: int) -> RaisedSignals:
        """Return the signals of these pairs of a rule and an entity.

        A hard rule's value in seconds is an age. An age keeps growing while the signal is not observed.
        """
        value, since_ms, seen_ms = self.value[at], self.since_ms[at], self.seen_ms[at]
        ages = np.array([rule.unit == "s" and rule.hard for rule in self.rules])[at[0]]
        lately = ages & (since_ms > 0) & (seen_ms < now_ms)
        value = np.where(lately, (now_ms - since_ms) / 1000, value)
        return RaisedSignals(*at, self.firm[at], value, self.usual[at], self.strength[at], since_ms, seen_ms)

    def dump(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Return a copy of the evidence of the pairs that were seen. The other pairs have no effect.

        An entity has the same row as in the table `Entities`.
        """
        rule, entity = np.nonzero((self.streak > 0) | self.firm)
        about = {"rules": [row.name for row in self.rules], "tick_ms": self.tick_ms}
        arrays = {name: getattr(self, name)[rule, entity] for name in EVIDENCE}
        return about, {**arrays, "rule": rule, "entity": entity, "sample_ms": self.sample_ms.copy()}

    def load(self, about: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Fill an empty object with the state that `dump` returned. Leaves out rules that no longer exist."""
        here = {rule.name: at for at, rule in enumerate(self.rules)}
        rows = np.array([here.get(name, -1) for name in about["rules"]], np.intp)
        self._grow_arrays(len(arrays["sample_ms"]))
        self.sample_ms[:], self.tick_ms, self._restored = arrays["sample_ms"], about["tick_ms"], True
        rule, entity = rows[arrays["rule"]], arrays["entity"]
        known = (rule >= 0) & (entity < len(self.sample_ms))
        for name in EVIDENCE:
            if name in arrays:  # a snapshot of an older version lacks the newest
                getattr(self, name)[rule[known], entity[known]] = arrays[name][known]

    def shift_times(self, by_ms: int) -> None:
        """Shift all times by `by_ms`. A time of 0 is unset and stays 0."""
        for times in (self.since_ms, self.seen_ms, self.sample_ms):
            times[times > 0] += by_ms
        self.tick_ms += by_ms if self.tick_ms else 0


def _count_samples_per_evidence(rule: Rule, interval_s: float) -> float:
    """Return how many samples count as one observation of a rule.

    An early sign needs minutes of evidence, so it needs more samples if they arrive at a shorter interval.
    """
    return max(1.0, EARLY_EVERY_S / interval_s) if rule.early else 1.0


def _pick_column(found: Sequence[Detection], name: str, at: Places, dtype: type) -> NDArray[Any]:
    """Return (pair,) the field `name` of the detections at these pairs of a rule and an entity."""
    rule, entity = at
    picked: NDArray[Any] = np.empty(len(rule), dtype)
    ends = np.searchsorted(rule, np.arange(len(found) + 1))
    for row in np.unique(rule).tolist():
        part = slice(ends[row], ends[row + 1])
        picked[part] = getattr(found[row], name)[entity[part]]
    return picked
