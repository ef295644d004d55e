"""What serves is what is judged: a recorded run gives the same scores in the pipeline and in training's replay."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.events import Failed, Finished, JobEvent, Started, Submitted
from fleetcast.fleet.requests import RankPlacement
from fleetcast.ingest.source import Batch
from fleetcast.models.risk.watch import FleetWatch
from fleetcast.service.board.board import Board, BoardReader
from fleetcast.service.config import Config, ScrapeConfig
from fleetcast.service.pipeline.pipeline import Pipeline
from fleetcast.simulator.faults.fault_file import parse_fault_file
from fleetcast.simulator.instrument import simulate_faults
from fleetcast.training.judges.risk_runs import replay_run
from fleetcast.training.sets.fault_runs import FaultRun, read_fault_runs

WORLD = """name = "run"
hours = 0.7
interval_s = 60
[fleet]
nodes = 4
[jobs]
sizes = [2]
weights = [1.0]
[draw]
scale = 1.0
[kinds.gpu_off_bus]
rate = 60_000.0
[kinds.thermal_throttle]
rate = 60_000.0
"""
LEMON = 2  # the node on which jobs fail
INTERVAL_MS = 60_000


def short_job(number: int, run: FaultRun, first_ms: int) -> list[JobEvent]:
    """Begins and ends between two scrapes. Every fourth is on LEMON, and fails."""
    row, at_ms, job = number % 4, first_ms + (5 + number // 3) * INTERVAL_MS + 1000 * (number % 3), f"short-{number:02}"
    node = run.topology.names[row]
    ranks = (RankPlacement(0, node, (0,)),)
    crash = Failed(job=job, sequence=2, time_ms=at_ms + 900, category="unknown", node=node, message="crashed")
    return [
        Submitted(job=job, sequence=0, time_ms=at_ms, gpus_per_node=1),
        Started(job=job, sequence=1, time_ms=at_ms + 100, ranks=ranks),
        crash if row == LEMON else Finished(job=job, sequence=2, time_ms=at_ms + 900),
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> FaultRun:
    """Faults and slow gangs as they are simulated, and a node on which jobs crash though no sensor says why."""
    out = tmp_path_factory.mktemp("runs")
    simulate_faults(parse_fault_file(WORLD), out)
    (found,) = read_fault_runs(out)
    path = found.folder / "events.jsonl"
    events = [msgspec.json.decode(line, type=JobEvent) for line in path.read_bytes().splitlines()]
    first_ms = events[0].time_ms
    events += [event for number in range(32) for event in short_job(number, found, first_ms)]
    events.sort(key=lambda event: event.time_ms)
    path.write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in events))
    return found


@dataclass(frozen=True)
class Scored:
    """What one moment of the fleet was scored as."""

    time_ms: int
    risk: NDArray[np.float64]  # (kind, horizon, node)
    stragglers: Any
    reasons: dict[str, list[dict[str, Any]]]  # by node


def read_board(board: Board) -> Scored:
    begins, answers = board.array("answers.node.offsets").tolist(), bytes(board.raw("answers.node"))
    nodes = [msgspec.json.decode(answers[first:end]) for first, end in pairwise(begins)]
    return Scored(
        board.meta("node.risk")["as_of_ms"],
        np.array(board.array("node.risk")),
        board.json("doc.stragglers"),
        {node["node"]: node["reasons"] for node in nodes if node["reasons"]},
    )


async def served(run: FaultRun, folder: Path) -> list[Scored]:
    """The run, scrape by scrape, through a pipeline that ticks after each."""
    clock = ManualClock(next(run.read_rounds(FleetWatch.from_topology(run.topology).entities)).time_ms - INTERVAL_MS)
    config = Config(state=str(folder), scrape=ScrapeConfig(interval_s=run.interval_s))
    pipeline = Pipeline(config, clock, run.topology, lambda _: [])
    scores = []
    for round in run.read_rounds(pipeline.state.entities):
        clock.advance((round.time_ms - clock.now_ms()) / 1000)
        pipeline.apply_batch(Batch(round.batches, round.events, round.node_events))
        await pipeline.tick()
        board = BoardReader(config.board).latest()
        assert board is not None
        scores.append(read_board(board))
    await pipeline.close()
    return scores


def replayed(run: FaultRun) -> Iterator[Scored]:
    replay = FleetWatch.from_topology(run.topology, run.interval_s)
    for round in run.read_rounds(replay.entities):
        now_ms = round.time_ms
        replay.apply_batch(round.batches, round.events, now_ms, round.node_events)
        fleet = replay.score(replay.make_moment(replay.extract_frames(run.topology, now_ms), run.topology, now_ms))
        reasons = {run.topology.names[row]: found for row, found in fleet.risk.reasons.items() if found}
        yield Scored(now_ms, fleet.risk.values, plain(fleet.stragglers), plain(reasons))


def plain(answer: object) -> Any:
    return msgspec.json.decode(msgspec.json.encode(answer))


@pytest.fixture(scope="module")
def board_scores(run: FaultRun, tmp_path_factory: pytest.TempPathFactory) -> list[Scored]:
    return asyncio.run(served(run, tmp_path_factory.mktemp("state")))


def test_a_replay_scores_as_the_pipeline_does_bit_for_bit(run: FaultRun, board_scores: list[Scored]) -> None:
    for live, judged in zip(board_scores, replayed(run), strict=True):
        assert live.time_ms == judged.time_ms
        np.testing.assert_array_equal(live.risk, judged.risk)
        assert live.stragglers == judged.stragglers
        assert live.reasons == judged.reasons


def test_what_risk_is_judged_by_is_what_was_served(run: FaultRun, board_scores: list[Scored]) -> None:
    judged = replay_run(run)
    assert judged.time_ms.tolist() == [live.time_ms for live in board_scores]
    hour = np.array([np.nan_to_num(live.risk[:, 0].max(axis=0)) for live in board_scores])
    np.testing.assert_array_equal(hour, judged.p)


def test_the_run_holds_what_the_law_is_about(run: FaultRun, board_scores: list[Scored]) -> None:
    """Faults of parts, a gang that is slow, and a node that jobs fail on."""
    lemon = board_scores[-1].reasons[run.topology.names[LEMON]]
    assert "failed_job_share" in [reason["feature"] for reason in lemon]
    features = {reason["feature"] for live in board_scores for found in live.reasons.values() for reason in found}
    assert len(features) > 3, features
    assert any(body["slow"] for live in board_scores for body in live.stragglers.values())
