"""The story of a demonstration: a node under the largest gang throttles, and the next gang avoids it.

It does only what an owner and a failing fan could do: it injects a fault, polls the public API, submits a
gang, and ends a job. Each turn is a line of story.jsonl: {"time_ms", "event", "sentence"}.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fleetcast.fleet.requests import Gang
from fleetcast.simulator.days.traces import POOL, TraceJob
from fleetcast.simulator.driver import Driver
from fleetcast.simulator.faults.faults import FaultPlan
from fleetcast.simulator.live_job import LiveJob
from fleetcast.simulator.teams import URGENT

BEGINS_S = 20.0  # wall, after the driver went live
PATIENCE_S = 25.0  # wall, from the injection to the owner's decision
CHECK_INTERVAL_S = 0.5  # wall
LONG_ENOUGH_S = 3600.0
NEXT_RUN_S = 4 * 3600.0
PRIORITY = 100
QUIET_CODES = frozenset({"none", "watch"})
ENDED = frozenset({"seen", "refused", "expired", "late", "withdrawn"})  # states of an action
NOT_SENT = frozenset({"proposed", "withdrawn"})  # states of an action that no agent has to carry out


@dataclass(slots=True)
class Story:
    """A story that is played once.

    It ends when the next gang is placed, or at once if no gang spans two nodes.
    """

    driver: Driver
    faults: FaultPlan
    path: Path
    begins_s: float = BEGINS_S
    patience_s: float = PATIENCE_S

    async def run(self) -> None:
        await self.driver.live.wait()
        await asyncio.sleep(self.begins_s)
        gang = find_largest_gang(self.driver, self.faults.list_faulty_nodes())
        if gang is None:
            self.write_turn("none", "no gang spans two healthy nodes: no story in this run")
            return
        node = self._inject_throttle(gang)
        await self._wait_for_detection(gang, node)
        decision = await self._submit_next_gang(gang, node)
        await self._write_verdict(decision, node)

    def write_turn(self, event: str, sentence: str) -> None:
        """Append one turn to the story's file."""
        line = {"time_ms": self.driver.clock.now_ms(), "event": event, "sentence": sentence}
        with self.path.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")

    def _inject_throttle(self, gang: LiveJob) -> str:
        """Simulate a failed fan: one GPU of the gang's first node begins to throttle hard. Returns the node."""
        rank = gang.ranks[0]
        gpu = rank.gpus[0]
        now_ms = self.driver.clock.now_ms()
        end_ms = now_ms + int(NEXT_RUN_S * 1000)
        self.faults.inject(
            "thermal_throttle", rank.node, gpu, now_ms, end_ms=end_ms, hard=True, hard_ratio=0.5, tau_s=25.0
        )
        size = f"{gang.gpus} GPUs on {len(list_hosts(gang))} nodes"
        self.write_turn(
            "throttle", f"a fan fails in {rank.node}: GPU {gpu} under {gang.name}, the largest gang ({size})"
        )
        return rank.node

    async def _wait_for_detection(self, gang: LiveJob, node: str) -> None:
        """Poll the API until the node is flagged and the straggler named, as an operator would.

        Gives up after `patience_s`.
        """
        began = time.monotonic()
        flagged = named = False
        while not (flagged and named) and time.monotonic() - began < self.patience_s:
            await asyncio.sleep(CHECK_INTERVAL_S)
            if not flagged and (sentence := describe_flag(await self.driver.api.get(f"/v1/nodes/{node}"))):
                flagged = True
                self.write_turn("flagged", f"{node} is flagged: {sentence}")
            patient = time.monotonic() - began < self.patience_s - 2 * CHECK_INTERVAL_S
            stragglers = await self.driver.api.get(f"/v1/jobs/{gang.name}/stragglers")
            if not named and (sentence := describe_culprit(stragglers, measured=patient)):
                named = True
                self.write_turn("straggler", f"{gang.name} is slow: {sentence}")

    async def _submit_next_gang(self, gang: LiveJob, node: str) -> "asyncio.Future[dict[str, Any]]":
        """Submit the owner's next gang, elastic and with high priority, then stop the slow one.

        Returns the future of the next gang's decision.
        """
        driver = self.driver
        members = len(list_hosts(gang))
        each = driver.gpus_per_node
        queue = POOL if gang.job.queue == POOL else URGENT
        now_ms, gpus = driver.clock.now_ms(), members * each
        sizes = Gang(max(1, members // 2), members)
        job = TraceJob("story-gang", now_ms, NEXT_RUN_S, gpus, gang.job.user, "training", queue, gang.job.pool, sizes)
        following = LiveJob(job, driver.profile_of(job), NEXT_RUN_S, NEXT_RUN_S, priority=PRIORITY)
        decision = await driver.submit(following)
        self.write_turn("next", f"the owner of {gang.name} stops it and sends the next gang: {members} x {each} GPUs")
        if driver.running.get(gang.name) is gang:
            await driver.fail_job(gang, "cancelled", node, f"stopped by its owner: {node} is slow")
        return decision

    async def _write_verdict(self, decision: "asyncio.Future[dict[str, Any]]", node: str) -> None:
        row = await decision
        used = {rank["node"] for rank in row.get("ranks", ())}
        verdict = "avoided" if row["outcome"] == "placed" and node not in used else "not_avoided"
        self.write_turn(verdict, f"the next gang: {row['sentence']}")


def list_hosts(job: LiveJob) -> tuple[str, ...]:
    return tuple(dict.fromkeys(rank.node for rank in job.ranks))


def find_largest_gang(
    driver: Driver, faulty: set[str], is_fit: Callable[[LiveJob], bool] = lambda live: True
) -> LiveJob | None:
    """Return the running gang on the most nodes that is healthy and will run for another hour, or None.

    Ties go to the gang with the highest power. A gang that has moved is left out: its usual step time is not known.
    So is an elastic gang, which may change its size meanwhile.
    is_fit: whether a gang may be chosen.
    """
    fit = [
        job
        for job in driver.running.values()
        if len(list_hosts(job)) > 1
        and job.remaining_s > LONG_ENOUGH_S
        and not (job.broken_ms or job.has_moved or job.job.gang)
        and not faulty & set(list_hosts(job))
        and is_fit(job)
    ]
    return max(fit, key=lambda job: (len(list_hosts(job)), job.profile.power_w), default=None)


def describe_flag(node: dict[str, Any] | None) -> str:
    """Return the first reason of a node's flag, or else its action. Returns "" if it is not flagged."""
    if not node or node.get("action", {}).get("code", "none") in QUIET_CODES:
        return ""
    reasons = node.get("reasons") or [node["action"]]
    return str(reasons[0]["sentence"])


def describe_culprit(stragglers: dict[str, Any] | None, *, measured: bool = False) -> str:
    """Return the sentence that names a job's straggler, or "" if no straggler is named.

    measured: whether to return "" until a step time has risen.
    """
    if not stragglers or not stragglers.get("slow") or stragglers["culprit"]["kind"] == "nobody":
        return ""
    if measured and not (stragglers.get("ratio") or 0) > 1.0:
        return ""
    return str(stragglers["sentence"])
