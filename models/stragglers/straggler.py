"""Detection of stragglers: which gangs are slow, and which member, if any, holds them back.

A synchronous gang runs at the pace of its slowest member. When one GPU throttles, power and tensor
activity of *all* fall together, because the others wait. So the culprit is not the member that does
less. It is the member that has a reason: a clock that fell, a link that shrank, a port below its
siblings, a compute time above its peers'. The answer names no member if most members have the reason, or if no
member stands out.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fleetcast.fleet.jobs import JobAttempt
from fleetcast.models.risk.rules import COMPUTE, LINK, PORT, RULES, STOPPED, Rule
from fleetcast.models.risk.signals import Signals, describe_signal
from fleetcast.models.stragglers.gang import GangColumns, GangMembers
from fleetcast.models.stragglers.not_observed import describe_missing_measurements, find_missing_measurements
from fleetcast.models.stragglers.paces import Paces
from fleetcast.models.stragglers.step_peers import SLOW_RATIO
from fleetcast.models.stragglers.steps import PAUSES, StepPace
from fleetcast.models.words import format_age, format_number

CLEAR_CUT = 0.5  # a culprit's severity must exceed this share of every other's to be the one named
GRAVE = 0.15  # a reason that costs at least this share of a step
STALLED_MS = 60_000
TELLING = np.array([rule.blames is not None for rule in RULES])


@dataclass(frozen=True, slots=True)
class Suspect:
    """A gang member that has a reason to be slow.

    severity: the slowdown that it would cause alone, as a share of the step, 0 for none.
    """

    rule: Rule
    entity: str
    node: str
    severity: float
    firm: bool
    since_ms: int
    sentence: str


def find_stragglers(
    gangs: GangMembers, signals: Signals, gpu: GangColumns, port: GangColumns, paces: Paces, now_ms: int
) -> dict[str, dict[str, Any]]:
    """Return job -> body of `/jobs/{id}/stragglers` without `as_of_ms`.

    The result has all running gangs, and all jobs that report steps. Updates `paces`.
    """
    suspects = _find_suspects(gangs, signals, gpu, port, now_ms)
    together = zip(gangs.attempts, gangs.together.tolist(), strict=True)
    judged = [index for index, (attempt, is_together) in enumerate(together) if is_together or attempt.steps]
    answers = {}
    for index, missing in zip(judged, find_missing_measurements(gangs, gpu, port, judged), strict=True):
        attempt, own = gangs.attempts[index], suspects.get(index, [])
        body = _make_answer(index, gangs, paces.find_pace(attempt), own, now_ms)
        if body["slow"] and not own and body["culprit"]["kind"] == "nobody" and body["cause"] not in NOBODYS:
            body["sentence"] += describe_missing_measurements(missing)
        answers[attempt.job] = body | {"not_observed": list(missing)}
    paces.drop_ended({attempt.job for attempt in gangs.attempts})
    return answers


def _find_suspects(
    gangs: GangMembers, signals: Signals, gpu: GangColumns, port: GangColumns, now_ms: int
) -> dict[int, list[Suspect]]:
    """Return attempt index -> its members that have a reason to be slow, the gravest first."""
    rows = np.flatnonzero(TELLING[signals.rule]).tolist()
    if not rows:
        return {}
    gpu_row = {name: row for row, name in enumerate(gpu.names)}
    port_row = {name: row for row, name in enumerate(port.names)}
    found: dict[int, list[Suspect]] = {}
    for at in rows:
        suspect = _make_suspect(signals, at, gangs.nodes[signals.node[at]], now_ms)
        entity = suspect.entity
        if entity in gpu_row:
            members = [int(gangs.of_gpu[gpu_row[entity]])]
        elif entity in port_row and gangs.of_port[port_row[entity]] >= 0:
            members = [int(gangs.of_port[port_row[entity]])]
        else:
            members = list(gangs.find_jobs_on(suspect.node))
        for index in members:
            if index >= 0:
                found.setdefault(index, []).append(suspect)
    return {index: sorted(rows, key=lambda row: (-row.severity, row.entity)) for index, rows in found.items()}


def _make_suspect(signals: Signals, at: int, node: str, now_ms: int) -> Suspect:
    rule = RULES[signals.rule[at]]
    value, usual, since_ms = float(signals.value[at]), float(signals.usual[at]), int(signals.since_ms[at])
    words = describe_signal(rule.name, signals.entity[at], value, usual, since_ms, now_ms)
    words += f": {signals.words[at]}" if rule.intended and signals.words else ""
    severity = _estimate_severity(rule, value, usual)
    return Suspect(rule, signals.entity[at], node, severity, bool(signals.firm[at]), since_ms, words)


def _estimate_severity(rule: Rule, value: float, usual: float) -> float:
    """Return the extra time that this member would cost alone, as a share of the step.

    Returns a constant if the cost is unknown.
    """
    if rule.blames is STOPPED:
        return 10.0
    if rule.by_ratio:
        return max(0.05, usual / value - 1) if value > 0 and np.isfinite(usual) else 0.3
    return 0.05


def _make_answer(
    index: int, gangs: GangMembers, pace: StepPace, suspects: list[Suspect], now_ms: int
) -> dict[str, Any]:
    culprit = _choose_culprit(index, gangs, suspects)
    attempt = gangs.attempts[index]
    slow, by_steps = _judge_slowness(pace, culprit, attempt)
    since_ms = (pace.since_ms if by_steps else None) or (culprit.since_ms if culprit else None) or None
    if slow and not by_steps:  # it never ran well since we know it: its own steps are no measure
        pace = replace(pace, expected_s=None, ratio=None)
    body: dict[str, Any] = {
        "slow": slow,
        "since_ms": since_ms if slow else None,
        "observed_step_s": _round_if_known(pace.observed_s),
        "expected_step_s": _round_if_known(pace.expected_s),
        "ratio": _round_if_known(pace.ratio, 3),
        "culprit": {"kind": "nobody", "name": None, "share": 0.0},
        "cause": pace.cause,
    }
    if not slow:
        body["cause"] = "checkpoint" if attempt.phase == "checkpoint" else pace.cause
        return body | {
            "sentence": _describe_steady_pace(pace, attempt.phase) + _describe_longest_part(pace, attempt.phase)
        }
    excess = (pace.ratio or 1.0) - 1
    if _are_steps_stronger_evidence(pace, culprit, attempt):
        return body | _describe_step_culprit(pace, attempt, suspects, excess)
    if culprit is not None:
        kind, name = _identify_culprit(culprit, suspects)
        share = min(1.0, culprit.severity / excess) if excess > 0 and culprit.severity > 0.05 else 1.0
        how = (
            _describe_slowness(pace)
            if by_steps or culprit.rule.blames is not STOPPED
            else _describe_stop(attempt, now_ms)
        )
        return body | {
            "culprit": {"kind": kind, "name": name, "share": round(share, 2)},
            "cause": _name_cause(culprit),
            "sentence": f"{how}; {name} holds the gang back: {culprit.sentence}",
        }
    return body | {"sentence": f"{_describe_slowness(pace)}; {NOBODYS.get(pace.cause, 'no member stands out')}"}


def _are_steps_stronger_evidence(pace: StepPace, culprit: Suspect | None, attempt: JobAttempt) -> bool:
    """Return whether step times name the culprit better than signals do.

    The steps must show which rank or stage is slow. If signals also name a culprit, it must be the same one, or
    it must cost less.
    """
    if culprit is None or not pace.ranks:
        return culprit is None and bool(pace.ranks or pace.stage is not None)
    cost = pace.excess_s / pace.observed_s if pace.observed_s else 0.0
    return culprit.severity < cost or culprit.node == _name_slow_ranks(pace.ranks, attempt)[2]


NOBODYS = {
    "sequence_length": "its steps have more tokens or longer sequences, and no member stands out",
    "garbage_collection": "one rank after another pauses, as garbage collection does, and no member stands out",
    "data": "all wait for data, and no member stands out",
}
WORK = {"compute": "compute", "data": "data loading"}


def _name_cause(culprit: Suspect) -> str:
    """Return the cause of a slowdown, as answers name it."""
    if culprit.rule.intended:
        return culprit.rule.name
    return "compute" if culprit.rule.blames is COMPUTE else "communication"


def _describe_step_culprit(
    pace: StepPace, attempt: JobAttempt, suspects: list[Suspect], excess: float
) -> dict[str, Any]:
    """Return the culprit, cause and sentence of an answer, from the ranks' own step times.

    The steps must show which rank or stage is slow.
    """
    cost_s = excess * (pace.usual_s if pace.usual_s and not pace.by_peers else pace.expected_s or 1.0)
    share = min(1.0, pace.excess_s / cost_s) if cost_s > 0 else 1.0
    if pace.ranks:
        kind, name, node = _name_slow_ranks(pace.ranks, attempt)
        reason = next((row for row in suspects if row.node == node), None)
        why = f"its {WORK[pace.cause]} takes longer than its peers'" if reason is None else reason.sentence
        cause = reason.rule.name if reason and reason.rule.intended and pace.cause == "compute" else pace.cause
    else:
        kind, name, cause = "stage", str(pace.stage), pace.cause
        why = "its ranks compute longer than the other stages' in every step"
    stage = "stage " if kind == "stage" else ""
    return {
        "cause": cause,
        "culprit": {"kind": kind, "name": name, "share": round(share, 2)},
        "sentence": f"{_describe_slowness(pace)}; {stage}{name} holds the gang back: {why}",
    }


def _name_slow_ranks(ranks: tuple[int, ...], attempt: JobAttempt) -> tuple[str, str, str]:
    """Return the kind, the name and the node of slow ranks, for an answer.

    Several ranks of one node are named by the node. Otherwise the worst rank is named.
    """
    placed = {row.rank: row for row in attempt.ranks}
    worst = placed.get(ranks[0])
    if worst is None:
        return "worker", str(ranks[0]), ""
    alike = {placed[rank].node if rank in placed else "" for rank in ranks}
    if len(worst.gpus) > 1 or not worst.gpus or (len(ranks) > 1 and len(alike) == 1):
        return ("node" if len(ranks) > 1 else "worker"), worst.node, worst.node
    return "worker", f"{worst.node}/{worst.gpus[0]}", worst.node


def _judge_slowness(pace: StepPace, culprit: Suspect | None, attempt: JobAttempt) -> tuple[bool, bool]:
    """Return whether the job is slow, and whether its own steps show that.

    If step times can be compared, the last four decide, by the job's own noise. If a member has a firm reason,
    two or three clearly slow steps are enough. Without comparable steps, a grave and firm reason decides.
    """
    if attempt.phase in PAUSES:  # the pace is that of its last step, which may be older than the phase
        return False, False
    firm = culprit is not None and culprit.firm
    if pace.slow and pace.ratio is not None and round(pace.ratio, 2) <= 1:  # as it is shown: nobody calls 1.00x slow
        return False, False  # the last steps are as usual: what made it slow ends now
    if pace.slow or (firm and (pace.lately or (pace.ratio or 0.0) >= SLOW_RATIO)):
        return True, True
    if culprit is None or not culprit.firm or culprit.severity < GRAVE:
        return False, False
    if culprit.rule.blames is STOPPED:
        return not pace.steps or attempt.steps[-1].time_ms < culprit.since_ms + STALLED_MS, False
    return pace.ratio is None or culprit.since_ms < pace.first_ms + STALLED_MS, False


def _choose_culprit(index: int, gangs: GangMembers, suspects: list[Suspect]) -> Suspect | None:
    """Return the gravest suspect, or None if no member stands out.

    No member stands out if most nodes of a gang have the same reason. If that reason is intended, as a power
    cap is, the next reason is considered.
    """
    hosts = gangs.count_hosts(index)
    while suspects:
        first = suspects[0]
        alike = {row.node for row in suspects if row.rule is first.rule and row.severity >= CLEAR_CUT * first.severity}
        if hosts < 2 or len(alike) <= hosts / 2:
            return first
        if not first.rule.intended:
            return None
        suspects = [row for row in suspects if row.rule is not first.rule]
    return None


def _identify_culprit(culprit: Suspect, suspects: list[Suspect]) -> tuple[str, str]:
    """Return the kind and the name of a culprit, for an answer.

    One GPU is a worker, several GPUs of a node are the node, and a port is a link.
    """
    if culprit.rule.kind is PORT:
        return "link", culprit.entity
    same = {row.entity for row in suspects if row.node == culprit.node and row.rule is culprit.rule}
    if len(same) > 1 or culprit.entity == culprit.node:
        return "node", culprit.node
    return ("link" if culprit.rule.blames is LINK else "worker"), culprit.entity


def _describe_stop(attempt: JobAttempt, now_ms: int) -> str:
    return (
        f"no step for {format_age((now_ms - attempt.steps[-1].time_ms) / 1000)}"
        if attempt.steps
        else "it cannot proceed"
    )


def _describe_slowness(pace: StepPace) -> str:
    """Describe in words how slow the job is, compared with its reference if there is one."""
    if pace.observed_s is None or pace.expected_s is None:
        return "slower than it should be"
    if pace.by_peers:
        expected = format_number(pace.expected_s)
        return f"steps take {format_number(pace.observed_s)} s, and would take {expected} if all were alike"
    return f"steps take {format_number(pace.observed_s)} s, usually {format_number(pace.usual_s or pace.expected_s)}"


def _describe_steady_pace(pace: StepPace, phase: str) -> str:
    if pace.cause == "checkpoint" and pace.observed_s is not None:
        usual = format_number(pace.usual_s or 0)
        return f"a step of {format_number(pace.observed_s)} s, usually {usual}: a checkpoint ran"
    if phase in PAUSES:
        return f"in {phase}: its steps are not compared"
    if pace.observed_s is None and pace.steps:
        return "its steps are reported to take 0 s, so their pace is unknown, and no member stands out"
    if pace.observed_s is None:
        return "no step times reported, and no member stands out"
    if pace.expected_s is None:
        return f"steps take {format_number(pace.observed_s)} s; too few for a comparison yet"
    usual = ", as usual"
    if (pace.ratio or 1.0) >= SLOW_RATIO:
        usual = f", usually {format_number(pace.usual_s or pace.expected_s)}"
    takes = f"steps take {format_number(pace.observed_s)} s{usual}"
    if pace.cause == "garbage_collection":
        return f"{takes}, but now and then one rank after another pauses, as garbage collection does"
    if usual == ", as usual":
        return takes
    few = pace.limit_s is not None and pace.observed_s > pace.limit_s
    return f"{takes}; {'too few to say that it is slow' if few else 'they vary as much as that'}"


def _describe_longest_part(pace: StepPace, phase: str) -> str:
    """Describe the ranks or the stage that always take longest in a job that is not slow.

    Returns "" if there are none.
    """
    if pace.even_s is None or phase in PAUSES:
        return ""
    if pace.longest is None:
        return f"; {len(pace.uneven)} ranks take longer than the rest since their first steps, as those of a stage do"
    return f"; stage {pace.longest} computes longest; even stages would take {format_number(pace.even_s)} s"


def _round_if_known(value: float | None, digits: int = 6) -> float | None:
    return None if value is None else round(value, digits)
