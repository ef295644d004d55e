"""Small fleets with queues: whom a request may stop, checked by trying every set, and what happens next."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from fleetcast.benchmarks.kit.victim_scenes import EACH, make_view
from fleetcast.fleet.requests import PlacementRequest
from fleetcast.placement.machines.options import Options
from fleetcast.placement.queues.charges import LeafUse
from fleetcast.placement.queues.queues_ahead import QueueHold
from fleetcast.placement.queues.queues_file import read_queues
from fleetcast.placement.queues.standing import QueueStanding
from fleetcast.placement.queues.tree import QueueTree
from fleetcast.placement.reclaim.fairness import FairnessVerdict, Queues, find_fair_victims
from fleetcast.placement.reclaim.victims import ChosenVictims, NoVictims


@dataclass(frozen=True)
class TeamJob:
    """A job of one-GPU members. cost: GPU-seconds, inf for a job that may not be stopped.

    A higher priority stops jobs of the own queue. Priority 2 is a class that may also stop lower ones of others.
    """

    name: str
    queue: str
    gpus: int
    cost: float = 1.0
    priority: int = 0


@dataclass(frozen=True)
class Teams:
    """The jobs that run on a fleet of nodes of 8 GPUs. They pack the nodes in order."""

    tree: QueueTree
    gpus: int
    jobs: tuple[TeamJob, ...]

    def make_standing(self) -> QueueStanding:
        held: dict[str, float] = {}
        for job in self.jobs:
            held[job.queue] = held.get(job.queue, 0.0) + job.gpus
        use = {leaf: LeafUse({"gpu": gpus}, 0.0) for leaf, gpus in held.items()}
        return QueueStanding(self.tree, use, {"gpu": float(self.gpus)})

    def make_queues(self, payer: TeamJob) -> Queues:
        holds = {job.name: QueueHold(job.queue, {"gpu": float(job.gpus)}) for job in self.jobs}
        outranked = frozenset(job.name for job in self.jobs if _outranks(payer, job))
        outranking = frozenset(job.name for job in self.jobs if _outranks(job, payer))
        return Queues(self.make_standing(), holds, outranked, outranking)

    def find(self, payer: TeamJob) -> ChosenVictims | NoVictims:
        owner = np.full(-(-self.gpus // EACH) * EACH, len(self.jobs))  # beyond the fleet: a job that is never stopped
        owner[: self.gpus] = -1
        owner[: sum(job.gpus for job in self.jobs)] = np.repeat(
            np.arange(len(self.jobs)), [job.gpus for job in self.jobs]
        )
        view = make_view(owner.reshape(-1, EACH), len(owner))
        names = [*(job.name for job in self.jobs), "outside"][: len(view.jobs)]
        cost = np.array([*(job.cost for job in self.jobs), np.inf][: len(view.jobs)])
        return find_fair_victims(
            self.ask(payer), replace(view, jobs=tuple(names)), cost, Options(), self.make_queues(payer)
        )

    @staticmethod
    def ask(payer: TeamJob) -> PlacementRequest:
        return PlacementRequest(request_id=payer.name, queue=payer.queue, gang=payer.gpus, gpus_per_node=1)

    def list_fair_sets(self, payer: TeamJob) -> Iterator[tuple[float, tuple[str, ...]]]:
        """Yield every set of jobs that lets the payer in, is needed whole, and is fair in the final state."""
        free = self.gpus - sum(job.gpus for job in self.jobs)
        verdict = FairnessVerdict(self.ask(payer), self.make_queues(payer))
        may = [job for job in self.jobs if np.isfinite(job.cost) and not _outranks(job, payer)]
        for size in range(len(may) + 1):
            for chosen in combinations(may, size):
                freed = free + sum(job.gpus for job in chosen)
                if freed >= payer.gpus and all(freed - job.gpus < payer.gpus for job in chosen):
                    rows = [verdict.make_job(job.name, job.cost) for job in chosen]
                    if verdict.find_unfair_giver(rows) is None and verdict.is_within_quota(rows):
                        yield sum(job.cost for job in chosen), tuple(job.name for job in chosen)

    def apply(self, payer: TeamJob, victims: tuple[str, ...]) -> "Teams":
        return replace(self, jobs=(*(job for job in self.jobs if job.name not in victims), payer))


def _outranks(one: TeamJob, other: TeamJob) -> bool:
    return one.priority > other.priority and (one.queue == other.queue or one.priority == 2)


def run_until_stable(teams: Teams, payer: TeamJob, most: int = 40) -> int:
    """Let stopped jobs ask again, each in its turn, until nobody gets anything. Returns the number of stops.

    Raises AssertionError if a state comes twice.
    """
    waiting, seen, stops = [payer], set(), 0
    while True:
        for job in waiting:
            found = teams.find(job)
            if isinstance(found, ChosenVictims):
                break
        else:
            return stops
        stopped = [one for one in teams.jobs if one.name in found.chosen.jobs]
        stops += len(stopped)
        teams = teams.apply(job, found.chosen.jobs)
        waiting = [*(one for one in waiting if one != job), *stopped]
        state = frozenset(one.name for one in teams.jobs)
        assert state not in seen or not stopped, f"a loop: {sorted(state)}"
        assert stops <= most, "the stops never end"
        seen.add(state)


def draw_teams(rng: np.random.Generator) -> tuple[Teams, TeamJob]:
    """Draw two or three queues with guarantees, weights or neither, in one or two cohorts, and a full fleet."""
    names = ["a", "b", "c"][: rng.integers(2, 4)]
    gpus = int(rng.integers(4, 25))
    text, queues = "", []
    even = np.ones(len(names)) / len(names)
    guarantees = rng.multinomial(gpus, even).tolist() if rng.random() < 0.6 else [0] * len(names)
    cohorts = rng.random() < 0.4
    for at, name in enumerate(names):
        queue = f"{'x' if at == 0 else 'y'}/{name}" if cohorts else name
        queues.append(queue)
        text += f'[queue."{queue}"]\nweight = {rng.integers(1, 5)}\n'
        if guarantees[at]:
            text += f"guaranteed = {{gpu = {guarantees[at]}}}\n"
    if cohorts:
        below = {"x": guarantees[0], "y": sum(guarantees[1:])}
        text = "".join(f"[queue.{top}]\nguaranteed = {{gpu = {n}}}\n" for top, n in below.items()) + text
    jobs, left = [], gpus
    for number in range(int(rng.integers(1, 9))):
        size = min(left, int(rng.integers(1, max(2, gpus // 2))))
        if size:
            cost = float("inf") if rng.random() < 0.1 else float(rng.integers(1, 100))
            priority = int(rng.choice([0, 0, 0, 1, 2]))
            jobs.append(TeamJob(f"j{number}", str(rng.choice(queues)), size, cost, priority))
            left -= size
    payer = TeamJob("payer", str(rng.choice(queues)), int(rng.integers(1, gpus + 1)), 50.0, int(rng.integers(0, 3)))
    return Teams(read_queues(text), gpus, tuple(jobs)), payer
