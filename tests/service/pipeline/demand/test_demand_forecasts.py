"""Demand in a pipeline: what is read, forecast and published, after a restart too; the routes that serve it."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleetcast.features import demand_series
from fleetcast.features.pool_inventory import PoolInventory
from fleetcast.features.serving import ServedInstance
from fleetcast.fleet.clock import ManualClock, SystemClock
from fleetcast.fleet.events import Finished, Queued, Started, Submitted
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.tellers import REQUESTED
from fleetcast.fleet.topology import NodeSpec, Topology
from fleetcast.ingest.source import Batch
from fleetcast.models.demand.forecaster import BIN_MS, HORIZONS_S, DemandForecaster, SeriesKey
from fleetcast.models.forecast import QUANTILES
from fleetcast.models.versions.card import Card
from fleetcast.models.versions.registry import Registry
from fleetcast.service.board.board import Board, Section, encode_board
from fleetcast.service.config import Config
from fleetcast.service.pipeline.demand import forecasts
from fleetcast.service.pipeline.demand.forecasts import PERIOD_S, DemandForecasts, TickStamp
from fleetcast.service.pipeline.demand.histories import list_series_keys, read_histories, sum_last_ten_minutes
from fleetcast.service.pipeline.demand.metrics import make_parts_page, make_trees_page
from fleetcast.service.pipeline.demand.sections import (
    SECTIONS,
    make_demand_sections,
    read_demand_keys,
    read_demand_record,
    read_demand_rows,
)
from fleetcast.service.pipeline.demand.served_trees import ServedTrees
from fleetcast.service.pipeline.snapshot import SavedState, Snapshot

NOW_MS = 2_916_000 * BIN_MS
MINUTE_MS = 60_000
MEDIAN = QUANTILES.index(0.5)
TOPOLOGY = Topology.build([NodeSpec(f"n{n}", gpus=8, pool="train") for n in range(8)])


def kept(folder: Path) -> SavedState:
    return Snapshot(folder / "snapshot").restore(Config(state=str(folder)), TOPOLOGY, NOW_MS)


def tell(state: Any, jobs: int = 40) -> None:
    events: list[Any] = []
    for n in range(jobs):
        then_ms = NOW_MS - (jobs - n) * 5 * MINUTE_MS
        about = {"queue": ("train", "serve")[n % 4 == 0], "group": f"g{n % 3}"}
        class_ = "inference" if n % 4 == 0 else "training"
        events.append(
            Submitted(job=f"j{n}", sequence=1, time_ms=then_ms, gpus_per_node=1 + n % 2, class_=class_, **about)
        )
        if n % 2:
            events.append(Started(job=f"j{n}", sequence=2, time_ms=then_ms + MINUTE_MS, nodes=("n1",)))
    state.apply(Batch(events=tuple(events)), NOW_MS)


def served(rate: float) -> ServedInstance:
    unknown = dict.fromkeys(("requests_running", "requests_waiting", "kv_cache_used", "prompt_tokens", "ttft_s"))
    unknown |= dict.fromkeys(("generated_tokens", "requests_finished", "ttft_requests"))
    return ServedInstance(
        pool="serve", model="llama", instance="1", age_s=1.0, ttft_le=(), requests_last_minute=rate, **unknown
    )


def forecast(kept: SavedState, now_ms: int = NOW_MS) -> DemandForecasts:
    made = DemandForecasts(kept.parts[DemandForecaster], ManualClock(now_ms))
    asyncio.run(made.forecast(kept.state))
    return made


def board(sections: list[Section]) -> Board:
    return Board(encode_board(sections, 1, NOW_MS))


def test_every_pool_class_and_group_is_forecast_and_they_add_up(tmp_path: Path) -> None:
    it = kept(tmp_path)
    tell(it.state)
    made = forecast(it)
    keys = {(row.queue, row.class_, row.group, row.target) for row in made.rows}
    assert {
        ("all", "all", "all", "wanted"),
        ("train", "training", "all", "running"),
        ("serve", "all", "g1", "queued"),
    } <= keys
    for target in ("running", "queued", "wanted"):
        rows = [row for row in made.rows if row.target == target and row.queue == "train"]
        (pool,) = (row for row in rows if row.class_ == row.group == "all")
        groups = [row for row in rows if row.group != "all"]
        assert {row.group for row in groups} == {"g0", "g1", "g2", "other"}
        assert pool.now == pytest.approx(sum(row.now for row in groups))
        sums = np.sum([row.values[MEDIAN] for row in groups], axis=0)
        np.testing.assert_allclose(sums, pool.values[MEDIAN], atol=0.3)
        assert pool.horizons_s == list(HORIZONS_S)


def medians_of(document: Any, target: str) -> dict[str, Any]:
    """Return queue -> its served medians."""
    whole = [row for row in document["series"] if row["target"] == target and row["pool"] == "all"]
    rows = [row for row in whole if row["class"] == row["group"] == "all"]
    return {row["queue"]: np.array(row["values"][MEDIAN]) for row in rows}


@pytest.mark.parametrize("most_pools", [200, 1])
def test_served_pools_add_up_to_all_with_those_beyond_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_pools: int
) -> None:
    monkeypatch.setitem(demand_series.MOST, "queue", most_pools)
    it = kept(tmp_path)
    tell(it.state)
    submission = {"queue": "debug", "queues": ("debug", "train"), "class_": "batch", "gpus_per_node": 8}
    event = Submitted(job="both", sequence=1, time_ms=NOW_MS - 20 * MINUTE_MS, **submission)
    it.state.apply(Batch(events=(event,)), NOW_MS)
    document = board(forecast(it).latest).json("doc.demand")
    for target in ("running", "queued", "wanted", "arriving"):
        found = medians_of(document, target)
        whole = found.pop("all")
        assert set(found) == ({"train", "serve", "debug"} if most_pools > 1 else {"serve", "other"})
        np.testing.assert_allclose(sum(found.values()), whole, atol=0.3)


def test_demand_by_pool_of_machines_stands_beside_its_capacity_and_adds_up_to_all(tmp_path: Path) -> None:
    """Jobs of the queues `train` and `serve` run on nodes of two pools; one job waits for a quota."""
    it = kept(tmp_path)
    it.state.topology = Topology.build(
        [NodeSpec(f"n{n}", gpus=8, pool="ab"[n % 2], gpu_model="H100") for n in range(8)]
    )
    tell(it.state)
    ask = Submitted(job="wait", sequence=1, time_ms=NOW_MS - MINUTE_MS, queue="train", gpus_per_node=8, pool="b")
    limit = Queued(job="wait", sequence=2, time_ms=NOW_MS - MINUTE_MS, reason="QOSGrpGRES")
    it.state.apply(Batch(events=(ask, limit)), NOW_MS)
    document = board(forecast(it).latest).json("doc.demand")
    for target in ("running", "queued", "wanted"):
        rows = [row for row in document["series"] if row["target"] == target]
        (whole,) = (r for r in rows if r["queue"] == r["pool"] == r["class"] == r["group"] == "all")
        pools = {row["pool"]: row for row in rows if row["pool"] != "all"}
        assert sum(row["now"] for row in pools.values()) == pytest.approx(whole["now"])
        medians = np.sum([row["values"][MEDIAN] for row in pools.values()], axis=0)
        np.testing.assert_allclose(medians, whole["values"][MEDIAN], atol=0.3)
        assert {name: pools[name]["capacity"] for name in ("a", "b")} == {"a": 32.0, "b": 32.0}
        assert all(row["queue"] == "all" for row in pools.values())
    queued = [row for row in document["series"] if row["target"] == "queued"]
    by_pool = {row["pool"]: row for row in queued if row["pool"] != "all"}
    assert by_pool["b"]["waits_for"]["quota"] == 0.0
    assert by_pool["unassigned"]["waits_for"]["quota"] == 8.0
    (train,) = (r for r in queued if (r["queue"], r["class"], r["group"]) == ("train", "all", "all"))
    assert train["waits_for"] == {"quota": 8.0, "machines": train["now"] - 8.0}


def test_the_board_gives_single_rows_and_fans(tmp_path: Path) -> None:
    it = kept(tmp_path)
    tell(it.state)
    made = forecast(it)
    published = board(made.latest)
    document = published.json("doc.demand")
    keys = read_demand_keys(published).rows
    assert [[row[name] for name in ("queue", "class", "group", "target", "pool")] for row in document["series"]] == [
        list(key) for key in keys
    ]
    at = keys.index(("train", "all", "g1", "wanted", "all"))
    assert json.loads(bytes(read_demand_rows(published, [at])[0])) == document["series"][at]
    fan = read_demand_record(published, "all|running") or {}
    assert {key: json.loads(bytes(part)) for key, part in fan.items()} == published.json("doc.demand_record")[
        "all|running"
    ]
    assert read_demand_record(published, "all|running|training") is not None
    assert read_demand_record(published, "nobody|running") is None
    assert {row["queue"] for row in published.json("doc.demand_model")["rows"]} == {"all", "serve", "train"}
    assert read_demand_keys(board(make_demand_sections([], {}, [], NOW_MS))).rows == []


def test_until_the_first_forecast_the_one_of_the_process_before_is_told(tmp_path: Path) -> None:
    it = kept(tmp_path)
    forecaster = it.parts[DemandForecaster]
    tell(it.state)
    before = board(forecast(it).latest)
    later = ManualClock(NOW_MS + 59 * MINUTE_MS)
    again = board(DemandForecasts(forecaster, later, before).latest)
    for name in SECTIONS:
        assert bytes(again.raw(name)) == bytes(before.raw(name))
        assert again.meta(name)["as_of_ms"] == NOW_MS
    assert DemandForecasts(forecaster, later, board([])).latest == []
    later.advance(61)
    assert DemandForecasts(forecaster, later, before).latest == DemandForecasts(forecaster, later).latest == []


def test_while_gates_have_a_history_to_learn_forecasts_follow_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = kept(tmp_path)
    made, rests = DemandForecasts(it.parts[DemandForecaster], SystemClock()), []

    async def nothing(state: Any) -> None:
        made._forecaster._behind = int(not rests)

    async def rest(seconds: float) -> None:
        rests.append(seconds)
        if len(rests) == 2:
            raise asyncio.CancelledError

    monkeypatch.setattr(made, "forecast", nothing)
    monkeypatch.setattr("fleetcast.service.pipeline.demand.forecasts.asyncio.sleep", rest)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(made.work(it.state))
    assert rests[0] < PERIOD_S / 2 < rests[1]


def test_request_rates_are_forecast_with_a_lead(tmp_path: Path) -> None:
    it = kept(tmp_path)
    tell(it.state)
    for minute in range(30):
        it.state.demand.requests.record(
            NOW_MS - (30 - minute) * MINUTE_MS, {("serve", "llama"): (10.0 + minute % 3, 2)}
        )
    made = DemandForecasts(it.parts[DemandForecaster], ManualClock(NOW_MS))
    made._unread.append(TickStamp(NOW_MS, [served(4.0), served(5.0)], {}, 0, [], {}))
    asyncio.run(made.forecast(it.state))
    rows = {(row.queue, row.group): row for row in made.rows if row.target == "request_rate"}
    assert set(rows) == {("all", "all"), ("serve", "all"), ("serve", "llama")}
    row = rows["serve", "llama"]
    assert row.now == 9.0
    assert row.class_ == "inference"
    assert row.prescale.instances == 2
    assert row.prescale.serves_per_s == pytest.approx(12.0)
    assert row.prescale.reason
    page = make_parts_page(made.rows)
    assert b'fleetcast_demand_requests_per_s{pool="serve",model="llama"} 9\n' in page
    assert b'fleetcast_demand_group_now_gpus{queue="train",group="g1"}' in page


@pytest.mark.parametrize("rests", [False, True])
def test_an_end_that_came_after_the_tick_counts_and_not_the_request_of_the_tick(tmp_path: Path, rests: bool) -> None:
    it = kept(tmp_path)
    since_ms = NOW_MS - 10 * MINUTE_MS
    about = {"job": "j", "sequence": 1, "time_ms": since_ms}
    request = JobAttempt("j", 1, submission=Submitted(**about, gpus_per_node=8), written={"submission": REQUESTED})
    made = DemandForecasts(it.parts[DemandForecaster], ManualClock(NOW_MS))
    made._unread.append(TickStamp(since_ms + 1, [], {}, 0, [request], {("j", 1): since_ms}))
    started = Started(job="j", sequence=2, time_ms=since_ms, nodes=("n1",))
    ended = Finished(job="j", sequence=3, time_ms=NOW_MS - MINUTE_MS)
    events = (Submitted(**about, gpus_per_node=8, queue="train"), started, ended)
    it.state.apply(Batch(events=events), NOW_MS)
    if rests:
        it.state.fold.pack_old_attempts(NOW_MS, 0)
    asyncio.run(made.forecast(it.state))
    demand = it.state.demand
    assert demand.list_queues() == ("train", "all")
    assert np.nansum(demand.read_series("all", "arriving", NOW_MS, 60, 60)) == 8
    assert demand.read_series("train", "running", NOW_MS, 60, 5).tolist() == [8.0, 8.0, 8.0, 0.0, 0.0]


def test_a_restart_forecasts_at_once_what_it_would_have(tmp_path: Path) -> None:
    it = kept(tmp_path)
    tell(it.state)
    forecast(it, NOW_MS - BIN_MS)
    asyncio.run(save(it, tmp_path))
    again = kept(tmp_path)
    ours, theirs = (forecast(one).rows for one in (again, it))
    assert [row.record for row in ours] == [row.record for row in theirs]
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one.values, other.values, atol=0.11)
    tell(again.state)  # the same events again, as after a replay
    assert forecast(again).rows == ours


async def save(it: SavedState, folder: Path) -> None:
    await Snapshot(folder / "snapshot").save(it)


def test_what_is_read_is_of_one_moment_and_others_are_what_groups_leave(tmp_path: Path) -> None:
    it = kept(tmp_path)
    tell(it.state)
    it.state.apply(Batch(events=(Submitted(job="x", sequence=1, time_ms=NOW_MS - 1, queue="train"),)), NOW_MS)
    it.state.demand.apply_inventory(PoolInventory.from_topology(TOPOLOGY), it.state.jobs)
    histories = {told.target: told for told in asyncio.run(read_histories(it.state.demand, NOW_MS))}
    queued = histories["queued"]
    assert queued.keys == list_series_keys(it.state.demand)
    assert queued.ten_minute[queued.keys.index(SeriesKey("train", group="other")), -1] == 1.0
    np.testing.assert_array_equal(
        histories["wanted"].minutes, histories["running"].minutes + histories["queued"].minutes
    )
    assert histories["running"].capacity[histories["running"].keys.index(SeriesKey("train"))] == 64
    assert histories["request_rate"].keys == ()


def test_arrivals_by_the_minute_are_of_the_last_ten() -> None:
    minutes = np.concatenate([np.full(5, np.nan), np.arange(20.0)])[None]
    np.testing.assert_array_equal(sum_last_ten_minutes(minutes)[0, -2:], [sum(range(9, 19)), sum(range(10, 20))])
    assert np.isnan(sum_last_ten_minutes(minutes)[0, :5]).all()


class Sick:
    name = "trees"

    def forecast(self, panel: Any, origins: Any, steps: Any) -> Any:
        return np.full((len(QUANTILES), len(steps), len(origins), len(panel.names)), np.inf)


class Known(Sick):
    def forecast(self, panel: Any, origins: Any, steps: Any) -> Any:
        return np.zeros((len(QUANTILES), len(steps), len(origins), len(panel.names))) + panel.values[:, -1]


@pytest.mark.parametrize("model", [Sick(), Known()])
def test_trees_forecast_after_what_they_learnt_and_sick_ones_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, model: Any
) -> None:
    trees = ServedTrees(Registry(tmp_path / "models"))
    it = kept(tmp_path)
    tell(it.state)
    (queued,) = (t for t in asyncio.run(read_histories(it.state.demand, NOW_MS)) if t.target == "queued")
    panel = queued.make_panel(np.arange(3), NOW_MS, 600)
    origins = np.array([panel.bins - 20, panel.bins - 1])
    assert not trees.refresh()
    assert np.isnan(trees.forecast(panel, origins, (1, 6))).all()
    monkeypatch.setattr(Registry, "find_current_version", lambda self, kind: "0007")
    monkeypatch.setattr(Registry, "find_serving_folder", lambda self, kind: tmp_path / "0007")
    monkeypatch.setattr(
        "fleetcast.service.pipeline.demand.served_trees.load_trees", lambda folder: (model, NOW_MS - 10 * BIN_MS)
    )
    card = Card(kind="demand", created_ms=0, made_by="a test", seed=0, fitted_until_ms=0)
    monkeypatch.setattr("fleetcast.service.pipeline.demand.served_trees.read_card", lambda folder: card)
    assert trees.refresh()
    assert not trees.refresh()
    assert trees.version == "demand-0007"
    found = trees.forecast(panel, origins, (1, 6))
    assert np.isnan(found[:, :, 0]).all()
    if isinstance(model, Known):
        np.testing.assert_array_equal(found[0, 0, 1], panel.values[:, -1])
        assert b'fleetcast_demand_trees_info{model="demand-0007"} 1' in make_trees_page(trees)
    else:
        assert np.isnan(found).all()
        assert "gives forecasts that are none" in caplog.text
        assert b"fleetcast_demand_trees_trouble 1" in make_trees_page(trees)


def test_a_version_that_cannot_be_read_is_said_and_the_others_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Registry, "find_current_version", lambda self, kind: "0003")
    monkeypatch.setattr(Registry, "find_serving_folder", lambda self, kind: tmp_path)
    trees = ServedTrees(Registry(tmp_path))
    assert not trees.refresh()
    assert "version 0003" in trees.trouble
    assert "the other forecasters serve" in caplog.text
    it = kept(tmp_path / "state")
    tell(it.state)
    made = DemandForecasts(DemandForecaster([trees]), ManualClock(NOW_MS))
    asyncio.run(made.forecast(it.state))
    assert all(row.model == "persistence" for row in made.rows)


def test_the_first_forecast_waits_while_the_past_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it = kept(tmp_path)
    made = DemandForecasts(it.parts[DemandForecaster], ManualClock(NOW_MS))
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:  # the last part comes late, up to now
            tell(it.state, jobs=40)
            it.state.apply(Batch(events=(Submitted(job="new", sequence=1, time_ms=NOW_MS),)), NOW_MS)

    monkeypatch.setattr(forecasts.asyncio, "sleep", sleep)
    asyncio.run(made._wait_for_past_events(it.state))
    assert pauses == []  # nobody has told anything
    it.state.apply(Batch(events=(Submitted(job="old", sequence=1, time_ms=NOW_MS - 90 * MINUTE_MS),)), NOW_MS)
    asyncio.run(made._wait_for_past_events(it.state))
    assert len(pauses) == 3  # what is told ends long ago; then more comes; then it is quiet
    tell(it.state, jobs=80)
    asyncio.run(made._wait_for_past_events(it.state))
    assert len(pauses) == 3  # later events do not hold up forecasts


def test_a_fleet_whose_history_ended_long_ago_is_forecast_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it, pauses = kept(tmp_path), []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(forecasts.asyncio, "sleep", sleep)
    it.state.apply(Batch(events=(Submitted(job="old", sequence=1, time_ms=NOW_MS - 90 * MINUTE_MS),)), NOW_MS)
    asyncio.run(DemandForecasts(it.parts[DemandForecaster], ManualClock(NOW_MS))._wait_for_past_events(it.state))
    assert len(pauses) == forecasts.MOST_PAUSES
