"""Snapshots of the state on disk: samples, jobs, nodes, the stateful parts, and the sources' positions.

    snapshot/<n>/   store/ (fleetcast.features.store_files)   jobs/ (fleetcast.service.pipeline.job_files)
                    NAME.arrays of each part (fleetcast.service.pipeline.stateful)
                    state.arrays: the header, nodes, and other small parts

A snapshot is written under a temporary name and renamed when complete, so a crash leaves the older ones
intact. Positions and tables belong to one moment. The ring buffers of samples are copied in slices
afterwards. This is safe, because a repeated record changes nothing. The last two snapshots stay. The
inbox stays from the position of the older one on. If the newest snapshot is unreadable, the other one
leads to the same state.
"""

import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import msgspec
import numpy as np

from fleetcast.features.arrays_file import AREA, read_arrays, write_arrays
from fleetcast.features.store import OtherIntervalError, WindowStore
from fleetcast.fleet import files
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.nodes import NodeRecord
from fleetcast.fleet.sequences import SeenSequences
from fleetcast.fleet.stateful import Dump
from fleetcast.fleet.topology import Topology
from fleetcast.models.demand.forecaster import DemandForecaster
from fleetcast.service.config import Config
from fleetcast.service.pipeline import old_names
from fleetcast.service.pipeline.job_files import JobFiles, read_jobs
from fleetcast.service.pipeline.node_past import NodePasts
from fleetcast.service.pipeline.state import FleetState
from fleetcast.service.pipeline.stateful import STATEFUL, UNREADABLE, PartKind, Parts, write_parts
from fleetcast.service.state_parts import Positions, SnapshotHeader
from fleetcast.service.thread_work import run_in_thread

logger = logging.getLogger(__name__)

SNAPSHOT_VERSION = 4  # changes with the shape of what is written; only `old_names.VERSION` is read, too
MAX_SNAPSHOTS = 2
MISSED_TICKS = 3  # what was before them is known; nobody looked since
Work = Callable[[], object]


class OtherVersionError(ValueError):
    """The error for a snapshot that another version of Fleetcast wrote."""

    def __init__(self, version: object) -> None:
        super().__init__(
            f"it has version {version} and version {SNAPSHOT_VERSION} is read here: samples start empty, and the inbox "
            "is read again as far as it reaches back, like every source that can go back"
        )


@dataclass(slots=True, kw_only=True)
class SavedState(SnapshotHeader):
    """All state that outlives a process.

    number: the number of the snapshot that it was restored from, or 0 for none.
    """

    state: FleetState
    parts: Parts
    number: int = 0


class Snapshot:
    """The snapshots of one pipeline in one folder. `kinds`: the kinds of parts in a snapshot."""

    def __init__(self, folder: Path, kinds: Sequence[PartKind] = STATEFUL) -> None:
        self.folder = folder
        self._kinds = kinds
        self.whole: dict[int, Positions] = {}  # the ones that can be relied on, oldest first
        self._jobs = JobFiles()
        files.make_folder(folder, AREA)

    def list_numbers(self) -> list[int]:
        """Return the numbers of the snapshots on disk, complete or not, the oldest first."""
        return sorted(int(path.name) for path in self.folder.iterdir() if path.name.isascii() and path.name.isdigit())

    def restore(self, config: Config, topology: Topology, now_ms: int) -> SavedState:
        """Restore the newest readable snapshot, and return its state. Without one, return an empty state."""
        for number in reversed(self.list_numbers()):
            try:
                saved = self._load(self.folder / str(number), config, topology)
            except UNREADABLE as error:
                logger.error("snapshot %d cannot be used (%s), going on with what was before it", number, error)
                continue
            self.whole = {number: saved.positions}
            if now_ms - saved.saved_ms > MISSED_TICKS * config.pipeline.tick_s * 1000:
                saved.parts[NodePasts].record_gap(saved.saved_ms)
            return saved
        store = _make_window_store(Entities(), config)
        state = FleetState(store.entities, store, topology, config.limits)
        return SavedState(state=state, parts=Parts(self._kinds, config, state), positions={}, began_ms=now_ms)

    def _load(self, folder: Path, config: Config, topology: Topology) -> SavedState:
        document, tables = read_arrays(folder / "state.arrays")
        is_old = document.get("version") == old_names.VERSION
        if not is_old and document.get("version") != SNAPSHOT_VERSION:
            raise OtherVersionError(document.get("version"))
        store = _load_store(folder / "store", config)
        state = FleetState(store.entities, store, topology, config.limits)
        read_jobs(folder / "jobs", document["jobs"], state.jobs, is_old)
        state.jobs.position = document["jobs_position"]
        state.nodes.load(msgspec.msgpack.decode(tables["nodes"].tobytes(), type=_Nodes))
        state.nodes.position = document["nodes_position"]
        state.counts.newest_sample_ms = document["newest_sample_ms"]
        parts = Parts(self._kinds, config, state)
        parts.load(folder, is_old)
        header = msgspec.convert(document, SnapshotHeader)
        awake, resting, nodes = len(state.jobs.attempts), len(state.jobs.resting), len(state.topology)
        logger.info("snapshot %s: %d attempts, %d jobs at rest, %d nodes restored", folder.name, awake, resting, nodes)
        header_fields = {row.name: getattr(header, row.name) for row in fields(header)}
        return SavedState(state=state, parts=parts, number=int(folder.name), **header_fields)

    def save(self, saved: SavedState, forecaster: Dump | None = None) -> Coroutine[None, None, Positions | None]:
        """Copy the tables at once, and return a coroutine that writes them. The coroutine raises OSError.

        The state may change while the coroutine runs. The coroutine returns the positions up to which a source
        may delete records. They are the positions of the older of two snapshots, or None before there are two.
        forecaster: a dump of the DemandForecaster that a thread has made. The forecaster must not have changed
        since.
        """
        number = max([0, *self.list_numbers()]) + 1
        dumps = saved.parts.dump({} if forecaster is None else {DemandForecaster: forecaster})
        works = self._iterate_steps(saved, dumps, self.folder / str(number))
        return self._write_snapshot(number, saved.positions, next(works), works)

    async def _write_snapshot(
        self, number: int, positions: Positions, work: Work | None, works: Iterator[Work]
    ) -> Positions | None:
        while work is not None:
            await run_in_thread(work)
            work = next(works, None)
        self.whole = dict([*self.whole.items(), (number, positions)][-MAX_SNAPSHOTS:])
        await run_in_thread(self._remove_old_folders)
        return next(iter(self.whole.values())) if len(self.whole) == MAX_SNAPSHOTS else None

    def _iterate_steps(self, saved: SavedState, dumps: dict[str, Dump], folder: Path) -> Iterator[Work]:
        """Yield the steps of a save as functions.

        Fetching the next step copies data. Calling the step writes the data, in any thread.
        """
        beside = folder.with_name(f".{folder.name}.tmp")
        yield self._prepare_tables(saved, dumps, beside, folder)
        yield from saved.state.store.iterate_save_steps(beside / "store", becomes=folder / "store")
        yield lambda: _publish_snapshot(beside, folder)

    def _prepare_tables(
        self, saved: SavedState, dumps: dict[str, Dump], beside: Path, becomes: Path
    ) -> Callable[[], None]:
        state = saved.state
        document = {row.name: msgspec.to_builtins(getattr(saved, row.name)) for row in fields(SnapshotHeader)} | {
            "version": SNAPSHOT_VERSION,
            "jobs_position": state.jobs.position,
            "nodes_position": state.nodes.position,
            "newest_sample_ms": state.counts.newest_sample_ms,
        }
        jobs = self._jobs.prepare_save(state.jobs, beside / "jobs", becomes / "jobs")
        nodes = np.frombuffer(msgspec.msgpack.encode(state.nodes.dump()), np.uint8)

        def write_tables() -> None:
            files.remove_tree(beside)  # by a save that was given up
            beside.mkdir()
            names = jobs()
            write_parts(beside, dumps)
            write_arrays(beside / "state.arrays", {**document, "jobs": names}, {"nodes": nodes})

        return write_tables

    def _remove_old_folders(self) -> None:
        """Remove every folder except the last complete snapshots."""
        names = {str(number) for number in self.whole}
        for path in self.folder.iterdir():
            if path.is_dir() and path.name not in names:
                files.remove_tree(path)


_Nodes = list[tuple[NodeRecord, dict[str, SeenSequences]]]


def _publish_snapshot(beside: Path, folder: Path) -> None:
    """Sync the temporary folder to disk, and rename it to a snapshot."""
    for path in (beside / "store", beside / "jobs", beside):
        files.sync_folder(path, AREA)
    files.rename(beside, folder, AREA)
    files.sync_folder(folder.parent, AREA)


def _load_store(folder: Path, config: Config) -> WindowStore:
    """Load the saved store. If the scrape interval has changed, return an empty store with the same entities."""
    interval_s, future_limit_s = config.scrape.interval_s, config.pipeline.future_limit_s
    try:
        return WindowStore.load(folder, interval_s=interval_s, future_limit_s=future_limit_s)
    except OtherIntervalError as error:
        logger.warning("%s: samples start empty, jobs and nodes stay", error)
        return _make_window_store(error.entities, config)


def _make_window_store(entities: Entities, config: Config) -> WindowStore:
    limit_s = config.pipeline.future_limit_s
    return WindowStore(entities, interval_s=config.scrape.interval_s, future_limit_s=limit_s)
