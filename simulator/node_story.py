"""The story of a lost node: it fails under the largest gang, and the placer gives the gang another one.

It does only what a failing power supply and an owner who reads the public API could do. The placer chooses the node,
and the gang's agent continues there from its last checkpoint.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fleetcast.simulator.agents import has_agent
from fleetcast.simulator.driver import Driver
from fleetcast.simulator.faults.faults import FaultPlan
from fleetcast.simulator.live_job import LiveJob
from fleetcast.simulator.story import CHECK_INTERVAL_S, ENDED, NOT_SENT, find_largest_gang, list_hosts

BEGINS_S = 6.0  # wall, after the driver went live
REPAIR_S = 4 * 3600.0


@dataclass(slots=True)
class NodeStory:
    """A story that is played once. write_turn: function that appends a turn to the story's file."""

    driver: Driver
    faults: FaultPlan
    write_turn: Callable[[str, str], None]
    begins_s: float = BEGINS_S

    async def run(self) -> None:
        await self.driver.live.wait()
        await asyncio.sleep(self.begins_s)
        gang = find_largest_gang(self.driver, self.faults.list_faulty_nodes(), has_agent)
        if gang is None:
            return
        node, attempt = gang.ranks[-1].node, gang.attempt
        self._lose_node(gang, node)
        action = await self._wait_for_action(gang, attempt)
        if action is None:
            self.write_turn("node_not_replaced", f"{gang.name} starts again: no action gave it another node")
            return
        self.write_turn("replace", action["sentence"])
        while action["state"] not in ENDED:
            await asyncio.sleep(CHECK_INTERVAL_S)
            action = await self.driver.api.get(f"/v1/actions/{action['action_id']}") or action
        if action["state"] == "seen":
            places = ", ".join(sorted({place["node"] for place in action["places"]})) or "fewer nodes"
            self.write_turn("node_replaced", f"{gang.name} runs on from its checkpoint on {places} instead of {node}")
        else:
            self.write_turn("node_not_replaced", f"the replacement is {action['state']}: {action['why']}")

    def _lose_node(self, gang: LiveJob, node: str) -> None:
        now_ms = self.driver.clock.now_ms()
        self.faults.inject("node_lost", node, None, now_ms, end_ms=now_ms + round(1000 * REPAIR_S))
        size = f"{gang.gpus} GPUs on {len(list_hosts(gang))} nodes"
        self.write_turn("node_lost", f"{node} fails under {gang.name}, the largest gang ({size})")

    async def _wait_for_action(self, gang: LiveJob, attempt: int) -> dict[str, Any] | None:
        """Return the action that was sent for a gang, or None once the gang has failed or ended."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            answer = await self.driver.api.get(f"/v1/actions?job={gang.name}&order=newest&limit=20") or {}
            for row in answer.get("rows", ()):
                if row["attempt"] == attempt and not row["payer"] and row["state"] not in NOT_SENT:
                    return dict(row)
            if self.driver.running.get(gang.name) is not gang:
                return None
