"""The life of one large gang under a trace of node faults, with a way to recover from each interruption.

The gang works, writes checkpoints at Young's interval, and stops at each fault of one of its nodes. Faults that
begin while the gang recovers join the same interruption. The nodes outside the gang run other jobs, except for
`free_nodes` of them. A free node that joins the gang is free no more, until the node that it replaced is repaired.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleetcast.placement.recovery.foresight import should_act_early
from fleetcast.placement.recovery.steps import RecoveryStep, RecoveryTimes, choose_step, price_step

DAY_S = 86_400.0
GPUS_PER_NODE = 8
OTHERS_LOST_S = 2_700.0  # work and restart of a job that gives a node: half an hour, and a quarter
BURST_S = 60.0
LEAD_S = (900.0, 3_600.0)  # shortest and longest time from a true warning to its fault

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class NodeFaults:
    """Faults by start. node: (f,) row of the node. start_s, end_s: (f,) end_s is inf if it never ended."""

    node: Ints
    start_s: Floats
    end_s: Floats
    nodes: int
    span_s: float


def read_faults(path: Path, nodes: int) -> NodeFaults:
    """Read a trace with the columns node, start_day and end_day of a fleet of `nodes`."""
    import pyarrow.parquet as pq

    table = pq.read_table(path, columns=["node", "start_day", "end_day"]).to_pydict()
    names = {name: row for row, name in enumerate(dict.fromkeys(table["node"]))}
    start = np.array(table["start_day"], np.float64) * DAY_S
    end = np.array([np.nan if day is None else day for day in table["end_day"]], np.float64) * DAY_S
    order = np.argsort(start, kind="stable")
    node = np.array([names[name] for name in table["node"]], np.int64)
    end = np.where(np.isnan(end), np.inf, end)
    span_s = math.ceil(start.max() / DAY_S) * DAY_S
    return NodeFaults(node[order], start[order], end[order], max(nodes, len(names)), span_s)


@dataclass(frozen=True, slots=True)
class Interruption:
    """The state of the gang when its recovery is decided.

    lost: number of its nodes that failed and are not healthy again. failed: number of nodes that failed, healthy
    again or not. free: number of free nodes. borrowable: number of nodes whose jobs may stop.
    """

    lost: int
    failed: int
    free: int
    borrowable: int
    gpus: float


@dataclass(frozen=True, slots=True)
class RecoveryChoice:
    """The way that an arm recovers. borrowed: nodes that other jobs give up for it."""

    delay_s: float
    borrowed: int = 0


Recover = Callable[[Interruption, RecoveryTimes], RecoveryChoice]


def restart_gang(state: Interruption, times: RecoveryTimes) -> RecoveryChoice:
    """Restart the whole gang. It waits in the queue if too few nodes are free."""
    wait_s = times.free_after_s if state.lost > state.free else 0.0
    return RecoveryChoice(wait_s + times.restart_s)


def swap_one_node(state: Interruption, times: RecoveryTimes) -> RecoveryChoice:
    """Replace one failed node by a free one, as Kueue's hot swap does. In all other cases restart the gang."""
    if state.failed == 1 and state.lost <= state.free:
        return RecoveryChoice(times.swap_s)
    return restart_gang(state, times)


def recover_by_ladder(state: Interruption, times: RecoveryTimes) -> RecoveryChoice:
    """Take the cheapest step of the ladder. The healthy members stay in place."""
    steps = [price_step(RecoveryStep.WAIT, times, state.gpus), price_step(RecoveryStep.ELSEWHERE, times, state.gpus)]
    steps = steps[:1] if state.lost else [price_step(RecoveryStep.IN_PLACE, times, state.gpus)]
    borrowed = max(0, state.lost - state.free)
    if state.lost and not borrowed:
        steps.append(price_step(RecoveryStep.FREE, times, state.gpus))
    if 0 < borrowed <= state.borrowable:
        others = borrowed * GPUS_PER_NODE * OTHERS_LOST_S
        steps.append(price_step(RecoveryStep.BORROW, times, state.gpus, others))
    step = choose_step(steps)
    return RecoveryChoice(step.delay_s, borrowed if step.step is RecoveryStep.BORROW else 0)


@dataclass(frozen=True, slots=True)
class Warnings:
    """Warnings of node faults, by time. node: (w,). time_s: (w,). p: the share of them that are true.

    follow: whether the gang acts on them. None decides by cost.
    """

    node: Ints
    time_s: Floats
    p: float
    follow: bool | None = None


def draw_warnings(faults: NodeFaults, foreseen: float, precision: float, rng: np.random.Generator) -> Warnings:
    """Draw a warning for a share of the faults, and false ones for the stated precision.

    False warnings fall on nodes as faults do: a model warns of nodes with a history.
    """
    hit = rng.random(len(faults.node)) < foreseen
    true_s = faults.start_s[hit] - rng.uniform(*LEAD_S, int(hit.sum()))
    false = int(rng.binomial(10 * hit.sum(), min(1.0, (1 / precision - 1) / 10)))
    time_s = np.append(true_s, rng.uniform(0, faults.span_s, false))
    node = np.append(faults.node[hit], rng.choice(faults.node, false))
    order = np.argsort(time_s, kind="stable")
    return Warnings(node[order], time_s[order], precision)


@dataclass(slots=True)
class GangLife:
    """The sums of one run. Times are in seconds of the whole gang.

    failed_s: times of interruptions, and of faults on nodes that the gang had left in time. swaps: of nodes that
    had not failed. lost_s: repeated work, detection and recovery, and early swaps. checkpoints_s: regular
    checkpoints. borrowed: nodes that other jobs gave up.
    """

    span_s: float
    interruptions: int = 0
    failed_s: list[float] = field(default_factory=list)
    swaps: int = 0
    lost_s: float = 0.0
    checkpoints_s: float = 0.0
    borrowed: int = 0

    @property
    def failures(self) -> int:
        """The number of failures that hit the gang, or would have. Faults within `BURST_S` are one failure."""
        return 1 + int((np.diff(self.failed_s) > BURST_S).sum())

    @property
    def minutes_per_failure(self) -> float:
        return self.lost_s / 60 / self.failures

    @property
    def ettr(self) -> float:
        """The share of the span in which the gang made progress."""
        return 1 - (self.lost_s + self.checkpoints_s) / self.span_s


@dataclass(slots=True)
class GangRun:
    """One run of a gang through a trace. `play` returns its sums.

    refills: whether a free node that is used is replaced `free_after_s` later, by a node of another job that ends.
    """

    faults: NodeFaults
    members: int
    free_nodes: int
    times: RecoveryTimes
    recover: Recover
    rng: np.random.Generator
    warnings: Warnings | None = None
    refills: bool = False
    down_until: Floats = field(init=False)
    in_gang: NDArray[np.bool_] = field(init=False)
    free_at: list[float] = field(init=False)
    left: dict[int, float] = field(init=False)
    work_began_s: float = 0.0

    def play(self) -> GangLife:
        """Run the gang through all faults and warnings."""
        faults = self.faults
        self.down_until = np.zeros(faults.nodes)
        self.in_gang = np.zeros(faults.nodes, bool)
        self.in_gang[self.rng.permutation(faults.nodes)[: self.members]] = True
        self.free_at, self.left = [0.0] * self.free_nodes, {}
        life = GangLife(faults.span_s)
        warned = [] if self.warnings is None else [*zip(self.warnings.time_s, self.warnings.node, strict=True)]
        at = warn = 0
        while at < len(faults.node):
            while warn < len(warned) and warned[warn][0] <= faults.start_s[at]:
                self._hear_warning(float(warned[warn][0]), int(warned[warn][1]), life)
                warn += 1
            at = self._meet_fault(at, life)
        self._count_checkpoints(faults.span_s, life)
        return life

    @property
    def interval_s(self) -> float:
        """Young's interval between checkpoints, by the mean rate of faults of a node."""
        rate = len(self.faults.node) / self.faults.nodes / self.faults.span_s
        return math.sqrt(2 * self.times.checkpoint_s / (rate * self.members))

    def _count_checkpoints(self, until_s: float, life: GangLife) -> float:
        """Count the checkpoints since the gang began to work. Returns the seconds since the last one."""
        worked_s, cycle_s = max(0.0, until_s - self.work_began_s), self.interval_s + self.times.checkpoint_s
        whole = math.floor(worked_s / cycle_s)
        life.checkpoints_s += whole * self.times.checkpoint_s
        return worked_s - whole * cycle_s

    def _meet_fault(self, at: int, life: GangLife) -> int:
        """Let the fault `at` happen, with all faults that join its interruption. Returns the next fault."""
        faults, now_s = self.faults, float(self.faults.start_s[at])
        if not self._fail(at, life):
            return at + 1
        life.interruptions += 1
        life.failed_s.append(now_s)
        life.lost_s += self._count_checkpoints(now_s, life)
        failed, decided_s, at = [at], now_s + self.times.detection_s, at + 1
        while True:
            at = self._collect(at, decided_s, failed, life)
            lost = sum(faults.end_s[one] > decided_s for one in failed)
            borrowable = int((~self.in_gang & (self.down_until <= decided_s)).sum())
            free = sum(ready_s <= decided_s for ready_s in self.free_at)
            gpus = float(self.members * GPUS_PER_NODE)
            choice = self.recover(Interruption(lost, len(failed), free, borrowable, gpus), self.times)
            ready_s, before = decided_s + choice.delay_s, len(failed)
            at = self._collect(at, ready_s, failed, life)
            if len(failed) == before:
                break
            decided_s = float(faults.start_s[at - 1]) + self.times.detection_s  # those that joined are decided with it
        self._replace([int(faults.node[one]) for one in failed if faults.end_s[one] > decided_s], decided_s)
        life.borrowed += choice.borrowed
        life.lost_s += ready_s - now_s
        self.work_began_s = ready_s
        return at

    def _fail(self, at: int, life: GangLife) -> bool:
        """Record a fault on its node. Returns whether it interrupts the gang."""
        node, start_s = int(self.faults.node[at]), float(self.faults.start_s[at])
        self.down_until[node] = max(self.down_until[node], self.faults.end_s[at])
        if start_s <= self.left.pop(node, -1.0) and not self.in_gang[node]:
            life.failed_s.append(start_s)
        return bool(self.in_gang[node])

    def _collect(self, at: int, until_s: float, failed: list[int], life: GangLife) -> int:
        """Add the faults of the gang's nodes that begin by `until_s`. Returns the next fault."""
        while at < len(self.faults.node) and self.faults.start_s[at] <= until_s:
            if self._fail(at, life):
                failed.append(at)
            at += 1
        return at

    def _replace(self, nodes: list[int], now_s: float) -> None:
        """Let other healthy nodes join the gang in place of these. Free nodes are used first."""
        for node in dict.fromkeys(nodes):
            others = np.flatnonzero(~self.in_gang & (self.down_until <= now_s))
            if not len(others):
                return
            self.in_gang[node] = False
            self.in_gang[self.rng.choice(others)] = True
            ready = [k for k, ready_s in enumerate(self.free_at) if ready_s <= now_s]
            if ready:
                again_s = now_s + self.times.free_after_s if self.refills else float(self.down_until[node])
                self.free_at[ready[0]] = again_s

    def _hear_warning(self, now_s: float, node: int, life: GangLife) -> None:
        """Swap a node of the working gang before it fails, if that pays."""
        assert self.warnings is not None
        if not self.in_gang[node] or now_s < self.work_began_s:
            return
        follows = self.warnings.follow
        if follows is None:
            follows = should_act_early(self.warnings.p, self.interval_s / 2, self.times)
        if not follows:
            return
        self._count_checkpoints(now_s, life)
        spent_s = self.times.checkpoint_s + self.times.swap_s
        life.lost_s += spent_s
        life.swaps += 1
        self.work_began_s = now_s + spent_s
        self.left[node] = now_s + LEAD_S[1]
        self._replace([node], now_s)
        self.down_until[node] = max(self.down_until[node], now_s + LEAD_S[1])
