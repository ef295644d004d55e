"""The start of a pipeline from its snapshot, the sources' positions and the last board.

It also checks that the parts of the state agree.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fleetcast.fleet import files
from fleetcast.fleet.clock import Clock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.topology import Topology
from fleetcast.ingest.shares import Share
from fleetcast.ingest.source import Source
from fleetcast.placement.ledger.promised import PromiseReader
from fleetcast.service.board.board import Board, BoardReader, Standing
from fleetcast.service.config import Config
from fleetcast.service.disk_errors import log_disk_errors
from fleetcast.service.pipeline.guarded_source import GuardedSource, guard_sources
from fleetcast.service.pipeline.occupancy import UNKNOWN, read_running_attempts
from fleetcast.service.pipeline.snapshot import SavedState, Snapshot
from fleetcast.service.state_identity import (
    BOARD,
    SNAPSHOT,
    Doubt,
    Part,
    PartView,
    StateParts,
    drop_missing_segments,
    find_doubts,
    merge_positions,
)
from fleetcast.service.state_parts import (
    StateFile,
    make_identity,
    read_board_part,
    read_identity,
    read_inbox_part,
    read_ledger_part,
    write_seen,
)

logger = logging.getLogger(__name__)


class StateMonitor:
    """A monitor that compares the parts of the state, at the start and at every board.

    A lost part stays lost until an operator accepts the loss.
    """

    def __init__(self, config: Config, saved: SavedState, now_ms: int) -> None:
        self._config = config
        self._saved = saved
        self._began_ms = now_ms
        self._board_lost: Doubt | None = None
        self.is_accepted = False
        parts = self._read_parts()
        self.identity = parts.find_identity()
        if not self.identity and parts.ledger is not None:  # one that cannot be read now may have an identity
            self.identity = make_identity(config.inbox)
        self.seen = PartView(identity=self.identity)
        for seen in parts.find_views().values():
            self.seen = self.seen.merge_views(seen)
        self._record_doubts(parts)
        self.record_unknown_occupancy()

    def _read_parts(self) -> StateParts:
        """Return the parts of the state that are on disk.

        A part that an operator has accepted counts as a part of the new identity.
        """
        saved, inbox = self._saved, read_inbox_part(self._config.inbox)
        there = saved.number > 0 or any(
            map(str.isdecimal, files.list_names(self._config.get_pipeline_folder(0) / "snapshot"))
        )
        folded = saved.positions.get("inbox", {})
        snapshot = Part(there, saved.identity, saved.number, saved.seen, folded, saved.lost)
        board, ledger = read_board_part(self._config.board), read_ledger_part(self._config.ledger)
        file = read_identity(self._config.inbox)
        if file and _is_snapshot_accepted(file, saved, (inbox.seen, board.seen, ledger.seen if ledger else PartView())):
            self._accept_restored_state()
            saved.positions["inbox"] = folded = drop_missing_segments(folded, inbox.end)
            snapshot = Part(there, file.identity, saved.number, folded=folded)
            board = board if board.identity == file.identity else Part(board.there)
        return StateParts(inbox, ledger, board, snapshot)

    def _record_doubts(self, parts: StateParts) -> None:
        found = {doubt.part: doubt for doubt in find_doubts(parts)}
        self._saved.lost, self._board_lost = found.get(SNAPSHOT), found.get(BOARD)
        for doubt in found.values():
            logger.error("%s; nothing is placed until it is put back, or accepted: fleetcast state show", doubt.what)

    def record_unknown_occupancy(self) -> None:
        """Record the snapshot as lost if the running jobs are unknown."""
        if not self._saved.occupancy_known and self._saved.lost is None:
            self._saved.lost = Doubt(SNAPSHOT, UNKNOWN, self.seen.time_ms)

    def _accept_restored_state(self) -> None:
        self.is_accepted = True
        self._saved.lost = self._board_lost = None
        self._saved.occupancy_known = True

    def check_parts(self, inbox: dict[str, int], board: int, snapshot: int, now_ms: int) -> Standing:
        """Compare the parts of the state, and return the standing of a board that includes `inbox`.

        `board`, `snapshot`: the numbers of the last board and of the last snapshot. Only one thread may call this
        at a time.
        """
        self._adopt_identity(read_identity(self._config.inbox), now_ms)
        parts = StateParts(
            inbox=read_inbox_part(self._config.inbox),
            ledger=read_ledger_part(self._config.ledger),
            board=Part(True, self.identity, board, self.seen, lost=self._board_lost),
            snapshot=Part(True, self.identity, snapshot, folded=inbox, lost=self._saved.lost),
        )
        if self.identity and not find_doubts(parts):
            self._update_view(parts, inbox, board, snapshot, now_ms)
        return Standing(inbox, self.identity, self.seen, self._board_lost, self._saved.lost)

    def _adopt_identity(self, file: StateFile | None, now_ms: int) -> None:
        """Adopt an identity that an operator accepted after the start, or that the placer made."""
        if file is None or file.identity == self.identity:
            return
        accepted = file.accepted is not None and file.accepted.time_ms >= self._began_ms
        if accepted:
            self._accept_restored_state()
        if accepted or not self.identity:
            logger.info("the state is %s from now on", file.identity)
            self.identity, self.seen = file.identity, PartView(identity=file.identity, time_ms=now_ms)

    def _update_view(self, parts: StateParts, inbox: dict[str, int], board: int, snapshot: int, now_ms: int) -> None:
        line, ledger = self.seen.ledger, parts.ledger
        if ledger is not None and ledger.identity == self.identity:
            line = max(line or 0, ledger.position)
        folded = merge_positions(self.seen.inbox, drop_missing_segments(inbox, parts.inbox.end))
        self.seen = PartView(self.identity, now_ms, line, board, snapshot, folded)

    def record_seen_parts(self, seen: PartView) -> None:
        """Record in the inbox which parts of the state a snapshot has seen.

        If the disk is full, only this record is lost.
        """
        with log_disk_errors("note in the inbox what the snapshot has seen", "the next one does"):
            write_seen(self._config.inbox, seen)


def _is_snapshot_accepted(file: StateFile, saved: SavedState, views: Sequence[PartView]) -> bool:
    """Return whether an operator has accepted the restored snapshot.

    Without a snapshot, the operator must have accepted its absence, and none may have been written since.
    """
    if file.accepted is None or saved.identity == file.identity:
        return False
    if saved.number:
        return (saved.number, saved.saved_ms) in file.accepted.snapshots
    since = any(seen.snapshot for seen in views if seen.identity == file.identity)
    return not file.accepted.snapshots and not since


@dataclass(frozen=True, slots=True)
class RestoredPipeline:
    """The restored parts of a pipeline.

    state_monitor, board: only in the first pipeline, which applies the events. board: the last board, or None
    if there is none.
    """

    snapshot: Snapshot
    saved: SavedState
    sources: Sequence[GuardedSource]
    state_monitor: StateMonitor | None
    board: Board | None


def restore_pipeline(
    config: Config,
    clock: Clock,
    topology: Topology,
    make_sources: Callable[[Entities], Sequence[Source]],
    share: Share,
) -> RestoredPipeline:
    """Restore a pipeline's state from its snapshot. The first pipeline also uses the last board.

    The sources are made once the snapshot's entities are known. They continue at its positions.
    """
    snapshot = Snapshot(config.get_pipeline_folder(share.instance) / "snapshot")
    saved = snapshot.restore(config, topology, clock.now_ms())
    saved.state.watch.ended.restore_attempts(saved.state.jobs.attempts.values(), clock.now_ms())
    saved.state.promises = PromiseReader(config.ledger) if share.is_first else None
    state_monitor = StateMonitor(config, saved, clock.now_ms()) if share.is_first else None
    sources = guard_sources(make_sources, saved.state.entities)
    for source in sources:
        if source.name in saved.positions:
            source.seek(saved.positions[source.name])
    board = BoardReader(config.board).latest() if share.is_first else None
    if state_monitor is not None:
        _continue_from_board(board, saved, sources, state_monitor, clock.now_ms())
    return RestoredPipeline(snapshot, saved, sources, state_monitor, board)


def _continue_from_board(
    board: Board | None, saved: SavedState, sources: Sequence[GuardedSource], state_monitor: StateMonitor, now_ms: int
) -> None:
    """Continue the numbering of topology generations from the last board.

    If the events are lost, also restore the attempts that ran on this board.
    """
    state = saved.state
    shown = board.json("meta")["generation"] if board is not None and "meta" in board else 0
    state.topology = replace(state.topology, generation=max(shown, saved.generation) + 1)
    if saved.saved_ms or all(source.begins() for source in sources):
        return
    running = None if board is None else read_running_attempts(board)
    saved.occupancy_known = running is not None or state_monitor.is_accepted
    then = UNKNOWN if running is None else f"the last board lists what runs: {len(running)} attempts"
    logger.error("no snapshot can be used, and the inbox does not reach back to its beginning: %s", then)
    state_monitor.record_unknown_occupancy()
    for attempt in running or ():
        state.fold.add_attempt(attempt, now_ms)
