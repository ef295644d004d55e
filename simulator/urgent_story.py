"""The story of an urgent gang: a running job stops at its checkpoint for it, and runs again later.

It does only what an owner could do: it submits a gang to its queue, and reads the public API. The placer chooses the
job, and the job's agent stops it.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fleetcast.simulator.days.traces import TraceJob
from fleetcast.simulator.driver import Driver
from fleetcast.simulator.live_job import LiveJob
from fleetcast.simulator.story import CHECK_INTERVAL_S, NOT_SENT
from fleetcast.simulator.teams import URGENT

BEGINS_S = 4.0  # wall, after the driver went live
NODES = 2
RUN_S = 2 * 3600.0
NAME = "story-urgent"


@dataclass(slots=True)
class UrgentStory:
    """A story that is played once. write_turn: function that appends a turn to the story's file. pool: of the gang."""

    driver: Driver
    write_turn: Callable[[str, str], None]
    pool: str = ""
    begins_s: float = BEGINS_S
    stopped: dict[str, dict[str, Any]] = field(default_factory=dict)  # job → the action that stops it

    async def run(self) -> None:
        await self.driver.live.wait()
        await asyncio.sleep(self.begins_s)
        decision = await self._submit_gang()
        while not decision.done():
            await asyncio.sleep(CHECK_INTERVAL_S)
            await self._report_stops()
        await self._report_stops()
        self._report_start(decision.result())
        await self._wait_until_stopped_jobs_run()

    async def _submit_gang(self) -> "asyncio.Future[dict[str, Any]]":
        driver, gpus = self.driver, NODES * self.driver.gpus_per_node
        job = TraceJob(NAME, driver.clock.now_ms(), RUN_S, gpus, "", "training", URGENT, self.pool)
        decision = await driver.submit(LiveJob(job, driver.profile_of(job), RUN_S, RUN_S))
        self.write_turn("urgent", f"an urgent gang of {NODES} x {driver.gpus_per_node} GPUs arrives: {NAME}")
        return decision

    async def _report_stops(self) -> None:
        """Report the actions that stop jobs for the gang, and the jobs that have stopped."""
        answer = await self.driver.api.get("/v1/actions?limit=1000") or {}
        for row in answer.get("rows", ()):
            if row["payer"] != NAME or row["state"] in NOT_SENT:
                continue
            job = row["job"]
            if job not in self.stopped:
                self.write_turn("stop", row["sentence"])
            elif row["state"] != self.stopped[job]["state"]:
                because = f": {row['why']}" if row["why"] else ""
                self.write_turn(f"stop_{row['state']}", f"the stop of {job} is {row['state']}{because}")
            self.stopped[job] = row

    def _report_start(self, decision: dict[str, Any]) -> None:
        """Report whether the gang was placed on exactly the GPUs that were freed for it."""
        freed = [row for row in self.stopped.values() if row["state"] == "seen"]
        if decision["outcome"] != "placed" or not freed:
            self.write_turn("urgent_placed", f"the urgent gang: {decision['sentence']}")
            return
        given = {(rank["node"], gpu) for rank in decision["ranks"] for gpu in rank["gpus"]}
        free = {(rank["node"], gpu) for row in freed for rank in row["ranks"] for gpu in rank["gpus"]}
        on = "on GPUs that were freed for it" if given <= free else "also on other GPUs"
        self.write_turn(
            "urgent_runs" if given & free else "urgent_placed", f"the urgent gang starts {on}: {decision['sentence']}"
        )

    async def _wait_until_stopped_jobs_run(self) -> None:
        attempts = {row["job"]: row["attempt"] for row in self.stopped.values() if row["state"] == "seen"}
        while attempts:
            await asyncio.sleep(CHECK_INTERVAL_S)
            for job, attempt in list(attempts.items()):
                live = self.driver.running.get(job)
                if live is not None and live.attempt > attempt:
                    del attempts[job]
                    self.write_turn("again", f"{job}, which was stopped, runs again from its checkpoint")
