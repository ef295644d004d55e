"""A view of the ledger for other processes: the GPUs promised to attempts, and the open requests.

No limit may refuse an attempt that Fleetcast has placed. Only the ledger's own process writes the
file. Any number of processes may read it at the same time, through SQLite's write-ahead log.
"""

import logging
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from fleetcast.fleet import files
from fleetcast.fleet.errors import RequestError
from fleetcast.fleet.requests import PlacementRequest, RankPlacement
from fleetcast.placement.ledger.file import MARK
from fleetcast.placement.ledger.rows import IntentState
from fleetcast.placement.queues.queues_file import read_queues
from fleetcast.placement.queues.tree import Window

OF_ATTEMPT = """SELECT intents.request_id, intents.state, intents.ranks FROM decisions JOIN intents USING (request_id)
WHERE decisions.job = ? AND decisions.attempt = ? AND decisions.outcome = 'placed'
ORDER BY decisions.cursor DESC LIMIT 1"""
MARKED = "SELECT value FROM state WHERE key = ?"  # JSON
QUEUES_TEXT, OVER_QUOTA = MARK + "queues_text", MARK + "over_quota"
WAITING = "SELECT body, queued_ms FROM queue ORDER BY queued_ms, rowid"
PROMISED = """SELECT decisions.body, intents.created_ms, intents.ranks FROM intents JOIN decisions USING (request_id)
WHERE intents.state = 'active' ORDER BY intents.created_ms, intents.rowid"""
STAND = "SELECT (SELECT seq FROM sqlite_sequence WHERE name = 'audit'), count(*) FROM intents WHERE state = 'active'"
HELD = frozenset({IntentState.ACTIVE, IntentState.SEEN, IntentState.ENDED})
_Rows = TypeVar("_Rows")
logger = logging.getLogger(__name__)
_decode_request = msgspec.json.Decoder(PlacementRequest).decode
_decode_ranks = msgspec.json.Decoder(tuple[RankPlacement, ...]).decode


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """A request that waits in the queue or has been promised GPUs, since `since_ms`.

    ranks: empty while it waits. is_over_quota: whether its queue is at its limit.
    """

    request: PlacementRequest
    since_ms: int
    ranks: tuple[RankPlacement, ...] = ()
    is_over_quota: bool = False

    @property
    def attempt(self) -> tuple[str, int]:
        """The request's job and attempt number."""
        return self.request.job_name, self.request.attempt

    @property
    def is_promised(self) -> bool:
        return bool(self.ranks)


@dataclass(frozen=True, slots=True)
class Promise:
    """The newest promise of GPUs to an attempt of a job."""

    request_id: str
    state: IntentState

    @property
    def is_held(self) -> bool:
        """Return whether the promise is in force, or was in force until the attempt ended."""
        return self.state in HELD


class PromiseReader:
    """A reader of the promises to attempts, from a ledger that another process writes.

    Use it from one thread at a time. Without a ledger file there are no promises. `unreadable` says why
    the ledger cannot be read now. It is "" if the ledger can be read.
    """

    def __init__(self, ledger: Path) -> None:
        self._path = ledger
        self._db: sqlite3.Connection | None = None
        self._file = 0
        self._open: tuple[OpenRequest, ...] = ()
        self._stand: tuple[Any, ...] = ()  # of the ledger, when `_open` was read
        self._windows: tuple[Window, ...] = ()
        self._queues = ""  # the file of queues that has these windows, as JSON
        self.unreadable = ""

    def find_promise(self, job: str, attempt: int) -> Promise | None:
        """Return the newest promise to an attempt.

        Returns None if there is none, or if the ledger is unreadable.
        """
        rows = self._read_ledger(lambda db: db.execute(OF_ATTEMPT, (job, attempt)).fetchall())
        return Promise(str(rows[0][0]), IntentState(rows[0][1])) if rows else None

    def find_ranks(self, job: str, attempt: int) -> tuple[RankPlacement, ...]:
        """Return the ranks and GPUs that an attempt holds by a promise.

        Returns () if there is no such promise, or if the ledger is unreadable.
        """
        rows = self._read_ledger(lambda db: db.execute(OF_ATTEMPT, (job, attempt)).fetchall())
        if not rows or IntentState(rows[0][1]) not in HELD:
            return ()
        return _decode_ranks(rows[0][2])

    def list_open_requests(self) -> Sequence[OpenRequest]:
        """Return the requests that wait, in order of arrival, and those whose promise is still active.

        While the ledger is unreadable, these are the requests that were read last.
        """
        found = self._read_ledger(self._read_open_requests)
        if not self.unreadable:
            self._open = found or ()
        return self._open

    def read_windows(self) -> Sequence[Window]:
        """Return the reservations and maintenance windows of the queue file that the placer serves.

        While the ledger is unreadable, return those that were read last.
        """
        rows = self._read_ledger(lambda db: db.execute(MARKED, [QUEUES_TEXT]).fetchall())
        if rows and rows[0][0] != self._queues:
            self._queues = rows[0][0]
            try:
                text = msgspec.json.decode(self._queues, type=str)
                self._windows = read_queues(text).windows if text else ()  # empty if the placer withdrew the file
            except RequestError as error:
                logger.error("the windows of the file of queues in the ledger cannot be read: %s", error)
        return self._windows

    def admits(self, job: str, attempt: int) -> bool:
        """Return whether an attempt must be admitted, whatever the limits.

        An attempt with a promise must be admitted. While the ledger is unreadable, every attempt must be admitted,
        because it may have a promise.
        """
        promise = self.find_promise(job, attempt)
        return bool(self.unreadable) if promise is None else promise.is_held

    def close(self) -> None:
        if self._db is not None:
            with suppress(sqlite3.Error):  # opened by another thread, which has ended
                self._db.close()
            self._db, self._stand = None, ()

    def _read_ledger(self, read: Callable[[sqlite3.Connection], _Rows]) -> _Rows | None:
        """Return the result of `read`. Returns None if there is no ledger, or if it is unreadable."""
        for is_last_try in (False, True):
            try:
                db = self._connect()
                found = None if db is None else read(db)
            except (sqlite3.Error, OSError, ValueError) as error:
                self.close()
                if is_last_try:
                    self._set_unreadable(f"{self._path} cannot be read: {error}")
            else:
                self._set_unreadable("")
                return found
        return None

    def _read_open_requests(self, db: sqlite3.Connection) -> tuple[OpenRequest, ...]:
        """Return the open requests. The last result is used again if the ledger has not changed since.

        Each change of a request writes an audit line, with one exception. A promise changes without an audit line
        when its job has been seen running.
        """
        noted = db.execute(MARKED, [OVER_QUOTA]).fetchone()
        stand = (*db.execute(STAND).fetchone(), noted)
        if stand == self._stand:
            return self._open
        over_quota = msgspec.json.decode(noted[0], type=frozenset[str]) if noted else frozenset()
        requests = [(_decode_request(body), since_ms) for body, since_ms in db.execute(WAITING)]
        waiting = [
            OpenRequest(request, since_ms, is_over_quota=request.request_id in over_quota)
            for request, since_ms in requests
        ]
        promised = [
            OpenRequest(_decode_request(body), since_ms, _decode_ranks(ranks))
            for body, since_ms, ranks in db.execute(PROMISED)
        ]
        self._stand = stand
        return (*waiting, *promised)

    def _connect(self) -> sqlite3.Connection | None:
        """Return a connection to the present ledger file, or None if there is no file."""
        try:
            file = self._path.stat().st_ino
        except FileNotFoundError:
            self.close()
            return None
        if self._db is None or file != self._file:
            self.close()
            self._db, self._file = files.connect_to_read(self._path), file
            if not self._db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'intents'").fetchone()[0]:
                self.close()  # the placer is making the file
                return None
        return self._db

    def _set_unreadable(self, why: str) -> None:
        if why and why != self.unreadable:
            logger.error("%s; meanwhile no limit refuses a name", why)
        self.unreadable = why
