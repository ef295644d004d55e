"""GET /v1/nodes/{node}/timeline and /drain, of what a pipeline published."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.events import NodeEvent, Started, Submitted
from fleetcast.fleet.requests import Gang, RankPlacement
from fleetcast.fleet.topology import NodeSpec, Topology
from fleetcast.ingest.source import Batch, MemorySource
from fleetcast.service.api.app import create_app
from fleetcast.service.api.routes.drain import Drain, _compute_unsaved_seconds
from fleetcast.service.api.routes.timeline import NodeTimeline
from fleetcast.service.pipeline.node_past import NodePasts
from fleetcast.service.pipeline.pipeline import Pipeline
from tests.service.api_world import Client, FakePlacer, config, publish, running

NOW_MS = 1_789_000_000_000
START = {"p10": NOW_MS, "p50": NOW_MS + 60_000, "p90": NOW_MS + 600_000}
TOPOLOGY = Topology.build([NodeSpec(name, 8, pool="train") for name in ("n1", "n2", "n3")])
RANKS = tuple(RankPlacement(rank, name, tuple(range(8))) for rank, name in enumerate(("n1", "n2")))
XID = NodeEvent(node="n1", source="kernel", sequence=1, time_ms=NOW_MS - 120_000, type="xid", gpu=3, code=63)
DRAIN = NodeEvent(node="n3", source="admin", sequence=1, time_ms=NOW_MS - 60_000, type="drain", message="fan")
OLD = NodeEvent(node="n1", source="kernel", sequence=2, time_ms=NOW_MS - 7_200_000, type="xid", gpu=1, code=13)


def work(folder: Path, port: int) -> None:
    """Two ticks of a pipeline: a job of two nodes, an XID of now and one of long ago, a drained node."""
    asked = Submitted(job="big", sequence=0, time_ms=NOW_MS - 900_000, gang=Gang(2, 2), gpus_per_node=8, user="ada")
    began = Started(job="big", sequence=1, time_ms=NOW_MS - 600_000, ranks=RANKS)
    batch = Batch(events=(asked, began), node_events=(OLD, XID, DRAIN))
    pipeline = Pipeline(config(folder, port), ManualClock(NOW_MS), TOPOLOGY, lambda _: [MemorySource([])])
    pipeline.apply_batch(batch)

    async def ticks() -> None:
        await pipeline.tick()
        await pipeline.save()
        await pipeline.close()

    asyncio.run(ticks())


@pytest.fixture(scope="module")
def placer() -> Iterator[FakePlacer]:
    with running(FakePlacer(body=msgspec.json.encode({"start_ms": START, "sentence": "Soon."}))) as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, placer: FakePlacer) -> Path:
    made = tmp_path_factory.mktemp("state")
    work(made, placer.port)
    return made


@pytest.fixture
def client(folder: Path, placer: FakePlacer) -> Iterator[Client]:
    placer.status = 200
    with Client(create_app(config(folder, placer.port), ManualClock(NOW_MS + 3000))) as found:
        yield found


def get(client: Client, path: str, kind: type) -> Any:
    response = client.get(f"/v1/nodes/{path}")
    assert response.status_code == 200, response.text
    assert response.headers["age"] == "3"
    return msgspec.convert(response.json(), kind, strict=True)


def test_a_timeline_holds_events_jobs_scores_and_actions_of_its_span(client: Client) -> None:
    body: NodeTimeline = get(client, "n1/timeline?minutes=60", NodeTimeline)
    assert (body.as_of_ms, body.from_ms, body.known_since_ms) == (NOW_MS, NOW_MS - 3_600_000, NOW_MS)
    assert [(row.time_ms, row.type, row.code, row.gpu) for row in body.events] == [(XID.time_ms, "xid", 63, 3)]
    [job] = body.jobs
    assert (job.job, job.gpus, job.began_ms, job.ended_ms) == ("big", 8, NOW_MS - 600_000, None)
    node = client.get("/v1/nodes/n1").json()
    for scores in body.scores:
        worst = max(
            (row["p"] for row in node["risk"] if row["horizon_s"] == scores.horizon_s and row["p"]), default=None
        )
        assert scores.steps[-1].p == worst
    assert [row.sentence for row in body.signals if row.ended_ms is None] == [
        row["sentence"] for row in node["reasons"]
    ]
    assert [(row.code, row.taken) for row in body.actions] == [(node["action"]["code"], False)]
    assert len(get(client, "n1/timeline?minutes=180", NodeTimeline).events) == 2


def test_a_drain_is_an_action_that_was_taken(client: Client) -> None:
    body: NodeTimeline = get(client, "n3/timeline", NodeTimeline)
    taken = [row for row in body.actions if row.taken]
    assert [(row.sentence, row.began_ms, row.ended_ms) for row in taken] == [
        ("Removed from service by admin: fan", NOW_MS - 60_000, None)
    ]
    assert body.states[-1].state == "drained"


def test_a_timeline_survives_the_process(folder: Path, placer: FakePlacer, client: Client) -> None:
    before = get(client, "n1/timeline", NodeTimeline)
    restarted = Pipeline(config(folder, placer.port), ManualClock(NOW_MS), TOPOLOGY, lambda _: [MemorySource([])])
    assert restarted.saved.parts[NodePasts].of["n1"].began_ms == before.known_since_ms
    assert [stay.job for stay in restarted.saved.parts[NodePasts].of["n1"].stays] == ["big"]
    asyncio.run(restarted.close())


@pytest.mark.parametrize(("down_ms", "outages"), [(25_000, 0), (6 * 3_600_000, 1)])
def test_a_timeline_claims_no_knowledge_of_an_outage(
    folder: Path, placer: FakePlacer, client: Client, down_ms: int, outages: int
) -> None:
    assert get(client, "n3/timeline", NodeTimeline).states[-1].ended_ms is None
    later = ManualClock(NOW_MS + down_ms)
    restarted = Pipeline(config(folder, placer.port), later, TOPOLOGY, lambda _: [MemorySource([])])
    past = restarted.saved.parts[NodePasts].of["n3"]
    unknown = [(row.began_ms, row.ended_ms) for row in past.states if row.code == "unknown"]
    assert unknown == [(NOW_MS, None)] * outages
    assert [step for step in past.steps if step == (NOW_MS, [None, None])] == [(NOW_MS, [None, None])] * outages
    asyncio.run(restarted.close())


@pytest.mark.parametrize("asked", ["n9/timeline", "n9/drain"])
def test_a_node_that_nobody_knows_is_named(client: Client, asked: str) -> None:
    response = client.get(f"/v1/nodes/{asked}")
    assert response.status_code == 404
    assert "'n9'" in response.json()["detail"]


@pytest.mark.parametrize("minutes", ["0", "-1", "10081", "x", "nan"])
def test_a_span_out_of_bounds_is_refused(client: Client, minutes: str) -> None:
    response = client.get(f"/v1/nodes/n1/timeline?minutes={minutes}")
    assert response.status_code == 422
    assert response.json()["errors"][0]["field"] == "minutes"


def test_without_timelines_a_board_is_warming(tmp_path: Path) -> None:
    publish(tmp_path)
    with Client(create_app(config(tmp_path), ManualClock(NOW_MS))) as client:
        for path in ("timeline", "drain"):
            assert client.get(f"/v1/nodes/n001/{path}").status_code == 503


def test_a_drain_names_the_jobs_and_what_is_lost(client: Client, placer: FakePlacer) -> None:
    body: Drain = get(client, "n1/drain", Drain)
    assert (body.gpus_lost, body.gpus_free_now, body.gpus_free_after) == (8, 0, 0)
    assert (body.gpus_in_service_now, body.gpus_in_service_after) == (16, 8)
    [job] = body.jobs
    assert (job.job, job.gpus, job.gpus_here, job.nodes, job.running_s) == ("big", 16, 8, 2, 600)
    assert (job.restart_ms, job.restart_reason) == (START, "")
    asked = msgspec.json.decode(placer.asked[-1][2])
    assert (asked["avoid_nodes"], asked["gang"]["desired"], asked["gpus_per_node"]) == (["n1"], 2, 8)
    assert body.queue_delay_s is None
    assert body.queue_reason
    assert "interrupts 1 job with 16 GPUs" in body.sentence


def test_work_since_the_last_checkpoint_is_told_also_where_the_next_one_is_overdue() -> None:
    assert _compute_unsaved_seconds(NOW_MS - 5_400_000, NOW_MS) == 5400.0
    assert _compute_unsaved_seconds(None, NOW_MS) is None


def test_without_a_placer_no_start_is_told_and_the_reason_is(client: Client, placer: FakePlacer) -> None:
    placer.status = 503
    [job] = get(client, "n1/drain", Drain).jobs
    assert job.restart_ms is None
    assert job.restart_reason


def test_a_drained_node_is_not_drained_again(client: Client) -> None:
    body: Drain = get(client, "n3/drain", Drain)
    assert not body.in_service
    assert (body.gpus_lost, body.jobs) == (0, [])
    assert "already" in body.sentence
