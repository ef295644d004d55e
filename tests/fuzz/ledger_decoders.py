"""The ledger's file, with any bytes in it, and its rows, with anything in a column: used, or a LedgerError.

A row whose checksum is made anew reaches what reads its columns; one with the old checksum is never served.
"""

import contextlib
import sqlite3
import tempfile
from pathlib import Path

from fleetcast.fleet.errors import RequestError
from fleetcast.fleet.requests import Decision, PlacementRequest, RankPlacement
from fleetcast.placement.ledger.chain import CHECKSUMS, encode, hash_line
from fleetcast.placement.ledger.file import read_ledger_identity
from fleetcast.placement.ledger.ledger import IntentState, Ledger, LedgerError
from fleetcast.placement.ledger.verify import verify_ledger
from tests.fuzz.bounds import MIB
from tests.fuzz.decoder import Decoder

FAST = "/dev/shm" if Path("/dev/shm").is_dir() else None  # every transaction is fsynced
PLACED, WAITING, NEW = (PlacementRequest(request_id=name, user="ada", gang=2) for name in ("placed", "waiting", "new"))
RANKS = (RankPlacement(0, "n1", (0, 1)), RankPlacement(1, "n2", (3,)))


def _decision(request: PlacementRequest, outcome: str) -> Decision:
    said = {"sentence": f"{outcome} by hand", "models": {"risk": "rules"}, "expires_ms": 9_000}
    return Decision(request_id=request.request_id, decision_id="d-1", outcome=outcome, ranks=RANKS, **said)  # type: ignore[arg-type]


def _file() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(Path(folder) / "ledger.sqlite")
        ledger.commit_decision(PLACED, _decision(PLACED, "placed"), 1_000, "ada", "place")
        ledger.enqueue(WAITING, _decision(WAITING, "queued"), 2_000, "bob")
        ledger.set_identity("s-1")
        ledger.close()
        return ledger.path.read_bytes()


FILE = _file()


def use(path: Path) -> None:
    """Everything that the placer does with a ledger, and what looks at its file from outside."""
    for look in (read_ledger_identity, verify_ledger):
        with contextlib.suppress(LedgerError):
            look(path)
    try:
        ledger = Ledger(path)
    except LedgerError:
        return
    with contextlib.closing(ledger):
        for ask in (
            lambda: [intent.gpus for intent in ledger.list_active_intents()],
            lambda: [entry.request.members for entry in ledger.list_queue_entries()],
            lambda: [ledger.find_stored_reply(request) for request in (PLACED, WAITING, NEW)],
            lambda: ledger.find_reply("placed"),
            lambda: ledger.read_decisions_after(0, 10),
            lambda: ledger.read_intent_state("placed"),
            lambda: ledger.read_audit_trail(10),
            lambda: ledger.read_audit_trail(10, after=0, request_id="placed"),
            lambda: ledger.finish_intents([("placed", IntentState.CANCELLED)], 3_000),
            lambda: ledger.commit_decision(WAITING, _decision(WAITING, "placed"), 4_000, "queue", "place"),
            lambda: ledger.enqueue(NEW, _decision(NEW, "queued"), 5_000, "ada"),
        ):
            with contextlib.suppress(LedgerError, RequestError):
                ask()


def decode_ledger(data: bytes) -> None:
    with tempfile.TemporaryDirectory(dir=FAST) as folder:
        path = Path(folder) / "ledger.sqlite"
        path.write_bytes(data)
        use(path)


LEDGERS = Decoder(
    decode_ledger,
    (FILE, b"", FILE[:100], FILE[:4096], b"SQLite format 3\x00"),
    (b"SQLite format 3\x00", b"CREATE TABLE", b"placed", b"\x10\x00", bytes(4096), b'"rank"', b"active"),
    base_bytes=8 * MIB,
)

COLUMNS = (
    *("UPDATE queue SET body = ?", "UPDATE queue SET reply = ?", "UPDATE queue SET queued_ms = ?"),
    *("UPDATE intents SET ranks = ?", "UPDATE intents SET state = ?", "UPDATE intents SET cpus = ?"),
    *("UPDATE decisions SET body = ?", "UPDATE decisions SET reply = ?", "UPDATE decisions SET outcome = ?"),
    "INSERT INTO audit (time_ms, caller, action, request_id, decision_id, board_as_of_ms, models, sentence, stored, "
    "previous, hash) VALUES (1, 'a', 'place', 'placed', '', 0, ?, '', '', '', '')",
    "UPDATE state SET value = ?",
    *(f"UPDATE state SET key = ? WHERE key = (SELECT {end}(key) FROM state)" for end in ("min", "max")),
)


def seal(db: sqlite3.Connection) -> None:
    """Checksums made anew, and the hash of the last line."""
    for table, checksum in CHECKSUMS.items():
        for rowid, *row, _ in db.execute(f"SELECT rowid, * FROM {table}").fetchall():
            db.execute(f"UPDATE {table} SET checksum = ? WHERE rowid = ?", [checksum(row), rowid])
    *line, _ = db.execute("SELECT * FROM audit ORDER BY audit_id DESC LIMIT 1").fetchone()
    db.execute("DROP TRIGGER audit_is_not_updated")
    db.execute("UPDATE audit SET hash = ? WHERE audit_id = ?", [hash_line(line), line[0]])


def decode_rows(value: bytes) -> None:
    """The bytes as a blob, as text and as a number, in one column; which one is for their length to say.

    Every other length has its checksums made anew.
    """
    change, sealed = COLUMNS[len(value) // 2 % len(COLUMNS)], len(value) % 2
    cells: list[bytes | str | int] = [value, value.decode("utf-8", "replace"), int.from_bytes(value[:7], "big")]
    for cell in cells:
        with tempfile.TemporaryDirectory(dir=FAST) as folder:
            path = Path(folder) / "ledger.sqlite"
            path.write_bytes(FILE)
            with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
                db.execute(change, [cell])
                if sealed:
                    seal(db)
            use(path)


ROWS = Decoder(
    decode_rows,
    (encode(PLACED), encode(RANKS), encode(_decision(PLACED, "placed")), b'{"risk": "rules"}', b"active", b"12"),
    (b'"gpus": [', b'"request_id": "', b"settled"),
    base_bytes=8 * MIB,
)

LEDGER: dict[str, Decoder] = {"ledgers": LEDGERS, "ledger rows": ROWS}
