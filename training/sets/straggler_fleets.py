"""An evaluation on fleets with faults: whether the faulty node and unit are found, and how soon.

The evaluation also counts false alarms. A run is replayed through the code that the service uses. Fleetcast
flags a node while it recommends more than watching the node, or while it blames the node for a slow
job. `judges/findings.py` defines which findings are right. Blaming a stage of a job without a
faulty node is a false alarm, too. Simulated runs and recordings are judged separately. Each has three
groups: runs with faults ("all"), runs with look-alikes and no fault ("decoys alone"), and runs with
neither ("healthy").
"""

import os
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from fleetcast.models.risk.rules import RULES
from fleetcast.models.risk.score import ScoredFleet
from fleetcast.models.risk.watch import FleetWatch
from fleetcast.training.fits.fan_out import map_items
from fleetcast.training.judges.findings import (
    Findings,
    HealthyTime,
    Score,
    find_false_alarms,
    find_false_job_alarms,
    measure_healthy_time,
    score_findings,
    shuffle_faults,
    shuffle_findings,
)
from fleetcast.training.judges.straggler_baselines import BaselineMoment, make_baselines
from fleetcast.training.judges.straggler_metrics import Table
from fleetcast.training.reports.results import Results
from fleetcast.training.sets.fault_runs import FaultRun

Say = Callable[[str], None]

QUIET_CODES = frozenset({"none", "watch"})
DAY_MS = 86_400_000
PROCESSES = 2
INTENDED = frozenset(rule.name for rule in RULES if rule.intended)
OURS = "ours"
BLAMED = "ours (slow jobs alone)"


@dataclass(frozen=True, slots=True)
class FlaggedRun:
    """The nodes that our rules and every baseline flagged in a run.

    found: method → its flags. stages: the jobs of which a stage was blamed. hosts: job → its nodes.
    """

    found: dict[str, Findings]
    stages: Findings
    hosts: dict[str, frozenset[str]]
    first_ms: int
    last_ms: int


@dataclass(slots=True)
class RunTotals:
    """Scores summed over the runs of one group: with faults, with decoys alone, or healthy."""

    methods: dict[str, Score] = field(default_factory=dict)
    kinds: dict[str, Score] = field(default_factory=dict)
    shuffled: Score = field(default_factory=Score)
    chance: Score = field(default_factory=Score)
    healthy: dict[str, HealthyTime] = field(default_factory=dict)
    decoys: int = 0
    runs: int = 0

    def add_run(self, run: FaultRun, seen: FlaggedRun, rng: np.random.Generator) -> None:
        """Score one more run, and add its scores to the sums."""
        names, truth, ours = run.topology.names, run.truth, seen.found[OURS].rows
        self.runs += 1
        self.decoys += sum(row.benign for row in truth)
        for method, findings in seen.found.items():
            self.methods.setdefault(method, Score()).add(score_findings(findings.rows, truth, seen.hosts))
            time = measure_healthy_time(names, seen.first_ms, seen.last_ms, truth, findings.rows)
            self.healthy.setdefault(method, HealthyTime()).add(time)
        faults = [row for row in truth if not row.benign]
        for method in (OURS, BLAMED):
            self.methods[method].wrong += len(find_false_job_alarms(seen.stages.rows, faults, seen.hosts))
        for kind in sorted({row.kind for row in truth if not row.benign}):
            self.kinds.setdefault(kind, Score()).add(score_findings(ours, truth, seen.hosts, kind))
        self.shuffled.add(score_findings(ours, shuffle_faults(truth, names, rng)))
        since_ms = min((row.start_ms for row in truth), default=seen.first_ms)
        self.chance.add(score_findings(shuffle_findings(ours, names, since_ms, seen.last_ms, rng), truth))


def judge_fleets(runs: Sequence[FaultRun], results: Results, seed: int, say: Say) -> None:
    """Replay all runs, and add their rows. Runs of one folder are pooled by whether they have faults."""
    rng = np.random.default_rng(seed)
    pools: dict[tuple[str, str], RunTotals] = {}
    processes = min(PROCESSES, os.cpu_count() or 1) if len(runs) > PROCESSES else 1
    watched = map_items(replay_run, runs, say=lambda line: say(f"runs: {line}"), processes=processes)
    for run, seen in zip(runs, watched, strict=True):
        series = choose_series(run)
        pools.setdefault((run.folder.parent.name, series), RunTotals()).add_run(run, seen, rng)
        faults = [row for row in run.truth if not row.benign]
        wrong = find_false_alarms(seen.found[OURS].rows, faults) + find_false_job_alarms(
            seen.stages.rows, faults, seen.hosts
        )
        say(f"{run.name}: {series}, {len(faults)} faults, {len(seen.found[OURS].rows)} findings, {len(wrong)} false")
    for (dataset, series), pool in pools.items():
        table = Table(results, dataset, "node")
        if series == "all":
            _add_fault_scores(table, pool)
        for method, one in pool.methods.items():
            time = pool.healthy[method]
            table.add_rate("false_alarms_per_node_day", method, one.wrong, time.quiet_ms / DAY_MS, series)
            if series == "all" and time.all_ms:
                still = time.after_ms / time.all_ms
                table.add_number("flagged_after_repair_share", method, still, (None, None), pool.runs, series)
        days = pool.healthy[OURS].all_ms / DAY_MS
        table.add_number("healthy_node_days", "truth", days, (None, None), pool.runs, series)
        table.add_number("decoys", "truth", pool.decoys, (None, None), pool.runs, series)


def choose_series(run: FaultRun) -> str:
    """Return "all" for a run with faults, "decoys alone" with only decoys, and "healthy" with neither."""
    if any(not row.benign for row in run.truth):
        return "all"
    return "decoys alone" if run.truth else "healthy"


def _add_fault_scores(table: Table, pool: RunTotals) -> None:
    """Add the scores of each method on runs with faults.

    Our method also gets scores for each kind of fault.
    """
    for method, one in pool.methods.items():
        table.add_detection(method, one.right, one.wrong, one.missed, spells=one.spells)
        table.add_delays("delay_s", method, one.delays)
        table.add_share("node_top1", method, one.own_nodes, one.nodes)
        if method in (OURS, BLAMED):
            table.add_share("top1", method, one.own_units, one.units)
    for method, one, series in ((OURS, pool.shuffled, "shuffled truth"), ("chance", pool.chance, "all")):
        table.add_detection(method, one.right, one.wrong, one.missed, series, one.spells)
    for kind, one in pool.kinds.items():
        table.add_share("recall", OURS, one.right, one.right + one.missed, kind)
        table.add_share("top1", OURS, one.own_units, one.units, kind)
        table.add_share("node_top1", OURS, one.own_nodes, one.nodes, kind)
        table.add_delays("delay_s", OURS, one.delays, kind)


def replay_run(run: FaultRun) -> FlaggedRun:
    """Replay a run and record what each method flags."""
    replay = FleetWatch.from_topology(run.topology, run.interval_s)
    rules, stages = make_baselines(), Findings()
    found = {method: Findings() for method in (OURS, BLAMED, *rules)}
    rows = {name: row for row, name in enumerate(run.topology.names)}
    hosts: dict[str, frozenset[str]] = {}
    first_ms = last_ms = 0
    for round in run.read_rounds(replay.entities):
        first_ms, last_ms = first_ms or round.time_ms, round.time_ms
        replay.apply_batch(round.batches, round.events, round.time_ms, round.node_events)
        frames = replay.extract_frames(run.topology, round.time_ms)
        fleet = replay.score(replay.make_moment(frames, run.topology, round.time_ms))
        running = {job.job: frozenset(job.hosts) for job in replay.fold.jobs.list_running()}
        hosts |= {job: hosts.get(job, frozenset()) | own for job, own in running.items()}
        for node, name in _find_flagged_nodes(fleet, run):
            found[OURS].record_flag(node, round.time_ms, name)
        for node, name in _find_blamed_nodes(fleet, rows):
            found[OURS].record_flag(node, round.time_ms, name)
            found[BLAMED].record_flag(node, round.time_ms, name)
        for job in _find_stage_blames(fleet):
            stages.record_flag(job, round.time_ms)
        gangs = {job: np.array(sorted(rows[host] for host in own if host in rows)) for job, own in running.items()}
        sight = BaselineMoment(frames.gpu, run.nodes, gangs)
        for method, rule in rules.items():
            for row in np.flatnonzero(rule(sight)).tolist():
                found[method].record_flag(run.topology.names[row], round.time_ms)
    return FlaggedRun(found, stages, hosts, first_ms, last_ms)


def _find_flagged_nodes(fleet: ScoredFleet, run: FaultRun) -> Iterable[tuple[str, str]]:
    """Yield (node, named entity) for each node whose recommended action is more than watching it.

    The entity is the one in the main reason, "" if there is none.
    """
    for row, action in fleet.risk.actions.items():
        if action.code not in QUIET_CODES:
            reasons = fleet.risk.reasons.get(row, ())
            top = max(reasons, key=lambda reason: reason.share, default=None)
            yield run.topology.names[row], top.entity if top else ""


def _find_blamed_nodes(fleet: ScoredFleet, rows: Container[str]) -> Iterable[tuple[str, str]]:
    """Yield (node, culprit) for each slow job that blames one of its members.

    Blamed stages are left out because a stage is on no single node. Power caps are left out because
    they are no fault.
    """
    for body in fleet.stragglers.values():
        name = str(body["culprit"]["name"])
        node = name.split("/", maxsplit=1)[0]
        if body["slow"] and node in rows and body["culprit"]["kind"] != "stage" and body.get("cause") not in INTENDED:
            yield node, name


def _find_stage_blames(fleet: ScoredFleet) -> Iterable[str]:
    """Yield the names of the slow jobs that blame one of their stages."""
    return (job for job, body in fleet.stragglers.items() if body["slow"] and body["culprit"]["kind"] == "stage")
