"""The page of the fleet's metrics: complete for the fleet, bounded for entities, readable for Prometheus."""

import asyncio
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.events import NodeEvent, Started, Submitted
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.metrics import find_metric_row
from fleetcast.fleet.nodes import NodeRecord, NodeState
from fleetcast.fleet.requests import RankPlacement
from fleetcast.fleet.samples import EntityKind, SampleBatch
from fleetcast.fleet.topology import NodeSpec, Topology
from fleetcast.ingest.source import Batch, MemorySource, Source
from fleetcast.models.demand.rows import DemandRow, WaitsFor
from fleetcast.models.risk.score import ScoredFleet
from fleetcast.models.risk.scores import RISK_HORIZONS_S, RISK_KINDS, Action, Reason, RiskScores
from fleetcast.service.board.board import BoardReader
from fleetcast.service.config import Config
from fleetcast.service.exposition import LABEL_CHARS
from fleetcast.service.pipeline import fleet_metrics
from fleetcast.service.pipeline.demand import metrics as demand_metrics
from fleetcast.service.pipeline.demand.metrics import make_demand_page
from fleetcast.service.pipeline.documents import STATES
from fleetcast.service.pipeline.fleet_metrics import make_fleet_page
from fleetcast.service.pipeline.gpu_states import compute_gpu_states
from fleetcast.service.pipeline.metrics import PipelinePage
from fleetcast.service.pipeline.pipeline import Pipeline
from fleetcast.service.pipeline.tick import Tick
from tests.programs import needed
from tests.service.ticks import GPUS, tick_of

NOW_MS = 1_789_000_000_000
MOST_SERIES = 6_000
MOST_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Crowd:
    """How much of everything."""

    nodes: int = 4
    flagged: int = 1
    queues: int = 2
    jobs: int = 3
    pools: int = 2


def attempts(crowd: Crowd) -> list[JobAttempt]:
    rows = []
    for number in range(crowd.jobs):
        rows.append(attempt := JobAttempt(f"job-{number}", 1))
        attempt.fold(Submitted(job=attempt.job, sequence=0, time_ms=NOW_MS - 90_000, queue=f"q{number % crowd.queues}"))
        ranks = (RankPlacement(0, f"n{number % crowd.nodes}", (number // crowd.nodes % GPUS,)),)
        attempt.fold(Started(job=attempt.job, sequence=1, time_ms=NOW_MS - 30_000, ranks=ranks))
    return rows


def waiting(crowd: Crowd) -> list[JobAttempt]:
    rows = []
    for number in range(crowd.jobs):
        rows.append(attempt := JobAttempt(f"later-{number}", 1))
        time_ms = NOW_MS - 60_000 * (number + 1)
        attempt.fold(Submitted(job=attempt.job, sequence=0, time_ms=time_ms, queue=f"q{number % crowd.queues}", gang=2))
    return rows


def slow(job: str) -> dict[str, Any]:
    culprit = {"kind": "worker", "name": 'n"0/1', "share": 0.9}
    return {"slow": True, "ratio": 1.5, "cause": "compute", "culprit": culprit}


def make_tick(crowd: Crowd = Crowd(), node_state: Sequence[int] = ()) -> Tick:
    n = crowd.nodes
    topology = Topology.build([NodeSpec(f"n{row}", GPUS, "H100") for row in range(n)])
    running = attempts(crowd)
    values = np.linspace(0.5, 0.1, n)[None, None, :].repeat(len(RISK_KINDS), 0).repeat(len(RISK_HORIZONS_S), 1)
    worst = range(n - crowd.flagged, n)  # the last ones, whose probability is lowest
    reason = Reason("xid", "n/1", 79.0, None, "code", 1.0, NOW_MS, "XID 79")
    names = {f"n{row}": state for row, state in enumerate(node_state)}
    nodes = {
        name: NodeRecord(name, drained=state == NodeState.DRAINED, lost=state == NodeState.LOST)
        for name, state in names.items()
    }
    risk = RiskScores(
        values,
        dict.fromkeys(worst, (reason,)),
        {row: Action("drain_now", "") for row in worst},
        values[0, 0] > 2,
        "r",
    )
    fleet = ScoredFleet(risk, {attempt.job: slow(attempt.job) for attempt in running})
    return tick_of(NOW_MS, topology, fleet, running, waiting(crowd), nodes=nodes)


def demand(crowd: Crowd = Crowd()) -> list[DemandRow]:
    horizons, quantiles = [600, 3600], [0.05, 0.1, 0.5, 0.9]
    return [
        DemandRow(
            queue=pool,
            class_="all",
            group="all",
            target=target,
            now=10.0,
            model="persistence",
            issued_ms=0,
            horizons_s=horizons,
            quantiles=quantiles,
            values=[[5.0, 4.0], [6.0, 5.0], [10.0, 10.0], [14.0, 19.0]],
            record={"coverage_80": 0.81, "wql_vs_best_naive": None},
        )
        for pool in ("all", *(f"pool{number}" for number in range(crowd.pools)))
        for target in ("arriving", "running", "queued", "wanted")
    ]


Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def series(page: bytes) -> Series:
    """(name, sorted labels) -> value, as Prometheus' own parser reads them."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def of(found: Series, name: str, *labels: str) -> dict[tuple[str, ...], float]:
    """The values of one family by the values of some of its labels."""
    rows = {key: value for key, value in found.items() if key[0] == f"fleetcast_{name}"}
    return {tuple(dict(key[1])[label] for label in labels): value for key, value in rows.items()}


def test_every_gpu_is_in_exactly_one_state() -> None:
    # three jobs hold a GPU on n0, n1 and n2 each; n1 is drained, n2 is lost, n3 is free
    tick = make_tick(node_state=[0, 1, 2, 0])
    assert np.sum([*compute_gpu_states(tick).values()], axis=0).tolist() == np.ones((4, GPUS)).tolist()
    told = of(series(make_fleet_page(tick)), "gpus", "state")
    none = {(state,): 0 for state in ("promised", "unheard", "unusable", "window", "reservation")}
    assert told == {("running",): 3, ("free",): 15, ("out_of_service",): 14, **none}


def test_nodes_are_counted_by_the_states_that_the_api_tells(tmp_path: Path) -> None:
    tick = make_tick(Crowd(nodes=6, flagged=2), node_state=[0, 1, 2, 0, 1, 0])
    counted = {state: tick.states.count(state) for state in STATES}
    assert of(series(make_fleet_page(tick)), "nodes", "state") == {(key,): value for key, value in counted.items()}


def test_a_flagged_node_is_told_with_its_action_even_where_riskier_ones_are_many() -> None:
    crowd = Crowd(nodes=500, flagged=1)
    found = series(make_fleet_page(make_tick(crowd)))
    flagged = of(found, "node_flagged", "node", "action", "feature")
    assert flagged == {("n499", "drain_now", "xid"): 1}
    assert len(of(found, "node_risk_probability", "node", "kind", "horizon")) == fleet_metrics.NODES_SHOWN * 12
    assert of(found, "node_risk_probability", "node", "kind", "horizon")["n0", "fail", "1h"] == 0.5


def test_waits_are_told_by_queue() -> None:
    # q0: waits of 1 and 3 minutes, q1: of 2; all three running jobs had waited a minute
    found = series(make_fleet_page(make_tick()))
    waits = of(found, "queue_wait_seconds", "queue", "quantile")
    assert (waits["q0", "0.5"], waits["q0", "1"], waits["q1", "1"]) == (120, 180, 120)
    assert of(found, "started_wait_seconds", "quantile") == {("0.5",): 60, ("0.9",): 60, ("1",): 60}
    gpus = of(found, "queue_gpus", "queue", "state")
    assert (gpus["q0", "queued"], gpus["q1", "queued"], gpus["q0", "running"]) == (4, 2, 2)


def test_demand_is_told_by_pool_target_and_horizon() -> None:
    found = series(make_demand_page(demand()))
    forecast = of(found, "demand_forecast_gpus", "queue", "target", "horizon", "quantile")
    assert forecast["all", "wanted", "1h", "0.9"] == 19
    assert len(forecast) == 3 * 4 * 2 * 3
    assert of(found, "demand_horizon_seconds", "horizon") == {("10m",): 600, ("1h",): 3600}
    assert of(found, "demand_coverage_ratio", "queue", "target")["all", "queued"] == 0.81
    assert of(found, "demand_loss_ratio", "pool", "target") == {}  # unknown is no zero


def test_a_slow_job_names_who_holds_it_back() -> None:
    found = series(make_fleet_page(make_tick()))
    assert of(found, "slow_job_gpus", "job_id", "culprit", "cause")["job-1", 'n"0/1', "compute"] == 1
    assert of(found, "slow_jobs", "cause")["compute",] == 3


def test_the_series_stay_bounded_on_a_fleet_of_ten_thousand_nodes() -> None:
    crowd = Crowd(nodes=10_000, flagged=3_000, queues=500, jobs=20_000, pools=200)
    page = make_fleet_page(make_tick(crowd)) + make_demand_page(demand(crowd))
    found = series(page)
    assert len(found) <= MOST_SERIES
    assert len(page) <= MOST_BYTES
    assert len(of(found, "node_info", "node")) == fleet_metrics.NODES_SHOWN
    assert of(found, "metrics_left_out", "what") == {
        ("nodes",): 10_000 - fleet_metrics.NODES_SHOWN,
        ("queues",): 500 - fleet_metrics.QUEUES_SHOWN,
        ("slow_jobs",): 20_000 - fleet_metrics.JOBS_SHOWN,
    }
    assert of(found, "demand_pools_left_out") == {(): 201 - demand_metrics.POOLS_SHOWN}
    assert of(found, "flagged_nodes", "action")["drain_now",] == 3_000
    assert sum(of(found, "queue_jobs", "queue", "state").values()) == 40_000


def test_names_from_outside_cannot_break_the_page() -> None:
    names = ['a"b\\c\nd', "x" * 5_000, "x" * 4_999 + "y", "", "other"]
    rows = [structs.replace(row, queue=name) for name in names for row in demand()[:1]]
    now = of(series(make_demand_page(rows)), "demand_now_gpus", "queue", "target")
    assert len(now) == len(names)
    assert all(len(pool) <= LABEL_CHARS for pool, _ in now)
    assert (names[0], "arriving") in now


def test_no_label_has_a_name_that_prometheus_gives_itself() -> None:
    found = series(make_fleet_page(make_tick()) + make_demand_page(demand()))
    assert not {"job", "instance"} & {label for _, labels in found for label, _ in labels}


def test_an_empty_fleet_has_a_page() -> None:
    found = series(make_fleet_page(make_tick(Crowd(nodes=1, flagged=0, jobs=0))))
    assert of(found, "gpus", "state")["free",] == GPUS
    assert of(found, "started_wait_seconds", "quantile") == {}


def test_readings_are_told_in_base_units(tmp_path: Path) -> None:
    def make(entities: Entities) -> Sequence[Source]:
        rows = [entities.add_to_node(EntityKind.GPU, "n1", gpu) for gpu in range(8)][:2]
        told = {"power_w": (300.0, 500.0), "sm_clock_mhz": (1980.0, 990.0), "gpu_util": (1.0, 0.5)}
        samples = [
            (find_metric_row(EntityKind.GPU, name), row, NOW_MS - 1000, value)
            for name, values in told.items()
            for row, value in zip(rows, values, strict=True)
        ]
        return [MemorySource([Batch(samples=(SampleBatch.from_rows(EntityKind.GPU, samples),))])]

    pipeline = Pipeline(Config(state=str(tmp_path)), ManualClock(NOW_MS), Topology.build([NodeSpec("n1", 8)]), make)
    pipeline.apply_batch(
        Batch(node_events=(NodeEvent(node="n1", source="a", sequence=1, time_ms=NOW_MS, type="drain"),))
    )
    pipeline.apply_batch(asyncio.run(pipeline.sources[0].next()))
    asyncio.run(pipeline.tick())
    board = BoardReader(pipeline.config.board).latest()
    assert board is not None
    found = series(board.text("metrics.fleet"))
    assert of(found, "power_watts") == {(): 800}
    assert of(found, "node_sm_clock_hertz", "node") == {("n1",): 990e6}
    assert of(found, "gpu_utilization_ratio", "state") == {("running",): 0.75}, (
        "no job holds them, and they are at work"
    )
    assert of(found, "gpus", "state")["out_of_service",] == 6
    assert of(found, "gpus_unknown_use") == {(): 2}
    assert of(found, "state_disk_free_bytes")[()] > 0
    assert of(found, "pipeline_process_resident_memory_bytes")[()] > 1e7


def test_the_time_of_the_newest_snapshot_is_told(tmp_path: Path) -> None:
    page, at = PipelinePage(tmp_path, []), make_tick()
    assert of(series(page.make_page(at)), "snapshot_timestamp_seconds") == {}
    for number, time_s in ((9, 100), (10, 200)):
        state = tmp_path / "snapshot" / str(number) / "state.arrays"
        state.parent.mkdir(parents=True)
        state.touch()
        os.utime(state, (time_s, time_s))
    assert of(series(page.make_page(at)), "snapshot_timestamp_seconds") == {(): 200}


def test_promtool_finds_no_fault_with_the_names(tmp_path: Path) -> None:
    page = make_fleet_page(make_tick()) + make_demand_page(demand()) + PipelinePage(tmp_path, []).make_page(make_tick())
    done = subprocess.run([needed("promtool"), "check", "metrics"], input=page, capture_output=True, check=False)
    assert (done.returncode, done.stderr.decode()) == (0, "")


def test_demand_of_a_pool_of_machines_stands_beside_its_gpus_and_what_waits_for_a_quota() -> None:
    whole = [row for row in demand() if row.queue == "all"]
    pool = [structs.replace(row, pool="h100", capacity=64.0) for row in whole]
    pool = [structs.replace(row, waits_for=WaitsFor(8.0, 2.0)) if row.target == "queued" else row for row in pool]
    found = series(make_demand_page([*whole, *pool]))
    assert of(found, "demand_now_gpus", "queue", "pool", "target")["all", "h100", "wanted"] == 10.0
    assert of(found, "demand_usable_gpus", "queue", "pool") == {("all", "h100"): 64.0}
    waits = of(found, "demand_waiting_gpus", "queue", "pool", "waits_for")
    assert waits == {("all", "h100", "quota"): 8.0, ("all", "h100", "machines"): 2.0}
