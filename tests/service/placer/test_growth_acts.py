"""Growth that executors carry out: sent, held for its job, seen, and withdrawn for a request before it is accepted."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetcast.fleet.requests import RankPlacement
from fleetcast.placement.actions.life import ActionRecord
from fleetcast.placement.ledger.verify import verify_ledger
from fleetcast.placement.machines.running_jobs import JobRun
from fleetcast.placement.plan.promised import make_gang_hold_name
from fleetcast.service.config import PlacerConfig
from fleetcast.service.placer.action_follow import has_happened
from fleetcast.service.placer.actions import OCCUPANCY
from tests.service.placer.test_act import ACT, ACT_LATE_S, ActWorld
from tests.service.placer.test_reclaim import OLD_S
from tests.service.placer_world import GPUS

GANG: dict[str, Any] = {"gang": {"min": 4, "desired": 12, "step": 2}, "gpus_per_member": GPUS}


class GrowthWorld(ActWorld):
    """The gang `wide` holds nodes 5 to 12. Nodes 13 to 16 are free."""

    def __init__(self, folder: Path, text: str = ACT) -> None:
        super().__init__(folder, text)
        self.board.more = {"wide": GANG}
        self.fill(own=("owed", 4), wide=("lender", 8), gone=("batch", 4))
        self.end("gone")

    def last(self, job: str = "wide") -> ActionRecord:
        return self.service.ledger.actions.read_after(0, 1000, job=job)[-1]

    def grow(self) -> None:
        """Let the gang run on the nodes of its growth, on the next board."""
        places = [int(place.node[1:]) - 1 for place in self.last().action.places]
        self.board.jobs["wide"] = [*self.board.jobs["wide"], *places]

    def place_now(self, nodes: int = 1) -> str:
        body = {"request_id": f"now{nodes}", "queue": "batch", "gang": nodes, "gpus_per_node": GPUS}
        return str(self.ask("POST", "/placements", json={**body, "dry_run": True})["outcome"])


def make_world(folder: Path, text: str = ACT) -> GrowthWorld:
    folder.mkdir()
    return GrowthWorld(folder, text)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[GrowthWorld]:
    world = GrowthWorld(tmp_path)
    yield world
    world.close()
    assert verify_ledger(world.config.ledger).is_intact


def test_growth_is_sent_held_for_its_job_alone_and_seen_on_the_board(world: GrowthWorld) -> None:
    world.agents_pass_at(OLD_S)
    (row,) = world.ask("GET", "/actions?job=wide&state=sent")["rows"]
    assert (row["kind"], row["executor"], row["gpus"], row["payer"]) == ("grow", "agents", 32, "")
    assert row["by_ms"] == world.clock.now_ms() + 1000 * ACT_LATE_S
    assert world.place_now() == "placed", "its agent has not accepted"
    world.restart()
    world.pass_at(5)
    world.reply("wide", "accept")
    assert world.place_now() == "refused"
    world.restart()
    world.pass_at(5)
    assert world.place_now() == "refused", "a restart keeps the hold"
    world.wait_for("p", "batch", 2)
    world.pass_at(5)
    assert (world.states(), world.placed()) == ({"wide": "accepted"}, {})
    world.grow()
    world.pass_at(5)
    assert (world.last().state, world.last().why) == ("seen", OCCUPANCY)
    world.ask("DELETE", "/queue/p")
    world.agents_pass_at(OLD_S)
    assert world.states() == {"wide": "seen"}, "it has its full size"


def test_growth_onto_a_node_that_left_the_fleet_has_not_happened(world: GrowthWorld) -> None:
    world.agents_pass_at(OLD_S)
    action, observed = world.last().action, world.service.view.observe_fleet()
    places = tuple(msgspec.structs.replace(place, node=f"gone-{place.node}") for place in action.places)
    assert not has_happened(msgspec.structs.replace(action, places=places), observed)
    own = tuple(RankPlacement(0, f"n{row + 1:02d}", tuple(range(GPUS))) for row in world.board.jobs["wide"])
    assert has_happened(msgspec.structs.replace(action, places=own), observed)
    assert not has_happened(msgspec.structs.replace(action, places=(*own, *places)), observed)


def test_a_request_gets_the_gpus_of_growth_that_no_agent_has_accepted(world: GrowthWorld) -> None:
    world.agents_pass_at(OLD_S)
    world.wait_for("p", "batch", 2)
    world.pass_at(5)
    first = world.service.ledger.actions.read_after(0, 1000, job="wide")[0]
    assert (first.state, first.why) == ("withdrawn", "a request waits for the GPUs")
    assert len(world.placed()["p"]) == 2
    body = {"job": "wide", "attempt": 1}
    assert "withdrawn" in str(world.ask("POST", f"/actions/{first.action_id}/accept", 409, json=body))
    assert world.last().action.gpus == 2 * GPUS
    assert not {place.node for place in world.last().action.places} & set(world.placed()["p"])


def test_a_placement_withdraws_the_growth_whose_gpus_it_gets_unless_it_was_accepted(world: GrowthWorld) -> None:
    world.agents_pass_at(OLD_S)
    body = {"queue": "batch", "gang": 1, "gpus_per_node": GPUS}
    assert world.ask("POST", "/placements", json={**body, "request_id": "p"})["outcome"] == "placed"
    assert (world.last().state, world.last().why) == ("withdrawn", "a request waits for the GPUs")
    assert world.placed()["p"][0] in {place.node for place in world.last().action.places}
    world.agents_pass_at(30)
    world.reply("wide", "accept")
    assert world.last().action.gpus == 2 * GPUS
    for request_id, outcome in (("q", "placed"), ("r", "refused")):  # one node is left beside a step of two
        assert world.ask("POST", "/placements", json={**body, "request_id": request_id})["outcome"] == outcome
    assert world.states() == {"wide": "accepted"}


def test_futures_hold_accepted_growth_until_the_end_of_its_gang(world: GrowthWorld) -> None:
    world.board.more["wide"] |= {"limit_s": 10.0 * OLD_S}
    world.agents_pass_at(OLD_S)
    now_ms, name = world.clock.now_ms(), make_gang_hold_name("wide")
    found = world.service.view.observe_fleet().running
    assert found.find_run(name, now_ms) == JobRun(now_ms, 1, float(ACT_LATE_S), None)
    world.reply("wide", "accept")
    found = world.service.view.observe_fleet().running
    assert found.find_run(name, now_ms) == found.find_run("wide", now_ms)
    assert found.find_run(name, now_ms).limit_s == 10.0 * OLD_S
    world.wait_for("p", "batch", 4)
    world.pass_at(5)
    planned = world.service.backlog.planned
    assert planned is not None
    assert planned.head is not None
    assert planned.head.start_ms > world.last().action.by_ms


def test_growth_that_fails_frees_the_gpus_at_once_and_is_not_asked_again(world: GrowthWorld) -> None:
    world.agents_pass_at(OLD_S)
    world.reply("wide", "refuse", why="cannot resize")
    assert world.place_now(4) == "placed"
    world.agents_pass_at(30)
    world.restart()
    world.agents_pass_at(ACT_LATE_S)
    assert world.states() == {"wide": "refused"}


def test_growth_that_nobody_carries_out_expires(world: GrowthWorld) -> None:
    world.agents_pass_at(OLD_S)
    world.reply("wide", "accept")
    world.wait_for("p", "batch", 4)
    world.agents_pass_at(ACT_LATE_S - 5)
    assert world.placed() == {}
    world.agents_pass_at(6)
    assert world.states() == {"wide": "expired"}
    assert len(world.placed()["p"]) == 4


def test_growth_of_an_attempt_that_has_ended_is_withdrawn(world: GrowthWorld) -> None:
    world.agents_pass_at(OLD_S)
    world.reply("wide", "accept")
    world.end("wide")
    world.pass_at(5)
    assert (world.last().state, world.last().why) == ("withdrawn", "its attempt ended before it grew")
    assert world.place_now(12) == "placed"


def test_growth_counts_against_its_queue_from_sending_on(tmp_path: Path) -> None:
    world = GrowthWorld(tmp_path, ACT.replace("[queue.lender]", "[queue.lender]\nlimit = {gpu = 96}"))
    world.board.jobs["own"] = range(2)
    world.agents_pass_at(OLD_S)
    assert world.last().action.gpus == 4 * GPUS
    elsewhere = [place.node for place in world.last().action.places]
    body = {"request_id": "q", "queue": "lender", "gang": 1, "gpus_per_node": GPUS, "avoid_nodes": elsewhere}
    assert world.ask("POST", "/placements", json=body)["outcome"] == "placed"
    assert (world.last().state, world.last().why) == ("withdrawn", "its queue may hold no more")
    world.ask("DELETE", "/placements/q")
    world.agents_pass_at(30)
    world.wait_for("p", "lender", 2)
    world.pass_at(5)
    assert (len(world.placed()["p"]), world.last().action.gpus) == (2, 2 * GPUS), "a request comes before growth"
    world.reply("wide", "accept")
    refused = world.ask("POST", "/placements", json={**body, "request_id": "q2"})
    assert "lender" in refused["sentence"], "accepted growth counts"
    world.close()


def test_growth_is_advice_without_an_executor_outside_the_canary_and_while_paused(tmp_path: Path) -> None:
    canary = make_world(tmp_path / "a", ACT.replace('"act"', '"act"\nact_in = ["batch"]'))
    canary.agents_pass_at(OLD_S)
    assert canary.states() == {"wide": "proposed"}
    canary.close()
    world = make_world(tmp_path / "b")
    world.pass_at(OLD_S)
    assert world.states() == {}, "no executor can grow it"
    world.ask("POST", "/actions/pause")
    world.agents_pass_at(30)
    assert world.states() == {"wide": "proposed"}
    assert world.place_now(4) == "placed", "a proposal holds nothing"
    world.ask("POST", "/actions/resume")
    world.agents_pass_at(30)
    assert world.states() == {"wide": "sent"}
    world.close()


def test_growth_is_sent_although_the_circuit_breaker_admits_no_gpu(tmp_path: Path) -> None:
    class Bounded(GrowthWorld):
        placer = PlacerConfig(taken_queue_share=0.0, taken_fleet_share=0.0)

    world = Bounded(tmp_path)
    world.agents_pass_at(OLD_S)
    assert world.states() == {"wide": "sent"}
    assert world.ask("GET", "/actions")["switches"]["opened_ms"] is None
    world.close()


def test_a_job_does_not_grow_again_within_ten_minutes(world: GrowthWorld) -> None:
    world.board.more = {"wide": {**GANG, "gang": {"min": 4, "desired": 16, "step": 2}}}
    resized_ms = world.clock.now_ms() + 1000 * OLD_S
    world.board.more["wide"] |= {"placed_ms": resized_ms}
    world.agents_pass_at(OLD_S + 590)
    assert world.states() == {}
    world.agents_pass_at(15)
    assert world.states() == {"wide": "sent"}


class GrowingSite:
    """An executor that begins to carry out an action as soon as it is sent."""

    def explain_inability(self, kind: str, job: str) -> str:
        return ""


def test_growth_that_another_executor_carries_out_is_held_from_sending(world: GrowthWorld) -> None:
    world.service.executors.configured = (("site", GrowingSite().explain_inability),)
    world.pass_at(OLD_S)
    assert (world.states(), world.last().action.executor) == ({"wide": "sent"}, "site")
    world.wait_for("p", "batch", 2)
    world.pass_at(5)
    assert (world.states(), world.placed()) == ({"wide": "sent"}, {})


def test_the_policy_says_how_long_a_gang_rests_between_two_changes(tmp_path: Path) -> None:
    world = make_world(tmp_path / "w", ACT.replace("[policy]", "[policy]\ndwell_s = 60"))
    world.board.more = {"wide": {**GANG, "gang": {"min": 4, "desired": 16, "step": 2}}}
    world.board.more["wide"] |= {"placed_ms": world.clock.now_ms() + 1000 * OLD_S}
    world.agents_pass_at(OLD_S + 50)
    assert world.states() == {}
    world.agents_pass_at(15)
    assert world.states() == {"wide": "sent"}
    world.close()
