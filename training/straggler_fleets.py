"""Judging simulated fleets: which node, how soon, and how often without a reason?

A run is replayed through the code that serves: samples to rings to frames to signals, risk and stragglers. Ours flags
a node while its action is more than `watch`, or a slow job's answer blames it. A *finding* is a spell of flags on a
node, holes of up to 5 minutes closed. It is right when it begins while a fault is there (its precursor and 10 minutes
after its end included), else a false alarm; a fault that could be seen and has no finding is missed.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from features.extract import extract
from features.store import WindowStore
from fleet.entities import Entities
from fleet.jobs import JobTable
from fleet.samples import EntityKind, SampleBatch
from models.memory import RiskMemory
from models.score import Fleet, score_fleet, score_local
from training.fault_runs import FaultRun, FaultTruth, Round
from training.results import Results
from training.straggler_baselines import Sight, baselines
from training.straggler_metrics import Table

Say = Callable[[str], None]

QUIET_CODES = frozenset({"none", "watch"})
HOLE_MS = 300_000
AFTER_MS = 600_000
EARLY_MS = 60_000
DAY_MS = 86_400_000
OURS = "ours"
BLAMED = "ours, slow jobs alone"


@dataclass(slots=True)
class Finding:
    """Flags on one node in a row. name: the node, GPU or port first named, "" where none was."""

    node: str
    first_ms: int
    last_ms: int
    name: str = ""


@dataclass(slots=True)
class Findings:
    """What one method flagged in a run."""

    rows: list[Finding] = field(default_factory=list)
    _open: dict[str, Finding] = field(default_factory=dict)

    def note(self, node: str, now_ms: int, name: str = "") -> None:
        """A flag at this moment; `name` counts until one was named."""
        row = self._open.get(node)
        if row is None or now_ms - row.last_ms > HOLE_MS:
            row = self._open[node] = Finding(node, now_ms, now_ms)
            self.rows.append(row)
        row.last_ms = now_ms
        row.name = row.name or name


@dataclass(slots=True)
class Score:
    """Sums over runs. delays: seconds; first: faults whose own unit was the first named."""

    right: int = 0
    wrong: int = 0
    missed: int = 0
    first: int = 0
    delays: list[float] = field(default_factory=list)

    def add(self, other: "Score") -> None:
        """Take in another run's."""
        self.right += other.right
        self.wrong += other.wrong
        self.missed += other.missed
        self.first += other.first
        self.delays += other.delays


def judge_fleets(runs: Sequence[FaultRun], results: Results, seed: int, say: Say) -> None:
    """Rows of all runs together, by method, and ours by kind of fault; `shuffled`: against faults of other nodes."""
    rng = np.random.default_rng(seed)
    totals: dict[str, Score] = {}
    kinds: dict[str, Score] = {}
    shuffled = Score()
    node_days = 0.0
    for run in runs:
        found, span_ms = watch(run)
        node_days += run.nodes * span_ms / DAY_MS
        for method, findings in found.items():
            totals.setdefault(method, Score()).add(score(findings.rows, run.truth))
        for kind in sorted({row.kind for row in run.truth if not row.benign}):
            kinds.setdefault(kind, Score()).add(score(found[OURS].rows, run.truth, kind))
        shuffled.add(score(found[OURS].rows, shuffle(run, rng)))
        say(f"{run.name}: {len(found[OURS].rows)} findings, {sum(not row.benign for row in run.truth)} faults")
    table = Table(results, "simulated", "node")
    for method, one in totals.items():
        _rows(table, method, one, node_days)
    _rows(table, OURS, shuffled, node_days, "shuffled truth")
    for kind, one in kinds.items():
        table.share("recall", OURS, one.right, one.right + one.missed, kind)
        table.share("top1", OURS, one.first, one.right, kind)
        table.median("delay_s", OURS, one.delays, kind)


def watch(run: FaultRun) -> tuple[dict[str, Findings], int]:
    """What ours and every baseline flagged in a run, and how long it was in ms."""
    replay = _Replay(run)
    rules = baselines()
    found = {method: Findings() for method in (OURS, BLAMED, *rules)}
    first_ms = last_ms = None
    for round in run.rounds(replay.entities):
        first_ms = round.time_ms if first_ms is None else first_ms
        last_ms = round.time_ms
        fleet, sight = replay.take(round)
        for node, name in _flagged(fleet, run):
            found[OURS].note(node, round.time_ms, name)
        for node, name in _blamed(fleet):
            found[OURS].note(node, round.time_ms, name)
            found[BLAMED].note(node, round.time_ms, name)
        for method, rule in rules.items():
            for row in np.flatnonzero(rule(sight)).tolist():
                found[method].note(run.topology.names[row], round.time_ms)
    return found, (last_ms or 0) - (first_ms or 0)


class _Replay:
    """The pipeline that serves, fed with rounds."""

    def __init__(self, run: FaultRun) -> None:
        self.topology = run.topology
        self.entities = Entities()
        for name in run.topology.names:
            self.entities.node(name)
        self.rows = {name: row for row, name in enumerate(run.topology.names)}
        self.store = WindowStore(self.entities, interval_s=run.interval_s)
        self.memory = RiskMemory(run.interval_s)
        self.jobs = JobTable()

    def take(self, round: Round) -> tuple[Fleet, Sight]:
        """The fleet's scores after one more round, and what baselines see of it."""
        for event in round.events:
            self.jobs.apply(event)
        kinds: dict[EntityKind, list[SampleBatch]] = {}
        for batch in round.batches:
            kinds.setdefault(batch.kind, []).append(batch)
        for parts in kinds.values():
            self.store.write(SampleBatch.concat(parts), round.time_ms)
        frames = extract(self.store, round.time_ms, self.topology.generation)
        local = score_local(frames, self.entities, self.topology, self.memory, round.time_ms)
        running = self.jobs.running()
        fleet = score_fleet([local], running, {}, self.topology, round.time_ms, self.memory)
        gangs = {one.job: np.array([self.rows[host] for host in one.hosts if host in self.rows]) for one in running}
        return fleet, Sight(frames.gpu, len(self.topology), gangs)


def _flagged(fleet: Fleet, run: FaultRun) -> Iterable[tuple[str, str]]:
    """(node, what is named there) of every node with more to do than to watch it."""
    for row, action in fleet.risk.actions.items():
        if action.code not in QUIET_CODES:
            reasons = fleet.risk.reasons.get(row, ())
            top = max(reasons, key=lambda reason: reason.share, default=None)
            yield run.topology.names[row], top.entity if top else ""


def _blamed(fleet: Fleet) -> Iterable[tuple[str, str]]:
    """(node, culprit) of every slow job that blames a member."""
    for body in fleet.stragglers.values():
        name = body["culprit"]["name"]
        if body["slow"] and name:
            yield str(name).split("/")[0], str(name)


def score(findings: Sequence[Finding], truth: Sequence[FaultTruth], kind: str | None = None) -> Score:
    """Findings against the truth; with `kind`, of faults of that kind alone (no false alarms are counted then)."""
    faults = [row for row in truth if not row.benign]
    scored = Score()
    used: set[int] = set()
    for fault in faults:
        hits = [at for at, finding in enumerate(findings) if _covers(fault, finding)]
        used.update(hits)
        if fault.visible_ms is None or (kind is not None and fault.kind != kind):
            continue
        if not hits:
            scored.missed += 1
            continue
        first = findings[hits[0]]
        scored.right += 1
        scored.first += _names(fault, first)
        scored.delays.append(max(0.0, (first.first_ms - fault.visible_ms) / 1000))
    scored.wrong = 0 if kind is not None else len(findings) - len(used)
    return scored


def _covers(fault: FaultTruth, finding: Finding) -> bool:
    """Whether a finding is about this fault: on its node, begun or still there while it lasted."""
    ends_ms = (fault.end_ms if fault.end_ms is not None else finding.last_ms) + AFTER_MS
    begins_ms = fault.start_ms - int(fault.lead_s * 1000) - EARLY_MS
    return finding.node == fault.node and finding.first_ms <= ends_ms and finding.last_ms >= begins_ms


def _names(fault: FaultTruth, finding: Finding) -> bool:
    """Whether the GPU or port named first is the fault's; a node is right where the whole node is, or has no other."""
    if not finding.name or (fault.gpu is None and fault.port is None):
        return True
    unit = f"{fault.node}/{fault.gpu}" if fault.gpu is not None else f"{fault.node}/mlx5_{fault.port}/1"
    return finding.name in (unit, fault.node)


def shuffle(run: FaultRun, rng: np.random.Generator) -> list[FaultTruth]:
    """The truth with every fault on some node instead of its own: what a method finds then is chance."""
    import msgspec

    names = run.topology.names
    return [msgspec.structs.replace(row, node=names[int(rng.integers(len(names)))]) for row in run.truth]


def _rows(table: Table, method: str, one: Score, node_days: float, series: str = "all") -> None:
    table.found(method, one.right, one.wrong, one.missed, series)
    if method in (OURS, BLAMED):
        table.share("top1", method, one.first, one.right, series)
    table.median("delay_s", method, one.delays, series)
    table.rate("false_alarms_per_node_day", method, one.wrong, node_days, series)
    if method == BLAMED:
        table.rate("false_culprits", method, one.wrong, node_days, series)
