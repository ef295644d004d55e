"""Agents of simulated jobs against a real placer: actions are proposed and sent in it, and its API answers them."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from fleetcast.fleet.requests import Gang, RankPlacement
from fleetcast.placement.actions.action import ActionKind
from fleetcast.service.placer.http import make_app
from fleetcast.simulator.agents import LATE_S, LIE_S, POLL_S, JobAgents, Manner, change_ranks, draw_manner
from fleetcast.simulator.days.replay import OngoingJob, TraceReplay, make_opening_events
from fleetcast.simulator.driver import BROKEN_S, Driver
from fleetcast.simulator.elastic_story import ElasticStory, make_elastic_job
from fleetcast.simulator.faults.faults import QUIET, FaultPlan
from fleetcast.simulator.live_job import SPEEDUP, LiveJob
from fleetcast.simulator.node_story import NodeStory
from fleetcast.simulator.outbox import ProductApi
from tests.placement.actions.action_world import make_action
from tests.service.placer_world import NOW_MS, World
from tests.simulator.test_driver import PROFILE, FakeFleet, job, ranks

GRACE_S, BY_S = 120.0, 600.0


class PlacerApi(ProductApi):
    """The API of a placer in this process. Events and requests are only recorded."""

    def __init__(self, world: World, client: httpx.AsyncClient) -> None:
        self.world, self.client, self.retries = world, client, 0
        self.events: list[dict[str, Any]] = []
        self.requests: list[dict[str, Any]] = []
        self.replies: list[tuple[str, int]] = []

    async def request_once(
        self, method: str, path: str, body: bytes | None = None, kind: str = "json"
    ) -> tuple[int, bytes] | None:
        if path == "/v1/events":
            self.events += [msgspec.json.decode(line) for line in (body or b"").splitlines()]
            return 202, b'{"rejected":[]}'
        if path == "/v1/queue":
            self.requests.append(msgspec.json.decode(body or b""))
            return 202, b"{}"
        answer = await self.client.request(method, path.removeprefix("/v1"), content=body)
        if method == "POST":
            self.replies.append((path.rpartition("/")[2], answer.status_code))
        return answer.status_code, answer.content


class Scene:
    """A running gang "a" on nodes n01 to n04 with an agent, and an action on it that was sent."""

    def __init__(self, world: World, api: PlacerApi, manner: Manner, changes: dict[str, Any]) -> None:
        self.world, self.api, self.fleet = world, api, FakeFleet()
        gang = OngoingJob(job("a", 32, run_s=8000.0), NOW_MS - 100_000, 7900.0, ranks("n01", "n02", "n03", "n04"))
        replay = TraceReplay(NOW_MS, (), (gang,), ())
        self.driver = Driver(self.fleet, api, world.clock, replay, (), lambda _: PROFILE)
        self.driver.start_ongoing_jobs()
        self.agents = JobAgents(self.driver, lambda _: manner)
        fields = {"gpus": 32.0, "ranks": ranks("n01", "n02", "n03", "n04"), "grace_s": GRACE_S, **changes}
        action = make_action("a", by_ms=NOW_MS + round(1000 * BY_S), **fields)
        control = world.service.actions
        (self.action_id,) = [row.action_id for row in control.propose([action], NOW_MS).opened]
        assert control.send([self.action_id], NOW_MS)

    async def wait(self, seconds: float) -> None:
        """Let fleet time pass, in steps of half a minute."""
        while seconds > 0:
            self.world.clock.advance(min(seconds, 30.0))
            await self.driver.advance(self.world.clock.now_ms())
            await self.agents.poll_jobs()
            await self.agents.act(self.world.clock.now_ms())
            await self.driver.outbox.wait_until_empty()
            seconds -= 30.0

    @property
    def state(self) -> str:
        return self.world.service.actions.get_action(self.action_id).state.value

    def types(self) -> list[str]:
        return [row["type"] for row in self.api.events if row["type"] not in ("phase", "step")]


def play(folder: Path, scene: Callable[[Scene], Awaitable[None]], manner: Manner = Manner.OBEY, **changes: Any) -> None:
    async def run() -> None:
        world = World(folder)
        world.board.jobs = {"a": (0, 1, 2, 3)}
        world.board.publish()
        world.service.view.observe_fleet()
        world.service.actions._limits = type(world.service.actions._limits)(1.0, 1.0)
        app = make_app(world.service, lambda: None)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
            stage = Scene(world, PlacerApi(world, client), manner, changes)
            tasks = [asyncio.create_task(stage.driver.outbox.run()), asyncio.create_task(stage.driver._post_requests())]
            try:
                await scene(stage)
            finally:
                for task in tasks:
                    task.cancel()
                    with suppress(asyncio.CancelledError):
                        await task
        world.close()

    asyncio.run(run())


def test_an_agent_writes_a_checkpoint_stops_within_the_grace_and_comes_back(tmp_path: Path) -> None:
    async def scene(stage: Scene) -> None:
        await stage.wait(30)
        assert (stage.state, stage.api.replies) == ("accepted", [("accept", 200)])
        assert stage.driver.running, "it still writes its checkpoint"
        await stage.wait(30)
        assert not stage.fleet.running
        assert stage.types() == ["checkpoint", "checkpoint", "preempted", "submitted", "queued"]
        assert stage.api.events[-3]["by"] == "urgent"
        waits = stage.driver.waiting["a.2"]
        assert waits.remaining_s == 7900.0 - 60, "no work is lost but that of the checkpoint's own time"
        await stage.driver._requests.join()
        assert [row["attempt"] for row in stage.api.requests] == [2]

    play(tmp_path, scene)


def test_a_shrunk_gang_goes_on_with_the_ranks_that_stay_and_takes_longer(tmp_path: Path) -> None:
    async def scene(stage: Scene) -> None:
        await stage.wait(60)
        assert [rank.node for rank in stage.fleet.running["a"]] == ["n01", "n04"]
        assert stage.types() == ["checkpoint", "checkpoint", "resized"]
        left_s = stage.driver.running["a"].remaining_s
        assert left_s == pytest.approx((7900.0 - 60) * 2**SPEEDUP + 60.0)
        assert not stage.driver.waiting

    leaving = (RankPlacement(0, "n02", tuple(range(8))), RankPlacement(1, "n03", tuple(range(8))))
    play(tmp_path, scene, kind=ActionKind.SHRINK, gpus=16.0, ranks=leaving)


def test_a_replaced_rank_gets_the_number_of_the_rank_that_left(tmp_path: Path) -> None:
    async def scene(stage: Scene) -> None:
        await stage.wait(60)
        assert [(rank.rank, rank.node) for rank in stage.fleet.running["a"]] == [
            (0, "n01"), (1, "n09"), (2, "n03"), (3, "n04"),
        ]  # fmt: skip

    leaving, places = ranks("n02"), ranks("n09")
    play(tmp_path, scene, kind=ActionKind.REPLACE, gpus=8.0, ranks=leaving, places=places)


def test_a_gang_that_lost_a_node_continues_on_another_one_from_its_last_checkpoint(tmp_path: Path) -> None:
    async def scene(stage: Scene) -> None:
        stage.driver.can_wait = lambda live: True
        stage.fleet.dead.append(("a", "node_lost", "n02", "it does not answer"))
        stage.driver.running["a"].safe_s = 7990.0
        await stage.driver.advance(stage.world.clock.now_ms())
        await stage.wait(30)
        assert [rank.node for rank in stage.fleet.running["a"]] == ["n01", "n09", "n03", "n04"]
        assert [row["type"] for row in stage.api.events if row["type"] in ("lost", "failed", "checkpoint")] == ["lost"]
        live = stage.driver.running["a"]
        assert (live.remaining_s, live.broken_ms) == (7990.0 + 60, 0)

    play(tmp_path, scene, kind=ActionKind.REPLACE, gpus=8.0, ranks=ranks("n02"), places=ranks("n09"))


@pytest.mark.parametrize(("is_seen", "last"), [(True, "node_replaced"), (False, "node_not_replaced")])
def test_the_story_of_a_lost_node_ends_with_its_replacement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_seen: bool, last: str
) -> None:
    monkeypatch.setattr("fleetcast.simulator.node_story.CHECK_INTERVAL_S", 0.01)
    turns: list[tuple[str, str]] = []

    async def scene(stage: Scene) -> None:
        faults = FaultPlan([f"n{number:02d}" for number in range(1, 17)], 8, QUIET, 0)
        stage.driver.live.set()
        story = NodeStory(stage.driver, faults, lambda *turn: turns.append(turn), begins_s=0.0)
        playing = asyncio.create_task(story.run())
        while "replace" not in dict(turns):
            await asyncio.sleep(0.01)
        control = stage.world.service.actions
        if is_seen:
            control.record_seen(stage.action_id, NOW_MS)
        else:
            control.record_contradiction(stage.action_id, "it stays", NOW_MS)
        await asyncio.wait_for(playing, 60)
        assert [event for event, _ in turns] == ["node_lost", "replace", last]
        assert faults.list_faulty_nodes() == {"n04"}

    changes = {"kind": ActionKind.REPLACE, "gpus": 8.0, "ranks": ranks("n04"), "places": ranks("n09"), "payer": ""}
    play(tmp_path, scene, **changes)


@pytest.mark.parametrize("is_seen", [True, False])
def test_the_story_of_an_elastic_gang_shrinks_it_and_lets_it_grow_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_seen: bool
) -> None:
    monkeypatch.setattr("fleetcast.simulator.elastic_story.CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr("fleetcast.simulator.elastic_story.ELASTIC", "a")
    turns: list[tuple[str, str]] = []

    async def has_turn(event: str) -> None:
        async with asyncio.timeout(60):
            while event not in dict(turns):
                await asyncio.sleep(0.01)

    async def scene(stage: Scene) -> None:
        control, driver = stage.world.service.actions, stage.driver
        driver.live.set()
        playing = asyncio.create_task(ElasticStory(driver, lambda *turn: turns.append(turn), begins_s=0.0).run())
        await has_turn("shrink")
        if not is_seen:
            control.record_contradiction(stage.action_id, "it stays", NOW_MS)
            await asyncio.wait_for(playing, 60)
            assert [event for event, _ in turns] == ["short", "shrink", "shrink_failed"]
            return
        control.record_seen(stage.action_id, NOW_MS)
        await has_turn("shrink_seen")
        driver._decided.pop("story-short").set_result({"sentence": "placed"})
        await has_turn("short_runs")
        (short,) = stage.api.requests
        assert (short["pool"], short["queue"], short["gang"]) == ("research", "urgent", 2)
        driver.waiting.pop("story-short")
        await has_turn("short_ended")
        grows = make_action("a", by_ms=NOW_MS + 600_000, **GROWS)
        (action_id,) = [row.action_id for row in control.propose([grows], NOW_MS).opened]
        control.send([action_id], NOW_MS)
        await has_turn("grow")
        control.record_seen(action_id, NOW_MS)
        await asyncio.wait_for(playing, 60)
        assert turns[-1][0] == "grow_seen"

    leaving = ranks("n03", "n04")
    play(tmp_path, scene, kind=ActionKind.SHRINK, gpus=16.0, ranks=leaving, payer="story-short")


def test_the_elastic_gang_of_the_story_states_its_sizes_and_its_pool() -> None:
    gang = make_elastic_job(("n1", "n2", "n3", "n4"), 8, NOW_MS)
    submitted, started = make_opening_events(gang.job, 8, started_ms=gang.started_ms, ranks=gang.ranks)
    assert (submitted.gang, submitted.gpus_per_node, submitted.pool) == (Gang(2, 4, 2), 8, "research")
    assert started.ranks == ranks("n1", "n2", "n3", "n4")
    request = LiveJob(gang.job, PROFILE, 1.0, 1.0).make_next_attempt().make_request(8)
    assert (request.gang, request.pool) == (Gang(2, 4, 2), "research")


GROWS = {"kind": ActionKind.GROW, "gpus": 16.0, "ranks": (), "places": ranks("n09", "n10"), "payer": ""}


def test_a_gang_grows_onto_its_new_nodes_and_ends_sooner(tmp_path: Path) -> None:
    async def scene(stage: Scene) -> None:
        await stage.wait(60)
        held = [(rank.rank, rank.node) for rank in stage.fleet.running["a"]]
        assert held == [(0, "n01"), (1, "n02"), (2, "n03"), (3, "n04"), (4, "n09"), (5, "n10")]
        assert stage.types() == ["checkpoint", "checkpoint", "resized"]
        left_s = stage.driver.running["a"].remaining_s
        assert left_s == pytest.approx((7900.0 - 60) * (4 / 6) ** SPEEDUP + 60.0)

    play(tmp_path, scene, **GROWS)


def test_a_gang_does_not_grow_after_its_growth_was_withdrawn(tmp_path: Path) -> None:
    async def scene(stage: Scene) -> None:
        await stage.wait(30)
        assert stage.state == "accepted"
        why = "its attempt ended before it grew"
        stage.world.service.actions.withdraw(stage.action_id, why, NOW_MS, has_ended=True)
        await stage.wait(120)
        assert stage.api.replies == [("accept", 200), ("accept", 409)]
        assert "resized" not in stage.types()

    play(tmp_path, scene, **GROWS)


def test_a_late_agent_takes_no_new_node_after_its_action_has_ended(tmp_path: Path) -> None:
    async def scene(stage: Scene) -> None:
        await stage.wait(BY_S + 2 * LATE_S)
        assert (stage.state, stage.api.replies) == ("expired", [("accept", 409)])
        assert stage.types() == []

    changes = {"kind": ActionKind.REPLACE, "gpus": 8.0, "ranks": ranks("n02"), "places": ranks("n09")}
    play(tmp_path, scene, Manner.LATE, **changes)


def test_a_gang_without_another_node_fails_in_the_end(tmp_path: Path) -> None:
    async def scene(stage: Scene) -> None:
        stage.driver.can_wait = lambda live: True
        stage.fleet.dead.append(("a", "node_lost", "n02", "it does not answer"))
        await stage.wait(BROKEN_S)
        assert "failed" not in stage.types()
        await stage.wait(60)
        assert stage.types()[-3:] == ["failed", "submitted", "queued"]

    play(tmp_path, scene, Manner.REFUSE)


def test_an_agent_that_refuses_keeps_its_job(tmp_path: Path) -> None:
    async def scene(stage: Scene) -> None:
        await stage.wait(300)
        assert (stage.state, stage.types()) == ("refused", [])
        assert "a" in stage.fleet.running

    play(tmp_path, scene, Manner.REFUSE)


def test_an_agent_that_hangs_replies_nothing(tmp_path: Path) -> None:
    async def scene(stage: Scene) -> None:
        await stage.wait(300)
        assert (stage.state, stage.api.replies, stage.types()) == ("sent", [], [])

    play(tmp_path, scene, Manner.HANG)


def test_a_liar_reports_a_stop_while_its_gpus_work(tmp_path: Path) -> None:
    async def scene(stage: Scene) -> None:
        await stage.wait(90)
        assert stage.types()[-1] == "preempted"
        assert "a" in stage.fleet.running
        assert not stage.driver.running
        await stage.wait(LIE_S + 30)
        assert not stage.fleet.running
        assert "a.2" in stage.driver.waiting

    play(tmp_path, scene, Manner.LIE)


def test_a_late_agent_replies_and_stops_after_the_action_has_expired(tmp_path: Path) -> None:
    async def scene(stage: Scene) -> None:
        await stage.wait(BY_S)
        assert stage.api.replies == []
        await stage.wait(LATE_S + 30)
        assert (stage.state, stage.api.replies) == ("expired", [("accept", 409)])
        assert stage.types()[:3] == ["checkpoint", "checkpoint", "preempted"]

    play(tmp_path, scene, Manner.LATE)


def test_an_agent_that_replies_twice_gets_the_same_answer(tmp_path: Path) -> None:
    async def scene(stage: Scene) -> None:
        await stage.wait(60)
        assert stage.api.replies == [("accept", 200)] * 2
        assert stage.types().count("preempted") == 1

    play(tmp_path, scene, Manner.TWICE)


def test_a_job_that_dies_meanwhile_has_no_new_checkpoint(tmp_path: Path) -> None:
    async def scene(stage: Scene) -> None:
        await stage.wait(60)
        assert stage.types() == ["checkpoint", "failed", "submitted", "queued"]
        assert stage.driver.waiting["a.2"].remaining_s == 7900.0

    play(tmp_path, scene, Manner.DIE)


def test_an_action_is_carried_out_once_however_often_it_is_read(tmp_path: Path) -> None:
    async def scene(stage: Scene) -> None:
        await stage.wait(10 * POLL_S)
        assert len(stage.api.replies) == 1

    play(tmp_path, scene, kind=ActionKind.SHRINK, gpus=8.0, ranks=ranks("n02"))


def test_the_share_of_unruly_agents_is_as_asked() -> None:
    drawn = [draw_manner(f"j{number}", 1, 0.3) for number in range(2000)]
    assert drawn == [draw_manner(f"j{number}", 1, 0.3) for number in range(2000)]
    assert 0.26 < sum(manner is not Manner.OBEY for manner in drawn) / 2000 < 0.34
    assert set(drawn) == set(Manner)
    assert {draw_manner(f"j{number}", 1, 0.0) for number in range(100)} == {Manner.OBEY}


def test_ranks_are_matched_by_their_gpus() -> None:
    half = RankPlacement(0, "n1", (0, 1, 2, 3)), RankPlacement(1, "n1", (4, 5, 6, 7))
    assert change_ranks(half, [RankPlacement(5, "n1", (4,))], ()) == half[:1]
