"""Signals: the evidence of one moment as columns, and the sentence for each signal."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.xids import describe_code
from fleetcast.models.risk.rules import BY_NAME, ROW, RULES
from fleetcast.models.words import format_age, format_clock_time, format_number, format_rate

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Times = NDArray[np.int64]
COLUMNS = {  # of Signals beside `rule`, by name
    "node": np.int32,
    "value": np.float64,
    "usual": np.float64,
    "strength": np.float64,
    "since_ms": np.int64,
    "seen_ms": np.int64,
    "firm": np.bool_,
}


@dataclass(frozen=True, slots=True)
class Signals:
    """A table of k raised signals: `entity` has names, `node` rows of nodes, and `rule` rows of RULES.

    seen_ms: when samples last showed the signal, 0 if no sample does. words: the text of a reporter, empty if
    our own rules raised the signal. An empty tuple means that no signal has words.
    """

    rule: NDArray[np.int16]
    node: NDArray[np.int32]
    entity: tuple[str, ...]
    value: Array
    usual: Array
    strength: Array
    since_ms: Times
    seen_ms: Times
    firm: Mask
    words: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.rule)

    @classmethod
    def from_signals(cls, rows: Sequence["Signal"]) -> "Signals":
        """Build the table from single signals. Use this only for few signals, because arrays are faster."""
        columns: dict[str, Any] = {
            name: np.array([getattr(row, name) for row in rows], dtype) for name, dtype in COLUMNS.items()
        }
        rule = np.array([ROW[row.rule] for row in rows], np.int16)
        return cls(rule, entity=tuple(row.entity for row in rows), words=tuple(row.words for row in rows), **columns)

    @classmethod
    def concat(cls, parts: Sequence["Signals"]) -> "Signals":
        if not parts:
            return cls.from_signals(())
        columns: dict[str, Any] = {
            name: np.concatenate([getattr(part, name) for part in parts]) for name in ("rule", *COLUMNS)
        }
        words = tuple(text for part in parts for text in part.words or ("",) * len(part))
        return cls(entity=tuple(name for part in parts for name in part.entity), words=words, **columns)

    def translate_nodes(self, rows: NDArray[np.int32]) -> "Signals":
        """Return the same signals with the node rows of another table. rows: (old row,) -> new row."""
        return replace(self, node=rows[self.node] if len(self) else self.node)

    def select_rows(self, mask: Mask) -> "Signals":
        """Return only the rows that `mask` (k,) selects."""
        if mask.all():
            return self
        columns: dict[str, Any] = {name: getattr(self, name)[mask] for name in ("rule", *COLUMNS)}
        rows = np.flatnonzero(mask).tolist()
        words = tuple(self.words[row] for row in rows) if self.words else ()
        return Signals(entity=tuple(self.entity[row] for row in rows), words=words, **columns)

    def compute_levels(self, nodes: int) -> Array:
        """Return (node, rule) the greatest strength of each rule on each node, 0 without a signal."""
        levels = np.zeros((nodes, len(RULES)))
        np.maximum.at(levels, (self.node, self.rule), self.strength)
        return levels


@dataclass(frozen=True, slots=True)
class Signal:
    """One signal, as a row of `Signals`."""

    rule: str
    node: int
    entity: str
    value: float
    usual: float = field(default=float("nan"))
    strength: float = 1.0
    since_ms: int = 0
    seen_ms: int = 0
    firm: bool = True
    words: str = ""


def describe_signal(rule: str, entity: str, value: float, usual: float, since_ms: int, now_ms: int) -> str:
    """Describe a signal in words. If the time at which it began is known, the description states it.

    >>> describe_signal("thermal_throttle", "n1/3", 990.0, 1980.0, 50_520_000, 50_600_000)
    'GPU 3: SM clock 990 MHz, usual 1,980; thermal slowdown since 14:02 UTC'
    """
    since = f" since {format_clock_time(since_ms, now_ms)}" if since_ms > 0 else ""
    return _format_place_prefix(entity) + BY_NAME[rule].says.format_map(_Words(value, usual, since))


def _format_place_prefix(entity: str) -> str:
    """Return the GPU or port of a signal as the start of a sentence, or "" for the node itself.

    >>> _format_place_prefix("n1/mlx5_0/1"), _format_place_prefix("n1")
    ('port mlx5_0: ', '')
    """
    match entity.split("/"):
        case [_, gpu]:
            return f"GPU {gpu}: "
        case [_, device, _]:
            return f"port {device}: "
    return ""


def _describe_clock(value: float, usual: float, since: str) -> str:
    """Describe the SM clock and its usual value, or return "" if the clock is unknown."""
    if not np.isfinite(value):
        return ""
    usually = f", usual {format_number(usual)}" if np.isfinite(usual) else ""
    return f"SM clock {format_number(value)} MHz{usually}; "


def _describe_xid(value: float, usual: float, since: str) -> str:
    words = describe_code(round(value))
    return f"XID {round(value)}{': ' + words if words else ''}"


def _format_gbit(bytes_per_s: float) -> str:
    return f"{format_number(bytes_per_s * 8 / 1e9)} Gbit/s"


# What a template of a rule may contain: value, usual and " since 14:02 UTC" (empty where unknown) -> words.
WORDS: dict[str, Callable[[float, float, str], str]] = {
    "value": lambda v, u, since: format_number(v),
    "usual": lambda v, u, since: format_number(u),
    "since": lambda v, u, since: since,
    "at": lambda v, u, since: since.replace("since", "at"),
    "age": lambda v, u, since: format_age(v),
    "times": lambda v, u, since: "once" if round(v) == 1 else f"{format_number(v)} times",
    "percent": lambda v, u, since: f"{100 * v:.0f}",
    "usual_percent": lambda v, u, since: format_number(100 * u),
    "of_all": lambda v, u, since: f", of all {100 * u:.0f} %" if np.isfinite(u) else "",
    "rate": lambda v, u, since: format_rate(v),
    "usual_rate": lambda v, u, since: format_rate(u),
    "speed": lambda v, u, since: _format_gbit(v),
    "usual_speed": lambda v, u, since: _format_gbit(u),
    "clock": _describe_clock,
    "xid": _describe_xid,
}


@dataclass(frozen=True, slots=True)
class _Words:
    """The words that a signal's template may contain, by name. A word is built only when a template needs it."""

    value: float
    usual: float
    since: str

    def __getitem__(self, name: str) -> str:
        return WORDS[name](self.value, self.usual, self.since)
