"""The agents of simulated jobs: they poll the actions on their jobs, and carry them out within the grace.

Only a job whose trainer reports its steps has an agent. A job whose node was lost waits for the action that gives it
another one, and continues there from its last checkpoint. By default each agent obeys. For tests of the product, a
share of the agents refuses, hangs, lies, replies late or twice, or dies. The seed and the job's name choose which.
"""

import asyncio
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec
import numpy as np

from fleetcast.fleet.requests import RankPlacement
from fleetcast.simulator.driver import Driver
from fleetcast.simulator.live_job import LiveJob

ROUND_S = 0.5  # wall
POLL_S = 90.0  # of fleet time, between two polls of a job
CHECKPOINT_S = 30.0  # of a job whose profile states no checkpoint
RESIZE_S = 60.0  # of a job that continues on other ranks
LIE_S = 600.0  # how long a liar still uses the GPUs that it reported as free
LATE_S = 60.0  # after the action has expired
TRAINING = frozenset({"training", "fine_tuning"})


class Manner(StrEnum):
    """How an agent replies to an action."""

    OBEY = "obey"
    REFUSE = "refuse"
    HANG = "hang"  # it never replies
    LIE = "lie"  # it reports a stop, but its GPUs still work
    LATE = "late"  # it replies and acts after the action has expired
    TWICE = "twice"  # it sends each reply twice
    DIE = "die"  # it accepts, and its job fails before the checkpoint


UNRULY = tuple(Manner)[1:]


def draw_manner(job: str, seed: int, unruly_share: float) -> Manner:
    """Draw the manner of a job's agent, the same for each attempt.

    unruly_share: the share of agents that do not obey, from 0 to 1.
    """
    rng = np.random.default_rng([seed, zlib.crc32(f"manner of {job}".encode())])
    return UNRULY[int(rng.integers(len(UNRULY)))] if rng.random() < unruly_share else Manner.OBEY


class ReceivedAction(msgspec.Struct, frozen=True):
    """The fields of an action that an agent uses, as `GET /v1/actions` shows them."""

    action_id: str
    kind: str
    job: str
    attempt: int
    executor: str
    payer: str
    by_ms: int
    grace_s: float
    ranks: tuple[RankPlacement, ...] = ()
    places: tuple[RankPlacement, ...] = ()


@dataclass(slots=True)
class StartedAction:
    """An action that an agent carries out at `due_ms`, after the checkpoint."""

    action: ReceivedAction
    live: LiveJob
    due_ms: int


@dataclass(slots=True)
class JobAgents:
    """The agents of all running jobs of a driver. choose_manner: job → the manner of its agent."""

    driver: Driver
    choose_manner: Callable[[str], Manner]
    _polled_ms: dict[str, int] = field(default_factory=dict)
    _seen: set[str] = field(default_factory=set)  # actions that were read
    _started: list[StartedAction] = field(default_factory=list)
    _lying: list[StartedAction] = field(default_factory=list)

    async def run(self) -> None:
        """Poll and act until the task is cancelled."""
        await self.driver.live.wait()
        while True:
            await self.poll_jobs()
            await self.act(self.driver.clock.now_ms())
            await asyncio.sleep(ROUND_S)

    async def poll_jobs(self) -> None:
        """Read the actions on each job whose last poll is `POLL_S` ago, and reply to the new ones."""
        now_ms = self.driver.clock.now_ms()
        self._polled_ms = {name: time_ms for name, time_ms in self._polled_ms.items() if name in self.driver.running}
        for live in [row for row in self.driver.running.values() if has_agent(row)]:
            if now_ms - self._polled_ms.get(live.name, 0) < POLL_S * 1000:
                continue
            self._polled_ms[live.name] = now_ms
            answer = await self.driver.api.get(f"/v1/actions?job={live.name}&state=sent")
            for row in (answer or {}).get("rows", ()):
                action = msgspec.convert(row, ReceivedAction)
                if (
                    action.executor == "agents"
                    and action.attempt == live.attempt
                    and action.action_id not in self._seen
                ):
                    self._seen.add(action.action_id)
                    await self._receive(action, live)

    async def act(self, now_ms: int) -> None:
        """Carry out the actions that are due, and end the jobs of liars."""
        due = [row for row in self._started if row.due_ms <= now_ms]
        self._started = [row for row in self._started if row.due_ms > now_ms]
        for row in due:
            if self.driver.running.get(row.live.name) is row.live:  # it may have ended by itself
                await self._carry_out(row, now_ms)
        done = [row for row in self._lying if row.due_ms <= now_ms]
        self._lying = [row for row in self._lying if row.due_ms > now_ms]
        for row in done:
            self.driver.fleet.stop_job(row.live.name, now_ms)
            await self.driver.resubmit_job(row.live)

    async def _receive(self, action: ReceivedAction, live: LiveJob) -> None:
        manner, now_ms = self.choose_manner(live.name), self.driver.clock.now_ms()
        if manner is Manner.HANG:
            return
        if manner is Manner.REFUSE:
            await self._reply(action, "refuse", why="the owner does not allow it")
            return
        checkpoint_s = 0.0 if live.broken_ms else min(live.profile.checkpoint_s or CHECKPOINT_S, action.grace_s)
        due_ms = now_ms + round(1000 * checkpoint_s)
        if manner is Manner.LATE:
            due_ms = action.by_ms + round(1000 * LATE_S)
        else:
            for _ in range(1 + (manner is Manner.TWICE)):
                await self._reply(action, "accept")
            await self._begin_checkpoint(live, now_ms)
        self._started.append(StartedAction(action, live, due_ms))

    async def _carry_out(self, row: StartedAction, now_ms: int) -> None:
        action, live, manner = row.action, row.live, self.choose_manner(row.live.name)
        if manner is Manner.DIE:
            await self.driver.fail_job(live, "unknown", "", "it ended before its checkpoint was whole")
            await self.driver.resubmit_job(live)
            return
        if action.places and not await self._reply(action, "accept"):
            return  # it has ended, so that other jobs may have these GPUs
        if manner is Manner.LATE:
            await self._reply(action, "accept")
            await self._begin_checkpoint(live, now_ms)
        if not live.broken_ms:
            await self.driver.outbox.put(live.end_checkpoint(now_ms))
        if action.kind == "preempt":
            if manner is Manner.LIE:
                await self.driver.report_preemption(live, action.payer, now_ms)
                self._lying.append(StartedAction(action, live, now_ms + round(1000 * LIE_S)))
            else:
                await self.driver.preempt_job(live, action.payer, now_ms)
        else:
            ranks = change_ranks(live.ranks, action.ranks, action.places)
            await self.driver.resize_job(live, ranks, RESIZE_S, now_ms)

    async def _begin_checkpoint(self, live: LiveJob, now_ms: int) -> None:
        if not live.broken_ms:
            await self.driver.outbox.put(*live.begin_checkpoint(now_ms))

    async def _reply(self, action: ReceivedAction, verb: str, **more: str) -> bool:
        """Reply to an action. Returns whether it is still open."""
        body = msgspec.json.encode({"job": action.job, "attempt": action.attempt, **more})
        path = f"/v1/actions/{action.action_id}/{verb}"
        status, _ = await self.driver.api.request_until_answered("POST", path, body)
        return status == 200


def has_agent(live: LiveJob) -> bool:
    return live.reports_steps and live.job.class_ in TRAINING


def change_ranks(
    ranks: Sequence[RankPlacement], leaving: Sequence[RankPlacement], places: Sequence[RankPlacement]
) -> tuple[RankPlacement, ...]:
    """Return the ranks of a job after an action: without those that leave, and with its new places.

    A rank leaves if its node and its GPUs do. The number of the rank in the action may differ from the job's own.

    >>> both = RankPlacement(0, "a", (0,)), RankPlacement(1, "b", (0,))
    >>> [rank.node for rank in change_ranks(both, both[1:], [])]
    ['a']
    """
    left = {(rank.node, gpu) for rank in leaving for gpu in rank.gpus}
    rest = [rank for rank in ranks if not any((rank.node, gpu) in left for gpu in rank.gpus)]
    numbers = (number for number in range(len(rest) + len(places)) if number not in {rank.rank for rank in rest})
    added = [msgspec.structs.replace(place, rank=next(numbers)) for place in places]
    return tuple(sorted([*rest, *added], key=lambda rank: rank.rank))
