"""Files of a WindowStore on disk. Metrics are stored by name, so a changed catalogue still finds them.

    state.arrays        newest sample of every series, sums of current buckets, names; small, written each time
    000001.slots …      slots and buckets written since the previous save, oldest file first; a later one wins

A save links the previous slot files into its folder and adds one file with all changes since then. After
SEGMENTS files, or a failed save, the next save writes everything into one file. A save copies
slices of entities. Between two slices the store may be written, since nothing in a ring depends on
two series. So a save blocks the store, and needs memory, only for SLICE_BYTES at a time.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetcast.features.arrays_file import AREA, ArraysWriter, TornFileError, read_parts
from fleetcast.features.layout import BUCKETS, Layout, RingSpan, make_layout
from fleetcast.features.ring import Ring
from fleetcast.fleet import files
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.samples import EntityKind

SEGMENTS = 30  # about as many minutes as a ring of fine slots reaches back: older files hold hardly anything else
SLICE_BYTES = 8 * 2**20
STATE_ROWS = {  # array -> which names its rows have
    "time_ms": "metrics",
    "raw": "metrics",
    "changed_ms": "metrics",
    "rate": "counters",
    "bucket_total": "days",
    "bucket_count": "days",
}
SLOT_ROWS = {"fine": "values", "events": "events", "coarse": "days"}
ROW_NAMES = ("metrics", "values", "days", "events", "counters")
Arrays = dict[str, NDArray[Any]]
Work = Callable[[], None]


class StoreError(Exception):
    """The error for a saved store that cannot be used: torn, incomplete, or of another time grid."""


class OtherIntervalError(StoreError):
    """The error for a complete store whose slots have another interval. `entities`: the entities of the store."""

    def __init__(self, message: str, entities: Entities) -> None:
        super().__init__(message)
        self.entities = entities


@dataclass(frozen=True, slots=True)
class SaveStart:
    """The first slot and the first bucket of a ring that are not on disk yet.

    By default nothing is on disk.
    """

    slot: int = 0
    bucket: int = 0

    def list_unsaved(self, ring: Ring) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the numbers of the slots and of the buckets up to now that are not on disk.

        The newest slot is always included, so that no saved time lacks its slot.
        """
        slot = max(min(self.slot, ring.touched_slot), ring.head - ring.span.slots + 1, ring.first_slot)
        bucket = max(min(self.bucket, ring.touched_bucket), ring.newest_bucket - BUCKETS + 1, ring.first_bucket)
        return np.arange(slot, ring.head + 1), np.arange(bucket, ring.newest_bucket + 1)


def begin_save(ring: Ring, *, everything: bool) -> SaveStart:
    """Return the first slot and bucket that a save of `ring` must write.

    From now on, the ring records where the next save must begin.
    """
    since = SaveStart() if everything else SaveStart(ring.touched_slot, ring.touched_bucket)
    ring.reset_touched_range()
    return since


def _compute_slice_length(ring: Ring, since: SaveStart) -> int:
    """Return how many entities fit into a slice of about SLICE_BYTES. The result is at least 16."""
    slots, buckets = since.list_unsaved(ring)
    layout = ring.layout
    of_slots = len(slots) * 4 * (len(layout.values) + len(layout.events)) + len(buckets) * 4 * len(layout.days)
    return max(16, SLICE_BYTES // (of_slots + 24 * len(layout.metrics) + 12 * len(layout.days)))


def make_save_steps(
    entities: Entities, span: RingSpan, rings: Mapping[EntityKind, Ring], folder: Path, earlier: list[Path]
) -> Iterator[Work]:
    """Yield the steps of one save into `folder`, as functions.

    An older save in the folder stays valid until the last step. Get each function in the thread that writes the
    store, because getting it copies from the store. Run it in any thread, because it only writes to disk. The
    last function replaces the content of `earlier` by the save's slot files.
    """
    since = {kind: begin_save(ring, everything=not earlier) for kind, ring in rings.items()}
    sizes = {kind: rings[kind].size for kind in since}
    folder.mkdir(parents=True, exist_ok=True)
    newest = max((int(path.stem) for path in (*folder.glob("*.slots"), *earlier)), default=0) + 1
    slots = ArraysWriter(folder / f"{newest:06d}.slots")
    state = ArraysWriter(folder / "state.arrays")
    try:
        for kind, begin in since.items():
            ring = rings[kind]
            length = _compute_slice_length(ring, begin)
            for first in range(0, sizes[kind], length):
                part = slice(first, min(first + length, sizes[kind]))
                yield _EntitySlice(ring, kind, part, begin).make_write_step(slots, state)
        heads = {kind.value: _describe_ring(rings[kind], size) for kind, size in sizes.items()}
        about = {"span": asdict(span), "names": entities.dump(), "rings": heads}
        yield lambda: _finish_save(slots, state, about, earlier)
    finally:
        slots.close()
        state.close()


class _EntitySlice:
    """Copies of some entities of one ring at one moment, without the slots that are already on disk."""

    def __init__(self, ring: Ring, kind: EntityKind, part: slice, since: SaveStart) -> None:
        names = {rows: list(getattr(ring.layout, rows)) for rows in ROW_NAMES}
        self.about = {"kind": kind.value, "first": part.start, **names}
        self.state: Arrays = {name: getattr(ring, name)[:, part].copy() for name in STATE_ROWS}
        self.state["first_seen_ms"] = ring.first_seen_ms[part].copy()
        slots, buckets = since.list_unsaved(ring)
        at = slots % ring.span.slots
        self.slots: Arrays = {
            "slot_numbers": slots,
            "bucket_numbers": buckets,
            "fine": _copy_slots(ring.fine, at, part),
            "events": _copy_slots(ring.events, at, part),
            "coarse": _copy_slots(ring.coarse, buckets % BUCKETS, part),
        }

    def make_write_step(self, slots: ArraysWriter, state: ArraysWriter) -> Work:
        def write() -> None:
            slots.add(self.about, self.slots)
            state.add(self.about, self.state)

        return write


def _copy_slots(rows: NDArray[Any], slots: NDArray[np.int64], part: slice) -> NDArray[Any]:
    """Copy some slots of some entities: (row, slot, entity).

    `numpy.take` would copy the slots of all entities.
    """
    copy = np.empty((len(rows), len(slots), part.stop - part.start), rows.dtype)
    for at, slot in enumerate(slots.tolist()):
        copy[:, at] = rows[:, slot, part]
    return copy


def _finish_save(slots: ArraysWriter, state: ArraysWriter, about: dict[str, Any], earlier: list[Path]) -> None:
    """Complete the save: write its last slot file, then the state file that names all slot files.

    Deletes older slot files.
    """
    folder = slots.path.parent
    slots.finish({})
    earlier[:] = [*(link_file(path, folder) for path in earlier), slots.path]
    state.finish({**about, "files": [path.name for path in earlier]})
    for path in set(folder.glob("*.slots")) - set(earlier):
        path.unlink()


def link_file(path: Path, folder: Path) -> Path:
    """Link the file into `folder` under the same name, and return its new path.

    Copies the file if links are impossible.
    """
    linked = folder / path.name
    if linked != path:
        files.link(path, linked, AREA)
    return linked


def read_store(folder: Path, future_ms: int | None = None) -> tuple[Entities, RingSpan, dict[EntityKind, Ring]]:
    """Read the rings and entities of a save. Raises StoreError if the save is missing or torn.

    future_ms: replaces the saved limit.
    """
    try:
        parts = list(read_parts(folder / "state.arrays"))
        about, _ = parts.pop()
        span, entities = RingSpan(**about["span"]), Entities.load(about["names"])
        span = span if future_ms is None else replace(span, future_ms=future_ms)
        rings = {EntityKind(name): _make_ring(EntityKind(name), row, span) for name, row in about["rings"].items()}
        for rows, state in parts:
            _fill_state(rings[EntityKind(rows["kind"])], rows, state)
        for file in about["files"]:
            for rows, slots in read_parts(folder / file):
                if slots:
                    _fill_slots(rings[EntityKind(rows["kind"])], rows, slots)
    except (OSError, TornFileError, KeyError, ValueError, IndexError, TypeError) as error:
        raise StoreError(f"cannot load the store in {folder}: {error}") from error
    return entities, span, rings


def _describe_ring(ring: Ring, size: int) -> dict[str, int]:
    """Return the facts about a whole ring that a save stores."""
    opened = {"first_slot": ring.first_slot, "first_bucket": ring.first_bucket}
    return {"head": ring.head, "closed": ring.closed, "size": size, **opened}


def _make_ring(kind: EntityKind, row: dict[str, Any], span: RingSpan) -> Ring:
    """Return a ring with room for a save and with empty slots.

    Older saves do not state which slots are open. Then all of them count as open.
    """
    ring = Ring(make_layout(kind), span)
    ring.reserve(row["size"])
    ring.head, ring.closed = row["head"], row["closed"]
    ring.first_slot, ring.first_bucket = ring.head + 1, ring.newest_bucket + 1
    ring.open_earlier_slots(row.get("first_slot", 0), row.get("first_bucket", 0))
    ring.dirty[: ring.size] = True
    return ring


def _fill_state(ring: Ring, about: dict[str, Any], state: Arrays) -> None:
    """Copy saved state into a new ring. The ring must have room for it."""
    part = slice(about["first"], about["first"] + len(state["first_seen_ms"]))
    for name, rows in STATE_ROWS.items():
        for mine, theirs in _match_rows(ring.layout, about, rows):
            getattr(ring, name)[mine, part] = state[name][theirs]
    ring.first_seen_ms[part] = state["first_seen_ms"]


def _fill_slots(ring: Ring, about: dict[str, Any], slots: Arrays) -> None:
    """Copy saved slots into a ring, except those that are too old for it."""
    for name, names in SLOT_ROWS.items():
        saved, ours = slots[name], getattr(ring, name)
        newest, numbers = (
            (ring.newest_bucket, slots["bucket_numbers"]) if name == "coarse" else (ring.head, slots["slot_numbers"])
        )
        part = slice(about["first"], about["first"] + saved.shape[2])
        pairs = _match_rows(ring.layout, about, names)
        for here, there in _find_slot_ranges(numbers, newest, ours.shape[1]):
            for mine, theirs in pairs:
                ours[mine, here, part] = saved[theirs, there]


def _find_slot_ranges(numbers: NDArray[np.int64], newest: int, length: int) -> Iterator[tuple[slice, slice]]:
    """Yield pairs of slices for runs of consecutive slots: their places in the ring, and in the file.

    numbers: (slot,) the slot numbers in the file. newest: the ring's newest slot. length: the ring's length. Slots
    that are too old for the ring are left out.

    >>> list(_find_slot_ranges(np.arange(96, 104), 103, 5))
    [(slice(4, 5, None), slice(3, 4, None)), (slice(0, 4, None), slice(4, 8, None))]
    """
    if not len(numbers):
        return
    first, end = int(numbers[0]), min(int(numbers[-1]), newest) + 1
    begin = max(first, newest - length + 1)
    while begin < end:
        stop = min(end, begin - begin % length + length)
        yield slice(begin % length, begin % length + stop - begin), slice(begin - first, stop - first)
        begin = stop


def _match_rows(layout: Layout, about: dict[str, Any], names: str) -> list[tuple[int, int]]:
    """Return (row in this layout, row in the file) for each metric name that both have."""
    here = {name: row for row, name in enumerate(getattr(layout, names))}
    return [(here[name], row) for row, name in enumerate(about[names]) if name in here]
