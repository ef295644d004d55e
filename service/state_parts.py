"""Reading and writing of the parts of the state that fleetcast.service.state_identity compares.

inbox/identity   the state's identity; if an operator has renewed it, also the parts that they accepted
inbox/seen       how far the inbox's reader had seen the other parts at its last snapshot
ledger.sqlite    table `state`: identity, and the mark `seen`
board            the field `standing` of its header
snapshot/<n>     state.arrays: identity, seen, lost
"""

import contextlib
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from fleetcast.features.arrays_file import TornFileError, read_arrays
from fleetcast.fleet import files
from fleetcast.fleet.decode_faults import explain_json_error
from fleetcast.ingest.inbox.reach import find_inbox_end, find_oldest_segments
from fleetcast.placement.ledger.chain import ChainHead
from fleetcast.placement.ledger.file import read_chain_hashes, read_ledger_identity, read_ledger_marks
from fleetcast.placement.ledger.rows import LedgerError
from fleetcast.service.board.board import Board, BoardReader
from fleetcast.service.config import Config
from fleetcast.service.state_identity import LEDGER, Doubt, InboxPart, Part, PartView, StateParts

logger = logging.getLogger(__name__)

AREA = "inbox"  # of failpoints
ACCEPTED_HEAD = "accepted_head"  # the ledger's mark: an expected head whose loss the operator accepted
TRIES, PAUSE_S = 100, 0.02  # wall
T = TypeVar("T")
Positions = dict[str, dict[str, Any]]


class AcceptedParts(msgspec.Struct, frozen=True):
    """The parts of the state that an operator accepted after they disagreed.

    A part gets the new identity only if it equals one of these.
    """

    time_ms: int
    by: str
    sentence: str
    ledger: tuple[str, int]  # identity, last line
    snapshots: list[tuple[int, int]]  # number, saved_ms
    expect_head: str = ""  # the head of the audit that the ledger need not contain any more


class StateFile(msgspec.Struct, frozen=True):
    """The contents of the file `inbox/identity`."""

    identity: str
    accepted: AcceptedParts | None = None


@dataclass(slots=True, kw_only=True)
class SnapshotHeader:
    """The identity fields of a snapshot. `fleetcast.service.state_identity` explains identity, seen and lost."""

    positions: Positions  # of the sources, by name
    began_ms: int  # its history reaches back so far
    saved_ms: int = 0  # 0: never saved
    generation: int = 0  # of the last topology
    occupancy_known: bool = True  # no event that told what runs was lost
    identity: str = ""
    seen: PartView = field(default_factory=PartView)
    lost: Doubt | None = None


def read_identity(inbox: Path) -> StateFile | None:
    """Read the identity file. Returns None if it is unreadable."""
    return _read_json_file(inbox / "identity", StateFile)


def write_identity(inbox: Path, file: StateFile) -> None:
    """Write the identity file, and return once it is on disk. Raises OSError."""
    files.make_folder(inbox, AREA)
    files.replace_file(inbox / "identity", [msgspec.json.encode(file)], AREA)


def make_identity(inbox: Path) -> str:
    """Create the identity of a new state, and return it.

    If another process was first, return the identity that it created. Returns "" if no identity can be
    written.
    """
    try:
        files.make_folder(inbox, AREA)
        for _ in range(TRIES):
            with contextlib.suppress(BlockingIOError):
                give_back = files.lock(inbox / "identity.lock")
                try:
                    found = read_identity(inbox) or StateFile(uuid.uuid4().hex)
                    write_identity(inbox, found)
                    return found.identity
                finally:
                    give_back()
            time.sleep(PAUSE_S)
    except OSError as error:
        logger.error("cannot write %s: %s; the state has no identity yet", inbox / "identity", error)
    return ""


def write_seen(inbox: Path, seen: PartView) -> None:
    """Record how far the inbox's reader has seen the other parts. Raises OSError."""
    files.replace_file(inbox / "seen", [msgspec.json.encode(seen)], AREA)


def read_inbox_part(inbox: Path) -> InboxPart:
    file = read_identity(inbox)
    return InboxPart(
        identity=file.identity if file else "",
        first=dict(find_oldest_segments(inbox)),
        end=dict(find_inbox_end(inbox)),
        seen=_read_json_file(inbox / "seen", PartView) or PartView(),
    )


def read_ledger_part(path: Path, expect_head: str = "") -> Part | None:
    """Return the state of the ledger on disk, or None if the file cannot be read now.

    `expect_head`: as in `find_missing_head`.
    """
    try:
        found, marks = read_ledger_identity(path), read_ledger_marks(path)
        lost = find_missing_head(expect_head, marks, lambda audit_id: read_chain_hashes(path, audit_id))
        return Part(False, lost=lost) if found is None else Part(True, *found, seen=read_seen_mark(marks), lost=lost)
    except LedgerError as error:
        logger.debug("%s", error)
        return None


def find_missing_head(
    expect_head: str, marks: dict[str, Any], hashes: Callable[[int], tuple[str | None, ChainHead]]
) -> Doubt | None:
    """Check that the ledger's audit trail has the head that the operator stored elsewhere (`expect_head`).

    Returns the doubt about the ledger if not. Returns None without `expect_head`, or if the operator
    accepted its loss. `hashes`: as `read_chain_hashes`.
    """
    expected = ChainHead.parse(expect_head)
    if expected is None or marks.get(ACCEPTED_HEAD) == expect_head:
        return None
    there, head = hashes(expected.audit_id)
    if there == expected.hash:
        return None
    is_older = "is older than" if there is None else "is not the one of"
    found = f"its head is {head}" if head.audit_id else "it is empty"
    if there is not None:
        found = f"its line {expected.audit_id} is {there}, and {found}"
    return Doubt(LEDGER, f"the ledger {is_older} [placer] expect_head: expected {expected}, and {found}")


def read_seen_mark(marks: dict[str, Any]) -> PartView:
    """Return the ledger's record of the other parts. It is empty if the mark is missing or malformed."""
    try:
        return msgspec.convert(marks.get("seen", {}), PartView)
    except msgspec.ValidationError:
        return PartView()


def read_board_part(folder: Path) -> Part:
    """Return the state of the board on disk.

    An unreadable board counts as present. A torn board is no loss, because the pipeline writes a new one.
    """
    return make_board_part(BoardReader(folder).latest()) or Part((folder / "board").exists())


def make_board_part(board: Board | None) -> Part | None:
    if board is None or board.standing is None:
        return None
    standing = board.standing
    return Part(True, standing.identity, board.sequence, standing.seen, lost=standing.board_lost)


def read_snapshot_headers(folder: Path) -> dict[int, SnapshotHeader]:
    """Return the header of each readable snapshot by number, the oldest first."""
    found = {}
    for name in sorted(filter(str.isdecimal, files.list_names(folder)), key=int):
        with contextlib.suppress(OSError, TornFileError, ValueError, KeyError, msgspec.MsgspecError):
            found[int(name)] = msgspec.convert(read_arrays(folder / name / "state.arrays")[0], SnapshotHeader)
    return found


def read_snapshot_part(folder: Path) -> Part:
    """Return the state of the newest readable snapshot.

    If no snapshot is readable, return only whether there are any.
    """
    found = read_snapshot_headers(folder)
    if not found:
        return Part(any(map(str.isdecimal, files.list_names(folder))))
    number, newest = max(found.items())
    folded = newest.positions.get("inbox", {})
    return Part(True, newest.identity, number, newest.seen, folded, newest.lost)


def read_state_parts(config: Config) -> StateParts:
    """Return all parts of the state as they are on disk."""
    return StateParts(
        inbox=read_inbox_part(config.inbox),
        ledger=read_ledger_part(config.ledger, config.placer.expect_head),
        board=read_board_part(config.board),
        snapshot=read_snapshot_part(config.get_pipeline_folder(0) / "snapshot"),
    )


def _read_json_file(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        why = error if isinstance(error, OSError) else explain_json_error(error)
        logger.warning("%s cannot be read (%s)", path, why)
        return None
