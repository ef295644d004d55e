"""The ledger's tables. Another shape needs another version: a program leaves the file of a later one alone.

1   decisions, intents, queue, audit
2   `state`: what the ledger knows of the service's state, JSON by name
"""

import sqlite3

SCHEMA_VERSION = 2
SCHEMA = """
CREATE TABLE IF NOT EXISTS decisions (
    cursor INTEGER PRIMARY KEY AUTOINCREMENT, request_id TEXT NOT NULL UNIQUE, body BLOB NOT NULL, reply BLOB NOT NULL,
    outcome TEXT NOT NULL, job TEXT NOT NULL, attempt INTEGER NOT NULL, time_ms INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS intents (
    request_id TEXT PRIMARY KEY, job TEXT NOT NULL, attempt INTEGER NOT NULL, ranks BLOB NOT NULL, cpus REAL NOT NULL,
    host_memory_gib REAL NOT NULL, limit_s REAL, created_ms INTEGER NOT NULL, expires_ms INTEGER NOT NULL,
    state TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS active_intents ON intents (state) WHERE state = 'active';
CREATE TABLE IF NOT EXISTS queue (
    request_id TEXT PRIMARY KEY, body BLOB NOT NULL, reply BLOB NOT NULL, queued_ms INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS audit (
    audit_id INTEGER PRIMARY KEY AUTOINCREMENT, time_ms INTEGER NOT NULL, caller TEXT NOT NULL, action TEXT NOT NULL,
    request_id TEXT NOT NULL, decision_id TEXT NOT NULL, board_as_of_ms INTEGER NOT NULL, models TEXT NOT NULL,
    sentence TEXT NOT NULL);
CREATE TRIGGER IF NOT EXISTS audit_is_not_updated BEFORE UPDATE ON audit BEGIN
    SELECT RAISE(ABORT, 'the audit trail is append-only'); END;
CREATE TRIGGER IF NOT EXISTS audit_is_not_deleted BEFORE DELETE ON audit BEGIN
    SELECT RAISE(ABORT, 'the audit trail is append-only'); END;
CREATE TRIGGER IF NOT EXISTS audit_is_not_replaced BEFORE INSERT ON audit
    WHEN EXISTS (SELECT 1 FROM audit WHERE audit_id = NEW.audit_id) BEGIN
    SELECT RAISE(ABORT, 'the audit trail is append-only'); END;
CREATE TABLE IF NOT EXISTS state (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
"""
AUDIT_COLUMNS = (
    "audit_id",
    "time_ms",
    "caller",
    "action",
    "request_id",
    "decision_id",
    "board_as_of_ms",
    "models",
    "sentence",
)


def make(db: sqlite3.Connection, version: int) -> None:
    """Bring a file of an earlier version (0: nothing yet) to this one, inside the caller's transaction."""
    for statement in statements(SCHEMA):
        db.execute(statement)
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def statements(script: str) -> list[str]:
    """The statements of a script one by one: `executescript` would end the transaction that it runs in.

    >>> statements("CREATE TABLE a (x); CREATE TABLE b (x);")
    ['CREATE TABLE a (x);', 'CREATE TABLE b (x);']
    """
    found, begun = [], ""
    for part in script.split(";")[:-1]:
        begun += part + ";"
        if sqlite3.complete_statement(begun):
            found.append(begun.strip())
            begun = ""
    return found
