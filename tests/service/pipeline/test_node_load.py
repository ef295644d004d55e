"""The load of nodes on its way from a tick over the board to those who ask."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fleetcast.features.frame import FeatureFrame
from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.events import Started
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.requests import PlacementRequest, RankPlacement
from fleetcast.fleet.samples import EntityKind
from fleetcast.fleet.topology import NodeSpec, Topology
from fleetcast.models.node_load import GPU_FEATURES, GpuUse
from fleetcast.models.risk.score import ScoredFleet
from fleetcast.models.risk.scores import RISK_HORIZONS_S, RISK_KINDS, RiskScores
from fleetcast.placement.ledger.promised import OpenRequest
from fleetcast.schedulers.bands import Bands
from fleetcast.service.board.board import BoardReader, BoardWriter, Section
from fleetcast.service.config import Config
from fleetcast.service.pipeline.node_load import SECTION, NodeLoads, compute_held_s
from fleetcast.service.pipeline.tick import Tick
from fleetcast.service.weather import WeatherStation, make_band_rule
from tests.service.ticks import GPUS, tick_of

NOW_MS = 1_789_000_000_000
NODES = ("n1", "n2")
SPELLED = [*GPU_FEATURES]
OTHERS = ("age_s", "fb_used_bytes", "power_w")


def attempt(job: str, node: str, gpus: tuple[int, ...], age_s: float) -> JobAttempt:
    row = JobAttempt(job, 1)
    ranks = (RankPlacement(0, node, gpus),)
    row.fold(Started(job=job, sequence=1, time_ms=NOW_MS - round(age_s * 1000), ranks=ranks))
    return row


def tick(*running: JobAttempt, busy: float = 0.5) -> Tick:
    """Every GPU of n1 is so busy; nobody has heard those of n2."""
    n = len(NODES)
    risk = RiskScores(np.full((len(RISK_KINDS), len(RISK_HORIZONS_S), n), 0.01), {}, {}, np.zeros(n, bool), "rules")
    topology = Topology.build([NodeSpec(name, GPUS) for name in NODES])
    made = tick_of(NOW_MS, topology, ScoredFleet(risk, {}), running)
    values = np.full((GPUS, len(SPELLED) + len(OTHERS)), np.nan, np.float32)
    values[:, :3] = (busy, busy, 0.0)
    since = np.zeros(values.shape, np.int64)
    gpu = FeatureFrame(EntityKind.GPU, (*SPELLED, *OTHERS), values, np.zeros(GPUS, np.int32), since, NOW_MS)
    rows = np.array([range(GPUS), [-1] * GPUS], np.int32)
    return replace(made, frames=replace(made.frames, gpu=gpu), gpu_rows=rows)


def test_holders_are_as_old_as_their_start_and_unknown_use_has_always_been() -> None:
    held = compute_held_s(tick(attempt("a", "n1", (0, 1), 60.0), busy=0.9))
    assert held[0, :2].tolist() == [60.0, 60.0]
    assert np.isinf(held[0, 2:]).all()  # at work, and no job holds them
    assert np.isnan(held[1]).all()
    assert np.isnan(compute_held_s(tick(busy=0.0))).all()


def test_a_promised_gpu_will_be_used_from_now_on() -> None:
    """Otherwise Trimaran sends pods to a node that is promised to a job."""
    ranks = (RankPlacement(0, "n2", (3,)),)
    promise = OpenRequest(PlacementRequest(request_id="r", gpus_per_node=1), NOW_MS, ranks)
    held = compute_held_s(replace(tick(busy=0.0), open_requests=(promise,)))
    assert np.argwhere(held == 0.0).tolist() == [[1, 3]]


def test_whoever_asks_finds_the_load_of_a_node_by_its_name(tmp_path: Path) -> None:
    config = Config(state=str(tmp_path))
    made = tick(attempt("a", "n1", (0, 1), 600.0))
    names = Section("names.node", "\n".join([*NODES, "n3"]).encode(), NOW_MS)
    BoardWriter(config.board).publish([names, *NodeLoads().make_sections(made)], NOW_MS)
    station = WeatherStation(config, ManualClock(NOW_MS), Bands(make_band_rule(config.adapters, shared=False)))
    weather = station.make_weather(BoardReader(config.board).latest())
    assert weather is not None
    assert weather.load is not None
    assert weather.load.gpu[:, weather.load.rows["n1"]].tolist() == [0.5, 0.5]
    for name in ("n2", "n3"):  # the section is a generation behind the names
        assert np.isnan(weather.load.gpu[:, weather.load.rows[name]]).all()
    assert np.isnan(weather.load.memory).all()


def test_a_board_without_loads_has_none(tmp_path: Path) -> None:
    config = Config(state=str(tmp_path))
    BoardWriter(config.board).publish([Section("names.node", b"n1", NOW_MS)], NOW_MS)
    station = WeatherStation(config, ManualClock(NOW_MS), Bands(make_band_rule(config.adapters, shared=False)))
    weather = station.make_weather(BoardReader(config.board).latest())
    assert weather is not None
    assert weather.load is None


def test_a_fleet_of_which_nothing_was_heard_is_unknown() -> None:
    made = tick_of(NOW_MS, Topology.build([NodeSpec("n1", GPUS)]), tick().fleet)
    (section,) = NodeLoads().make_sections(made)
    assert section.name == SECTION
    assert np.isnan(np.asarray(section.data)).all()
    assert np.isnan(
        GpuUse.from_frame(made.frames.gpu, made.gpu_rows, compute_held_s(made)).forecast_use()
    ) == pytest.approx(1.0)
