"""State to disk and back: rings, jobs, nodes, forecasts' memory, and the positions of the sources.

    snapshot/<n>/   store/ (features.store)   jobs.msgpack   state.json
    snapshot/current   the newest whole one's number, replaced last

A snapshot is written beside the old one and becomes current by one rename, so a crash leaves the old one. Positions
are taken before the state: what is replayed twice changes nothing. A missing or broken snapshot is not fatal: the
pipeline starts empty, replays the inbox that is still there, and says that it is warming.
"""

import asyncio
import json
import logging
import os
import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from features.store import FrozenStore, WindowStore
from features.store_files import StoreError
from fleet.entities import Entities
from fleet.jobs import JobAttempt, NodeRecord, SeenSequences
from fleet.topology import Topology
from models.demand import DemandDesk
from models.memory import RiskMemory
from service.board import replace_file
from service.config import Config
from service.plugins import load
from service.state import FleetState

logger = logging.getLogger(__name__)

Positions = dict[str, dict[str, Any]]


class _Saved(msgspec.Struct):
    """Tables of one snapshot."""

    jobs: list[JobAttempt]
    nodes: list[tuple[NodeRecord, dict[str, SeenSequences]]]


@dataclass(frozen=True, slots=True)
class Restored:
    """What a pipeline begins with. `began_ms`: since when its history reaches back."""

    state: FleetState
    memory: RiskMemory
    desk: DemandDesk
    positions: Positions
    began_ms: int


class Snapshot:
    """The snapshots of one pipeline in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writing = threading.Lock()  # a cancelled save goes on in its thread: the next one waits for it
        folder.mkdir(parents=True, exist_ok=True)

    def restore(self, config: Config, topology: Topology, now_ms: int) -> Restored:
        """The current snapshot, or an empty state where there is none that is whole."""
        number = self._current()
        if number is not None:
            try:
                return self._load(self.folder / number, config, topology)
            except (OSError, ValueError, KeyError, StoreError, msgspec.MsgspecError) as error:
                logger.error("snapshot %s cannot be used (%s), starting empty and replaying the inbox", number, error)
        entities = Entities()
        store = WindowStore(
            entities, interval_s=config.scrape.interval_s, future_limit_s=config.pipeline.future_limit_s
        )
        return Restored(FleetState(entities, store, topology), _memory(config), _desk(config), {}, now_ms)

    def _current(self) -> str | None:
        try:
            text = (self.folder / "current").read_bytes().strip()
        except FileNotFoundError:
            return None
        if text.isdigit():
            return text.decode()
        logger.error("%s holds no number but %.40r, so no snapshot is current", self.folder / "current", text)
        return None

    def _load(self, folder: Path, config: Config, topology: Topology) -> Restored:
        document = json.loads((folder / "state.json").read_bytes())
        saved = msgspec.msgpack.decode((folder / "jobs.msgpack").read_bytes(), type=_Saved)
        store = WindowStore.load(
            folder / "store", interval_s=config.scrape.interval_s, future_limit_s=config.pipeline.future_limit_s
        )
        state = FleetState(store.entities, store, topology)
        for attempt in saved.jobs:
            state.jobs.put(attempt)
            state.demand.update(attempt)
        state.jobs.position = document["jobs_position"]
        state.nodes.load(saved.nodes)
        state.nodes.position = document["nodes_position"]
        state.counts.newest_sample_ms = document["newest_sample_ms"]
        desk = _desk(config)
        desk.load(document["desk"])
        logger.info("snapshot %s: %d jobs, %d nodes restored", folder.name, len(state.jobs), len(state.topology))
        return Restored(state, _memory(config), desk, document["positions"], document["began_ms"])

    async def save(
        self, state: FleetState, desk: DemandDesk, positions: Mapping[str, Mapping[str, Any]], began_ms: int
    ) -> None:
        """Copy the state in the loop (it must hold still), write it in a thread."""
        document = {
            "positions": positions,
            "began_ms": began_ms,
            "jobs_position": state.jobs.position,
            "nodes_position": state.nodes.position,
            "newest_sample_ms": state.counts.newest_sample_ms,
            "desk": desk.dump(),
        }
        frozen = state.store.freeze()
        tables = msgspec.msgpack.encode(_Saved(list(state.jobs), state.nodes.dump()))
        await asyncio.to_thread(self._write, document, tables, frozen)

    def _write(self, document: Mapping[str, Any], tables: bytes, frozen: FrozenStore) -> None:
        with self._writing:
            folder = self.folder / str(int(self._current() or "0") + 1)
            beside = folder.with_name(f".{folder.name}.tmp")
            for left in (beside, folder):  # by a save that was killed before its number became current
                shutil.rmtree(left, ignore_errors=True)
            beside.mkdir()
            frozen.save(beside / "store", becomes=folder / "store")
            replace_file(beside / "jobs.msgpack", tables, sync=True)
            replace_file(beside / "state.json", json.dumps(document).encode(), sync=True)
            os.rename(beside, folder)
            replace_file(self.folder / "current", folder.name.encode(), sync=True)
            for old in self.folder.iterdir():
                if old.is_dir() and old != folder:
                    shutil.rmtree(old, ignore_errors=True)


def _memory(config: Config) -> RiskMemory:
    return RiskMemory(config.scrape.interval_s)


def _desk(config: Config) -> DemandDesk:
    return DemandDesk([load("pipeline.forecasters", path)() for path in config.pipeline.forecasters])
