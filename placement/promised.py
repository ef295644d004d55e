"""Promises of the ledger, as other processes read them: an attempt that Fleetcast has placed passes every limit.

The ledger's own process writes it. SQLite lets any number of processes read beside it (write-ahead log).
"""

import logging
import sqlite3
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fleet import files
from placement.ledger_rows import IntentState

OF_ATTEMPT = """SELECT intents.request_id, intents.state FROM decisions JOIN intents USING (request_id)
WHERE decisions.job = ? AND decisions.attempt = ? AND decisions.outcome = 'placed'
ORDER BY decisions.cursor DESC LIMIT 1"""
HELD = frozenset({IntentState.ACTIVE, IntentState.SEEN, IntentState.ENDED})
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Promise:
    """The last placement of an attempt."""

    request_id: str
    state: IntentState

    @property
    def is_held(self) -> bool:
        """Return whether the attempt has its GPUs by this promise, or had them until its end."""
        return self.state in HELD


class PromiseReader:
    """Looks up attempts in a ledger that another process writes. Use it from one thread at a time.

    A state without a ledger has no promises. `unreadable` says why the ledger cannot be read now; else it is empty.
    """

    def __init__(self, ledger: Path) -> None:
        self._path = ledger
        self._db: sqlite3.Connection | None = None
        self._file = 0
        self.unreadable = ""

    def find(self, job: str, attempt: int) -> Promise | None:
        """Return the newest promise to an attempt. Returns None if there is none, or if the ledger is unreadable."""
        for is_last_try in (False, True):
            try:
                row = self._row(job, attempt)
            except (sqlite3.Error, OSError, UnicodeDecodeError) as error:
                self.close()
                if is_last_try:
                    self._set_unreadable(f"{self._path} cannot be read: {error}")
            else:
                self._set_unreadable("")
                return None if row is None else Promise(str(row[0]), IntentState(row[1]))
        return None

    def admits(self, job: str, attempt: int) -> bool:
        """Return whether no limit may refuse this attempt: it holds a promise, or nobody can say whether it does."""
        promise = self.find(job, attempt)
        return bool(self.unreadable) if promise is None else promise.is_held

    def close(self) -> None:
        if self._db is not None:
            with suppress(sqlite3.Error):  # opened by another thread, which has ended
                self._db.close()
            self._db = None

    def _row(self, job: str, attempt: int) -> tuple[str, str] | None:
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
        row: tuple[str, str] | None = self._db.execute(OF_ATTEMPT, (job, attempt)).fetchone()
        return row

    def _set_unreadable(self, why: str) -> None:
        if why and why != self.unreadable:
            logger.error("%s; meanwhile no limit refuses a name", why)
        self.unreadable = why
