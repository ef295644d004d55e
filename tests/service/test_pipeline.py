"""The pipeline's start: what is on disk comes first."""

import asyncio
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from fleet.clock import ManualClock
from fleet.topology import NodeSpec, Topology
from ingest.inbox import InboxSource, InboxWriter
from ingest.source import Batch
from models.node_risk import RiskFit
from service.board import BoardReader
from service.config import Config, PipelineConfig
from service.pipeline import Pipeline

NOW_MS = 1_789_000_000_000
JOBS = 8


class Trickle(InboxSource):
    """An inbox on a slow disk: nothing comes before `LATE_S`."""

    LATE_S = 0.3

    async def next(self) -> Batch:
        await asyncio.sleep(self.LATE_S)
        return await super().next()


def started(number: int) -> bytes:
    event = {"job": f"j{number}", "sequence": 1, "time_ms": NOW_MS - 1000, "type": "started"}
    ranks = [{"rank": 0, "node": "n1", "gpus": [number % 8]}]
    return msgspec.json.encode(event | {"ranks": ranks, "attempt": 1})


async def first_board(folder: Path, torn: bytes = b"") -> int:
    """How many jobs run on the first board that a starting pipeline publishes."""
    config = Config(state=str(folder))
    writer = InboxWriter(config.inbox, "api")
    await writer.append([started(number) for number in range(JOBS)], NOW_MS)
    await writer.close()
    with next(config.inbox.glob("*-*")).open("ab") as segment:
        segment.write(torn)
    topology = Topology.build([NodeSpec("n1", 8)])
    pipeline = Pipeline(config, ManualClock(NOW_MS), topology, lambda _: [Trickle(config.inbox)])
    reader = BoardReader(config.board)
    work = asyncio.create_task(pipeline.run())
    try:
        while (board := reader.latest()) is None:
            await asyncio.sleep(0.005)
        return len(board.json("occupancy")["running"])
    finally:
        work.cancel()
        with suppress(asyncio.CancelledError):
            await work
        await pipeline.close()


@pytest.mark.parametrize("torn", [b"", b"\x07"], ids=["whole", "torn tail"])
def test_the_first_board_knows_every_job_on_disk(tmp_path: Path, torn: bytes) -> None:
    assert asyncio.run(asyncio.wait_for(first_board(tmp_path, torn), 20)) == JOBS


def test_the_fitted_models_of_the_configuration_serve(tmp_path: Path) -> None:
    (tmp_path / "node_risk.json").write_bytes(msgspec.json.encode(RiskFit(version=7, kinds={})))
    config = Config(state=str(tmp_path / "state"), pipeline=PipelineConfig(models=str(tmp_path)))
    pipeline = Pipeline(config, ManualClock(NOW_MS), Topology.build([NodeSpec("n1", 8)]), lambda _: [])
    asyncio.run(pipeline.tick())
    board = BoardReader(config.board).latest()
    assert board is not None
    assert board.json("meta")["models"]["risk"] == board.meta("node.risk")["model"] == "rules+logistic-7"
