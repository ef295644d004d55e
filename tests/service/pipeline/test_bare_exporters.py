"""The first day: exporters alone, and no job event at all."""

import asyncio
from pathlib import Path

from fleet.events import Finished, Started, Submitted
from fleet.requests import RankPlacement
from ingest.source import Batch
from service.config import PlacerConfig
from tests.service.bare_world import BUSY, GPUS, IDLE, NOW_MS, BareWorld, page

FULL = page("n3", [(BUSY, {})] * GPUS)
EMPTY = page("n1", [(IDLE, {})] * GPUS)
UNTOLD = "8 GPUs of node n3 are in use by work that no job event tells of"


def test_gpus_that_telemetry_shows_at_work_get_nothing_and_the_decision_says_why(tmp_path: Path) -> None:
    world = BareWorld(tmp_path)
    board = world.run(90, n1=EMPTY, n3=FULL)
    placed = world.decide(board, gang=1, gpus_per_node=8)
    assert placed.outcome == "placed"
    assert {rank.node for rank in placed.ranks} == {"n1"}
    assert placed.rejected == {"unknown_use": 1}
    assert placed.sentence.endswith(f"; {UNTOLD}")
    refused = world.decide(board, gang=2, gpus_per_node=8)
    assert refused.outcome == "refused"
    assert refused.nodes == refused.candidates + sum(refused.rejected.values())
    assert "1 in use by work that no job event tells of" in refused.sentence
    assert refused.sentence.endswith(f"; {UNTOLD}")


def test_the_map_the_node_the_metrics_and_demand_tell_of_unknown_use(tmp_path: Path) -> None:
    world = BareWorld(tmp_path)
    board = world.run(240, n1=EMPTY, n3=FULL)
    fleet = board.json("doc.fleet")
    assert fleet["gpus"] == {"running": 8, "free": 8, "unusable": 0, "total": 16, "unknown_use": 8}
    by_node = {row["node"]: row["gpus"] for row in fleet["nodes"]}
    assert by_node["n3"] == [{"job": None, "usable": True, "held_by": "unknown"}] * GPUS
    assert by_node["n1"] == [{"job": None, "usable": True}] * GPUS
    assert bytes(board.raw("answers.node")).count(b'"held_by":"unknown"') == GPUS
    metrics = bytes(board.raw("metrics.fleet"))
    assert b'fleetcast_gpus{state="running"} 8' in metrics
    assert b"fleetcast_gpus_unknown_use 8" in metrics
    world.forecast()
    assert world.running() == world.running(pool="unknown") == [8.0, 8.0, 8.0]


def test_an_operator_may_ignore_unknown_use(tmp_path: Path) -> None:
    world = BareWorld(tmp_path, placer=PlacerConfig(unknown_use="ignore"))
    board = world.run(90, n3=FULL)
    assert world.decide(board, gang=1, gpus_per_node=8).outcome == "placed"
    assert board.json("doc.fleet")["gpus"]["unknown_use"] == 8, "the map tells of it all the same"


def test_a_job_event_takes_the_gpus_over_at_once_and_its_end_frees_them(tmp_path: Path) -> None:
    world = BareWorld(tmp_path)
    world.run(90, n3=FULL)
    ranks = (RankPlacement(0, "n3", tuple(range(GPUS))),)
    at = {"job": "j", "time_ms": world.clock.now_ms()}
    world.pipeline.take(Batch(events=(Started(sequence=3, ranks=ranks, **at),)))
    assert world.tick().json("doc.fleet")["gpus"]["unknown_use"] == 0
    world.pipeline.take(Batch(events=(Finished(sequence=9, **at),)))
    gpus = world.tick().json("doc.fleet")["gpus"]
    assert (gpus["free"], gpus["unknown_use"]) == (8, 0)


def test_gpus_of_a_job_that_names_nodes_only_are_those_at_work(tmp_path: Path) -> None:
    world = BareWorld(tmp_path)
    readings = [IDLE] * 6 + [BUSY] * 2
    board = world.run(90, n3=page("n3", [(one, {}) for one in readings]))
    assert board.json("doc.fleet")["gpus"]["unknown_use"] == 2
    told = Submitted(job="j", sequence=1, time_ms=NOW_MS, gpus_per_node=2)
    world.pipeline.take(Batch(events=(told, Started(job="j", sequence=3, time_ms=NOW_MS, nodes=("n3",)))))
    board = world.tick()
    assert board.array("gpu.job")[0].tolist() == [-1] * 6 + [0] * 2
    assert board.json("doc.fleet")["gpus"]["unknown_use"] == 0


def test_verdicts_outlive_a_restart(tmp_path: Path) -> None:
    world = BareWorld(tmp_path)
    world.run(90, n1=EMPTY, n3=FULL)
    asyncio.run(world.pipeline.save())
    again = BareWorld(tmp_path)
    again.clock.advance(100)
    board = again.tick()
    assert board.json("doc.fleet")["gpus"]["unknown_use"] == 8, "before any page is read"
