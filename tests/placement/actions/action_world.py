"""Actions for tests."""

from typing import Any

from hypothesis import strategies as st

from fleetcast.fleet.requests import RankPlacement
from fleetcast.placement.actions.action import ActionCost, ActionKind, ActionReason, JobAction, RejectedSet


def make_action(job: str = "big", **changes: Any) -> JobAction:
    """An action that stops a job of two nodes for the request `urgent`, until 600 s."""
    facts = {
        "kind": ActionKind.PREEMPT,
        "job": job,
        "attempt": 1,
        "queue": "research",
        "gpus": 4.0,
        "ranks": (RankPlacement(0, "n1", (0, 1)), RankPlacement(1, "n2", (0, 1))),
        "executor": "agents",
        "by_ms": 600_000,
        "reason": ActionReason("guarantee", {"guaranteed": 8.0, "held": 4.0}),
        "cost": ActionCost(lost=1200.0, restart=300.0),
        "payer": "urgent",
        "grace_s": 120.0,
        "rejected": (RejectedSet(("other",), 4.0, 9000.0),),
    }
    return JobAction(**{**facts, **changes})


KINDS = st.sampled_from(ActionKind)
