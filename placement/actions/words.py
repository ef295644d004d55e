"""The sentences about actions. They are made only when a caller asks for them."""

from fleetcast.placement.actions.action import RECOVERY, ActionKind, JobAction
from fleetcast.placement.actions.life import ActionRecord

VERBS = {
    ActionKind.PLACE: "places",
    ActionKind.SHRINK: "shrinks",
    ActionKind.GROW: "grows",
    ActionKind.PREEMPT: "stops",
    ActionKind.MOVE: "moves",
    ActionKind.REPLACE: "replaces nodes of",
}
REASONS = {
    "guarantee": "a queue gets back what it is guaranteed",
    "class": "a higher class needs the GPUs",
    "surplus": "a request that is next needs members above the minimum",
    "idle": "no request waits for the GPUs",
    "lost": "nodes were lost",
    "foreseen": "nodes are likely to fail",
    "slow": "a node slows the whole gang",
    "fragments": "a waiting gang fits then",
}

STEPS = {
    "in_place": "it restarts in place",
    "spare": "spare nodes join",
    "free": "free nodes join",
    "borrow": "other jobs leave their nodes",
    "shrink": "it runs on with fewer members",
    "elsewhere": "the whole gang moves",
    "wait": "it waits for free nodes",
}
REASONS |= {
    f"{code}_{step}": f"{REASONS[code]}, and {words}"
    for code in ("lost", "foreseen", "slow")
    for step, words in STEPS.items()
}


def describe_action(action: JobAction) -> str:
    """Return one sentence that says what an action does, for whom and why.

    If a reason has no words here, its code is stated.
    """
    whom = f"the {action.payer}" if action.payer.startswith(RECOVERY) else f"request {action.payer}"
    to = f" for {whom}" if action.payer else ""
    numbers = ", ".join(f"{name} {amount:g}" for name, amount in sorted(action.reason.numbers.items()))
    why = REASONS.get(action.reason.code, action.reason.code) + (f" ({numbers})" if numbers else "")
    return (
        f"{VERBS[action.kind]} attempt {action.attempt} of {action.job} by {action.gpus:g} GPUs{to}: {why}"
        if action.kind in (ActionKind.SHRINK, ActionKind.GROW)
        else f"{VERBS[action.kind]} attempt {action.attempt} of {action.job} ({action.gpus:g} GPUs){to}: {why}"
    )


def describe_change(record: ActionRecord) -> str:
    """Return the sentence of the audit line about an action's last state."""
    because = f": {record.why}" if record.why else ""
    return f"{record.state}{because}; {describe_action(record.action)}"
