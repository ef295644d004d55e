"""A WindowStore on disk. Names are kept, never rows' meanings: a catalogue that changed finds its metrics by name.

    state.arrays        newest sample of every series, sums of current buckets, names; small, written each time
    000001.slots …      slots and buckets written since the previous save, oldest file first; a later one wins

A save links the slot files of the previous one into its folder and adds one with what changed since, so it costs the
slots of a minute and not of a day. After SEGMENTS files, or when a save failed, one file with everything starts anew.
"""

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from features.arrays_file import TornFileError, read_arrays, write_arrays
from features.layout import BUCKETS, Layout, Span, layout_of
from features.ring import Ring
from fleet.entities import Entities
from fleet.samples import EntityKind

VERSION = 1
SEGMENTS = 60
STATE_ROWS = {  # array -> which names its rows have
    "time_ms": "metrics",
    "raw": "metrics",
    "changed_ms": "metrics",
    "rate": "counters",
    "bucket_total": "values",
    "bucket_count": "values",
}
SLOT_ROWS = {"fine": "values", "events": "events", "coarse": "values"}


class StoreError(Exception):
    """A saved store that cannot be used: torn, incomplete, or of another time grid."""


@dataclass(frozen=True, slots=True)
class SavedRing:
    """Copies of one ring: `state` arrays whole, `slots` arrays as (row, chosen slots, entity) with their numbers."""

    about: dict[str, Any]
    state: dict[str, NDArray[Any]]
    slots: dict[str, NDArray[Any]]


def copy_ring(ring: Ring, *, everything: bool) -> SavedRing:
    """What a save needs of a ring, and forget what was touched: the next copy starts from here."""
    layout, size = ring.layout, ring.size
    about: dict[str, Any] = {rows: list(getattr(layout, rows)) for rows in ("metrics", "values", "events", "counters")}
    about |= {"head": ring.head, "closed": ring.closed, "size": size}
    state = {name: getattr(ring, name)[:, :size].copy() for name in STATE_ROWS}
    state["first_seen_ms"] = ring.first_seen_ms[:size].copy()
    oldest_slot, oldest_bucket = ring.head - ring.span.slots + 1, ring.newest_bucket - BUCKETS + 1
    if not everything:
        oldest_slot = max(oldest_slot, ring.touched_slot)
        oldest_bucket = max(oldest_bucket, ring.touched_bucket)
    slots = np.arange(max(0, oldest_slot), ring.head + 1)
    buckets = np.arange(max(0, oldest_bucket), ring.newest_bucket + 1)
    ring.forget_touched()
    at = slots % ring.span.slots
    return SavedRing(
        about,
        state,
        {
            "slot_numbers": slots,
            "bucket_numbers": buckets,
            "fine": ring.fine[:, at, :size],
            "events": ring.events[:, at, :size],
            "coarse": ring.coarse[:, buckets % BUCKETS, :size],
        },
    )


def fill_ring(ring: Ring, about: dict[str, Any], state: dict[str, NDArray[Any]]) -> None:
    """Put saved state into a new ring with room for it."""
    for name, rows in STATE_ROWS.items():
        mine, theirs = _rows(ring.layout, about, rows)
        getattr(ring, name)[mine, : about["size"]] = state[name][theirs]
    ring.first_seen_ms[: about["size"]] = state["first_seen_ms"]
    ring.head, ring.closed = about["head"], about["closed"]
    ring.dirty[: ring.size] = True


def fill_slots(ring: Ring, about: dict[str, Any], slots: dict[str, NDArray[Any]]) -> None:
    """Put saved slots into a ring, as far as they are still within it."""
    numbers, buckets = slots["slot_numbers"], slots["bucket_numbers"]
    inside = (numbers > ring.head - ring.span.slots) & (numbers <= ring.head)
    recent = (buckets > ring.newest_bucket - BUCKETS) & (buckets <= ring.newest_bucket)
    for name, names in SLOT_ROWS.items():
        mine, theirs = _rows(ring.layout, about, names)
        chosen, number, length = (recent, buckets, BUCKETS) if name == "coarse" else (inside, numbers, ring.span.slots)
        size = slots[name].shape[2]
        getattr(ring, name)[np.ix_(np.array(mine, np.intp), number[chosen] % length, np.arange(size))] = slots[name][
            theirs
        ][:, chosen]


def _rows(layout: Layout, about: dict[str, Any], names: str) -> tuple[list[int], list[int]]:
    """Rows of the names that both have: (in this layout, in the file)."""
    here = {name: row for row, name in enumerate(getattr(layout, names))}
    pairs = [(here[name], row) for row, name in enumerate(about[names]) if name in here]
    return [mine for mine, _ in pairs], [theirs for _, theirs in pairs]


def write_store(
    folder: Path, about: dict[str, Any], rings: dict[EntityKind, SavedRing], earlier: list[Path]
) -> list[Path]:
    """Write a whole save into `folder`; returns its slot files, `earlier` ones linked, oldest first.

    The folder may hold an older save: that one stays whole until the new one is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kept = [_link(path, folder) for path in earlier]
    newest = folder / f"{_next_number(folder):06d}.slots"
    rows = {kind.value: ring.about for kind, ring in rings.items()}
    slots = {f"{kind.value}/{name}": array for kind, ring in rings.items() for name, array in ring.slots.items()}
    state = {f"{kind.value}/{name}": array for kind, ring in rings.items() for name, array in ring.state.items()}
    write_arrays(newest, {"rings": rows}, slots)
    files = [*kept, newest]
    about = {**about, "version": VERSION, "rings": rows, "files": [path.name for path in files]}
    write_arrays(folder / "state.arrays", about, state)
    for path in set(folder.glob("*.slots")) - set(files):
        path.unlink()
    return files


def _next_number(folder: Path) -> int:
    return max((int(path.stem) for path in folder.glob("*.slots")), default=0) + 1


def _link(path: Path, folder: Path) -> Path:
    linked = folder / path.name
    if linked != path:
        linked.unlink(missing_ok=True)  # left by a save that failed
        try:
            os.link(path, linked)
        except OSError:
            shutil.copyfile(path, linked)
    return linked


def read_store(folder: Path, future_ms: int | None = None) -> tuple[Entities, Span, dict[EntityKind, Ring]]:
    """Rings and entities of a save, with room for another `future_ms` if one is given.

    Raises StoreError when the save is missing, torn or of another version.
    """
    try:
        about, state = read_arrays(folder / "state.arrays")
        if about["version"] != VERSION:
            raise StoreError(f"{folder}: version {about['version']}, expected {VERSION}")
        span, entities = Span(**about["span"]), Entities.load(about["names"])
        span = span if future_ms is None else replace(span, future_ms=future_ms)
        rings = {}
        for name, row in about["rings"].items():
            ring = rings[EntityKind(name)] = Ring(layout_of(EntityKind(name)), span)
            ring.reserve(row["size"])
            fill_ring(ring, row, _of(name, state))
        for file in about["files"]:
            rows, slots = read_arrays(folder / file)
            for name, row in rows["rings"].items():
                fill_slots(rings[EntityKind(name)], row, _of(name, slots))
    except (OSError, TornFileError, KeyError, ValueError, IndexError, TypeError) as error:
        raise StoreError(f"cannot load the store in {folder}: {error}") from error
    return entities, span, rings


def _of(kind: str, arrays: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    prefix = f"{kind}/"
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
