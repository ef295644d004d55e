"""Signals: the evidence of one moment as columns, and the sentence that each of them says."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from features.frame import FeatureFrame
from fleet.xids import meaning
from models.rules import ROW, RULES
from models.words import age, clock_time, number, rate

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Times = NDArray[np.int64]


class Columns:
    """A frame's features as float64 columns; a feature that the frame does not have is NaN throughout."""

    def __init__(self, frame: FeatureFrame) -> None:
        self.frame = frame
        self.rows = len(frame.values)
        self.node = frame.node
        self.now_ms = frame.time_ms
        self._at = {name: column for column, name in enumerate(frame.names)}
        self._read: dict[str, Array] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._at

    def __getitem__(self, name: str) -> Array:
        """(entity,) one feature."""
        if name not in self._read:
            at = self._at.get(name)
            self._read[name] = np.full(self.rows, np.nan) if at is None else self.frame.values[:, at].astype(np.float64)
        return self._read[name]

    def since(self, name: str) -> Times:
        """(entity,) when the signal behind a feature last changed, 0 where unknown."""
        at = self._at.get(name)
        return np.zeros(self.rows, np.int64) if at is None else self.frame.since_ms[:, at]

    @property
    def age_s(self) -> Array:
        """(entity,) seconds since the last sample; a frame without ages is taken as fresh."""
        return self["age_s"] if "age_s" in self else np.zeros(self.rows)


@dataclass(frozen=True, slots=True)
class Sight:
    """What one rule sees on the entities of its kind, all (entity,).

    on: the condition holds; telling: the entity was in a state in which the condition would have shown (a link
    downgrade does not show on an idle GPU); strength: 0..1; since_ms: 0 where unknown.
    """

    on: Mask
    value: Array
    usual: Array
    strength: Array
    since_ms: Times
    telling: Mask


@dataclass(frozen=True, slots=True)
class Signals:
    """k raised signals as columns; `entity` holds names, `node` rows, `rule` rows of RULES.

    words: what whoever reported it said, empty where our own rules saw it; no words at all: of none.
    """

    rule: NDArray[np.int16]
    node: NDArray[np.int32]
    entity: tuple[str, ...]
    value: Array
    usual: Array
    strength: Array
    since_ms: Times
    firm: Mask
    words: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.rule)

    @classmethod
    def of(cls, rows: Sequence["Signal"]) -> "Signals":
        """Columns from single signals: for the few that are not found by vectors."""
        return cls(
            np.array([ROW[row.rule] for row in rows], np.int16),
            np.array([row.node for row in rows], np.int32),
            tuple(row.entity for row in rows),
            np.array([row.value for row in rows], np.float64),
            np.array([row.usual for row in rows], np.float64),
            np.array([row.strength for row in rows], np.float64),
            np.array([row.since_ms for row in rows], np.int64),
            np.array([row.firm for row in rows], bool),
            tuple(row.words for row in rows),
        )

    @classmethod
    def concat(cls, parts: Sequence["Signals"]) -> "Signals":
        if not parts:
            return cls.of(())
        return cls(
            np.concatenate([part.rule for part in parts]),
            np.concatenate([part.node for part in parts]),
            tuple(name for part in parts for name in part.entity),
            np.concatenate([part.value for part in parts]),
            np.concatenate([part.usual for part in parts]),
            np.concatenate([part.strength for part in parts]),
            np.concatenate([part.since_ms for part in parts]),
            np.concatenate([part.firm for part in parts]),
            tuple(text for part in parts for text in part.words or ("",) * len(part)),
        )

    def on_nodes(self, rows: NDArray[np.int32]) -> "Signals":
        """The same signals with node rows translated by `rows` (old row -> new row)."""
        return replace(self, node=rows[self.node] if len(self) else self.node)

    def where(self, mask: Mask) -> "Signals":
        """Only the rows that `mask` (k,) selects."""
        if mask.all():
            return self
        return Signals(
            self.rule[mask],
            self.node[mask],
            tuple(name for name, keep in zip(self.entity, mask.tolist(), strict=True) if keep),
            self.value[mask],
            self.usual[mask],
            self.strength[mask],
            self.since_ms[mask],
            self.firm[mask],
            tuple(text for text, keep in zip(self.words, mask.tolist(), strict=True) if keep) if self.words else (),
        )

    def levels(self, nodes: int) -> Array:
        """(node, rule) the greatest strength of each rule on each node: what the risk model sees."""
        levels = np.zeros((nodes, len(RULES)))
        np.maximum.at(levels, (self.node, self.rule), self.strength)
        return levels


@dataclass(frozen=True, slots=True)
class Signal:
    """One signal, as a record."""

    rule: str
    node: int
    entity: str
    value: float
    usual: float = field(default=float("nan"))
    strength: float = 1.0
    since_ms: int = 0
    firm: bool = True
    words: str = ""


Say = Callable[[float, float, str, int], str]


def sentence(rule: str, entity: str, value: float, usual: float, since_ms: int, now_ms: int) -> str:
    """One signal in words, ending in since when if that is known.

    >>> sentence("thermal_throttle", "n1/3", 990.0, 1980.0, 50_520_000, 50_600_000)
    'GPU 3: SM clock 990 MHz, usual 1,980; thermal slowdown since 14:02 UTC'
    """
    when = f" since {clock_time(since_ms, now_ms)}" if since_ms > 0 else ""
    return f"{_place(entity)}{SAY[rule](value, usual, when, now_ms - since_ms)}"


def _place(entity: str) -> str:
    """GPU 3, port mlx5_0; nothing for the node itself.

    >>> _place("n1/mlx5_0/1"), _place("n1")
    ('port mlx5_0: ', '')
    """
    match entity.split("/"):
        case [_, gpu]:
            return f"GPU {gpu}: "
        case [_, device, _]:
            return f"port {device}: "
    return ""


def _clock(value: float, usual: float, why: str) -> str:
    if not np.isfinite(value):
        return why
    usually = f", usual {number(usual)}" if np.isfinite(usual) else ""
    return f"SM clock {number(value)} MHz{usually}; {why}"


def _xid(value: float, when: str) -> str:
    words = meaning(round(value))
    return f"XID {round(value)}{': ' + words if words else ''}{when.replace('since', 'at')}"


def _events(value: float, what: str) -> str:
    return f"{number(value)} {what} in 10 min"


SAY: dict[str, Say] = {
    "thermal_throttle": lambda v, u, when, ago: _clock(v, u, f"thermal slowdown{when}"),
    "power_brake": lambda v, u, when, ago: _clock(v, u, f"power brake{when}"),
    "clock_low": lambda v, u, when, ago: _clock(v, u, "slower than its peers under load"),
    "gpu_hot": lambda v, u, when, ago: f"{number(v)} °C, its node's other GPUs {number(u)}",
    "gpu_hot_for_its_load": lambda v, u, when, ago: f"{number(v)} °C, its slot at this power usually {number(u)}{when}",
    "xid_hard": lambda v, u, when, ago: _xid(v, when),
    "xid_part": lambda v, u, when, ago: _xid(v, when),
    "xid_soft": lambda v, u, when, ago: _xid(v, when),
    "xid_old": lambda v, u, when, ago: f"{_xid(v, '')}, older than our records",
    "ecc_uncorrectable": lambda v, u, when, ago: f"{number(v)} uncorrectable ECC errors in 30 min",
    "ecc_burst": lambda v, u, when, ago: _events(v, "corrected ECC errors"),
    "ecc_corrected_few": lambda v, u, when, ago: f"{number(v)} corrected ECC errors in 30 min, usual {number(u)}",
    "row_remap_failure": lambda v, u, when, ago: f"row remapping failed{when}",
    "row_remapped": lambda v, u, when, ago: f"{number(v)} rows remapped after uncorrectable errors{when}",
    "page_retirement": lambda v, u, when, ago: f"page retirement pending until a reset{when}",
    "pcie_width": lambda v, u, when, ago: f"PCIe link x{number(v)} under load, usual x{number(u)}{when}",
    "pcie_gen": lambda v, u, when, ago: f"PCIe link at generation {number(v)} under load, usual {number(u)}{when}",
    "pcie_replays": lambda v, u, when, ago: _events(v, "PCIe replays"),
    "nvlink_errors": lambda v, u, when, ago: _events(v, "NVLink errors"),
    "gpu_vanished": lambda v, u, when, ago: f"series vanished {age(v)} ago",
    "link_down": lambda v, u, when, ago: f"InfiniBand link down{when}",
    "link_flap": lambda v, u, when, ago: f"InfiniBand link went down {_times(v)} in 30 min",
    "link_errors": lambda v, u, when, ago: _events(v, "symbol errors"),
    "link_errors_few": lambda v, u, when, ago: f"{number(v)} symbol errors in 30 min, usual {number(u)}",
    "link_speed": lambda v, u, when, ago: f"InfiniBand link at {_gbit(v)}, usual {_gbit(u)}",
    "link_timeouts": lambda v, u, when, ago: _events(v, "packets that nobody acknowledged in time"),
    "slow_nic": lambda v, u, when, ago: f"moves {rate(v)}, its sibling ports {rate(u)}",
    "node_silent": lambda v, u, when, ago: f"node has not answered for {age(v)}",
    "exporter_silent": lambda v, u, when, ago: f"no GPU telemetry for {age(v)}",
    "exporter_frozen": lambda v, u, when, ago: f"exporter frozen: no value has changed for {age(v)}",
    "gpus_missing": lambda v, u, when, ago: f"{number(v)} of {number(u)} GPUs reported",
    "scrape_slow": lambda v, u, when, ago: f"exporter takes {number(v)} s to answer, usual {number(u)}",
    "scrapes_late": lambda v, u, when, ago: f"exporter takes {number(v)} s to answer{when}, its usual {number(u)}",
    "scrapes_lost": lambda v, u, when, ago: (
        f"{100 * v:.0f} % of its scrapes in 30 min were lost, usual {number(100 * u)} %"
    ),
    "cpu_stolen": lambda v, u, when, ago: f"other guests of its host take {round(100 * v)} % of its CPU time",
    "memory_short": lambda v, u, when, ago: f"tasks wait for memory {round(100 * v)} % of the time",
    "xid_reported": lambda v, u, when, ago: f"{_xid(v, when)}, reported by the node",
    "xid_noted": lambda v, u, when, ago: f"{_xid(v, when)}, reported by the node",
    "health_failed": lambda v, u, when, ago: f"a health check failed{when}",
    "health_degraded": lambda v, u, when, ago: f"a health check warns{when}",
    "link_predicted": lambda v, u, when, ago: f"a link failure is predicted with probability {number(v)}{when}",
    "node_lost": lambda v, u, when, ago: f"node reported lost{when.replace('since', 'at')}",
    "drain_requested": lambda v, u, when, ago: f"drained{when}",
    "gang_outlier": lambda v, u, when, ago: f"SM clocks down to {number(v)} MHz, its gang's at {number(u)}",
    "recent_fault": lambda v, u, when, ago: f"had a fault {age(v)} ago",
    "failed_jobs": lambda v, u, when, ago: f"{100 * v:.0f} % of the jobs on it failed{_of_all(u)}",
}


def _of_all(share: float) -> str:
    return f", of all {100 * share:.0f} %" if np.isfinite(share) else ""


def _times(count: float) -> str:
    return "once" if round(count) == 1 else f"{number(count)} times"


def _gbit(bytes_per_s: float) -> str:
    return f"{number(bytes_per_s * 8 / 1e9)} Gbit/s"
