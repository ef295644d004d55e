"""The schema of the ledger's tables.

A change of the schema needs a new version. A program never writes to the file of a later version.

1   decisions, intents, queue, audit
2   a checksum for each row, the audit's chain, and `state`: facts about the service's state, JSON by name
3   charges (the GPUs that each attempt held) and credits (the credits of queues)
4   actions (on running jobs)
"""

import sqlite3
from contextlib import closing
from functools import cache

SCHEMA_VERSION = 4
KEEP_TABLES = """
CREATE INDEX active_intents ON intents (state) WHERE state = 'active';
CREATE TRIGGER audit_is_not_updated BEFORE UPDATE ON audit BEGIN
    SELECT RAISE(ABORT, 'the audit trail is append-only'); END;
CREATE TRIGGER audit_is_not_deleted BEFORE DELETE ON audit BEGIN
    SELECT RAISE(ABORT, 'the audit trail is append-only'); END;
CREATE TRIGGER audit_is_not_replaced BEFORE INSERT ON audit
    WHEN EXISTS (SELECT 1 FROM audit WHERE audit_id = NEW.audit_id) BEGIN
    SELECT RAISE(ABORT, 'the audit trail is append-only'); END;
"""
SCHEMA_1 = """
CREATE TABLE decisions (
    cursor INTEGER PRIMARY KEY AUTOINCREMENT, request_id TEXT NOT NULL UNIQUE, body BLOB NOT NULL, reply BLOB NOT NULL,
    outcome TEXT NOT NULL, job TEXT NOT NULL, attempt INTEGER NOT NULL, time_ms INTEGER NOT NULL);
CREATE TABLE intents (
    request_id TEXT PRIMARY KEY, job TEXT NOT NULL, attempt INTEGER NOT NULL, ranks BLOB NOT NULL, cpus REAL NOT NULL,
    host_memory_gib REAL NOT NULL, limit_s REAL, created_ms INTEGER NOT NULL, expires_ms INTEGER NOT NULL,
    state TEXT NOT NULL);
CREATE TABLE queue (
    request_id TEXT PRIMARY KEY, body BLOB NOT NULL, reply BLOB NOT NULL, queued_ms INTEGER NOT NULL);
CREATE TABLE audit (
    audit_id INTEGER PRIMARY KEY AUTOINCREMENT, time_ms INTEGER NOT NULL, caller TEXT NOT NULL, action TEXT NOT NULL,
    request_id TEXT NOT NULL, decision_id TEXT NOT NULL, board_as_of_ms INTEGER NOT NULL, models TEXT NOT NULL,
    sentence TEXT NOT NULL);
"""
SCHEMA_2 = """
CREATE TABLE decisions (
    cursor INTEGER PRIMARY KEY AUTOINCREMENT, request_id TEXT NOT NULL UNIQUE, body BLOB NOT NULL, reply BLOB NOT NULL,
    outcome TEXT NOT NULL, job TEXT NOT NULL, attempt INTEGER NOT NULL, time_ms INTEGER NOT NULL,
    checksum TEXT NOT NULL);
CREATE TABLE intents (
    request_id TEXT PRIMARY KEY, job TEXT NOT NULL, attempt INTEGER NOT NULL, ranks BLOB NOT NULL, cpus REAL NOT NULL,
    host_memory_gib REAL NOT NULL, limit_s REAL, created_ms INTEGER NOT NULL, expires_ms INTEGER NOT NULL,
    state TEXT NOT NULL, checksum TEXT NOT NULL);
CREATE TABLE queue (
    request_id TEXT PRIMARY KEY, body BLOB NOT NULL, reply BLOB NOT NULL, queued_ms INTEGER NOT NULL,
    checksum TEXT NOT NULL);
CREATE TABLE audit (
    audit_id INTEGER PRIMARY KEY AUTOINCREMENT, time_ms INTEGER NOT NULL, caller TEXT NOT NULL, action TEXT NOT NULL,
    request_id TEXT NOT NULL, decision_id TEXT NOT NULL, board_as_of_ms INTEGER NOT NULL, models TEXT NOT NULL,
    sentence TEXT NOT NULL, stored TEXT NOT NULL, previous TEXT NOT NULL, hash TEXT NOT NULL);
CREATE TABLE state (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
"""
CHARGES = """
CREATE TABLE charges (
    charge_id INTEGER PRIMARY KEY AUTOINCREMENT, request_id TEXT NOT NULL, job TEXT NOT NULL, attempt INTEGER NOT NULL,
    leaf TEXT NOT NULL, user TEXT NOT NULL, class TEXT NOT NULL, held BLOB NOT NULL, expected_s REAL,
    queued_ms INTEGER, held_ms INTEGER NOT NULL, started_ms INTEGER, ended_ms INTEGER, outcome TEXT NOT NULL,
    used_gpu_s REAL, lost_gpu_s REAL, checksum TEXT NOT NULL);
CREATE INDEX open_charges ON charges (charge_id) WHERE ended_ms IS NULL;
CREATE INDEX closed_charges ON charges (ended_ms) WHERE ended_ms IS NOT NULL;
CREATE INDEX charged_jobs ON charges (job, attempt);
CREATE INDEX decided_jobs ON decisions (job, attempt);
CREATE TABLE credits (
    queue TEXT PRIMARY KEY, as_of_ms INTEGER NOT NULL, earned REAL NOT NULL, spent REAL NOT NULL, expired REAL NOT NULL,
    checksum TEXT NOT NULL) WITHOUT ROWID;
"""
ACTIONS = """
CREATE TABLE actions (
    action_id TEXT PRIMARY KEY, wish TEXT NOT NULL, job TEXT NOT NULL, queue TEXT NOT NULL, state TEXT NOT NULL,
    body BLOB NOT NULL, life BLOB NOT NULL, why TEXT NOT NULL, changed INTEGER NOT NULL, checksum TEXT NOT NULL);
CREATE INDEX open_actions ON actions (changed) WHERE state IN ('proposed', 'sent', 'accepted');
CREATE INDEX action_wishes ON actions (wish);
CREATE INDEX action_changes ON actions (changed);
CREATE INDEX action_jobs ON actions (job, changed);
CREATE INDEX action_states ON actions (state, changed);
CREATE INDEX action_queues ON actions (queue, changed);
"""
SCHEMA_3 = SCHEMA_2 + KEEP_TABLES + CHARGES
SCHEMAS = {
    1: SCHEMA_1 + KEEP_TABLES,
    2: SCHEMA_2 + KEEP_TABLES,
    3: SCHEMA_3,
    SCHEMA_VERSION: SCHEMA_3 + ACTIONS,
}
TABLES = ("decisions", "intents", "queue", "audit")
AUDIT_COLUMNS = (
    *("audit_id", "time_ms", "caller", "action", "request_id", "decision_id", "board_as_of_ms", "models", "sentence"),
    *("stored", "previous", "hash"),
)
Shape = dict[str, str]  # name of a table, index or trigger → its statement, white space aside


def read_schema(db: sqlite3.Connection) -> Shape:
    """Return the tables, indexes and triggers of a file, without those that SQLite creates by itself."""
    rows = db.execute("SELECT name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'")
    return {name: " ".join(str(sql).split()).replace("IF NOT EXISTS ", "") for name, sql in rows}


@cache
def make_expected_schema(version: int) -> Shape:
    """Return the tables, indexes and triggers that a file of this version must have. Callers do not change it."""
    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript(SCHEMAS[version])
        return read_schema(db)


def explain_schema_mismatch(found: Shape, version: int) -> str:
    """Explain in words why a file does not have the schema of a version. Returns "" if it does.

    Missing indexes and triggers do not count, because the ledger creates them again.
    """
    wanted = make_expected_schema(version)
    for name, sql in wanted.items():
        if name not in found and sql.startswith("CREATE TABLE"):
            return f"it has version {version}, but no table {name}"
        if found.get(name, sql) != sql:
            return f"it has version {version}, but another {name} than that"
    for name, sql in found.items():
        if name not in wanted and sql.startswith("CREATE TRIGGER"):
            return f"it has a trigger {name} that is not the ledger's"
    return ""


def find_missing_statements(found: Shape) -> dict[str, str]:
    """Return name → statement for each trigger and index that a file of this version lacks."""
    return {name: sql for name, sql in make_expected_schema(SCHEMA_VERSION).items() if name not in found}


def create_tables(db: sqlite3.Connection) -> None:
    """Create all tables, indexes and triggers of this version, inside the caller's transaction."""
    for statement in split_statements(SCHEMAS[SCHEMA_VERSION]):
        db.execute(statement)
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def split_statements(script: str) -> list[str]:
    """Split a script into statements.

    `executescript` would end the transaction that it runs in.

    >>> split_statements("CREATE TABLE a (x); CREATE TABLE b (x);")
    ['CREATE TABLE a (x);', 'CREATE TABLE b (x);']
    """
    found, begun = [], ""
    for part in script.split(";")[:-1]:
        begun += part + ";"
        if sqlite3.complete_statement(begun):
            found.append(begun.strip())
            begun = ""
    return found
