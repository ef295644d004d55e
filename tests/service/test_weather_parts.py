"""Demand, jobs and start times, as adapters see them."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.events import Checkpoint
from fleetcast.models.demand.rows import DemandRow
from fleetcast.schedulers.bands import Bands
from fleetcast.schedulers.weather import DemandKey, StartOutlook
from fleetcast.service import start_times_link
from fleetcast.service.board.board import BoardReader, BoardWriter, Section
from fleetcast.service.config import Config, PlacerConfig
from fleetcast.service.pipeline.demand.sections import make_demand_sections
from fleetcast.service.start_times_link import StartTimesLink, decode_start_outlooks
from fleetcast.service.weather import WeatherStation, make_band_rule
from tests.service.runs_world import NOW_MS, batch, began, board_of, came, past, pipeline_in

ROW = DemandRow(
    queue="gpu",
    class_="all",
    group="",
    target="running",
    now=3.0,
    model="persistence",
    issued_ms=NOW_MS,
    horizons_s=[600],
    quantiles=[0.5, 0.9],
    values=[[3.0], [5.0]],
    record=None,
)
QUEUE = {
    "as_of_ms": NOW_MS,
    "rows": [
        {"request_id": "r1", "job": "train-1", "position": 1, "why": "no room", "start_ms": {"p50": 5, "p90": 9}},
        {"request_id": "r2", "position": 2, "why": "behind r1", "start_ms": None},
    ],
}


def station(folder: Path, now_ms: int = NOW_MS) -> WeatherStation:
    config = Config(state=str(folder))
    return WeatherStation(config, ManualClock(now_ms), Bands(make_band_rule(config.adapters, shared=False)))


def test_a_forecast_of_demand_is_found_by_its_key(tmp_path: Path) -> None:
    writer = BoardWriter(Config(state=str(tmp_path)).board)
    writer.publish(make_demand_sections([ROW], {}, [], NOW_MS), NOW_MS)
    weather = station(tmp_path).make_weather(BoardReader(Config(state=str(tmp_path)).board).latest())
    assert weather is not None
    assert weather.demand is not None
    assert weather.demand[DemandKey("gpu", "all", "", "running")] == ROW
    assert list(weather.demand) == [DemandKey("gpu", "all", "", "running")]
    assert (weather.jobs, weather.nodes, weather.starts) == (None, None, None)


def test_a_board_without_forecasts_has_no_demand(tmp_path: Path) -> None:
    BoardWriter(Config(state=str(tmp_path)).board).publish([Section("meta", b"{}", NOW_MS)], NOW_MS)
    weather = station(tmp_path).make_weather(BoardReader(Config(state=str(tmp_path)).board).latest())
    assert weather is not None
    assert weather.demand is None


@pytest.mark.parametrize(("age_s", "known"), [(659, True), (661, False)])
def test_forecasts_that_are_much_older_than_the_board_are_none(tmp_path: Path, age_s: int, known: bool) -> None:
    old = make_demand_sections([ROW], {}, [], NOW_MS - 1000 * age_s)
    BoardWriter(Config(state=str(tmp_path)).board).publish(old, NOW_MS)
    weather = station(tmp_path).make_weather(BoardReader(Config(state=str(tmp_path)).board).latest())
    assert weather is not None
    assert (weather.demand is not None) == known


def test_nodes_have_their_places_in_the_topology(tmp_path: Path) -> None:
    parts: dict[str, Any] = {
        "names.node": b"a\nb\nnew",
        "node.risk": np.zeros((3, 4, 3)),
        "node.state": np.zeros(3, np.int8),
        "gpu.usable": np.ones((3, 8), bool),
        "gpu.job": np.full((3, 8), -1, np.int32),
        "risk.reason": b"{}",
        "names.rack": b"r1\nr2",
        "node.domain.rack": np.array([1, -1], np.int32),  # one generation behind the names
    }
    config = Config(state=str(tmp_path))
    BoardWriter(config.board).publish([Section(name, data, NOW_MS) for name, data in parts.items()], NOW_MS)
    weather = station(tmp_path).make_weather(BoardReader(config.board).latest())
    assert weather is not None
    assert weather.nodes is not None
    assert list(weather.nodes.domains) == ["rack"]
    assert weather.nodes.domains["rack"].names == ("r1", "r2")
    assert weather.nodes.domains["rack"].of.tolist() == [1, -1, -1]


def test_jobs_have_their_nodes_times_and_last_checkpoint(tmp_path: Path) -> None:
    pipeline = pipeline_in(tmp_path)
    kept = Checkpoint(job="one", sequence=2, time_ms=NOW_MS - 60_000, edge="end")
    waits = came("two", NOW_MS - 1000)
    pipeline.apply_batch(batch(*past(), came("one", NOW_MS - 301_000), began("one", NOW_MS - 300_000), kept, waits))
    asyncio.run(pipeline.tick())
    weather = station(tmp_path).make_weather(board_of(tmp_path))
    assert weather is not None
    assert weather.jobs is not None
    one, two = weather.jobs["one"], weather.jobs["two"]
    assert (one.state, one.nodes, one.gpus, one.checkpoint_ms) == ("running", ("n1",), 2, NOW_MS - 60_000)
    assert 100 < (one.left_p50_s or 0) < 600
    assert (two.state, two.nodes, two.checkpoint_ms) == ("queued", (), None)
    assert (one.slow_since_ms, one.culprit, one.why) == (None, "", "")


def test_start_times_are_found_by_request_and_by_job() -> None:
    starts = decode_start_outlooks(json.dumps(QUEUE).encode())
    assert starts["r1"] == starts["train-1"] == StartOutlook(None, 5, 9, 1, "no room")
    assert starts["r2"] == StartOutlook(None, None, None, 2, "behind r1")


@pytest.mark.parametrize("body", [json.dumps(QUEUE).encode(), b"no json", b"[]"])
def test_start_times_are_asked_of_the_placer_and_grow_old(
    body: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_times_link, "PERIOD_S", 0.01)
    asked: list[Mapping[str, str]] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.headers)
        return web.Response(body=body)

    async def latest() -> tuple[bool, bool]:
        app = web.Application()
        app.router.add_get("/queue", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        link = StartTimesLink(Config(state=str(tmp_path), placer=PlacerConfig(port=port)))
        changes: list[object] = []
        link.on_change = lambda: changes.append(link.latest)
        while len(asked) < 3:
            assert link.latest is None or "r1" in link.latest
            await asyncio.sleep(0.01)
        assert len(changes) == (link.latest is not None), "equal start times are no change"
        was_known = link.latest is not None
        monkeypatch.setattr(start_times_link, "OLD_S", -1.0)
        is_old = link.latest is None
        await link.close()
        await runner.cleanup()
        return was_known, is_old

    assert asyncio.run(latest()) == (b"rows" in body, True)
    assert asked[0]["x-fleetcast-caller"] == "read adapters"
