"""Two pipelines on disjoint shares of a fleet publish what one would have: scores, stragglers, pages, demand."""

import asyncio
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.events import Finished, JobEvent, NodeEvent, Started, Step, Submitted
from fleetcast.fleet.metrics import find_metric_row
from fleetcast.fleet.requests import Gang, RankPlacement
from fleetcast.fleet.samples import EntityKind, SampleBatch
from fleetcast.fleet.topology import Level, NodeSpec, Topology
from fleetcast.ingest.shares import Share
from fleetcast.ingest.source import Batch
from fleetcast.service.board.board import Board, BoardReader
from fleetcast.service.config import Config, PipelineConfig
from fleetcast.service.pipeline.demand.forecasts import DemandForecasts
from fleetcast.service.pipeline.pipeline import Pipeline

START_MS = 1_789_000_000_000
EVERY_MS = 15_000
NODES = [f"n{number}" for number in range(8)]
GPUS = 4
GANG = ("n1", "n2", "n5", "n6")  # in both blocks, and in both shares
GPU, PORT, NODE = EntityKind.GPU, EntityKind.PORT, EntityKind.NODE


def placed() -> Topology:
    return Topology.build(
        [NodeSpec(name, GPUS, "H100", domains={Level.BLOCK: "b1" if name < "n4" else "b2"}) for name in NODES]
    )


def unplaced() -> Topology:
    return Topology.build([])


def readings(entities: Entities, nodes: list[str], number: int) -> Iterator[SampleBatch]:
    """One scrape of `nodes`: n2/1 throttles from the tenth on, n5's second port moves less, n6/3 has an XID, n7/2 is
    gone."""
    now_ms = START_MS + number * EVERY_MS
    gpu: list[tuple[int, int, int, float]] = []
    port: list[tuple[int, int, int, float]] = []
    node: list[tuple[int, int, int, float]] = []
    late = number >= 10
    for name in nodes:
        for index in range(GPUS):
            if late and (name, index) == ("n7", 2):
                continue
            row = entities.add_to_node(GPU, name, index)
            throttles = late and (name, index) == ("n2", 1)
            values = {
                "sm_clock_mhz": 600.0 if throttles else 1980.0 - (number + index) % 3,
                "clock_event_reasons": 36.0 if throttles else 4.0,
                "gpu_temp_c": 60.0 + index,
                "power_w": 600.0 + number % 5 + index,
                "gpu_util": 0.99,
                "sm_active": 0.8,
                "tensor_active": 0.4,
                "xid": 79.0 if late and (name, index) == ("n6", 3) else 0.0,
            }
            gpu += [(find_metric_row(GPU, metric), row, now_ms, value) for metric, value in values.items()]
            row = entities.add_to_node(PORT, name, f"mlx5_{index}", 1)
            pace = 0.4 if late and (name, index) == ("n5", 1) else 1.0
            values = {"state": 4.0, "speed_bytes_per_s": 50e9, "rx_bytes": 1e10, "tx_bytes": 1e10}
            for metric, value in values.items():
                scale = pace * 15 * number if metric.endswith("_bytes") else 1.0
                port.append((find_metric_row(PORT, metric), row, now_ms, value * scale))
        row = entities.find_or_add_node(name)
        gone = late and name == "n7"
        values = {"scrape_up": 1.0, "scrape_duration_s": 0.02, "gpus_reported": GPUS - gone}
        node += [(find_metric_row(NODE, metric), row, now_ms, float(value)) for metric, value in values.items()]
    yield from (SampleBatch.from_rows(kind, rows) for kind, rows in ((GPU, gpu), (PORT, port), (NODE, node)) if rows)


def told(number: int) -> tuple[list[JobEvent], list[NodeEvent]]:
    """A gang across both blocks that steps and grows slow, short jobs that come and go, a drain."""
    now_ms = START_MS + number * EVERY_MS
    events: list[JobEvent] = []
    if number == 0:
        ranks = tuple(RankPlacement(rank, node, tuple(range(GPUS))) for rank, node in enumerate(GANG))
        gang = Gang(len(GANG), len(GANG))
        events.append(Submitted(job="gang", sequence=0, time_ms=now_ms, gang=gang, gpus_per_node=GPUS))
        events.append(Started(job="gang", sequence=1, time_ms=now_ms, ranks=ranks))
    for part in range(3):
        at_ms, step_s = now_ms + part * 5000, 5.0 if number < 10 else 9.0
        sequence = 10 + number * 3 + part
        events.append(Step(job="gang", sequence=sequence, time_ms=at_ms, step=sequence, duration_s=step_s))
    job = f"short-{number}"
    events.append(Submitted(job=job, sequence=0, time_ms=now_ms, gpus_per_node=2))
    if number % 2:
        ranks = (RankPlacement(0, "n3", (0, 1)),)
        events.append(Started(job=job, sequence=1, time_ms=now_ms, ranks=ranks))
        events.append(Finished(job=job, sequence=2, time_ms=now_ms + 5000))
    drains = [NodeEvent(node="n0", source="admin", sequence=1, time_ms=now_ms, type="drain")] if number == 12 else []
    return events, drains


class Run:
    """Pipelines over the same input, in step."""

    def __init__(self, folder: Path, instances: int, topology: Topology) -> None:
        self.config = Config(state=str(folder), pipeline=PipelineConfig(instances=instances))
        self.clock = ManualClock(START_MS)
        self.topology = topology
        self.shares = [Share.from_topology(number, instances, topology) for number in range(instances)]
        self.pipelines = [self.start(share) for share in self.shares]
        self.takes_all: list[Pipeline] = []
        self.kinds = {GPU, PORT, NODE}

    def start(self, share: Share) -> Pipeline:
        return Pipeline(self.config, self.clock, self.topology, lambda _: [], share)

    def round(self, number: int, away: tuple[int, ...] = ()) -> None:
        """One scrape, the events of that moment, and a tick of everybody; the first one's comes last."""
        self.clock.advance((START_MS + number * EVERY_MS + 6000 - self.clock.time_ms) / 1000)
        events, drains = told(number)
        for pipeline in reversed(self.pipelines):
            if pipeline.share.instance in away:
                continue
            own = [name for name in NODES if pipeline.share.owns(name) or pipeline in self.takes_all]
            scrape = [part for part in readings(pipeline.state.entities, own, number) if part.kind in self.kinds]
            pipeline.apply_batch(Batch(tuple(scrape), tuple(events), tuple(drains)))
            asyncio.run(pipeline.tick())

    def board(self) -> Board:
        asyncio.run(self.pipelines[0].capabilities[DemandForecasts].forecast(self.pipelines[0].state))
        asyncio.run(self.pipelines[0].tick())
        board = BoardReader(self.config.board).latest()
        assert board is not None
        return board


def pages(board: Board) -> dict[str, Any]:
    """Node -> its page, without what only says where its row is."""
    text, offsets = board.text("answers.node"), board.array("answers.node.offsets").tolist()
    bodies = [json.loads(text[begin:end]) for begin, end in itertools.pairwise(offsets)]
    return {body["node"]: body for body in bodies}


def risk(board: Board) -> dict[str, Any]:
    values = board.array("node.risk")
    return {name: values[:, :, row].tolist() for row, name in enumerate(board.names("names.node"))}


def picture(board: Board) -> dict[str, Any]:
    """Everything of the fleet, by name."""
    fleet = board.json("doc.fleet")
    nodes = {row["node"]: row for row in fleet.pop("nodes")}
    return {
        "risk": risk(board),
        "pages": pages(board),
        "reasons": board.json("risk.reason"),
        "stragglers": board.json("doc.stragglers"),
        "jobs": board.json("doc.jobs"),
        "job": board.json("doc.job"),
        "demand": board.json("doc.demand"),
        "durations": board.json("durations"),
        "occupancy": board.json("occupancy"),
        "usable": dict(zip(board.names("names.node"), board.array("gpu.usable").tolist(), strict=True)),
        "held": dict(zip(board.names("names.node"), board.array("gpu.job").tolist(), strict=True)),
        "fleet": fleet,
        "nodes": nodes,
    }


@pytest.mark.parametrize("topology", [placed, unplaced])
def test_two_pipelines_say_of_a_fleet_what_one_says(tmp_path: Path, topology: Any) -> None:
    one, two = Run(tmp_path / "one", 1, topology()), Run(tmp_path / "two", 2, topology())
    assert {two.shares[0].owns(node) for node in GANG} == {True, False}
    for number in range(20):
        one.round(number)
        two.round(number)
    here, there = picture(one.board()), picture(two.board())
    for key, expected in here.items():
        assert there[key] == expected, key
    # and it was worth comparing
    assert here["stragglers"]["gang"]["slow"]
    assert here["stragglers"]["gang"]["culprit"]["name"] == "n2/1"
    assert {"n2", "n6", "n7", "n0"} <= here["reasons"].keys()
    assert [row["job"] for row in here["jobs"]].count("gang") == 1
    assert msgspec.json.decode(two.board().text("doc.ingestion"))["samples_total"] > 4000


def test_nodes_of_a_pipeline_that_is_away_are_stale_and_the_rest_goes_on(tmp_path: Path) -> None:
    two = Run(tmp_path, 2, placed())
    for number in range(6):
        two.round(number)
    for number in range(6, 14):
        two.round(number, away=(1,))
    board = two.board()
    page = pages(board)
    theirs = [node for node in NODES if two.shares[1].owns(node)]
    ours = [node for node in NODES if two.shares[0].owns(node)]
    assert len(theirs) == len(ours) == 4
    assert {page[node]["state"] for node in theirs} == {"stale"}
    assert {page[node]["state"] for node in ours} <= {"ok", "drained", "degraded"}
    ages = {node: page[node]["gpus"][0]["age_s"] for node in NODES}
    assert {ages[node] for node in theirs} == {8 * 15 + 6}
    assert {ages[node] for node in ours} == {6}
    assert not any(np.isnan(np.array(risk(board)[node])).any() for node in NODES)
    two.round(14)
    two.pipelines[0].others.poll()  # type: ignore[union-attr]
    assert {pages(two.board())[node]["state"] for node in theirs} <= {"ok", "degraded"}


def test_a_pipeline_that_had_a_node_before_is_not_believed_that_it_fell_silent(tmp_path: Path) -> None:
    two = Run(tmp_path, 2, placed())
    two.kinds = {GPU, PORT}  # pushed: nobody says that a node was asked and answered
    two.takes_all = two.pipelines[:1]
    for number in range(4):
        two.round(number, away=(1,))
    two.takes_all = []
    for number in range(4, 12):  # 120 s
        two.round(number)
    board = two.board()
    silent = [node for node, sentence in board.json("risk.reason").items() if "not answered" in sentence]
    assert not silent
    states = {page["state"] for node, page in pages(board).items() if two.shares[1].owns(node)}
    assert states <= {"ok", "unknown", "degraded"}


def test_a_restarted_first_pipeline_goes_on_with_what_the_others_say(tmp_path: Path) -> None:
    two = Run(tmp_path, 2, unplaced())
    for number in range(4):
        two.round(number)
    before = picture(two.board())
    asyncio.run(two.pipelines[0].save())
    two.pipelines[0] = two.start(two.shares[0])
    after = picture(two.board())
    for key in ("risk", "pages", "stragglers", "held", "usable"):
        assert after[key] == before[key], key


def test_a_hard_signal_elsewhere_is_on_the_fleets_board_before_it_is_scored(tmp_path: Path) -> None:
    two = Run(tmp_path, 2, placed())
    for number in range(4):
        two.round(number)
    first, second = two.pipelines
    node = next(name for name in NODES if two.shares[1].owns(name))
    row = second.state.entities.add_to_node(GPU, node, 0)
    two.clock.advance(1)
    second.apply_batch(
        Batch((SampleBatch.from_rows(GPU, [(find_metric_row(GPU, "xid"), row, two.clock.now_ms(), 79.0)]),))
    )

    async def looked(until: Any) -> None:
        work = asyncio.create_task(first.others.work(first.state))  # type: ignore[union-attr]
        while not until():
            await asyncio.sleep(0.01)
        work.cancel()

    reader = BoardReader(two.config.board)

    def rows() -> list[dict[str, Any]]:
        board = reader.latest()
        try:
            return [] if board is None else list(board.json("doc.urgent")["rows"])
        except KeyError:
            return []

    asyncio.run(asyncio.wait_for(looked(rows), 60))
    assert [(row["node"], row["code"]) for row in rows()] == [(node, 79)]
    taken_ms = rows()[0]["taken_ms"]
    two.clock.advance(1)
    asyncio.run(first.tick())  # the other one's scores do not know of it yet: it stays on top
    assert len(rows()) == 1
    assert rows()[0]["taken_ms"] > taken_ms
    two.clock.advance(1)
    asyncio.run(second.tick())
    asyncio.run(asyncio.wait_for(looked(first._wake.is_set), 60))
    two.clock.advance(1)
    asyncio.run(first.tick())
    assert pages(two.board())[node]["state"] == "degraded"
    assert rows()[0]["taken_ms"] < two.clock.now_ms()
    two.pipelines[0] = two.start(two.shares[0])
    asyncio.run(two.pipelines[0].tick())
    assert not two.pipelines[0].urgent  # what was scored long ago is no news to one that starts
