"""The parts of the state as they lie on disk, for whoever compares them (service.state_identity).

inbox/identity   the state's identity, made once; with what was accepted, if it was ever made anew
inbox/seen       what the inbox's reader had seen of the other parts at its last snapshot
ledger.sqlite    table `state`: identity, and the mark `seen`
board            the header's standing
snapshot/<n>     state.arrays: identity, seen, lost
"""

import contextlib
import logging
import time
import uuid
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from features.arrays_file import TornFileError, read_arrays
from fleet import files
from ingest.inbox_reach import inbox_end, inbox_first
from placement.ledger_file import peek, peek_marks
from placement.ledger_rows import LedgerError
from service.board import Board, BoardReader
from service.config import Config
from service.state_identity import Doubt, InboxPart, Part, Parts, Seen

logger = logging.getLogger(__name__)

AREA = "inbox"  # of failpoints
TRIES, PAUSE_S = 100, 0.02  # wall
T = TypeVar("T")


class Accepted(msgspec.Struct, frozen=True):
    """What lay there when somebody accepted it: (identity, last line) of the ledger, (number, saved_ms) of snapshots.

    Parts that equal this take the new identity; one that is put back later does not.
    """

    time_ms: int
    by: str
    sentence: str
    ledger: tuple[str, int]
    snapshots: list[tuple[int, int]]


class StateFile(msgspec.Struct, frozen=True):
    """`inbox/identity`."""

    identity: str
    accepted: Accepted | None = None


class Glance(msgspec.Struct, frozen=True):
    """One snapshot's document, as far as it tells of the state."""

    positions: dict[str, dict[str, Any]]
    saved_ms: int
    identity: str = ""
    seen: Seen = Seen()
    lost: Doubt | None = None


def read_identity(inbox: Path) -> StateFile | None:
    """None where there is none that can be read."""
    return _read(inbox / "identity", StateFile)


def write_identity(inbox: Path, file: StateFile) -> None:
    """On disk when it returns. Raises OSError."""
    files.make_folder(inbox, AREA)
    files.replace_file(inbox / "identity", [msgspec.json.encode(file)], AREA)


def make_identity(inbox: Path) -> str:
    """A new state's identity, or the one that another process has made meanwhile; "" where none can be written."""
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


def write_seen(inbox: Path, seen: Seen) -> None:
    """Raises OSError."""
    files.replace_file(inbox / "seen", [msgspec.json.encode(seen)], AREA)


def inbox_part(inbox: Path) -> InboxPart:
    file = read_identity(inbox)
    return InboxPart(
        identity=file.identity if file else "",
        first=dict(inbox_first(inbox)),
        end=dict(inbox_end(inbox)),
        seen=_read(inbox / "seen", Seen) or Seen(),
    )


def ledger_part(path: Path) -> Part | None:
    """None where the file cannot be read now, so that nothing can be said of it."""
    try:
        found = peek(path)
        return Part(False) if found is None else Part(True, *found, seen=seen_of(peek_marks(path)))
    except LedgerError as error:
        logger.debug("%s", error)
        return None


def seen_of(marks: dict[str, Any]) -> Seen:
    """What the ledger's marks say; nothing where they say nothing that is understood."""
    try:
        return msgspec.convert(marks.get("seen", {}), Seen)
    except msgspec.ValidationError:
        return Seen()


def board_part(folder: Path) -> Part:
    """A board that cannot be read is there: a torn one is written anew, and no sign of a loss."""
    return part_of(BoardReader(folder).latest()) or Part((folder / "board").exists())


def part_of(board: Board | None) -> Part | None:
    if board is None or board.standing is None:
        return None
    standing = board.standing
    return Part(True, standing.identity, board.sequence, standing.seen, lost=standing.board_lost)


def glances(folder: Path) -> dict[int, Glance]:
    """The snapshots of a folder whose document can be read, by number, oldest first."""
    found = {}
    for name in sorted(filter(str.isdecimal, files.listing(folder)), key=int):
        with contextlib.suppress(OSError, TornFileError, ValueError, KeyError):
            found[int(name)] = msgspec.convert(read_arrays(folder / name / "state.arrays")[0], Glance)
    return found


def snapshot_part(folder: Path) -> Part:
    """The newest one; where none can be read, what is left of some."""
    found = glances(folder)
    if not found:
        return Part(any(map(str.isdecimal, files.listing(folder))))
    number, newest = max(found.items())
    folded = newest.positions.get("inbox", {})
    return Part(True, newest.identity, number, newest.seen, folded, newest.lost)


def survey(config: Config) -> Parts:
    """Everything as it lies there."""
    return Parts(
        inbox=inbox_part(config.inbox),
        ledger=ledger_part(config.ledger),
        board=board_part(config.board),
        snapshot=snapshot_part(config.home(0) / "snapshot"),
    )


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        logger.warning("%s cannot be read (%s)", path, error)
        return None
