"""A site's own log of faults: a CSV with the columns `node,start,end,kind`, in any order.

Times are ISO 8601 (UTC without a zone) or epoch milliseconds. `end` may be empty if it is not known
yet. `kind` is free text, and may be missing. The log names only nodes that failed, so the caller must
also state the size of the fleet.
"""

import csv
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from fleetcast.fleet.errors import ConfigError, RecordError
from fleetcast.models.risk.hazard import FaultHistory

DAY_MS = 86_400_000
NEEDED = ("node", "start", "end")
PARTS = (  # words in a kind that put the fault down to a part
    *("hardware", "gpu", "xid", "ecc", "nvlink", "pcie", "memory", "dimm"),
    *("disk", "nvme", "fan", "psu", "power", "nic", "link", "cable"),
)
SMALLEST_MS = 10**11  # March 1973: smaller numbers are seconds or days
LONGEST_DAYS = 20_000


@dataclass(frozen=True, slots=True)
class FaultLogFile:
    """The faults of a log file, in days since 1970.

    skipped: reason → the number of rows that could not be read.
    """

    path: Path
    names: tuple[str, ...]
    nodes: int
    history: FaultHistory
    skipped: Counter[str] = field(default_factory=Counter)


def read_fault_log(path: Path, nodes: int) -> FaultLogFile:
    """Read the fault log of a fleet of `nodes` nodes.

    A repeated fault counts once, and ends at the later of its ends. Raises ConfigError if the log names more
    nodes than the fleet has, and RecordError if no row can be read.
    """
    faults: dict[tuple[str, float], tuple[float, bool]] = {}
    skipped = Counter[str]()
    for row in _read_rows(path):
        try:
            key, fault = _parse_fault(row)
        except ValueError as error:
            skipped[str(error)] += 1
            continue
        if key in faults:
            skipped["reported twice"] += 1
            fault = float(np.fmax(fault[0], faults[key][0])), fault[1] or faults[key][1]
        faults[key] = fault
    if not faults:
        why = "; ".join(f"{count:,} rows: {reason}" for reason, count in skipped.items())
        raise RecordError("no faults", f"{path}: no row is a fault{f' ({why})' if why else ''}")
    log = _make_fault_log(path, faults, nodes, skipped)
    span = float(np.ptp(log.history.start_day))
    if span > LONGEST_DAYS:
        raise RecordError("no faults", f"{path}: start spans {span:,.0f} days: look for a wrong time")
    if nodes < len(log.names):
        raise ConfigError(f"--nodes {nodes}: {path} names {len(log.names)} nodes; say how many the whole fleet has")
    return log


def _read_rows(path: Path) -> Iterable[dict[str, str]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in NEEDED if name not in (reader.fieldnames or ())]
            if missing:
                raise RecordError("no faults", f"{path}: no column {', '.join(missing)}; expected node,start,end,kind")
            yield from reader
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RecordError("no faults", f"{path}: {error}") from None


def _parse_fault(row: dict[str, str]) -> tuple[tuple[str, float], tuple[float, bool]]:
    """Return ((node, start), (end, whether a part was at fault)), with times in days since 1970.

    Raises ValueError with the reason.
    """
    node, times = (row["node"] or "").strip(), [(row[name] or "").strip() for name in ("start", "end")]
    if not node:
        raise ValueError("no node")
    start, end = (_parse_day(name, text) for name, text in zip(("start", "end"), times, strict=True))
    if np.isnan(start):
        raise ValueError("no start")
    if end < start:
        raise ValueError("end before start")
    kind = (row.get("kind") or "").lower()
    return (node, start), (end, any(word in kind for word in PARTS))


def _parse_day(name: str, text: str) -> float:
    """Convert a time into days since 1970. Returns NaN if the text is empty.

    >>> _parse_day("start", "1970-01-02T12:00:00Z"), _parse_day("start", "1767225600000")
    (1.5, 20454.0)
    """
    if not text:
        return float("nan")
    try:
        number = float(text)
    except ValueError:
        return _parse_iso_day(name, text)
    if not SMALLEST_MS <= number < 100 * SMALLEST_MS:
        raise ValueError(f"{name} is a number, but no epoch milliseconds")
    return number / DAY_MS


def _parse_iso_day(name: str, text: str) -> float:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{name} is neither ISO 8601 nor epoch milliseconds") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000 / DAY_MS


def _make_fault_log(
    path: Path, faults: Mapping[tuple[str, float], tuple[float, bool]], nodes: int, skipped: Counter[str]
) -> FaultLogFile:
    names, node = np.unique(np.array([name for name, _ in faults], np.str_), return_inverse=True)
    history = FaultHistory(
        node.astype(np.int64),
        np.array([start for _, start in faults], np.float64),
        np.array([end for end, _ in faults.values()], np.float64),
        np.array([hardware for _, hardware in faults.values()], np.bool_),
    )
    return FaultLogFile(path, tuple(names.tolist()), nodes, history, skipped)
