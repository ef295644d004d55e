"""Clients: jobs that ask for GPUs, start where they were placed, end, and repeat whatever was not answered.

A client keeps the contract and no more: it starts a job only upon a `placed` answer, holds its GPUs only while its
start was acknowledged in time, and repeats a request with the same bytes. Its start may come as late as it likes.
"""

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from fleetcast.fleet.errors import FleetcastError, RequestError, StaleError
from fleetcast.fleet.requests import Decision, PlacementRequest
from fleetcast.placement.ledger.ledger import LedgerError
from fleetcast.service.http.problems import Problem

if TYPE_CHECKING:
    from tests.simulation.world import World

encode = msgspec.json.Encoder().encode
MOST_JOBS = 14
BEYOND = 64  # added to GPUs, no node has so many
ENDS: tuple[tuple[str, dict[str, str]], ...] = (("finished", {}), ("failed", {"category": "user"}))
AGAIN = (StaleError, LedgerError)  # nothing was decided: ask again


@dataclass(slots=True, eq=False)
class Job:
    """One attempt of one job. `wants`: what its client does next; `asked`: an answer is under way."""

    name: str
    attempt: int
    request: PlacementRequest
    queued: bool
    wants: str = "place"
    asked: bool = False
    asked_ms: int = 0
    start_ms: int = 0  # steady: when its client sends its start
    end_ms: int = 0
    sequence: int = 0
    decision: Decision | None = None
    event: bytes = b""
    told: list[bytes] = field(default_factory=list)  # events that a late delivery may repeat

    @property
    def key(self) -> tuple[str, int]:
        return self.name, self.attempt


class Clients:
    """All of them; `act` lets one do what it wants next."""

    def __init__(self, world: "World", rng: random.Random, mistakes: random.Random) -> None:
        self.world = world
        self.rng = rng
        self.mistakes = mistakes  # apart from `rng`, so that mistakes change no other draw
        self.jobs: list[Job] = []
        self.quiet = False  # no new jobs, no dawdling
        self.given_up: set[tuple[str, int]] = set()  # a limit refused their start; a copy of it may still arrive
        self._numbers = 0

    def act(self) -> None:
        """One client takes its next step; a new one comes where there is room."""
        if not self.quiet and len(self.jobs) < MOST_JOBS and self.rng.random() < 0.4:
            self._new()
        elif self.jobs:
            job = self.rng.choice(self.jobs)
            if not job.asked or self.rng.random() < 0.2 or self.world.steady_ms - job.asked_ms > 5000:
                getattr(self, f"_{job.wants}")(job)

    def _new(self) -> None:
        self._numbers += 1
        self._add(f"j{self._numbers}", 1)

    def _add(self, name: str, attempt: int) -> None:
        rng = self.rng
        request = PlacementRequest(
            request_id=f"r-{name}-{attempt}",
            job=name,
            attempt=attempt,
            gang=rng.choice((1, 1, 1, 2)),
            gpus_per_node=rng.choice((1, 1, 2)),
            priority=rng.randrange(3),
        )
        job = Job(name, attempt, request, queued=rng.random() < 0.35)
        self.jobs.append(job)
        if rng.random() < 0.5:
            job.wants = "submit"

    def _gone(self, job: Job) -> None:
        if job in self.jobs:
            self.jobs.remove(job)
            if not self.quiet and self.rng.random() < 0.15:
                self._add(job.name, job.attempt + 1)

    # -- events

    def _submit(self, job: Job) -> None:
        told = {"gang": job.request.gang, "gpus_per_node": job.request.gpus_per_node}
        self._tell(job, "submitted", told, lambda: setattr(job, "wants", "place"))

    def _tell(self, job: Job, kind: str, facts: dict[str, Any], then: Any) -> None:
        """Send an event until it is acknowledged; the same bytes each time."""
        if not job.event:
            job.sequence += 1
            about = {"job": job.name, "attempt": job.attempt, "sequence": job.sequence, "type": kind}
            job.event = encode({**about, "time_ms": self.world.now_ms, **facts})
        event = job.event
        late = job.told and self.rng.random() < 0.1
        body = event + b"\n" + self.rng.choice(job.told) if late else event

        def answered(answer: Any) -> None:
            if job.event != event:
                return
            job.asked = False
            if isinstance(answer, dict) and not answer["rejected"]:
                job.told.append(event)
                job.event = b""
                then()
            elif isinstance(answer, dict):
                job.event = b""  # it was bad, or the clock was set back: it is told again, with the time as it is now
                if kind == "started" and not self.quiet:
                    job.start_ms = self.world.steady_ms + self.rng.choice((0, 5000, 40_000))
            elif isinstance(answer, Problem):  # all places are taken
                job.event = b""
                if kind == "submitted":
                    then()
                elif kind == "started":  # its promise is over, so that it is a stranger
                    self.world.oracle.released(job)
                    self.given_up.add(job.key)
                    self._gone(job)

        job.asked, job.asked_ms = True, self.world.steady_ms
        self.world.send_events(job, body, answered)

    # -- placements

    def _place(self, job: Job) -> None:
        call = "enqueue" if job.queued else "place"
        self._ask(job, call, job.request, lambda reply: self._placed(job, reply))

    def _ask(self, job: Job, call: str, what: Any, then: Any) -> None:
        def answered(reply: Any) -> None:
            job.asked = False
            then(reply)

        job.asked, job.asked_ms = True, self.world.steady_ms
        self.world.send_placer(job, call, what, answered)

    def _placed(self, job: Job, reply: Any) -> None:
        if job.wants != "place" or isinstance(reply, AGAIN):
            return
        if isinstance(reply, FleetcastError):
            assert not isinstance(reply, RequestError), reply
            self._gone(job)
            return
        decision = msgspec.json.decode(reply, type=Decision)
        if decision.outcome == "refused":
            self._gone(job)
        elif decision.outcome == "queued":
            if self.rng.random() < 0.1 or self.quiet:
                job.wants = "withdraw"
        else:
            self._begin(job, decision)

    def _begin(self, job: Job, decision: Decision) -> None:
        """Most start at once, some about when their promise ends, some never."""
        job.decision = decision
        coin, left_ms = self.rng.random(), decision.expires_ms - self.world.now_ms
        job.wants, job.start_ms = "start", self.world.steady_ms
        if self.quiet or coin < 0.5:
            return
        if coin < 0.9:
            job.start_ms += max(0, left_ms - self.rng.randrange(4000))
        elif coin < 0.95:
            job.wants = "cancel"
            self.world.oracle.released(job)
        else:
            self._gone(job)

    def _start(self, job: Job) -> None:
        assert job.decision is not None
        if self.world.steady_ms >= job.start_ms:
            ranks = [{"rank": rank.rank, "node": rank.node, "gpus": list(rank.gpus)} for rank in job.decision.ranks]
            bad = {"unreadable": True} if not self.quiet and self.rng.random() < 0.1 else {}
            if not self.quiet:
                ranks = self._misname(ranks)
            self._tell(job, "started", {"ranks": ranks, **bad}, lambda: self._started(job))

    def _misname(self, ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the ranks as a wrong launcher reports them now and then: GPUs that the node lacks, none at all, or a
        node that is not of the fleet. The job runs where it was placed all the same."""
        coin = self.mistakes.random()
        if coin < 0.05:
            return [{**rank, "gpus": [gpu + BEYOND for gpu in rank["gpus"]]} for rank in ranks]
        if coin < 0.1:
            return [{**rank, "node": f"{rank['node']}.elsewhere"} for rank in ranks]
        if coin < 0.15:
            return [{"rank": rank["rank"], "node": rank["node"]} for rank in ranks]
        return ranks

    def _started(self, job: Job) -> None:
        """It runs, if that was in time as the client sees it; else it ends at once."""
        assert job.decision is not None
        runs_ms = self.rng.choice((2000, 20_000, 60_000))
        in_time = self.world.now_ms < job.decision.expires_ms
        job.end_ms = self.world.steady_ms + (runs_ms if in_time and not self.quiet else 0)
        job.wants = "finish"

    def _finish(self, job: Job) -> None:
        if job.event or self.world.steady_ms >= job.end_ms or self.quiet:
            self.world.oracle.released(job)
            kind, facts = self.rng.choice(ENDS)
            self._tell(job, kind, facts, lambda: self._gone(job))

    def _cancel(self, job: Job) -> None:
        self._ask(job, "cancel", job.request.request_id, lambda reply: self._cancelled(job, reply))

    def _cancelled(self, job: Job, reply: Any) -> None:
        if not isinstance(reply, AGAIN):
            self._gone(job)

    def _withdraw(self, job: Job) -> None:
        self._ask(job, "withdraw", job.request.request_id, lambda reply: self._withdrawn(job, reply))

    def _withdrawn(self, job: Job, reply: Any) -> None:
        """Where it does not wait any more, it was decided meanwhile: the next answer says how."""
        if isinstance(reply, AGAIN):
            return
        if isinstance(reply, FleetcastError):
            job.wants = "place"
        else:
            self._gone(job)
