"""Nodes under a gang that are replaced by an executor: sent, held for the gang alone, and seen."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fleetcast.fleet.nodes import NodeState
from fleetcast.models.risk.rules import ACTIONS
from fleetcast.models.risk.scores import RISK_KINDS
from fleetcast.placement.actions.breaker import CircuitBreaker
from fleetcast.placement.actions.life import IllegalTransition
from fleetcast.placement.ledger.verify import verify_ledger
from fleetcast.placement.machines.view import Hearing
from fleetcast.service.config import PlacerConfig
from fleetcast.service.placer.action_follow import BUSY
from tests.service.placer.test_act import ACT_LATE_S, ActBoard, ActWorld
from tests.service.placer.test_reclaim import OLD_S
from tests.service.placer_world import GPUS, NODES

FILE = """
[policy]
reclaim = "act"
[queue.q]
[queue.other]
"""


class BrokenBoard(ActBoard):
    """A board on which some nodes are lost, and others are advised to be drained."""

    lost: tuple[int, ...] = ()
    drained: tuple[int, ...] = ()
    attempt = 1  # of the job `big`
    finished: tuple[str, ...] = ()
    slow: tuple[str, int] | None = None  # the node that slows `big`, and since when

    def sections(self) -> dict[str, Any]:
        found = super().sections()
        running = [(job, self.attempt if job == "big" else 1) for job in self.jobs]
        found["occupancy"] = msgspec.json.encode({"position": 1, "running": running, "ended": self.ended})
        state, advice = np.zeros(NODES, np.int8), np.zeros(NODES, np.int8)
        rows = [{"job": job, "attempt": 1, "gpus": 8, "outcome": "finished"} for job in self.finished]
        found["jobs.ended"] = msgspec.json.encode([{**row, "started_ms": 0, "queue": "q"} for row in rows])
        state[list(self.lost)] = NodeState.LOST
        advice[list(self.drained)] = ACTIONS.index("drain_now")
        for row in self.drained:
            found["node.risk"][RISK_KINDS.index("fail"), :, row] = 0.4
        if self.slow:
            culprit = {"kind": "worker", "name": f"{self.slow[0]}/3", "share": 0.9}
            verdict = {"slow": True, "since_ms": self.slow[1], "culprit": culprit, "sentence": "slow"}
            found["doc.stragglers"] = msgspec.json.encode({"big": verdict})
        return found | {"node.state": state, "node.action": advice}


class BrokenWorld(ActWorld):
    """A gang `big` on the nodes n01 to n04, a job `other`, and the free nodes n15 and n16."""

    board: BrokenBoard

    def __init__(self, folder: Path, text: str = FILE) -> None:
        super().__init__(folder, text)
        self.board = BrokenBoard(self.config.board)
        self.board.queue_of, self.board.more = {}, {}
        self.run_job("big", range(4))
        self.run_job("other", range(4, NODES - 2))
        self.beat(0)

    def run_job(self, name: str, nodes: Any) -> None:
        self.board.jobs[name], self.board.queue_of[name] = nodes, "q"

    def lose(self, *rows: int) -> dict[str, str]:
        """Let these nodes be lost. Agents poll, and a pass runs. Returns job → state of its last action."""
        self.board.lost = rows
        self.agents_pass_at(30)
        return self.states()

    def last(self, job: str = "big") -> Any:
        return self.ask("GET", f"/actions?job={job}&order=newest")["rows"][-1]

    def try_now(self, nodes: int) -> str:
        """Return the outcome of a request of another queue for whole nodes, which stores nothing."""
        body = {"request_id": "try", "queue": "other", "gang": nodes, "gpus_per_node": GPUS, "dry_run": True}
        return str(self.ask("POST", "/placements", json=body)["outcome"])


@pytest.fixture
def world(tmp_path: Path) -> Iterator[BrokenWorld]:
    world = BrokenWorld(tmp_path)
    yield world
    world.close()
    assert verify_ledger(world.config.ledger).is_intact


def test_a_lost_node_is_replaced_and_its_replacement_is_held_for_the_gang_alone(world: BrokenWorld) -> None:
    assert world.try_now(2) == "placed"
    assert world.lose(1) == {"big": "sent"}
    row = world.last()
    assert (row["kind"], row["executor"], row["gpus"]) == ("replace", "agents", GPUS)
    assert ([rank["node"] for rank in row["ranks"]], [rank["node"] for rank in row["places"]]) == (["n02"], ["n15"])
    assert row["by_ms"] == world.clock.now_ms() + 1000 * ACT_LATE_S
    for _ in range(2):
        assert (world.try_now(1), world.try_now(2)) == ("placed", "refused")
        world.restart()
        world.pass_at(5)
    world.reply("big", "accept")
    world.run_job("big", (0, 2, 3, 14))
    world.agents_pass_at(10)
    assert world.states() == {"big": "seen"}
    assert world.try_now(2) == "refused"


def test_a_request_that_waits_gets_neither_the_new_node_nor_the_healthy_ones_of_the_gang(world: BrokenWorld) -> None:
    world.wait_for("r", "other", 2)
    world.board.jobs["filler"], world.board.queue_of["filler"] = (15,), "q"
    world.lose(1)
    assert (world.states(), world.placed()) == ({"big": "sent"}, {})
    world.end("big")
    world.agents_pass_at(30)
    assert (world.states(), world.placed()) == ({"big": "sent"}, {}), "the shape is held while the gang restarts"
    body = {"request_id": "again", "job": "big", "attempt": 2, "queue": "q", "gang": 4, "gpus_per_node": GPUS}
    world.ask("POST", "/queue", 202, json=body)
    world.pass_at(10)
    assert world.placed() == {"again": ["n01", "n03", "n04", "n15"]}
    assert world.states() == {"big": "sent"}


@pytest.mark.parametrize("verb", ["refuse", "expire"])
def test_the_end_of_a_replacement_frees_its_gpus_at_once(world: BrokenWorld, verb: str) -> None:
    world.lose(1)
    assert world.try_now(2) == "refused"
    if verb == "refuse":
        world.reply("big", "refuse", why="cannot")
    else:
        world.pass_at(ACT_LATE_S + 1)
    world.board.lost = ()
    world.pass_at(5)
    assert world.try_now(2) == "placed"


def test_the_next_attempt_may_be_placed_at_once_on_the_nodes_that_are_held(world: BrokenWorld) -> None:
    world.board.jobs["filler"], world.board.queue_of["filler"] = (15,), "q"
    world.lose(1)
    world.end("big")
    world.agents_pass_at(10)
    body = {"request_id": "again", "job": "big", "attempt": 2, "queue": "q", "gang": 4, "gpus_per_node": GPUS}
    for other in ({"job": "rival"}, {"queue": "other"}):
        assert world.ask("POST", "/placements", json={**body, **other, "dry_run": True})["outcome"] == "refused"
    world.ask("POST", "/queue", 202, json={**body, "request_id": "stranger", "attempt": 3, "queue": "other"})
    world.pass_at(10)
    assert world.placed() == {}
    assert world.ask("POST", "/placements", json=body)["outcome"] == "placed"
    assert world.placed() == {"again": ["n01", "n03", "n04", "n15"]}


@pytest.mark.parametrize("verb", ["", "accept"])
def test_the_nodes_are_free_once_the_job_has_finished(world: BrokenWorld, verb: str) -> None:
    world.lose(1)
    if verb:
        world.reply("big", verb)
    world.end("big")
    world.board.finished = ("big",)
    world.pass_at(10)
    assert (world.states(), world.try_now(5)) == ({"big": "withdrawn"}, "placed")


def test_a_later_attempt_that_its_scheduler_starts_elsewhere_ends_the_hold(world: BrokenWorld) -> None:
    world.lose(1)
    world.end("other")
    world.board.attempt = 2
    world.run_job("big", (1, 4, 5, 6))
    world.agents_pass_at(10)
    assert world.states() == {"big": "sent"}, "it still has the lost node"
    world.run_job("big", range(4, 8))
    world.agents_pass_at(10)
    assert (world.states(), world.try_now(9)) == ({"big": "seen"}, "placed")


def test_one_more_lost_node_joins_unless_the_executor_has_accepted(world: BrokenWorld) -> None:
    world.lose(0)
    first = world.last()["action_id"]
    world.lose(0, 1)
    assert world.last()["state"] == "sent" != first
    assert [place["node"] for place in world.last()["places"]] == ["n15", "n16"]
    assert world.ask("GET", f"/actions/{first}")["why"] == "other nodes are concerned now"
    world.reply("big", "accept")
    accepted = world.last()["action_id"]
    world.lose(0, 1, 2)
    assert (world.last()["action_id"], world.last()["state"]) == (accepted, "accepted")


def test_an_executor_that_may_have_begun_is_not_overtaken(world: BrokenWorld) -> None:
    world.service.executors.configured = (("site", lambda kind, job: ""),)
    world.board.lost = (0,)
    world.pass_at(30)
    first = world.last()
    assert (first["executor"], first["state"]) == ("site", "sent")
    world.board.lost = (0, 1)
    world.pass_at(30)
    assert world.last() == first, "it begins before it replies"
    with pytest.raises(IllegalTransition, match="site may have begun it"):
        world.service.actions.withdraw(first["action_id"], "why", world.clock.now_ms())


def test_a_wish_that_failed_becomes_advice_and_two_failures_leave_advice(world: BrokenWorld) -> None:
    world.lose(1)
    world.reply("big", "refuse", why="no")
    assert world.lose(1) == {"big": "proposed"}
    assert world.last()["executor"] == "advice"
    world.lose(1, 2)
    world.reply("big", "refuse", why="no")
    world.lose(1, 3)
    assert (world.last()["state"], world.last()["executor"]) == ("proposed", "advice")


def test_an_elastic_gang_without_a_free_node_shrinks_to_one_of_its_sizes(world: BrokenWorld) -> None:
    world.run_job("fill", range(NODES - 2, NODES))
    gang = {"min": 1, "desired": 7, "step": 2}
    world.board.more = {"big": {"gang": gang, "members": 4, "gpus_per_member": GPUS}}
    assert world.lose(0)["big"] == "sent"
    row = world.last()
    assert (row["kind"], row["payer"], [rank["node"] for rank in row["ranks"]]) == ("shrink", "", ["n01"])
    world.run_job("big", (1, 2, 3))
    world.agents_pass_at(10)
    assert world.states()["big"] == "seen"
    world.lose(0, 1)
    assert [rank["node"] for rank in world.last()["ranks"]] == ["n02", "n04"], "two members are none of its sizes"


@pytest.mark.parametrize(
    ("text", "more", "polls"),
    [
        (FILE.replace('"act"', '"advise"'), {}, True),
        (FILE.replace('"act"', '"act"\nact_in = ["other"]'), {}, True),
        (FILE, {"preemptible": False}, True),
        (FILE, {}, False),
    ],
)
def test_it_is_only_advice_unless_it_may_and_can_be_carried_out(
    tmp_path: Path, text: str, more: dict[str, Any], polls: bool
) -> None:
    world = BrokenWorld(tmp_path, text)
    world.board.more = {"big": more}
    world.board.lost = (1,)
    world.agents_pass_at(30) if polls else world.pass_at(30)
    assert (world.last()["state"], world.last()["executor"]) == ("proposed", "advice")
    assert world.try_now(2) == "placed"
    world.close()


def test_advice_is_sent_once_actions_are_resumed(world: BrokenWorld) -> None:
    world.ask("POST", "/actions/pause")
    world.lose(1)
    assert world.last()["state"] == "proposed"
    world.ask("POST", "/actions/resume")
    world.lose(1)
    assert world.last()["state"] == "sent"


def test_a_node_that_is_likely_to_fail_is_left_and_its_busy_gpus_contradict_it(world: BrokenWorld) -> None:
    world.board.hearing = Hearing.FRESH
    world.board.drained = (0,)
    world.agents_pass_at(OLD_S)
    assert (world.last()["state"], world.last()["sentence"].split(": ")[1].split(",")[0]) == (
        "sent",
        "nodes are likely to fail",
    )
    world.run_job("big", (1, 2, 3, 14))
    world.agents_pass_at(10)
    assert world.states() == {"big": "sent"}, "readings of a minute are needed"
    world.board.busy = (0,)
    world.agents_pass_at(30)
    assert (world.last()["state"], world.last()["why"]) == ("refused", BUSY)


def test_two_gangs_get_different_nodes(world: BrokenWorld) -> None:
    assert world.lose(0, 4) == {"big": "sent", "other": "sent"}
    places = {world.last(job)["places"][0]["node"] for job in ("big", "other")}
    assert places == {"n15", "n16"}


def test_a_gang_stays_in_the_domain_that_its_request_requires(world: BrokenWorld) -> None:
    world.lose()
    world.end("big")
    world.pass_at(5)
    body = {"request_id": "b2", "job": "big2", "queue": "q", "gang": 4, "gpus_per_node": GPUS}
    assert world.ask("POST", "/placements", json={**body, "topology": {"required": "rack"}})["outcome"] == "placed"
    world.run_job("big2", range(4))
    world.agents_pass_at(5)
    world.lose(0)
    assert (world.last("big2")["state"], world.last("big2")["places"]) == ("proposed", []), "r01 has no free node"


def slow_down(world: BrokenWorld, node: str = "n02", checkpoint_age_s: int | None = 60) -> None:
    """Let a node slow `big` for ten minutes. Its last whole checkpoint is so old, None: it has none."""
    now_ms = world.clock.now_ms()
    world.board.slow = node, now_ms - 600_000
    checkpoint_ms = None if checkpoint_age_s is None else now_ms - 1000 * checkpoint_age_s
    world.board.more = {"big": {"checkpoint_ms": checkpoint_ms}}
    world.agents_pass_at(5)


def test_a_node_that_slows_a_gang_is_left_once_after_a_checkpoint(world: BrokenWorld) -> None:
    slow_down(world)
    row = world.last()
    assert (row["state"], row["kind"]) == ("sent", "replace")
    assert "a node slows the whole gang, and free nodes join" in row["sentence"]
    assert ([rank["node"] for rank in row["ranks"]], [rank["node"] for rank in row["places"]]) == (["n02"], ["n15"])
    world.reply("big", "accept")
    world.run_job("big", (0, 2, 3, 14))
    world.agents_pass_at(10)
    assert world.states() == {"big": "seen"}
    slow_down(world, "n03")
    assert (world.last()["state"], world.last()["executor"]) == ("proposed", "advice"), "once per job"


@pytest.mark.parametrize(
    ("node", "age_s"),
    [("n02", None), ("n02", 601), ("n09", 60), ("gone", 60)],  # n09 is of another job
)
def test_without_a_checkpoint_since_then_or_for_a_node_of_another_job_a_slow_gang_stays(
    world: BrokenWorld, node: str, age_s: int | None
) -> None:
    slow_down(world, node, age_s)
    assert world.states() == {}


def test_a_slow_gang_stays_where_no_other_node_is_free(world: BrokenWorld) -> None:
    world.run_job("fill", range(NODES - 2, NODES))
    slow_down(world)
    assert world.states() == {}


def test_a_lost_node_counts_more_than_a_slow_one(world: BrokenWorld) -> None:
    world.board.lost = (2,)
    slow_down(world)
    assert [rank["node"] for rank in world.last()["ranks"]] == ["n03"]
    assert "nodes were lost, and free nodes join" in world.last()["sentence"]


class BoundedWorld(BrokenWorld):
    """The limits of an hour are less than the GPUs of one node."""

    placer = PlacerConfig(taken_queue_share=0.05, taken_fleet_share=0.05)


def test_a_lost_rack_opens_no_circuit_breaker_and_a_node_that_may_fail_counts(tmp_path: Path) -> None:
    world = BoundedWorld(tmp_path)
    assert world.lose(0, 4) == {"big": "sent", "other": "sent"}
    assert world.service.actions.switches.breaker == CircuitBreaker()
    for job in ("big", "other"):
        assert world.service.actions.list_open()[0].action.lost_gpus == GPUS
        world.reply(job, "refuse", why="no")
    world.lose()
    world.board.drained = (1,)
    world.agents_pass_at(OLD_S)
    record = world.service.actions.find_open_action_of("big")
    assert record is not None
    assert (record.state, record.action.taken_gpus) == ("proposed", GPUS), "it alone is more than an hour's limit"
    assert not world.service.actions.switches.breaker.is_open
    world.close()


def test_healthy_members_that_a_smaller_gang_gives_up_count(world: BrokenWorld) -> None:
    world.run_job("fill", range(NODES - 2, NODES))
    gang = {"min": 1, "desired": 7, "step": 2}
    world.board.more = {"big": {"gang": gang, "members": 4, "gpus_per_member": GPUS}}
    world.lose(0)
    world.run_job("big", (1, 2, 3))
    world.agents_pass_at(10)
    world.lose(0, 1)
    record = world.service.actions.find_open_action_of("big")
    assert record is not None
    assert (record.action.gpus, record.action.lost_gpus) == (2 * GPUS, GPUS)
    (taken,) = world.service.actions.switches.breaker.taken
    assert taken.gpus == GPUS


class TwinBoard(BrokenBoard):
    """A board on which the job `again` is the second attempt of `big`, while its first attempt still runs."""

    def sections(self) -> dict[str, Any]:
        found = super().sections()
        rows, occupancy = (msgspec.json.decode(found[name]) for name in ("jobs.running", "occupancy"))
        for row in rows:
            row |= {"job": "big", "attempt": 2} if row["job"] == "again" else {}
        occupancy["running"] = [("big", 2) if job == "again" else (job, 1) for job, _ in occupancy["running"]]
        return found | {
            "names.job": found["names.job"].replace(b"again", b"big"),
            "jobs.running": msgspec.json.encode(rows),
            "occupancy": msgspec.json.encode(occupancy),
        }


@pytest.mark.parametrize(("lost", "states"), [((13, 5), {"big": "sent", "other": "sent"}), ((1, 5), {"other": "sent"})])
def test_of_two_attempts_that_run_the_later_one_gets_other_nodes(
    world: BrokenWorld, lost: tuple[int, ...], states: dict[str, str]
) -> None:
    world.board = TwinBoard(world.config.board)
    world.board.queue_of, world.board.more = {}, {}
    world.run_job("big", range(4))
    world.run_job("other", range(4, 8))
    world.run_job("again", (12, 13))
    world.beat(0)
    world.poll("big")
    assert world.lose(*lost) == states
    assert world.service.failures.last is None
    if "big" in states:
        row = world.last()
        assert (row["attempt"], [rank["node"] for rank in row["ranks"]]) == (2, ["n14"])
        world.run_job("again", (12, 14))
        world.agents_pass_at(10)
        assert world.states()["big"] == "sent", "it got another node than that of the action"
