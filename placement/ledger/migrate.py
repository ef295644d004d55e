"""Migration of a ledger file from an earlier version and back, and creation of the tables in an empty file.

Version 1 had neither checksums nor a hash chain. The checksums that the migration adds prove
nothing about lines written before it. The fact `migrated` records the last of these lines. Version
2 had no charges. The placer opens a charge for each running job when it first sees the job. Version
3 had no actions.
"""

import sqlite3
from collections.abc import Callable, Sequence
from typing import Any

from fleetcast.placement.ledger.chain import CHECKSUMS, NO_HASH, QUEUED, encode, hash_line
from fleetcast.placement.ledger.old_bodies import SAID_AFTER
from fleetcast.placement.ledger.schema import (
    ACTIONS,
    CHARGES,
    SCHEMA_VERSION,
    TABLES,
    create_tables,
    make_expected_schema,
    read_schema,
    split_statements,
)

MIGRATED = "migrated"
FACTS_OF_ACTIONS = ("mark.actions", "mark.promised_sets", "mark.gang_losses", SAID_AFTER)
"""Keys of facts that mean nothing without the table of actions. "mark.actions" has the switches and the breaker."""
DOWNGRADED = 3  # the version that `drop_actions` leaves


def create_tables_if_empty(db: sqlite3.Connection) -> str:
    """Create the tables in a file of version 0 if it holds no rows.

    Otherwise return why it cannot be used. Returns "" on success. Version 1 created its tables one by
    one, so such a file may already have some empty tables.
    """
    found = read_schema(db)
    tables = [name for name, sql in found.items() if sql.startswith("CREATE TABLE")]
    if found.keys() - make_expected_schema(1).keys() or any(
        db.execute(f'SELECT EXISTS (SELECT 1 FROM "{name}")').fetchone()[0] for name in tables
    ):
        return f"it has version 0 and {', '.join(sorted(found))}: it is no ledger"
    for name in tables:
        db.execute(f"DROP TABLE {name}")
    create_tables(db)
    return ""


def migrate(db: sqlite3.Connection, version: int) -> None:
    """Migrate a file of an earlier version to this one, inside the caller's transaction."""
    if version == 1:
        _copy_first_version(db)
        return
    for statement in split_statements((CHARGES if version == 2 else "") + ACTIONS):
        db.execute(statement)
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def drop_actions(db: sqlite3.Connection) -> None:
    """Make a file of this version one of version 3, inside the caller's transaction. Its actions are lost."""
    db.execute("DROP TABLE actions")
    db.executemany("DELETE FROM state WHERE key = ?", [[key] for key in FACTS_OF_ACTIONS])
    db.execute(f"PRAGMA user_version = {DOWNGRADED}")


def _copy_first_version(db: sqlite3.Connection) -> None:
    """Copy everything of version 1 into tables of this version."""
    counted = dict(db.execute("SELECT name, seq FROM sqlite_sequence"))
    for name, sql in read_schema(db).items():
        if not sql.startswith("CREATE TABLE"):
            db.execute(f"DROP {sql.split()[1]} {name}")
    for table in TABLES:
        db.execute(f"ALTER TABLE {table} RENAME TO {table}_1")
    create_tables(db)
    for table, checksum in CHECKSUMS.items():
        _copy_table(db, table, lambda row, checksum=checksum: [*row, checksum(row)])  # type: ignore[misc]
    _copy_table(db, "audit", _LineConverter(db))
    for table in TABLES:
        db.execute(f"DROP TABLE {table}_1")
    for table in counted:  # the last numbers ever given, whatever rows there are
        db.execute("DELETE FROM sqlite_sequence WHERE name = ?", [table])
    db.executemany("INSERT INTO sqlite_sequence (name, seq) VALUES (?, ?)", counted.items())
    (lines,) = db.execute("SELECT coalesce(max(audit_id), 0) FROM audit").fetchone()
    db.execute("INSERT INTO state VALUES (?, ?)", [MIGRATED, encode({"version": 1, "lines": lines}).decode()])


def _copy_table(db: sqlite3.Connection, table: str, made: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
    """Copy a table in the order of its row ids. The oldest active intent then remains the first.

    made: function that converts a row of version 1.
    """
    rows = (made(row) for row in db.execute(f"SELECT * FROM {table}_1 ORDER BY rowid"))
    width = len(db.execute(f"SELECT * FROM {table} LIMIT 0").description)
    db.executemany(f"INSERT INTO {table} VALUES ({','.join('?' * width)})", rows)


class _LineConverter:
    """A converter that adds the columns `stored`, `previous` and `hash` to lines of version 1."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._hash = NO_HASH

    def __call__(self, row: Sequence[Any]) -> Sequence[Any]:
        line = [*row, self._find_stored_checksum(row[4], row[3]), self._hash]
        self._hash = hash_line(line)
        return [*line, self._hash]

    def _find_stored_checksum(self, request_id: Any, action: Any) -> str:
        table = {QUEUED: "queue", "place": "decisions", "refuse": "decisions", "withdraw": "decisions"}.get(action)
        if table is None:
            return ""
        found = self._db.execute(f"SELECT checksum FROM {table} WHERE request_id = ?", [request_id]).fetchone()
        return str(found[0]) if found else ""
