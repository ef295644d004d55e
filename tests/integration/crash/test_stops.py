"""Processes that stand still while a promise expires: a start that was acknowledged in time keeps its GPUs.

placed ── roles stopped ── started, answered 202 ── the promise expires ── asked for GPUs ── roles go on ── asked on
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fleetcast.fleet.clock import ScaledClock
from fleetcast.service.config import load_config
from tests.integration.service_process import Service

pytestmark = pytest.mark.integration

SPEED = 3.0
EXPIRES_S = 25.0
NODES, GPUS = 4, 8
TRIES = 5  # on a busy machine a start may be answered too late to count
ASKED_ON_S = 20.0  # fleet


@contextmanager
def stopped(service: Service, roles: tuple[str, ...]) -> Iterator[None]:
    """Meanwhile the roles stand still. The processes are found by the ids that the supervisor wrote."""
    pids = [service.pids()[role] for role in roles]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


class Fleet:
    """Four nodes that one job takes whole, so that nobody else can be placed while it has them."""

    def __init__(self, service: Service) -> None:
        self.service = service
        config = load_config(service.folder / "config.toml").clock
        self.clock = ScaledClock(config.epoch_ms, config.wall_ms, config.speed)
        self.asked = 0

    def place(self, gang: int, gpus: int) -> dict[str, Any]:
        """The decision upon a new request; what a service says that cannot decide now is none."""
        self.asked += 1
        request = {"request_id": f"r{self.asked}", "gang": gang, "gpus_per_node": gpus}
        status, answer, _ = self.service.request("POST", "/v1/placements", request)
        assert status in (200, 503), answer
        return answer if status == 200 else {"outcome": "undecided", "sentence": answer["detail"]}

    def take_all(self) -> dict[str, Any]:
        def placed() -> dict[str, Any] | None:
            decision = self.place(NODES, GPUS)
            return decision if decision["outcome"] == "placed" else None

        taken: dict[str, Any] = self.service.until("the whole fleet", placed, 60)
        return taken

    def tell(self, job: str, *events: dict[str, Any]) -> None:
        told = [{"job": job, "time_ms": self.clock.now_ms(), **event} for event in events]
        status, answer, _ = self.service.request("POST", "/v1/events", told)
        assert (status, answer["accepted"]) == (202, len(events)), answer

    def start(self, decision: dict[str, Any]) -> bool:
        """Whether the start was answered while the promise lasted."""
        shape = {"gang": NODES, "gpus_per_node": GPUS}
        submitted = {"sequence": 0, "type": "submitted", **shape}
        self.tell(decision["request_id"], submitted, {"sequence": 1, "type": "started", "ranks": decision["ranks"]})
        return self.clock.now_ms() < decision["expires_ms"]

    def wait_until(self, time_ms: int) -> None:
        time.sleep(max(0.0, self.clock.convert_to_wall_s((time_ms - self.clock.now_ms()) / 1000)))

    def is_kept(self) -> None:
        """Nobody gets a GPU of it."""
        decision = self.place(1, 1)
        assert decision["outcome"] in ("refused", "undecided"), decision

    def is_kept_for(self, fleet_s: float) -> None:
        until_ms = self.clock.now_ms() + round(1000 * fleet_s)
        while self.clock.now_ms() < until_ms:
            self.is_kept()
            time.sleep(0.2)


def started_in_time(fleet: Fleet, before: tuple[str, ...], after: tuple[str, ...]) -> str:
    """Place and start a job that takes the whole fleet, and let its promise expire while roles stand still.

    before: roles that stand still from the decision on; after: those that do from the answer to the start on.
    """
    for _ in range(TRIES):
        decision = fleet.take_all()
        with stopped(fleet.service, before):
            in_time = fleet.start(decision)
            with stopped(fleet.service, after):
                fleet.wait_until(decision["expires_ms"] + 5000)
                if in_time and not {"api", "placer"} & {*before, *after}:
                    fleet.is_kept()
            if in_time and before == ("pipeline",):  # the placer has come back alone, if it was away
                fleet.is_kept()
        if in_time:
            return str(decision["request_id"])
        fleet.tell(decision["request_id"], {"sequence": 2, "type": "finished"})
    raise AssertionError(f"no start was answered within {EXPIRES_S} s of fleet time in {TRIES} tries")


@pytest.mark.parametrize(
    ("before", "after"),
    [(("pipeline",), ()), (("placer",), ()), ((), ("api",)), (("pipeline",), ("placer",))],
    ids=["pipeline", "placer", "api", "pipeline and placer"],
)
def test_a_start_that_was_answered_in_time_keeps_its_gpus(
    four_nodes: Callable[..., Service], before: tuple[str, ...], after: tuple[str, ...]
) -> None:
    ticks = {"pipeline": {"tick_s": 3.0}, "placer": {"intent_expires_s": EXPIRES_S}}
    fleet = Fleet(four_nodes(speed=SPEED, **ticks))
    pids = fleet.service.pids()
    job = started_in_time(fleet, before, after)
    fleet.is_kept_for(ASKED_ON_S)
    fleet.service.until("the job", lambda: (fleet.service.get(f"/v1/jobs/{job}") or {}).get("state") == "running")
    fleet.is_kept()
    fleet.tell(job, {"sequence": 2, "type": "finished"})
    fleet.service.until("room again", lambda: fleet.place(1, 1)["outcome"] == "placed", 60)
    assert fleet.service.pids() == pids


def test_a_promise_that_nobody_starts_expires_all_the_same(four_nodes: Callable[..., Service]) -> None:
    """Else the test above could not fail."""
    fleet = Fleet(four_nodes(speed=SPEED, pipeline={"tick_s": 3.0}, placer={"intent_expires_s": EXPIRES_S}))
    decision = fleet.take_all()
    with stopped(fleet.service, ("pipeline",)):
        fleet.wait_until(decision["expires_ms"] + 1000)
    fleet.service.until("room again", lambda: fleet.place(1, 1)["outcome"] == "placed", 60)
