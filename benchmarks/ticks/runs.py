"""Forecasts of run times, with a model fitted on simulated jobs: the model alone, and in a pipeline.

`fit`: fitting the model, with its back-tests. `tell`: forecasting the run-time quantiles of one submission
after another. `look`: one pass over the remaining time of every running job (each minute, mostly in a
thread). `rows`: the remaining times that a tick adds to `/v1/jobs` and to the placer's section.
`estimate`: the board's part of `POST /v1/jobs/estimate`. benchmarks/answers/start_time.py measures the
placer's part.
"""

import asyncio
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fleetcast.benchmarks.kit.case import measure
from fleetcast.features.past_runs import COLUMN, FEATURES
from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.events import JobEvent, Started, Submitted
from fleetcast.fleet.requests import PlacementRequest, RankPlacement
from fleetcast.fleet.topology import NodeSpec, Topology
from fleetcast.ingest.source import Batch, MemorySource
from fleetcast.models.run_times.duration import DurationModel
from fleetcast.models.run_times.rows import RunRows
from fleetcast.models.versions.registry import Registry
from fleetcast.service.api.estimates import PlacerEstimate, StartAnswer, make_estimate
from fleetcast.service.board.board import BoardReader
from fleetcast.service.config import Config
from fleetcast.service.pipeline.pipeline import Pipeline
from fleetcast.service.pipeline.run_times.forecasts import RunForecasts
from fleetcast.service.pipeline.run_times.model import ServedRunModel

SIZES = (1_000, 10_000)  # running jobs
NOW_MS = 1_760_000_000_000
USERS, NAMES = 97, 40
FITTED_ON = 5_000
ESTIMATES = 100
FORECASTS = 100


def run(sizes: Sequence[int] = SIZES) -> Iterator[dict[str, Any]]:
    """Yield two records of the model, and three of the pipeline for each number of running jobs."""
    rows = _make_history()
    yield measure("runs", "fit", {"jobs": FITTED_ON}, _make_fit_work(rows), "s", repeats=1)
    model = _fit_model(rows)
    yield measure("runs", "tell", {"jobs": FORECASTS}, _make_forecast_work(model, rows), "us/job")
    for jobs in sizes:
        size = {"jobs": jobs}
        with tempfile.TemporaryDirectory() as folder:
            pipeline = _make_pipeline(Path(folder), jobs, model)
            asyncio.run(pipeline.capabilities[RunForecasts].forecast(pipeline.state))
            yield measure("runs", "look", size, _make_pipeline_forecast_work(pipeline, jobs), "ms", repeats=3)
            yield measure("runs", "rows", size, _make_row_work(pipeline, jobs), "ms")
            asyncio.run(pipeline.tick())
            yield measure("runs", "estimate", size, _make_estimate_work(Path(folder)), "us/request")


def _make_history() -> RunRows:
    """Make training rows: one for each submission, and one after 10 min for each job that runs longer."""
    rng = np.random.default_rng(3)
    gpus, at_s = rng.choice([1.0, 4.0, 8.0], FITTED_ON), np.sort(rng.uniform(0, 3e6, FITTED_ON))
    run_s = 600 * gpus * np.exp(rng.normal(0, 1.0, FITTED_ON))
    features = np.full((FITTED_ON, len(FEATURES)), np.nan, np.float32)
    features[:, COLUMN["log_gpus"]] = np.log(gpus)
    late = run_s > 600
    rows = RunRows(
        np.concatenate((features, features[late])),
        np.concatenate((at_s, at_s[late] + 600)),
        np.concatenate((at_s, at_s[late])),
        np.concatenate((at_s + run_s, (at_s + run_s)[late])),
    )
    return rows.select_rows(np.argsort(rows.at_s, kind="stable"))


def _fit_model(rows: RunRows) -> DurationModel:
    return DurationModel(seed=1).fit(rows, 4e6)


def _make_fit_work(rows: RunRows) -> Callable[[], int]:
    def fit_once() -> int:
        assert _fit_model(rows).fitted_until_ms is not None
        return 1

    return fit_once


def _make_forecast_work(model: DurationModel, rows: RunRows) -> Callable[[], int]:
    def forecast_submissions() -> int:
        for row in range(FORECASTS):
            (forecast_s,) = model.predict_run_s(rows.features[row : row + 1])
            assert np.isfinite(forecast_s).all()
        return FORECASTS

    return forecast_submissions


class _FixedRunModel(ServedRunModel):
    """A served model that is always the same, and reads no registry."""

    def __init__(self, pipeline: Pipeline, model: DurationModel) -> None:
        super().__init__(Registry(pipeline.config.models_folder))
        self._set_model(model, "duration-0001", NOW_MS)

    def refresh(self) -> bool:
        return False


def _make_pipeline(folder: Path, jobs: int, model: DurationModel) -> Pipeline:
    nodes = [NodeSpec(f"n{number}", 8) for number in range(-(-jobs // 8))]
    pipeline = Pipeline(
        Config(state=str(folder)), ManualClock(NOW_MS), Topology.build(nodes), lambda _: [MemorySource()]
    )
    pipeline.capabilities[RunForecasts].model = _FixedRunModel(pipeline, model)
    pipeline.apply_batch(Batch(events=tuple(event for number in range(jobs) for event in _make_job_events(number))))
    return pipeline


def _make_job_events(number: int) -> list[JobEvent]:
    job, start_ms = f"job{number % NAMES}-{number}", NOW_MS - 400_000 - 1000 * number
    rank = RankPlacement(0, f"n{number // 8}", (number % 8,))
    return [
        Submitted(job=job, sequence=0, time_ms=start_ms - 1000, user=f"u{number % USERS}", queue="train"),
        Started(job=job, sequence=1, time_ms=start_ms, ranks=(rank,)),
    ]


def _make_pipeline_forecast_work(pipeline: Pipeline, jobs: int) -> Callable[[], int]:
    def forecast_running_jobs() -> int:
        pipeline.clock.advance(60)  # type: ignore[attr-defined]
        asyncio.run(pipeline.capabilities[RunForecasts].forecast(pipeline.state))
        forecast_rows = pipeline.capabilities[RunForecasts].issued.values()
        assert sum(row.left is not None and row.left_ms == pipeline.clock.now_ms() for row in forecast_rows) == jobs
        return 1

    return forecast_running_jobs


def _make_row_work(pipeline: Pipeline, jobs: int) -> Callable[[], int]:
    forecast_rows, now_ms = pipeline.capabilities[RunForecasts].issued, pipeline.clock.now_ms()

    def make_rows() -> int:
        left = [row.compute_remaining_time(now_ms) for row in forecast_rows.values()]
        left_s = np.array([row.left_s for row in forecast_rows.values()])
        assert len(left) == len(left_s) == jobs
        assert None not in left
        return 1

    return make_rows


def _make_estimate_work(folder: Path) -> Callable[[], int]:
    board = BoardReader(Config(state=str(folder)).board).latest()
    assert board is not None
    start = PlacerEstimate(StartAnswer(sentence="such a block is free now"))

    def estimate_requests() -> int:
        for number in range(ESTIMATES):
            request = PlacementRequest(request_id=f"job7-{number}", user=f"u{number % USERS}", queue="train")
            answer = make_estimate(board, request, start, NOW_MS)
            assert answer.run_s is not None
            assert answer.run_s.p50 > 0
        return ESTIMATES

    return estimate_requests
