"""A ledger with something of everything in it, and what it serves."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from fleetcast.fleet.requests import Decision, PlacementRequest, RankPlacement
from fleetcast.placement.ledger.ledger import IntentState, Ledger

FAST = "/dev/shm" if Path("/dev/shm").is_dir() else None  # every transaction is fsynced
TRIGGERS = ("audit_is_not_updated", "audit_is_not_deleted", "audit_is_not_replaced")
DECIDED = tuple(PlacementRequest(request_id=name, user="ada", gang=2, limit_s=60) for name in ("held", "seen", "left"))
REFUSED = PlacementRequest(request_id="refused", user="zoë", gpu_model="B200")
WAITING = tuple(PlacementRequest(request_id=name, user="bob", priority=3) for name in ("waits", "waits too"))
MOVED = PlacementRequest(request_id="moved", user="bob")
NEW = PlacementRequest(request_id="new")
EVERYBODY = (*DECIDED, REFUSED, *WAITING, MOVED, NEW)


def decision(request: PlacementRequest, outcome: str, node: str = "n1") -> Decision:
    ranks = (RankPlacement(0, node, (0, 1)), RankPlacement(1, "n2", (3,))) if outcome == "placed" else ()
    said = {"sentence": f"{outcome} by hand", "models": {"risk": "rules"}, "expires_ms": 9_000}
    return Decision(request_id=request.request_id, decision_id="d-1", outcome=outcome, ranks=ranks, **said)  # type: ignore[arg-type]


def fill(ledger: Ledger) -> None:
    for time_ms, request in enumerate(DECIDED, 1_000):
        ledger.commit_decision(request, decision(request, "placed", f"n{time_ms}"), time_ms, "ada", "place")
    ledger.commit_decision(REFUSED, decision(REFUSED, "refused"), 2_000, "zoë", "refuse")
    for request in (*WAITING, MOVED):
        ledger.enqueue(request, decision(request, "queued"), 3_000, "bob")
    ledger.commit_decision(MOVED, decision(MOVED, "placed"), 4_000, "queue", "place")
    ledger.finish_intents([("seen", IntentState.SEEN), ("left", IntentState.CANCELLED)], 5_000, "ada")
    ledger.record_acceptance("the board was lost", 6_000, "ada")


def make(path: Path) -> None:
    """A closed file with all of it."""
    ledger = Ledger(path)
    fill(ledger)
    ledger.close()


def edit(path: Path, *statements: str, values: Any = ()) -> None:
    """What somebody does who can write the file and cares for no trigger; the triggers are there again afterwards."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        made = [sql for (sql,) in db.execute("SELECT sql FROM sqlite_master WHERE type = 'trigger'")]
        for name in TRIGGERS:
            db.execute(f"DROP TRIGGER {name}")
        for statement in statements:
            db.execute(statement, values)
        for sql in made:
            db.execute(sql)


QUESTIONS: dict[str, Any] = {
    "intents": lambda ledger: ledger.list_active_intents(),
    "queue": lambda ledger: ledger.list_queue_entries(),
    **{f"replay {row.request_id}": lambda ledger, row=row: ledger.find_stored_reply(row) for row in EVERYBODY},
    **{f"find {row.request_id}": lambda ledger, row=row: ledger.find_reply(row.request_id) for row in EVERYBODY},
    **{
        f"state {row.request_id}": lambda ledger, row=row: ledger.read_intent_state(row.request_id) for row in EVERYBODY
    },
    "page": lambda ledger: ledger.read_decisions_after(0, 100),
    "audit": lambda ledger: ledger.read_audit_trail(100),
    "audit of one": lambda ledger: ledger.read_audit_trail(100, after=0, request_id="moved"),
}
