"""Detectors: the function of each rule, and the data on which it works.

    @register_detector("xid_hard")    takes the view of all entities of a kind, and returns a Detection
    @register_reporter("slow_nic")    makes Signals in another way: by comparing a gang, from node events or
                                      from ended jobs

Every rule of `fleetcast.models.risk.rules` has exactly one of these functions.
`check_rules_have_detectors` raises ValueError if a rule has none.
"""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from fleetcast.features.frame import FeatureFrame
from fleetcast.fleet.samples import EntityKind
from fleetcast.models.risk.rules import OF_KIND, ROW, RULES
from fleetcast.models.risk.signals import Array, Mask, Times


class FeatureColumns:
    """The columns of a frame as float64. Raises KeyError for a feature that the frame does not have."""

    def __init__(self, frame: FeatureFrame) -> None:
        self.frame = frame
        self.rows = len(frame.values)
        self.node = frame.node
        self.now_ms = frame.time_ms
        self._at = {name: column for column, name in enumerate(frame.names)}
        self._read: dict[str, Array] = {}

    def __getitem__(self, name: str) -> Array:
        """Return (entity,) the values of one feature as float64."""
        if name not in self._read:
            self._read[name] = self.frame.values[:, self._find_column(name)].astype(np.float64)
        return self._read[name]

    def changed_ms(self, name: str) -> Times:
        """Return (entity,) when the readings behind a feature last changed, in Unix ms, 0 if unknown."""
        return self.frame.since_ms[:, self._find_column(name)]

    def _find_column(self, name: str) -> int:
        if name not in self._at:
            near = difflib.get_close_matches(name, self._at)
            hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise KeyError(f"frame of {self.frame.kind} has no feature {name!r}{hint}")
        return self._at[name]


def compute_newest_age_s(columns: FeatureColumns, nodes: int) -> Array:
    """Return (node,) seconds since any entity of the node last sent a sample, NaN if none ever did."""
    age = columns["age_s"]
    known = np.isfinite(age) & (columns.node >= 0)
    newest = np.full(nodes, np.inf)
    np.minimum.at(newest, columns.node[known], age[known])
    return np.where(np.isfinite(newest), newest, np.nan)


@dataclass(frozen=True, slots=True)
class Detection:
    """The findings of one rule on all entities of a kind. All arrays are (entity,).

    on: whether the condition holds. telling: whether the condition would be visible if it held. Only then is
    its absence evidence against it. An idle GPU shows no link downgrade, and an unreadable value shows
    nothing. strength: 0 to 1. since_ms: 0 if unknown.
    """

    on: Mask
    value: Array
    usual: Array
    strength: Array
    since_ms: Times
    telling: Mask

    @classmethod
    def make_detection(
        cls,
        on: Mask,
        value: Array,
        usual: Array | float = np.nan,
        strength: Array | float = 1.0,
        since: Times | None = None,
        telling: Mask | None = None,
    ) -> "Detection":
        """Build a detection. Strength is limited to the range from 0 to 1, and NaN becomes 0.

        A single number applies to all entities. By default, an entity is `telling` if its value is known.
        """
        n = len(on)
        return cls(
            on,
            value,
            np.full(n, usual) if isinstance(usual, float) else usual,
            np.full(n, strength) if isinstance(strength, float) else np.clip(np.nan_to_num(strength), 0.0, 1.0),
            np.zeros(n, np.int64) if since is None else since,
            np.isfinite(value) if telling is None else telling,
        )


Function = TypeVar("Function", bound=Callable[..., object])
DETECTORS: dict[str, Callable[[Any], Detection]] = {}  # by rule, of what samples show
REPORTERS: dict[str, Callable[..., object]] = {}  # by rule, of what is raised elsewhere


def register_detector(rule: str) -> Callable[[Function], Function]:
    """Return a decorator that registers a function as the detector of a rule.

    The function takes the view of the rule's kind, e.g. `GpuView`, and returns a Detection.
    """
    return _register(DETECTORS, rule)


def register_reporter(*rules: str) -> Callable[[Function], Function]:
    """Return a decorator that registers a function as the one that raises signals of these rules."""
    return _register(REPORTERS, *rules)


def _register(table: dict[str, Callable[..., Any]], *rules: str) -> Callable[[Function], Function]:
    def register(function: Function) -> Function:
        for rule in rules:
            if rule not in ROW:
                raise ValueError(f"there is no rule {rule!r} in fleetcast.models.risk.rules")
            if rule in DETECTORS or rule in REPORTERS:
                raise ValueError(f"rule {rule!r} has a function already")
            table[rule] = function
        return function

    return register


def detect_signals(kind: EntityKind, view: object, rows: int) -> list[Detection]:
    """Run the detector of each rule of a kind, and return their detections in the order of OF_KIND[kind].

    view: the view of all entities, e.g. `GpuView`. rows: the number of entities. A rule whose signals are raised
    elsewhere has a detection in which no condition holds.
    """
    nothing = Detection.make_detection(np.zeros(rows, bool), np.zeros(rows), strength=0.0)
    detectors = [DETECTORS.get(RULES[row].name) for row in OF_KIND[kind]]
    return [nothing if detector is None else detector(view) for detector in detectors]


def check_rules_have_detectors() -> None:
    """Check that each rule has a function that raises its signals. Raises ValueError if a rule has none.

    Call this after all modules that register such functions are imported.
    """
    missing = [rule.name for rule in RULES if rule.name not in DETECTORS and rule.name not in REPORTERS]
    if missing:
        raise ValueError(f"no function sees or reports {', '.join(missing)}")
