"""A comparison of flagged nodes with the truth: faults found, delays, and units named.

A *finding* is a spell of flags on a node. Gaps of up to 5 minutes do not end it. A fault lasts from
the start of its precursor to its end. A finding detects a fault of its node if the finding starts
within that span. A finding that started earlier detects the fault if it first names the faulty unit
within that span. A finding is a false alarm if it starts neither during a fault of its node nor in
the 10 minutes after one. A visible fault that no finding detects is missed. While a node is
flagged, no other spell can start there, so that time does not count as healthy.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from fleetcast.training.sets.fault_runs import RunTruth

HOLE_MS = 300_000
AFTER_MS = 600_000
FOREVER_MS = 2**62

Hosts = Mapping[str, frozenset[str]]  # the nodes that a job ran on


@dataclass(slots=True)
class FlagSpell:
    """A spell of consecutive flags on one node.

    named: name of a node, GPU or port → when the method first named it, in order of time.
    """

    node: str
    first_ms: int
    last_ms: int
    named: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Findings:
    """The flags of one method in a run."""

    rows: list[FlagSpell] = field(default_factory=list)
    _open: dict[str, FlagSpell] = field(default_factory=dict)

    def record_flag(self, node: str, now_ms: int, name: str = "") -> None:
        """Record a flag at this moment, and the unit that it names."""
        row = self._open.get(node)
        if row is None or now_ms - row.last_ms > HOLE_MS:
            row = self._open[node] = FlagSpell(node, now_ms, now_ms)
            self.rows.append(row)
        row.last_ms = now_ms
        if name:
            row.named.setdefault(name, now_ms)


@dataclass(slots=True)
class Score:
    """Counts of right and wrong findings, summed over runs.

    right, missed: faults. spells: findings that detected faults. wrong: false alarms. delays: seconds
    from when a fault became visible to its detection. units: detected faults of one GPU or port.
    own_units: the detected faults whose unit was named first. nodes: faults with a flag on any node of their
    job. own_nodes: the faults whose faulty node was flagged first within its job.
    """

    right: int = 0
    spells: int = 0
    wrong: int = 0
    missed: int = 0
    units: int = 0
    own_units: int = 0
    nodes: int = 0
    own_nodes: int = 0
    delays: list[float] = field(default_factory=list)

    def add(self, other: "Score") -> None:
        """Add the counts of another run."""
        for name in ("right", "spells", "wrong", "missed", "units", "own_units", "nodes", "own_nodes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.delays += other.delays


def score_findings(
    findings: Sequence[FlagSpell], truth: Sequence[RunTruth], hosts: Hosts | None = None, kind: str | None = None
) -> Score:
    """Score the findings of one run against its true faults.

    With `kind`, only faults of that kind count, and false alarms are not counted. hosts: job → its
    nodes.
    """
    faults = [row for row in truth if not row.benign]
    scored = Score()
    finders: set[int] = set()
    for fault in faults:
        if fault.visible_ms is None or (kind is not None and fault.kind != kind):
            continue
        found = _find_detection(fault, findings)
        _score_node(scored, fault, found, findings, faults, hosts or {})
        if found is None:
            scored.missed += 1
            continue
        at_ms, name, row = found
        finders.add(row)
        scored.right += 1
        scored.delays.append(max(0.0, (at_ms - fault.visible_ms) / 1000))
        if unit := find_faulty_unit(fault):
            scored.units += 1
            scored.own_units += name == unit
    scored.spells = len(finders)
    scored.wrong = 0 if kind is not None else len(find_false_alarms(findings, faults))
    return scored


def find_false_alarms(findings: Iterable[FlagSpell], faults: Sequence[RunTruth]) -> list[FlagSpell]:
    """Return the findings that begin neither during a fault of their node nor just after one."""
    return [one for one in findings if _is_false_alarm(one, {one.node}, faults)]


def find_false_job_alarms(findings: Iterable[FlagSpell], faults: Sequence[RunTruth], hosts: Hosts) -> list[FlagSpell]:
    """Return the findings on jobs that begin while no node of the job has a fault or just had one.

    The field `node` of such a finding holds the job's name.
    """
    return [one for one in findings if _is_false_alarm(one, hosts.get(one.node, frozenset()), faults)]


@dataclass(slots=True)
class HealthyTime:
    """The time, in node-milliseconds, in which a finding would be a false alarm.

    all_ms: all of this time, by the truth. quiet_ms: the part without a flag. after_ms: the part with a flag
    that began during a fault and has not ended since.
    """

    all_ms: int = 0
    quiet_ms: int = 0
    after_ms: int = 0

    def add(self, other: "HealthyTime") -> None:
        """Add the healthy time of another run."""
        self.all_ms += other.all_ms
        self.quiet_ms += other.quiet_ms
        self.after_ms += other.after_ms


def measure_healthy_time(
    names: Iterable[str], first_ms: int, last_ms: int, truth: Sequence[RunTruth], findings: Sequence[FlagSpell] = ()
) -> HealthyTime:
    """Return the healthy time of a run, given the findings of a method."""
    faults = [row for row in truth if not row.benign]
    false = {id(one) for one in find_false_alarms(findings, faults)}
    sums = HealthyTime()
    for name in names:
        spells = [(one.first_ms, one.last_ms, id(one) in false) for one in findings if one.node == name]
        for begin_ms, end_ms in _find_healthy_spans(name, first_ms, last_ms, faults):
            flagged_ms = [
                (max(0, min(last, end_ms) - max(first, begin_ms)), is_false) for first, last, is_false in spells
            ]
            sums.all_ms += end_ms - begin_ms
            sums.quiet_ms += end_ms - begin_ms - sum(ms for ms, _ in flagged_ms)
            sums.after_ms += sum(ms for ms, is_false in flagged_ms if not is_false)
    return sums


def _find_healthy_spans(
    name: str, first_ms: int, last_ms: int, faults: Sequence[RunTruth]
) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of each time of a node that is neither during a fault nor just after one."""
    at_ms = first_ms
    for fault in sorted((row for row in faults if row.node == name), key=_compute_begin_ms):
        until_ms = min(_compute_begin_ms(fault), last_ms)
        if until_ms > at_ms:
            yield at_ms, until_ms
        at_ms = max(at_ms, min(_compute_end_ms(fault) + AFTER_MS, last_ms))
    if last_ms > at_ms:
        yield at_ms, last_ms


def find_faulty_unit(fault: RunTruth) -> str:
    """Return the name of the faulty GPU or port. "" if the whole node is the culprit."""
    if fault.gpu is not None:
        return f"{fault.node}/{fault.gpu}"
    return f"{fault.node}/mlx5_{fault.port}/1" if fault.port is not None else ""


def shuffle_faults(truth: Sequence[RunTruth], names: Sequence[str], rng: np.random.Generator) -> list[RunTruth]:
    """Return the true faults, each moved to another node at random."""
    found = []
    for row in truth:
        others = [name for name in names if name != row.node] or list(names)
        found.append(msgspec.structs.replace(row, node=others[int(rng.integers(len(others)))]))
    return found


def shuffle_findings(
    findings: Sequence[FlagSpell], names: Sequence[str], first_ms: int, last_ms: int, rng: np.random.Generator
) -> list[FlagSpell]:
    """Return the same number of findings, of the same lengths, on random nodes at random times.

    Their score shows how many faults would be found by chance.
    """
    moved = []
    for row in findings:
        lasts_ms = row.last_ms - row.first_ms
        begins_ms = int(rng.integers(first_ms, max(first_ms, last_ms - lasts_ms) + 1))
        node = names[int(rng.integers(len(names)))]
        moved.append(replace(row, node=node, first_ms=begins_ms, last_ms=begins_ms + lasts_ms, named={}))
    return moved


def _find_detection(fault: RunTruth, findings: Iterable[FlagSpell]) -> tuple[int, str, int] | None:
    """Return when a fault was detected, the GPU or port named first, and the number of the finding.

    The name is "" if only the node was named. Returns None if no finding detected the fault.
    """
    hits = []
    for row, one in enumerate(findings):
        if one.node != fault.node:
            continue
        if _compute_begin_ms(fault) <= one.first_ms <= _compute_end_ms(fault):
            units = (name for name, at_ms in one.named.items() if name != one.node and at_ms <= _compute_end_ms(fault))
            hits.append((one.first_ms, next(units, ""), row))
        elif one.first_ms < _compute_begin_ms(fault):
            unit = find_faulty_unit(fault) or fault.node
            if _compute_begin_ms(fault) <= one.named.get(unit, -1) <= _compute_end_ms(fault):
                hits.append((one.named[unit], unit, row))
    return min(hits, default=None)


def _score_node(
    scored: Score,
    fault: RunTruth,
    found: tuple[int, str, int] | None,
    findings: Iterable[FlagSpell],
    faults: Sequence[RunTruth],
    hosts: Hosts,
) -> None:
    """Count whether the faulty node was flagged before any healthy node of the same job."""
    until_ms = found[0] if found else _compute_end_ms(fault)
    peers = hosts.get(fault.job or "", frozenset()) - {fault.node}
    others = [one for one in findings if one.node in peers and _compute_begin_ms(fault) <= one.first_ms < until_ms]
    if found or others:
        scored.nodes += 1
        scored.own_nodes += found is not None and not find_false_alarms(others, faults)


def _is_false_alarm(one: FlagSpell, nodes: Container[str], faults: Iterable[RunTruth]) -> bool:
    return not any(
        fault.node in nodes and _compute_begin_ms(fault) <= one.first_ms <= _compute_end_ms(fault) + AFTER_MS
        for fault in faults
    )


def _compute_begin_ms(fault: RunTruth) -> int:
    return fault.start_ms - int(fault.lead_s * 1000)


def _compute_end_ms(fault: RunTruth) -> int:
    return FOREVER_MS if fault.end_ms is None else fault.end_ms
