"""Opening, migrating and writing the ledger's file. A damaged file is refused.

The table `state` holds facts and marks as JSON.
"""

import logging
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from fleetcast.fleet import failpoints, files
from fleetcast.placement.ledger.chain import ChainHead, encode
from fleetcast.placement.ledger.migrate import create_tables_if_empty, migrate
from fleetcast.placement.ledger.rows import LedgerError, LedgerUnavailable
from fleetcast.placement.ledger.schema import (
    SCHEMA_VERSION,
    explain_schema_mismatch,
    find_missing_statements,
    read_schema,
)

LAST_NUMBER = {  # ever given, whatever was deleted since
    table: f"SELECT max(coalesce((SELECT max(seq) FROM sqlite_sequence WHERE name = '{table}'), 0), "
    f"coalesce((SELECT max({key}) FROM {table}), 0))"
    for table, key in (("audit", "audit_id"), ("decisions", "cursor"))
}
IDENTITY, MARK = "identity", "mark."
logger = logging.getLogger(__name__)


class LedgerFile:
    """The ledger's SQLite file. Constructing this opens the file, or creates it.

    Raises LedgerError if the file cannot be trusted. `was_new`: whether the file was empty before.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.was_new = False
        self._writing = False
        self._before: list[tuple[object, dict[str, Any]]] = []  # objects, and their attributes before the transaction
        self._state: dict[str, Any] = {}
        self._unwritten: dict[str, Any] = {}
        # The service touches it from one event loop at a time, which need not be the thread that opened it.
        try:
            self._db = files.connect(path)
        except sqlite3.OperationalError as error:
            raise LedgerUnavailable(f"{path} cannot be opened: {error}") from None
        try:
            self._open_database()
            self._load_state()
        except sqlite3.OperationalError as error:
            self._db.close()
            raise LedgerUnavailable(f"{path} cannot be opened: {error}") from None
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            self._db.close()
            raise self._make_damage_error(error) from None
        except LedgerError:
            self._db.close()
            raise

    def _load_state(self) -> None:
        """Load the state into memory after the file was opened."""
        with self.translate_decode_errors():
            self._state = {
                key: msgspec.json.decode(value) for key, value in self._db.execute("SELECT key, value FROM state")
            }
        if not isinstance(self.identity, str):
            raise self._make_damage_error(f"its identity is {self.identity!r}")

    def _drop_cache(self) -> None:
        """Drop the rows that a subclass caches.

        After a rollback they may contain changes that the file does not have. This class caches none.
        """

    def _make_damage_error(self, why: object) -> LedgerError:
        return LedgerError(f"{self.path} is damaged ({why}): move it away, or restore a copy")

    def _open_database(self) -> None:
        self._db.text_factory = bytes.decode  # text that is no UTF-8 is damage, not a disk that is away
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        # All of it: an index that lost a row would let a request be decided twice, or free what a job was promised.
        (verdict,) = self._db.execute("PRAGMA integrity_check(1)").fetchone()
        if verdict != "ok":
            raise self._make_damage_error(verdict)
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if not 0 <= version <= SCHEMA_VERSION:
            raise LedgerError(f"{self.path} has version {version}, this program writes {SCHEMA_VERSION}")
        self.was_new = version == 0
        if version == 0:
            self._create_tables()
        elif why := explain_schema_mismatch(read_schema(self._db), version):
            raise self._make_damage_error(why)
        elif version < SCHEMA_VERSION:
            self._migrate_file(version)
        self._restore_missing_schema()

    def _create_tables(self) -> None:
        with self.transaction():
            if why := create_tables_if_empty(self._db):
                raise self._make_damage_error(why)

    def _migrate_file(self, version: int) -> None:
        """Copy the old file next to itself, then rewrite the original in one transaction.

        If the process is killed, either the old or the new content remains.
        """
        copy = self.copy_file()
        with self.transaction():
            migrate(self._db, version)
        logger.info("%s has version %d now; %s is what it was", self.path, SCHEMA_VERSION, copy)

    def copy_file(self) -> Path:
        """Copy the file next to itself, under a name with its version, and return the copy's path.

        Raises LedgerUnavailable if it cannot be copied.
        """
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        copy = self.path.with_name(f"{self.path.name}.v{version}")
        part = copy.with_name(f".{copy.name}.tmp")
        try:
            part.unlink(missing_ok=True)
            with closing(files.connect(part)) as target:
                self._db.backup(target)
            files.rename(part, copy, "migration")
            files.sync_folder(copy.parent, "migration")
        except OSError as error:
            raise LedgerUnavailable(f"{self.path} cannot be copied to {copy}: {error.strerror}") from None
        return copy

    def _restore_missing_schema(self) -> None:
        """Create missing triggers and indexes again.

        If the audit trail was changed while they were missing, its hash chain shows that.
        """
        for name, statement in find_missing_statements(read_schema(self._db)).items():
            logger.error(
                "%s had lost its %s: `fleetcast audit verify` checks whether anything was changed", self.path, name
            )
            self._db.execute(statement)

    def close(self) -> None:
        """Write the pending marks if possible, then close the file.

        Pending marks are those that no transaction has written yet.
        """
        try:
            if self._unwritten:
                with self.transaction():
                    pass
        except LedgerError as error:
            logger.error("%s; what it has seen since its last line is forgotten", error)
        self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Write everything inside to disk together, or not at all.

        A nested transaction joins the outer one. After a rollback memory is as before, too: the facts, the cached
        rows, and the objects of `restore_after_rollback`.
        """
        if self._writing:
            yield
            return
        self._writing = True
        state, unwritten = self._state, self._unwritten
        try:
            with self._translate_errors():
                self._db.execute("BEGIN IMMEDIATE")
                yield
                self._write_state()
                failpoints.call_hook("ledger.before_commit")
                self._db.execute("COMMIT")
                state, unwritten, self._before = self._state, {}, []
                failpoints.call_hook("ledger.after_commit")
            self._unwritten = {}
        except BaseException:
            self._state, self._unwritten = state, unwritten
            self._drop_cache()
            for owner, attributes in reversed(self._before):
                vars(owner).update(attributes)
            with self._translate_errors():
                self._db.rollback()
            raise
        finally:
            self._writing, self._before = False, []

    def restore_after_rollback(self, owner: object) -> None:
        """Restore the present attributes of an object if this transaction is rolled back.

        Call it inside the transaction, before the object changes. It must replace its attributes: a list or dict that
        it changes in place stays changed.
        """
        assert self._writing, "outside a transaction nothing is rolled back"
        self._before.append((owner, dict(vars(owner))))

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Turn errors of SQLite into LedgerErrors. Nothing was stored then, so a caller may retry."""
        try:
            yield
        except sqlite3.OperationalError as error:
            raise LedgerError(f"{self.path} cannot be used now: {error}") from None
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            raise self._make_damage_error(error) from None

    @contextmanager
    def translate_decode_errors(self) -> Iterator[None]:
        """Turn errors from decoding a damaged value inside the context into a LedgerError.

        SQLite does not detect a value of the wrong type.
        """
        try:
            yield
        except (ValueError, TypeError, RecursionError) as error:
            raise self._make_damage_error(error) from None

    def read_rows(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with self._translate_errors():
            return self._db.execute(query, values).fetchall()

    def execute_in_transaction(self, statement: str, values: Sequence[Any]) -> None:
        """Execute a statement inside the caller's transaction."""
        self._db.execute(statement, values)

    def check_row(self, what: str, row: Sequence[Any], checksum: Callable[[Sequence[Any]], str]) -> Sequence[Any]:
        """Return a row without its checksum, the last column.

        Raises LedgerError if the row is not what was written.
        """
        *values, stored = row
        if checksum(values) != stored:
            raise self._make_damage_error(
                f"{what} is not what was written; `fleetcast audit verify` lists what else is"
            )
        return values

    # -- what it knows of the service's state

    @property
    def identity(self) -> str:
        """The identity of the service state that the ledger belongs to. It is "" until it is set."""
        identity: str = self._state.get(IDENTITY, "")
        return identity

    def set_identity(self, identity: str, *, rebuilt: bool = False) -> None:
        """Write the identity of the service state that the ledger belongs to.

        Raises LedgerError if the ledger has another identity already, unless `rebuilt` is set.
        """
        if self.identity not in ("", identity) and not rebuilt:
            raise LedgerError(f"{self.path} belongs to the state {self.identity}, not to {identity}")
        with self.transaction():
            self._record_facts({IDENTITY: identity})

    def record_marks(self, **marks: Any) -> None:
        """Record marks of other parts of the service for the next transaction or the close.

        marks: JSON values by name.

        This needs no extra fsync. Unchanged marks cost nothing. Call it in `with ledger.transaction():` for
        a mark that must be on disk at once. A rollback of that transaction undoes it.
        """
        self._record_facts({MARK + name: value for name, value in marks.items()})

    def _record_facts(self, facts: dict[str, Any]) -> None:
        """Record facts about the service's state for the present transaction, or else for the next one.

        If the next one is rolled back, the one after it writes them. Facts of the present one are then as before.
        """
        changed = {key: value for key, value in facts.items() if key not in self._state or self._state[key] != value}
        if changed:
            self._state, self._unwritten = self._state | changed, self._unwritten | changed

    def list_marks(self) -> dict[str, Any]:
        """Return the newest marks by name, including those that are not on disk yet."""
        return {key.removeprefix(MARK): value for key, value in self._state.items() if key.startswith(MARK)}

    def find_mark(self, name: str) -> Any:
        """Return the newest mark of this name, or None if there is none."""
        return self._state.get(MARK + name)

    def _write_state(self) -> None:
        rows = [(key, encode(value).decode()) for key, value in self._unwritten.items()]
        self._db.executemany("INSERT OR REPLACE INTO state VALUES (?, ?)", rows)


def read_ledger_identity(path: Path) -> tuple[str, int] | None:
    """Return (identity, position) of a ledger file, even while the placer writes it.

    The identity is "" until it is set. The position is the highest audit_id ever written. Returns None if the
    file is absent or empty. Raises LedgerError if the file cannot be read or has a later version.
    """
    if not path.exists() or not path.stat().st_size:
        return None
    try:
        with closing(files.connect_to_read(path)) as db:
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version > SCHEMA_VERSION:
                raise LedgerError(f"{path} has version {version}, this program reads {SCHEMA_VERSION}")
            if not db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'audit'").fetchone()[0]:
                return None
            rows = db.execute("SELECT value FROM state WHERE key = ?", [IDENTITY]).fetchall() if version > 1 else []
            return msgspec.json.decode(rows[0][0], type=str) if rows else "", int(
                db.execute(LAST_NUMBER["audit"]).fetchone()[0]
            )
    except (sqlite3.DatabaseError, ValueError, TypeError) as error:
        raise LedgerError(f"{path} cannot be read: {error}") from None


def read_chain_hashes(path: Path, audit_id: int) -> tuple[str | None, ChainHead]:
    """Return the hash of a line of a ledger file's audit trail, and the head of the trail.

    The hash is None if there is no such line.
    """
    if not read_ledger_identity(path):
        return None, ChainHead()
    try:
        with closing(files.connect_to_read(path)) as db:
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version <= 1:  # a chain came with version 2
                return None, ChainHead()
            line = db.execute("SELECT hash FROM audit WHERE audit_id = ?", [audit_id]).fetchone()
            newest = db.execute("SELECT audit_id, hash FROM audit ORDER BY audit_id DESC LIMIT 1").fetchone()
            return line[0] if line else None, ChainHead(*newest) if newest else ChainHead()
    except (sqlite3.DatabaseError, ValueError, TypeError) as error:
        raise LedgerError(f"{path} cannot be read: {error}") from None


def read_ledger_marks(path: Path) -> dict[str, Any]:
    """Read the marks of a ledger file, by name, even while the placer writes it.

    Returns an empty dict if the file is absent or has the first version. Raises LedgerError if the file cannot
    be read or has a later version.
    """
    if not read_ledger_identity(path):
        return {}
    try:
        with closing(files.connect_to_read(path)) as db:
            (version,) = db.execute("PRAGMA user_version").fetchone()
            query = "SELECT key, value FROM state WHERE key LIKE ?"
            rows = db.execute(query, [f"{MARK}%"]).fetchall() if version > 1 else []
            return {key.removeprefix(MARK): msgspec.json.decode(value) for key, value in rows}
    except (sqlite3.DatabaseError, ValueError, TypeError) as error:
        raise LedgerError(f"{path} cannot be read: {error}") from None
