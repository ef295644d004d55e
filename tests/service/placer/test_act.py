"""Stops that executors carry out: sent as a whole set, seen, and the freed GPUs promised to who paid for them."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fleetcast.placement.actions.action import ActionKind
from fleetcast.placement.ledger.verify import verify_ledger
from fleetcast.placement.machines.view import Hearing
from fleetcast.service.config import AdapterConfig, AdaptersConfig, PlacerConfig
from fleetcast.service.placer.action_follow import BUSY
from fleetcast.service.placer.executors import ExecutorChoice, open_configured_executors
from tests.service.placer.test_reclaim import FILE, OLD_S, AdvisedBoard, AdvisedWorld
from tests.service.placer_world import GPUS, NODES

ACT = FILE.replace('"advise"', '"act"')
ACT_LATE_S = 720  # grace and the time beyond it


class ActBoard(AdvisedBoard):
    """A board with telemetry if `hearing` is set. busy: nodes whose GPUs work for no job."""

    hearing: int | None = None
    busy: tuple[int, ...] = ()

    def sections(self) -> dict[str, Any]:
        found = super().sections()
        occupancy = msgspec.json.decode(found["occupancy"])
        occupancy["running"] = [(job, self.more.get(job, {}).get("attempt", 1)) for job in self.jobs]
        found["occupancy"] = msgspec.json.encode(occupancy)
        if self.hearing is not None:
            found["node.hearing"] = np.full(NODES, self.hearing, np.int8)
            found["gpu.unknown_use"] = np.zeros((NODES, GPUS), bool)
            found["gpu.unknown_use"][list(self.busy)] = True
        return found


class ActWorld(AdvisedWorld):
    """A placer that stops jobs, whose agents poll their actions."""

    board: ActBoard

    def __init__(self, folder: Path, text: str = ACT) -> None:
        super().__init__(folder, text)
        self.board = ActBoard(self.config.board)
        self.board.queue_of, self.board.more = {}, {}

    def poll(self, *jobs: str) -> None:
        for job in jobs:
            self.ask("GET", f"/actions?job={job}&state=sent")

    def agents_pass_at(self, seconds: float) -> None:
        """Let time pass. The agents of all jobs poll, then a pass runs."""
        self.clock.advance(seconds)
        self.poll(*self.board.jobs)
        self.pass_at(0)

    def states(self) -> dict[str, str]:
        """Return job → state of its last action."""
        rows = self.service.ledger.actions.read_after(0, 1000)
        return {row.action.job: row.state.value for row in rows}

    def reply(self, job: str, verb: str, **more: Any) -> Any:
        record = self.service.ledger.actions.find_open_action_of(job)
        assert record is not None
        return self.ask("POST", f"/actions/{record.action_id}/{verb}", json={"job": job, "attempt": 1, **more})

    def end(self, job: str) -> None:
        """End a job on the next board."""
        del self.board.jobs[job]
        self.board.ended.append((job, 1, self.clock.now_ms()))

    def placed(self) -> dict[str, list[str]]:
        """Return request → nodes of the placements in force."""
        return {
            row.request_id: sorted({rank.node for rank in row.ranks})
            for row in self.service.ledger.list_active_intents()
        }

    def why(self, request_id: str) -> str:
        steps = self.ask("GET", f"/queue/{request_id}/why")["ladder"]
        return next(step["sentence"] for step in steps if step["code"] == "reclaim")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[ActWorld]:
    world = ActWorld(tmp_path)
    yield world
    world.close()
    assert verify_ledger(world.config.ledger).is_intact


def send_stop(world: ActWorld) -> None:
    """The request p of 4 nodes is owed GPUs, the job a is to stop for it, and r waits for the same GPUs."""
    world.fill(own=("owed", 4), a=("lender", 4), b=("lender", 4), c=("lender", 4))
    old_ms = world.clock.now_ms()
    world.board.more = {"a": {"checkpoint_ms": old_ms + 1000 * (OLD_S - 10)}, "b": {"checkpoint_ms": old_ms + 1000}}
    world.wait_for("p", "owed", 4)
    world.wait_for("r", "lender", 4)
    world.agents_pass_at(OLD_S)
    assert world.states() == {"a": "sent"}


def send_two_stops(world: ActWorld) -> None:
    """The request p of 4 nodes is owed GPUs, and the jobs a and b of 2 nodes each are to stop for it."""
    world.fill(own=("owed", 4), a=("lender", 2), b=("lender", 2), c=("lender", 2), d=("lender", 6))
    near_ms = world.clock.now_ms() + 1000 * (OLD_S - 10)
    world.board.more = {"a": {"checkpoint_ms": near_ms}, "b": {"checkpoint_ms": near_ms}}
    world.wait_for("p", "owed", 4)
    world.agents_pass_at(OLD_S)
    assert world.states() == {"a": "sent", "b": "sent"}


def test_a_stop_is_sent_accepted_seen_and_its_payer_alone_is_placed_there(world: ActWorld) -> None:
    send_stop(world)
    (row,) = world.ask("GET", "/actions?job=a&state=sent")["rows"]
    assert (row["executor"], row["payer"], row["gpus"]) == ("agents", "p", 32)
    assert row["by_ms"] == world.clock.now_ms() + 1000 * ACT_LATE_S
    world.reply("a", "accept")
    world.pass_at(10)
    assert (world.states(), world.placed()) == ({"a": "accepted"}, {})
    world.end("a")
    world.pass_at(10)
    assert world.states() == {"a": "seen"}
    assert world.placed() == {"p": ["n05", "n06", "n07", "n08"]}
    world.pass_at(10)
    assert world.service.view.promised_sets.read() == {}


def test_a_rival_gets_no_promised_gpus_neither_by_a_pass_nor_at_once(world: ActWorld) -> None:
    world.fill(own=("owed", 4), a=("lender", 2), b=("lender", 2), c=("lender", 8))
    old_ms = world.clock.now_ms() + 1000 * (OLD_S - 10)
    world.board.more = {"a": {"checkpoint_ms": old_ms}, "b": {"checkpoint_ms": old_ms}}
    world.wait_for("p", "owed", 4)
    world.wait_for("r", "lender", 2, priority=0)
    world.agents_pass_at(OLD_S)
    assert world.states() == {"a": "sent", "b": "sent"}
    world.end("a")
    for seconds in (5, 30):
        world.pass_at(seconds)
        assert world.placed() == {}
    body = {"request_id": "now", "queue": "lender", "gang": 1, "gpus_per_node": 8}
    assert world.ask("POST", "/placements", json=body)["outcome"] == "refused"
    world.restart()
    world.pass_at(5)
    assert world.placed() == {}
    assert "waits until 1 job makes room for it (b)" in str(world.ask("GET", "/queue/p/why"))
    world.end("b")
    world.pass_at(5)
    assert world.placed() == {"p": ["n05", "n06", "n07", "n08"]}


def test_a_promise_ends_with_its_time_and_the_job_that_did_not_stop_is_not_tried_again(world: ActWorld) -> None:
    send_stop(world)
    world.agents_pass_at(ACT_LATE_S + 1)
    assert world.states() == {"a": "expired", "b": "sent"}, "the next cheapest set, once"
    world.agents_pass_at(ACT_LATE_S + 1)
    assert world.states() == {"a": "expired", "b": "expired"}
    world.agents_pass_at(30)
    assert world.states() == {"a": "expired", "b": "expired"}
    assert world.why("p") == "stops no further job: two sets of jobs did not make room"


def test_a_refusal_gets_the_next_set_at_once_and_no_more_than_needed(world: ActWorld) -> None:
    send_two_stops(world)
    world.reply("a", "accept")
    world.reply("b", "refuse", why="cannot")
    world.end("a")
    world.agents_pass_at(10)
    assert world.states() == {"a": "seen", "b": "refused", "c": "sent"}
    world.end("c")
    world.agents_pass_at(10)
    assert world.placed() == {"p": ["n05", "n06", "n09", "n10"]}


@pytest.mark.parametrize("taker", ["a", "stranger"])
def test_gpus_that_a_new_attempt_or_another_job_takes_at_once_are_replaced_by_the_next_set(
    world: ActWorld, taker: str
) -> None:
    send_two_stops(world)
    nodes = world.board.jobs["a"]
    world.end("a")
    world.board.jobs[taker], world.board.queue_of[taker] = nodes, "lender"
    world.board.more[taker] = {"attempt": 2, "started_ms": world.clock.now_ms()}
    world.agents_pass_at(10)
    assert world.states() == {"a": "seen", "b": "sent", "c": "sent"}
    world.end("b")
    world.end("c")
    world.agents_pass_at(10)
    assert world.placed() == {"p": ["n07", "n08", "n09", "n10"]}


def test_busy_gpus_contradict_a_stop_and_go_to_nobody(world: ActWorld) -> None:
    world.board.hearing = Hearing.FRESH
    world.fill(own=("owed", 4), a=("lender", 2), b=("lender", 2), c=("lender", 8))
    world.board.more = {"a": {"checkpoint_ms": world.clock.now_ms() + 1000 * (OLD_S - 10)}}
    world.wait_for("p", "owed", 2)
    world.agents_pass_at(OLD_S)
    world.reply("a", "accept")
    world.end("a")
    world.board.busy = (4, 5)
    world.agents_pass_at(30)
    (record,) = [row for row in world.service.ledger.actions.read_after(0, 9) if row.action.job == "a"]
    assert (record.state, record.why) == ("refused", BUSY)
    assert world.placed() == {}
    assert world.states()["b"] == "sent"


def test_gpus_of_a_stop_are_free_only_once_they_show_idle_even_if_its_payer_no_longer_waits(world: ActWorld) -> None:
    world.board.hearing = Hearing.FRESH
    send_stop(world)
    world.ask("DELETE", "/queue/p")
    world.end("a")
    world.pass_at(10)
    assert (world.states(), world.placed()) == ({"a": "sent"}, {})
    world.pass_at(90)
    assert world.states() == {"a": "seen"}
    world.pass_at(10)
    assert set(world.placed()) == {"r"}


def test_a_stop_whose_payer_no_longer_waits_counts_against_further_stops(world: ActWorld) -> None:
    send_stop(world)
    world.ask("DELETE", "/queue/p")
    world.wait_for("q", "owed", 4)
    world.agents_pass_at(400)
    assert world.states() == {"a": "sent"}, "without a and one more job, lender would hold less than its guarantee"
    world.end("a")
    world.pass_at(10)
    world.pass_at(10)
    assert world.placed() == {"q": ["n05", "n06", "n07", "n08"]}


@pytest.mark.parametrize("set_ms", [-3_600_000, 3_600_000])
def test_a_request_waits_its_patience_whatever_the_clock_is_set_to(world: ActWorld, set_ms: int) -> None:
    world.fill(own=("owed", 4), a=("lender", 4), b=("lender", 8))
    world.agents_pass_at(3 * 3600)
    world.wait_for("p", "owed", 4)
    world.agents_pass_at(10)
    world.clock.time_ms += set_ms
    world.agents_pass_at(280)
    assert (world.states(), world.why("p")) == ({}, "stops no job yet: it has waited 290 of 300 s")
    world.agents_pass_at(10)
    assert world.states() == {"a": "sent"}


@pytest.mark.parametrize("set_ms", [-3_600_000, 3_600_000])
def test_a_clock_that_is_set_after_a_job_has_left_delays_its_request_by_the_readings_alone(
    world: ActWorld, set_ms: int
) -> None:
    world.board.hearing = Hearing.FRESH
    send_stop(world)
    world.end("a")
    world.pass_at(10)
    world.clock.time_ms += set_ms
    world.pass_at(10)
    world.pass_at(70)
    assert world.states() == {"a": "sent"}
    world.pass_at(20)
    assert world.states() == {"a": "seen"}
    assert set(world.placed()) == {"p"}


def test_an_idle_reading_of_a_minute_is_needed_and_late_telemetry_waits(world: ActWorld) -> None:
    world.board.hearing = Hearing.FRESH
    send_stop(world)
    world.end("a")
    world.pass_at(10)
    assert (world.states(), world.placed()) == ({"a": "sent"}, {})
    world.board.hearing = Hearing.STALE
    world.pass_at(70)
    assert world.states() == {"a": "sent"}
    world.board.hearing = Hearing.FRESH
    world.pass_at(20)
    assert world.states() == {"a": "seen"}
    assert set(world.placed()) == {"p"}
    record = world.service.ledger.actions.read_after(0, 9)[0]
    assert record.why == "telemetry shows it"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (ACT.replace('"act"', '"act"\nact_in = ["batch"]'), "act_in does not name the queue of a"),
        (ACT, "actions are paused"),
    ],
)
def test_a_set_outside_the_canary_or_while_paused_is_only_advice(tmp_path: Path, text: str, said: str) -> None:
    world = ActWorld(tmp_path, text)
    if text is ACT:
        world.ask("POST", "/actions/pause")
    world.fill(own=("owed", 4), a=("lender", 4), b=("lender", 8))
    world.board.more = {"a": {"checkpoint_ms": world.clock.now_ms() + 1000 * (OLD_S - 10)}}
    world.wait_for("p", "owed", 4)
    world.agents_pass_at(OLD_S)
    assert world.states() == {"a": "proposed"}
    assert world.why("p").endswith(f"not sent: {said}")
    if text is ACT:
        world.ask("POST", "/actions/resume")
        world.agents_pass_at(30)
        assert world.states() == {"a": "sent"}
    world.close()


def test_a_job_without_an_executor_is_not_planned(world: ActWorld) -> None:
    world.fill(own=("owed", 4), a=("lender", 12))
    world.wait_for("p", "owed", 4)
    world.pass_at(OLD_S)
    assert world.states() == {}
    assert world.why("p") == "stops no job: 1 job of the same queue, 1 job that no executor can stop"


def test_a_set_beyond_the_bound_of_an_hour_is_never_sent_and_opens_no_breaker(tmp_path: Path) -> None:
    class Bounded(ActWorld):
        placer = PlacerConfig(taken_queue_share=1.0, taken_fleet_share=0.2)

    world = Bounded(tmp_path)
    world.fill(own=("owed", 4), a=("lender", 4), b=("lender", 8))
    world.wait_for("p", "owed", 4)
    world.agents_pass_at(OLD_S)
    assert world.states() == {}
    bound = "32 GPUs of the fleet within an hour are more than 20.0% of its 128 (placer.taken_fleet_share)"
    assert world.why("p") == f"stops no job: {bound}"
    assert world.ask("GET", "/actions")["switches"]["opened_ms"] is None
    world.rewrite(ACT.replace('"act"', '"advise"'))
    world.agents_pass_at(10)
    assert (world.states(), world.why("p")[:34]) == ({"a": "proposed"}, "would stop 1 job for it (a), at 20")
    assert world.why("p").endswith(f" GPU-hours of lost work; the mode act would not send it: {bound}")
    world.close()


class OneJobSite:
    """An executor that can stop the job `a` alone."""

    def explain_inability(self, kind: str, job: str) -> str:
        return "" if kind == "preempt" and job == "a" else "runs elsewhere"


def make_site(options: Mapping[str, Any]) -> OneJobSite:
    return OneJobSite()


def test_a_configured_executor_is_chosen_for_the_jobs_that_it_can_stop() -> None:
    rows = (AdapterConfig(use=f"{__name__}:make_site", name="site", mode="write"),)
    choice = ExecutorChoice(open_configured_executors(AdaptersConfig(executor=rows)))
    choice.record_agent("b", 0)
    names = {job: choice.find_executor(ActionKind.PREEMPT, job, 1000) for job in "abc"}
    assert names == {"a": "site", "b": "agents", "c": ""}
    assert choice.find_executor(ActionKind.PREEMPT, "b", 300_001) == ""
    assert choice.find_executor(ActionKind.SHRINK, "a", 1000) == ""
    observed = (AdapterConfig(use=f"{__name__}:make_site", name="site"),)
    assert open_configured_executors(AdaptersConfig(executor=observed)) == []


@pytest.mark.parametrize(("cost_s", "stopped"), [(30.0, "a"), (119.0, "b"), (200.0, "b")])
def test_a_job_whose_agent_writes_a_checkpoint_within_the_grace_loses_that_time_alone(
    world: ActWorld, cost_s: float, stopped: str
) -> None:
    """The last checkpoint of b is 100 s old, and that of a 1,000 s. The agent of a writes another before it stops."""
    world.fill(own=("owed", 4), a=("lender", 4), b=("lender", 4), c=("lender", 4))
    began_ms = world.clock.now_ms()
    world.board.more = {
        "a": {"checkpoint_ms": began_ms + 1000 * (OLD_S - 1000), "checkpoint_cost_s": cost_s},
        "b": {"checkpoint_ms": began_ms + 1000 * (OLD_S - 100)},
    }
    world.wait_for("p", "owed", 4)
    world.agents_pass_at(OLD_S)
    assert world.states() == {stopped: "sent"}
    record = world.service.ledger.actions.find_open_action_of(stopped)
    assert record is not None
    assert record.action.cost.lost == 32 * (cost_s if stopped == "a" else 100.0)


def test_only_a_caller_who_asks_for_the_actions_sent_to_a_job_counts_as_its_agent(world: ActWorld) -> None:
    world.fill(own=("owed", 4), a=("lender", 12))
    for query in ("job=a", "job=a&state=open", "job=a&order=newest", "state=sent"):
        world.ask("GET", f"/actions?{query}")
    assert world.service.executors.find_executor(ActionKind.PREEMPT, "a", world.clock.now_ms()) == ""
    world.poll("a")
    assert world.service.executors.find_executor(ActionKind.PREEMPT, "a", world.clock.now_ms()) == "agents"
