"""The story of an elastic gang: it shrinks for an urgent gang, and grows back when the urgent gang has ended.

It does only what an owner could do: it submits a gang to its queue, and reads the public API. The placer chooses the
members that leave and the nodes onto which the gang grows. The gang's agent changes its size.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fleetcast.fleet.requests import Gang, RankPlacement
from fleetcast.simulator.days.replay import OngoingJob
from fleetcast.simulator.days.traces import TraceJob
from fleetcast.simulator.driver import Driver
from fleetcast.simulator.live_job import LiveJob
from fleetcast.simulator.story import CHECK_INTERVAL_S, ENDED, NOT_SENT
from fleetcast.simulator.teams import RESEARCH, URGENT

BEGINS_S = 1.0  # wall, after the driver went live
ELASTIC = "story-elastic"
SHORT = "story-short"
RESEARCH_NODES = 4
SIZES = Gang(RESEARCH_NODES // 2, RESEARCH_NODES, RESEARCH_NODES // 2)
AGE_S, REMAINING_S = 2 * 3600.0, 12 * 3600.0
SHORT_RUN_S = 120.0


def make_elastic_job(nodes: Sequence[str], gpus_per_node: int, now_ms: int) -> OngoingJob:
    """Return the elastic gang, which has run on all of these nodes for some time."""
    started_ms = now_ms - round(1000 * AGE_S)
    gpus = len(nodes) * gpus_per_node
    job = TraceJob(ELASTIC, started_ms, AGE_S + REMAINING_S, gpus, "ria", "training", RESEARCH, RESEARCH, SIZES)
    ranks = tuple(RankPlacement(rank, node, tuple(range(gpus_per_node))) for rank, node in enumerate(nodes))
    return OngoingJob(job, started_ms, REMAINING_S, ranks)


@dataclass(slots=True)
class ElasticStory:
    """A story that is played once. write_turn: function that appends a turn to the story's file."""

    driver: Driver
    write_turn: Callable[[str, str], None]
    begins_s: float = BEGINS_S

    async def run(self) -> None:
        await self.driver.live.wait()
        await asyncio.sleep(self.begins_s)
        decision = await self._submit_gang()
        if not await self._follow("shrink", f"{ELASTIC} runs on with fewer members, from a checkpoint: "):
            return
        row = await decision
        self.write_turn("short_runs", f"the urgent gang starts on the nodes that {ELASTIC} left: {row['sentence']}")
        while SHORT in self.driver.running or SHORT in self.driver.waiting:
            await asyncio.sleep(CHECK_INTERVAL_S)
        self.write_turn("short_ended", f"{SHORT} has ended, and no waiting request can use its nodes")
        await self._follow("grow", f"{ELASTIC} has its former size again: ")

    async def _submit_gang(self) -> "asyncio.Future[dict[str, Any]]":
        driver, members = self.driver, SIZES.desired - SIZES.min
        gpus = members * driver.gpus_per_node
        job = TraceJob(SHORT, driver.clock.now_ms(), SHORT_RUN_S, gpus, "", "training", URGENT, RESEARCH)
        decision = await driver.submit(LiveJob(job, driver.profile_of(job), SHORT_RUN_S, SHORT_RUN_S))
        size = f"{members} x {driver.gpus_per_node} GPUs"
        self.write_turn("short", f"an urgent gang of {size} arrives for the nodes that {ELASTIC} fills: {SHORT}")
        return decision

    async def _follow(self, kind: str, done: str) -> bool:
        """Report the action of a kind on the gang once it is sent, and once it ends. Returns whether it happened.

        done: the beginning of the sentence for an action that happened.
        """
        reported = ""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            row = await self._find_action(kind)
            if row is None:
                continue
            if row["action_id"] != reported:
                reported = row["action_id"]
                self.write_turn(kind, row["sentence"])
            if row["state"] == "seen":
                held = sorted({rank.node for rank in self.driver.running[ELASTIC].ranks})
                self.write_turn(f"{kind}_seen", done + ", ".join(held))
                return True
            if row["state"] in ENDED:
                self.write_turn(f"{kind}_failed", f"the {kind} of {ELASTIC} is {row['state']}: {row['why']}")
                return False

    async def _find_action(self, kind: str) -> dict[str, Any] | None:
        """Return the newest action of a kind on the gang that was sent and not withdrawn."""
        answer = await self.driver.api.get(f"/v1/actions?job={ELASTIC}&order=newest&limit=20") or {}
        for row in answer.get("rows", ()):
            if row["kind"] == kind and row["state"] not in NOT_SENT:
                return dict(row)
        return None
