"""The tree of queues of the made-up fleet, and why its requests wait, in the shapes of the API."""

from typing import Any

from tests.service.console_scene import Scene

DAYS = [0.31, 0.33, None, 0.42, 0.41, 0.38, 0.39]


def queues(scene: Scene) -> dict[str, Any]:
    """Language borrows what vision lends; users share teaching."""
    if scene.state == "empty":
        notes = ["no file of queues is configured: all wait in one line"]
        return {"as_of_ms": scene.now_ms(), "generation": "", "rows": [], "capacity": {}, "notes": notes, "refused": ""}
    rows = [
        _row("language", None, 40, 620, 400, share=0.31, share_days=DAYS, share_7d=0.38, waiting=7, waiting_gpus=120.0),
        _row("language/pretraining", "language", 70, 500, None, share=0.4, waiting=4, waiting_gpus=96.0),
        _row("language/tuning", "language", 30, 120, None, share=0.35, waiting=3, waiting_gpus=24.0),
        _row("teaching", None, 20, 190, 200, limit={"gpu": 400.0}, per_user=True, waiting=1, waiting_gpus=1.0),
        _row("teaching/hana", "teaching", 1, 190, None, share=0.9),
        _row("urgent", None, 1, 0, 64, running=0, **{"class": "urgent"}, wait_s=None),
        _row("vision", None, 40, 190, 400, lent={"gpu": 210.0}, banked=3_600_000.0, wait_s={"p50": 0, "p90": 0}),
    ]
    capacity, notes = {"gpu": 1064.0, "H100": 1064.0}, ["credits come first in the order, and protect no job"]
    return {"as_of_ms": scene.now_ms(), "generation": "5d1f0c2b9a3e4f60", "rows": rows, "capacity": capacity,
            "notes": notes, "refused": ""}  # fmt: skip


def _row(
    queue: str, parent: str | None, weight: float, held: int, guaranteed: int | None, **more: Any
) -> dict[str, Any]:
    owed = {"gpu": float(guaranteed)} if guaranteed is not None else {}
    beyond = held - (guaranteed or 0)
    known = {"class": None, "priority": 0, "per_user": False, "limit": {}, "lent": {}, "share": 0.0, "share_7d": None}
    known |= {"share_days": None, "decayed": 1.5e6, "banked": None, "waiting": 0, "waiting_gpus": 0.0}
    known |= {"running": 9, "wait_s": {"p50": 340.0, "p90": 5200.0}, "borrowed": {"gpu": beyond} if beyond > 0 else {}}
    return {"queue": queue, "parent": parent, "weight": weight, "held": {"gpu": held, "H100": held},
            "guaranteed": owed, **known, **more}  # fmt: skip


def why(scene: Scene, request: str) -> dict[str, Any] | None:
    """The ladder of one that waits; None for any other."""
    found = scene.queue()["rows"]
    position = next((at for at, row in enumerate(found) if row["request_id"] == request), None)
    if position is None:
        return None
    row, before = found[position], [other["request_id"] for other in found[:position]]
    said = f"{len(before)} requests before it from queues with no larger share: 'vision' (share 0.12)"
    ladder: list[dict[str, Any]] = (
        [{"code": "before", "sentence": said, "requests": before[-5:][::-1]}] if before else []
    )
    ladder.append({"code": "room", "sentence": row["why"], "requests": []})
    if row["start_ms"]:
        ladder.append({"code": "start", "sentence": "starts in 70 min (p90 3 h)", "requests": []})
    return {"as_of_ms": scene.now_ms(), "request_id": request, "queue": row["queue"], "position": position + 1,
            "position_in_queue": 1, "share": 0.21, "sentence": ladder[-1]["sentence"], "ladder": ladder,
            "start_ms": row["start_ms"]}  # fmt: skip
