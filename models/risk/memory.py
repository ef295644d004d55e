"""RuleMemory: per-rule state between ticks, so that one odd sample neither raises nor clears a signal.

    seen once ──► shown (a reason, action "watch") ──► seen `firm_after` times in a row ──► firm
    firm ──► cleared after `clears_s` of telling observations against it
         └─► a rule that is not hard: cleared after HOLD_S of pages that do not tell (idle, or without the metric)

What cannot be read changes nothing: while an entity's page is late, its signals stay as they were.

Only a new sample counts as an observation: ticks between two scrapes change nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet.samples import EntityKind
from models.risk.detectors import Detection
from models.risk.rules import OF_KIND, RULES, Rule
from models.risk.signals import Array, Mask, Times

HOLD_S = 600.0
NEW_SAMPLE_MS = 500
LONGEST_GAP = 2.2  # intervals: a sample after a longer silence says nothing of the time before
EVIDENCE = ("streak", "firm", "against_s", "untold_s", "value", "usual", "strength", "since_ms", "seen_ms")
EARLY_EVERY_S = 15.0  # between the samples that the rules of early signs count


@dataclass(frozen=True, slots=True)
class Raised:
    """What is shown now of one kind: (rule, entity) masks and the evidence of when it was last seen."""

    shown: Mask
    firm: Mask
    value: Array
    usual: Array
    strength: Array
    since_ms: Times
    seen_ms: Times


class RuleMemory:
    """Arrays (rule, entity) of one kind of entity, rules as in OF_KIND."""

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

    def settle(
        self,
        found: Sequence[Detection],
        age_s: Array,
        now_ms: int,
        interval_s: float,
        answers: Mask | None = None,
    ) -> Raised:
        """Fold in this tick's detections, in the order of OF_KIND. Returns what is shown and what is firm.

        age_s: (entity,) since the last sample, NaN for none. interval_s: between samples. answers: (node,) its
        exporters answer; required of nodes, whose samples also say that they do not.
        """
        self._grow(len(age_s))
        on, telling = (
            np.array([getattr(seen, name) for seen in found]).reshape(len(self.rules), -1) for name in ("on", "telling")
        )
        fresh, gap_s = self._fresh(age_s, now_ms)
        elapsed_s = min(max(now_ms - self.tick_ms, 0) / 1000, 10 * interval_s) if self.tick_ms else 0.0
        self.tick_ms = now_ms
        if answers is None:  # time counts by samples, so it does not where none arrives
            told_s = read_s = np.where(fresh, np.minimum(gap_s, LONGEST_GAP * interval_s), 0.0)
        else:
            told_s, read_s = np.full(len(age_s), elapsed_s), np.where(answers, elapsed_s, 0.0)
        began = on & (self.streak == 0) & ~self.firm
        self.streak = np.where(fresh, np.where(on, self.streak + 1, np.where(telling, 0, self.streak)), self.streak)
        self.against_s = np.where(on, 0.0, self.against_s + np.where(telling, told_s, 0.0))
        self.untold_s = np.where(on | telling, 0.0, self.untold_s + read_s)
        often = np.array([_often(rule, interval_s) for rule in self.rules])[:, None]
        need = often * np.array([rule.firm_after for rule in self.rules])[:, None]
        clears_s = np.array([rule.clears_s for rule in self.rules])[:, None]
        hold_s = np.array([np.inf if rule.hard else HOLD_S for rule in self.rules])[:, None]
        gone = ~on & ((self.against_s >= clears_s) | (self.untold_s >= hold_s))
        self.firm = (self.firm & ~gone) | (on & (self.streak >= need))
        self.streak = np.where(gone, 0, self.streak)
        self._keep(found, on, began, now_ms)
        shown_after = often * np.array([rule.shown_after for rule in self.rules])[:, None]
        shown = self.firm | (on & (self.streak >= shown_after))
        value = self._grown(now_ms)
        return Raised(shown, self.firm & shown, value, self.usual, self.strength, self.since_ms, self.seen_ms)

    def _grow(self, entities: int) -> None:
        more = entities - len(self.sample_ms)
        if more > 0:
            for name in EVIDENCE:
                setattr(self, name, np.pad(getattr(self, name), ((0, 0), (0, more))))
            self.sample_ms = np.pad(self.sample_ms, (0, more))

    def _fresh(self, age_s: Array, now_ms: int) -> tuple[Mask, Array]:
        """(entity,) a sample arrived since the last call, and the seconds since the one before.

        Ages leave out our own downtime. So in the first call after a restart all samples look new, and none counts.
        """
        sample_ms = np.where(np.isfinite(age_s), now_ms - np.nan_to_num(age_s) * 1000, 0).astype(np.int64)
        fresh = sample_ms > self.sample_ms + NEW_SAMPLE_MS
        gap_s = (sample_ms - self.sample_ms) / 1000
        self.sample_ms = np.where(fresh, sample_ms, self.sample_ms)
        if self._restored:
            fresh, self._restored = np.zeros(len(fresh), bool), False
        return fresh, gap_s

    def _keep(self, found: Sequence[Detection], on: Mask, began: Mask, now_ms: int) -> None:
        """Remember the evidence of what is on now; a signal that does not know its start begins when first seen."""
        for name in ("value", "usual", "strength"):
            now = np.array([getattr(seen, name) for seen in found]).reshape(on.shape)
            setattr(self, name, np.where(on, now, getattr(self, name)))
        known = np.array([seen.since_ms for seen in found]).reshape(on.shape)
        self.since_ms = np.where(on & (known > 0), known, np.where(began, now_ms, self.since_ms))
        self.seen_ms = np.where(on, now_ms, self.seen_ms)

    def _grown(self, now_ms: int) -> Array:
        """(rule, entity) the values. An age goes on growing while nobody can read it."""
        ages = np.array([rule.unit == "s" and rule.hard for rule in self.rules])[:, None]
        lately = ages & (self.since_ms > 0) & (self.seen_ms < now_ms)
        return np.where(lately, (now_ms - self.since_ms) / 1000, self.value)

    def dump(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """The evidence where something was seen; elsewhere it has no effect. Rows are those of `Entities`."""
        rule, entity = np.nonzero((self.streak > 0) | self.firm)
        about = {"rules": [row.name for row in self.rules], "tick_ms": self.tick_ms}
        arrays = {name: getattr(self, name)[rule, entity] for name in EVIDENCE}
        return about, {**arrays, "rule": rule, "entity": entity, "sample_ms": self.sample_ms.copy()}

    def load(self, about: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """The inverse of `dump`, into an empty one; rules that are gone are left out."""
        here = {rule.name: at for at, rule in enumerate(self.rules)}
        rows = np.array([here.get(name, -1) for name in about["rules"]], np.intp)
        self._grow(len(arrays["sample_ms"]))
        self.sample_ms[:], self.tick_ms, self._restored = arrays["sample_ms"], about["tick_ms"], True
        rule, entity = rows[arrays["rule"]], arrays["entity"]
        known = (rule >= 0) & (entity < len(self.sample_ms))
        for name in EVIDENCE:
            if name in arrays:  # a snapshot of an older version lacks the newest
                getattr(self, name)[rule[known], entity[known]] = arrays[name][known]

    def move(self, by_ms: int) -> None:
        """Move all times; 0 is none."""
        for times in (self.since_ms, self.seen_ms, self.sample_ms):
            times[times > 0] += by_ms
        self.tick_ms += by_ms if self.tick_ms else 0


def _often(rule: Rule, interval_s: float) -> float:
    """Samples that count as one: early signs ask for minutes, which are more samples where they come oftener."""
    return max(1.0, EARLY_EVERY_S / interval_s) if rule.early else 1.0
