"""The sentences about actions. They are made only when a caller asks for them."""

from collections.abc import Mapping

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
GPU_S = "_gpu_s"  # the end of the names of costs
COSTS = {
    "set": "this set",
    "bound": "any set at least",
    "in_place": "in place",
    "spare": "spare nodes",
    "free": "free nodes",
    "borrow": "other jobs' nodes",
    "shrink": "fewer members",
    "elsewhere": "the whole gang elsewhere",
    "wait": "waiting",
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
    numbers, gpus = describe_numbers(action.reason.numbers), _format_count(action.gpus, "GPU")
    why = REASONS.get(action.reason.code, action.reason.code) + (f" ({numbers})" if numbers else "")
    return (
        f"{VERBS[action.kind]} attempt {action.attempt} of {action.job} by {gpus}{to}: {why}"
        if action.kind in (ActionKind.SHRINK, ActionKind.GROW)
        else f"{VERBS[action.kind]} attempt {action.attempt} of {action.job} ({gpus}){to}: {why}"
    )


def describe_numbers(numbers: Mapping[str, float]) -> str:
    """Describe the numbers of a reason: nodes, a probability below one, and costs in GPU-hours, the least first.

    >>> describe_numbers({"nodes": 1.0, "p": 0.16, "wait_gpu_s": 87480.0, "spare_gpu_s": 1080.0})
    '1 node, probability 16%, GPU-hours: spare nodes 0.30, waiting 24.30'
    """
    parts = [f"{name} {amount:g}" for name, amount in sorted(numbers.items()) if not _is_described(name)]
    if "nodes" in numbers:
        parts.append(_format_count(numbers["nodes"], "node"))
    if numbers.get("p", 1.0) < 1:
        parts.append(f"probability {100 * numbers['p']:.3g}%")
    costs = sorted((gpu_s, name.removesuffix(GPU_S)) for name, gpu_s in numbers.items() if name.endswith(GPU_S))
    if costs:
        shown = [f"{COSTS.get(name, name)} {gpu_s / 3600:,.2f}" for gpu_s, name in costs]
        parts.append(f"GPU-hours: {', '.join(shown)}")
    return ", ".join(parts)


def _is_described(name: str) -> bool:
    return name in ("nodes", "p") or name.endswith(GPU_S)


def _format_count(number: float, noun: str) -> str:
    return f"{number:g} {noun}" if number == 1 else f"{number:g} {noun}s"


def describe_change(record: ActionRecord) -> str:
    """Return the sentence of the audit line about an action's last state."""
    because = f": {record.why}" if record.why else ""
    return f"{record.state}{because}; {describe_action(record.action)}"
