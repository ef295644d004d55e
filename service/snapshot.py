"""State to disk and back: rings, jobs, nodes, what models remember, and the positions of the sources.

    snapshot/<n>/   store/ (features.store_files)   jobs/ (service.job_files)   demand.arrays   desk.arrays
                    memory.arrays   runs.arrays   peaks.arrays   told.arrays   co_runs.arrays   pasts.arrays
                    state.arrays: positions, nodes, and what else is small

A snapshot is written beside the others and becomes one by a rename, so a crash leaves those. Positions and tables are
of one moment, the rings are copied in slices after it: what is replayed twice changes nothing. The last two are kept,
and the inbox from the older one's position on: where the newest cannot be read, the one before it and the inbox end
in the same state.
"""

import logging
import math
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from features.arrays_file import AREA, TornFileError, read_arrays, write_arrays
from features.co_runs import CoRuns
from features.job_peaks import JobPeaks
from features.similarity import tell_history
from features.store import OtherIntervalError, WindowStore
from features.store_files import StoreError
from fleet import files
from fleet.entities import Entities
from fleet.nodes import NodeRecord
from fleet.sequences import SeenSequences
from fleet.topology import Topology
from models.demand import DemandDesk
from models.memory import RiskMemory
from models.registry import Registry
from models.sparse import Sparse
from service.config import Config
from service.job_files import JobFiles, read_jobs
from service.node_past import NodePasts
from service.plugins import load
from service.run_book import RunBook
from service.served_trees import ServedTrees
from service.shadow_trees import ShadowTrees
from service.state import FleetState
from service.state_identity import Doubt, Seen
from service.thread_work import in_thread

logger = logging.getLogger(__name__)

KEPT = 2
MISSED_TICKS = 3  # what was before them is known; nobody looked since
Positions = dict[str, dict[str, Any]]
Work = Callable[[], object]
Dump = tuple[dict[str, Any], dict[str, NDArray[Any]]]
_UNREADABLE = (OSError, ValueError, KeyError, IndexError, TypeError, StoreError, TornFileError, msgspec.MsgspecError)


@dataclass(slots=True)
class Kept:
    """All that outlives a process. `began_ms`: since when its history reaches back; `saved_ms`: 0 if never saved.

    generation: of the last topology; occupancy_known: no event that told what runs was lost; number: of the snapshot
    that it was restored from, 0 for none; identity, seen, lost: see service.state_identity.
    """

    state: FleetState
    memory: RiskMemory
    desk: DemandDesk
    positions: Positions
    began_ms: int
    saved_ms: int = 0
    generation: int = 0
    occupancy_known: bool = True
    peaks: JobPeaks = field(default_factory=JobPeaks)
    book: RunBook = field(default_factory=RunBook)
    co_runs: CoRuns = field(default_factory=CoRuns)
    pasts: NodePasts = field(default_factory=NodePasts)
    number: int = 0
    identity: str = ""
    seen: Seen = field(default_factory=Seen)
    lost: Doubt | None = None


class Snapshot:
    """The snapshots of one pipeline in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.whole: dict[int, Positions] = {}  # the ones that can be relied on, oldest first
        self._jobs = JobFiles()
        files.make_folder(folder, AREA)

    def numbers(self) -> list[int]:
        """Snapshots that are there, whole or not, oldest first."""
        return sorted(int(path.name) for path in self.folder.iterdir() if path.name.isascii() and path.name.isdigit())

    def restore(self, config: Config, topology: Topology, now_ms: int) -> Kept:
        """The newest snapshot that can be read, or an empty state."""
        for number in reversed(self.numbers()):
            try:
                kept = self._load(self.folder / str(number), config, topology)
            except _UNREADABLE as error:
                logger.error("snapshot %d cannot be used (%s), going on with what was before it", number, error)
                continue
            self.whole = {number: kept.positions}
            if now_ms - kept.saved_ms > MISSED_TICKS * config.pipeline.tick_s * 1000:
                kept.pasts.missed(kept.saved_ms)
            return kept
        store = _new_store(Entities(), config)
        state = FleetState(store.entities, store, topology, config.limits)
        return Kept(state, _memory(config), _desk(config), {}, now_ms)

    def _load(self, folder: Path, config: Config, topology: Topology) -> Kept:
        document, tables = read_arrays(folder / "state.arrays")
        store = _store(folder / "store", config)
        state = FleetState(store.entities, store, topology, config.limits)
        read_jobs(folder / "jobs", document["jobs"], state.jobs)
        state.jobs.position = document["jobs_position"]
        state.nodes.load(msgspec.msgpack.decode(tables["nodes"].tobytes(), type=_Nodes))
        state.nodes.position = document["nodes_position"]
        state.counts.newest_sample_ms = document["newest_sample_ms"]
        state.demand.load(*read_arrays(folder / "demand.arrays"))
        memory, desk = _memory(config), _desk(config)
        memory.load(*read_arrays(folder / "memory.arrays"))
        peaks, book = _load_runs(folder, state) if document.get("tells_runs") else _learn_runs(state)
        desk.load(*(read_arrays(folder / "desk.arrays") if document["desk"] is None else (document["desk"], {})))
        awake, resting, nodes = len(state.jobs.attempts), len(state.jobs.resting), len(state.topology)
        logger.info("snapshot %s: %d attempts, %d jobs at rest, %d nodes restored", folder.name, awake, resting, nodes)
        return Kept(
            state=state,
            memory=memory,
            desk=desk,
            positions=document["positions"],
            began_ms=document["began_ms"],
            saved_ms=document["saved_ms"],
            generation=document["generation"],
            occupancy_known=document["occupancy_known"],
            peaks=peaks,
            book=book,
            co_runs=_load_co_runs(folder) if document.get("tells_co_runs") else CoRuns(),
            pasts=_load_pasts(folder) if document.get("tells_pasts") else NodePasts(),
            number=int(folder.name),
            identity=document.get("identity", ""),
            seen=msgspec.convert(document.get("seen", {}), Seen),
            lost=msgspec.convert(document.get("lost"), Doubt | None),
        )

    def save(self, kept: Kept, desk: Dump | None = None) -> Coroutine[None, None, Positions | None]:
        """Copy the tables at once; what is returned is to be awaited, and writes while the state goes on.

        desk: what `kept.desk.dump()` gave, where that was asked in a thread; the desk has not changed since.
        It gives the positions of the older one of the snapshots that are kept: what lies before them may be deleted
        at its source (None: nothing may). Raises OSError; then the snapshots from before are still there.
        """
        number = max([0, *self.numbers()]) + 1
        works = self._works(kept, desk or kept.desk.dump(), self.folder / str(number))
        return self._write(number, kept.positions, next(works), works)

    async def _write(
        self, number: int, positions: Positions, work: Work | None, works: Iterator[Work]
    ) -> Positions | None:
        while work is not None:
            await in_thread(work)
            work = next(works, None)
        self.whole = dict([*self.whole.items(), (number, positions)][-KEPT:])
        await in_thread(self._tidy)
        return next(iter(self.whole.values())) if len(self.whole) == KEPT else None

    def _works(self, kept: Kept, desk: Dump, folder: Path) -> Iterator[Work]:
        """To take the next one copies; to do it writes, and may be done in a thread."""
        beside = folder.with_name(f".{folder.name}.tmp")
        yield self._tables(kept, desk, beside, folder)
        yield from kept.state.store.saving(beside / "store", becomes=folder / "store")
        yield lambda: _become(beside, folder)

    def _tables(self, kept: Kept, desk: Dump, beside: Path, becomes: Path) -> Callable[[], None]:
        state = kept.state
        document = {
            "positions": kept.positions,
            "began_ms": kept.began_ms,
            "saved_ms": kept.saved_ms,
            "generation": kept.generation,
            "occupancy_known": kept.occupancy_known,
            "jobs_position": state.jobs.position,
            "nodes_position": state.nodes.position,
            "newest_sample_ms": state.counts.newest_sample_ms,
            "desk": None,  # in a file of its own
            "identity": kept.identity,
            "seen": msgspec.to_builtins(kept.seen),
            "lost": msgspec.to_builtins(kept.lost),
            "tells_runs": True,
            "tells_co_runs": True,  # absent in snapshots of versions that kept none
            "tells_pasts": True,
        }
        jobs = self._jobs.saving(state.jobs, beside / "jobs", becomes / "jobs")
        nodes = np.frombuffer(msgspec.msgpack.encode(state.nodes.dump()), np.uint8)
        demand, memory = state.demand.dump(), kept.memory.dump()
        runs, peaks, told = state.runs.dump(), kept.peaks.dump(), kept.book.dump()
        co_runs = np.frombuffer(msgspec.msgpack.encode(kept.co_runs.dump()), np.uint8)
        pasts = np.frombuffer(kept.pasts.dump(), np.uint8)

        def write() -> None:
            files.remove_tree(beside)  # by a save that was given up
            beside.mkdir()
            names = jobs()
            write_arrays(beside / "demand.arrays", *demand)
            write_arrays(beside / "desk.arrays", *desk)
            write_arrays(beside / "memory.arrays", *memory)
            packed = np.frombuffer(msgspec.msgpack.encode(runs), np.uint8)
            write_arrays(beside / "runs.arrays", {}, {"history": packed})
            write_arrays(beside / "peaks.arrays", *peaks)
            write_arrays(beside / "told.arrays", *told)
            write_arrays(beside / "co_runs.arrays", {}, {"kept": co_runs})
            write_arrays(beside / "pasts.arrays", {}, {"kept": pasts})
            write_arrays(beside / "state.arrays", {**document, "jobs": names}, {"nodes": nodes})

        return write

    def _tidy(self) -> None:
        """Remove what is none of the snapshots that are kept: older ones, broken ones, and halves."""
        names = {str(number) for number in self.whole}
        for path in self.folder.iterdir():
            if path.is_dir() and path.name not in names:
                files.remove_tree(path)


_Nodes = list[tuple[NodeRecord, dict[str, SeenSequences]]]


def _become(beside: Path, folder: Path) -> None:
    """The rename that makes a snapshot of it, once its names are on disk as well as its files."""
    for path in (beside / "store", beside / "jobs", beside):
        files.sync_folder(path, AREA)
    files.rename(beside, folder, AREA)
    files.sync_folder(folder.parent, AREA)


def _load_co_runs(folder: Path) -> CoRuns:
    """What is there, or none: they are learnt again, and no reason to go back to an older snapshot."""
    co_runs = CoRuns()
    try:
        co_runs.load(msgspec.msgpack.decode(read_arrays(folder / "co_runs.arrays")[1]["kept"].tobytes()))
    except _UNREADABLE as error:
        logger.warning("co-runs of snapshot %s cannot be used (%s), they begin anew", folder.name, error)
        return CoRuns()
    return co_runs


def _load_pasts(folder: Path) -> NodePasts:
    """What is there, or none: timelines that begin anew are no reason to go back to an older snapshot."""
    pasts = NodePasts()
    try:
        pasts.load(read_arrays(folder / "pasts.arrays")[1]["kept"].tobytes())
    except _UNREADABLE as error:
        logger.warning("timelines of snapshot %s cannot be used (%s), they begin anew", folder.name, error)
        return NodePasts()
    return pasts


def _load_runs(folder: Path, state: FleetState) -> tuple[JobPeaks, RunBook]:
    """The history of runs into the state; what was seen and told of them."""
    history = read_arrays(folder / "runs.arrays")[1]["history"]
    state.runs.load(msgspec.msgpack.decode(history.tobytes()))
    peaks, book = JobPeaks(), RunBook()
    peaks.load(*read_arrays(folder / "peaks.arrays"))
    book.load(*read_arrays(folder / "told.arrays"))
    return peaks, book


def _learn_runs(state: FleetState) -> tuple[JobPeaks, RunBook]:
    """What the jobs tell of runs, in order of their end: for a snapshot of a version that kept no history of these."""
    for attempt in sorted(state.jobs, key=lambda row: math.inf if row.over_ms is None else row.over_ms):
        tell_history(state.runs, attempt)
    return JobPeaks(), RunBook()


def _store(folder: Path, config: Config) -> WindowStore:
    """The saved store, or an empty one of the same entities where the interval was changed since."""
    interval_s, future_limit_s = config.scrape.interval_s, config.pipeline.future_limit_s
    try:
        return WindowStore.load(folder, interval_s=interval_s, future_limit_s=future_limit_s)
    except OtherIntervalError as error:
        logger.warning("%s: samples begin anew, jobs and nodes stay", error)
        return _new_store(error.entities, config)


def _new_store(entities: Entities, config: Config) -> WindowStore:
    limit_s = config.pipeline.future_limit_s
    return WindowStore(entities, interval_s=config.scrape.interval_s, future_limit_s=limit_s)


def _memory(config: Config) -> RiskMemory:
    return RiskMemory(config.scrape.interval_s)


def _desk(config: Config) -> DemandDesk:
    registry = Registry(config.models_folder)
    plugins = [load("pipeline.forecasters", path)() for path in config.pipeline.forecasters]
    sparse = Sparse()
    return DemandDesk([ServedTrees(registry), sparse, *plugins], [sparse], [ShadowTrees(registry)])
