"""Run times in a pipeline: what is told of jobs, what is left of them, how often it held, what a restart keeps."""

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fleetcast.features.past_runs import COLUMN, FEATURES, JobShape
from fleetcast.features.run_past import LEVELS
from fleetcast.features.similarity import make_kind_keys
from fleetcast.fleet.errors import ModelError
from fleetcast.fleet.samples import EntityKind
from fleetcast.ingest.source import Batch
from fleetcast.models.run_times.duration import DurationModel
from fleetcast.models.run_times.rows import RunRows
from fleetcast.models.versions.card import Card
from fleetcast.models.versions.registry import Registry
from fleetcast.service.board.kind_tables import find_expected_needs, find_expected_run_time
from fleetcast.service.pipeline.pipeline import Pipeline
from fleetcast.service.pipeline.run_times.forecasts import RunForecasts
from fleetcast.service.pipeline.run_times.model import BASELINE, ServedRunModel
from fleetcast.service.pipeline.run_times.record import RunTimeRecord, issue_run_time
from tests.service.runs_world import (
    NOW_MS,
    batch,
    began,
    board_of,
    came,
    failed,
    finite,
    past,
    pipeline_in,
    readings,
    run_of,
)


def tick(pipeline: Pipeline) -> None:
    async def once() -> None:
        await pipeline.capabilities[RunForecasts].forecast(pipeline.state)
        await pipeline.tick()

    asyncio.run(once())


def later(pipeline: Pipeline, seconds: float) -> None:
    pipeline.clock.advance(seconds)  # type: ignore[attr-defined]


def row_of(folder: Path, job: str) -> dict[str, Any]:
    rows = {row["job"]: row for row in board_of(folder).json("doc.jobs")}
    return {**rows[job], **board_of(folder).json("doc.job")[job]}


def test_a_new_job_is_told_how_long_it_runs_and_what_is_left_as_it_runs(tmp_path: Path) -> None:
    pipeline = pipeline_in(tmp_path)
    pipeline.apply_batch(batch(*past(), came("train-99", NOW_MS), began("train-99", NOW_MS)))
    tick(pipeline)
    row = row_of(tmp_path, "train-99")
    assert 600 <= row["run_s"]["p50"] <= row["run_s"]["p90"] <= row["run_s"]["p99"] <= 720
    assert row["model"] == BASELINE
    assert row["remaining_s"]["p50"] == pytest.approx(row["run_s"]["p50"], abs=2)
    told = row["run_s"]
    later(pipeline, 650)
    tick(pipeline)
    row = row_of(tmp_path, "train-99")
    assert row["run_s"] == told
    # of the twenty that ran 600 … 714 s, those that ran longer than 650 s had some half a minute to go
    assert 5 < row["remaining_s"]["p50"] < 60 < row["remaining_s"]["p90"] + 30
    left_s = board_of(tmp_path).array("jobs.running.left_s")
    assert left_s.shape == (1, len(LEVELS))
    assert left_s[0, LEVELS.index(0.5)] == pytest.approx(row["remaining_s"]["p50"], abs=1)


def test_what_is_left_counts_down_between_two_looks(tmp_path: Path) -> None:
    pipeline = pipeline_in(tmp_path)
    pipeline.apply_batch(batch(*past(), came("train-99", NOW_MS), began("train-99", NOW_MS)))
    tick(pipeline)
    first = row_of(tmp_path, "train-99")["remaining_s"]["p50"]
    later(pipeline, 30)
    asyncio.run(pipeline.tick())
    assert row_of(tmp_path, "train-99")["remaining_s"]["p50"] == first - 30


def test_no_run_is_told_to_pass_its_limit(tmp_path: Path) -> None:
    pipeline = pipeline_in(tmp_path)
    pipeline.apply_batch(batch(*past(), came("train-99", NOW_MS, limit_s=300), began("train-99", NOW_MS)))
    tick(pipeline)
    row = row_of(tmp_path, "train-99")
    assert row["run_s"] == {"p50": 300, "p90": 300, "p99": 300}
    assert row["remaining_s"] == {"p50": 300, "p90": 300}


def test_before_any_job_has_ended_nothing_is_told(tmp_path: Path) -> None:
    pipeline = pipeline_in(tmp_path)
    pipeline.apply_batch(batch(came("train-1", NOW_MS), began("train-1", NOW_MS), came("wait", NOW_MS)))
    tick(pipeline)
    assert row_of(tmp_path, "train-1")["run_s"] is None
    assert row_of(tmp_path, "train-1")["remaining_s"] is None
    assert row_of(tmp_path, "wait")["run_s"] is None
    assert find_expected_run_time(board_of(tmp_path), JobShape(user="ada", gpus=2)) is None


def test_the_board_knows_how_long_jobs_of_a_kind_run(tmp_path: Path) -> None:
    pipeline = pipeline_in(tmp_path)
    pipeline.apply_batch(batch(*past(), came("train-99", NOW_MS)))
    tick(pipeline)
    board = board_of(tmp_path)

    def asked(**more: Any) -> Any:
        return find_expected_run_time(board, JobShape(**{"queue": "train", "gpus": 2, **more}))

    assert asked(user="ada", name="train-5").kind == "user, name and GPUs"
    assert asked(user="ada", name="train-5", gpus=4).kind == "user and name"
    assert asked(user="ada", name="other").kind == "user and GPUs"
    assert asked(user="bob", name="train-5").kind == "queue and GPUs"
    assert asked(user="bob", gpus=64).kind == "all jobs"
    assert 600 <= asked(user="ada", name="train-5").quantiles["p50"] <= 720
    assert asked(user="bob", limit_s=60.0).quantiles == {"p50": 60, "p90": 60, "p99": 60}
    assert asked().model == BASELINE


def test_what_was_told_is_held_against_what_came(tmp_path: Path) -> None:
    pipeline = pipeline_in(tmp_path)
    pipeline.apply_batch(batch(*past()))
    names = {"short": 500.0, "long": 5000.0, "broke": 30.0}
    for gpu, name in enumerate(names):
        pipeline.apply_batch(batch(came(name, NOW_MS), began(name, NOW_MS, 2, 2 * gpu)))
    tick(pipeline)
    pipeline.apply_batch(batch(*run_of("short", NOW_MS + 500_000, 500.0)[2:], failed("broke", NOW_MS + 30_000)))
    pipeline.apply_batch(batch(*run_of("long", NOW_MS + 5_000_000, 5000.0)[2:]))
    later(pipeline, 5000)
    tick(pipeline)
    tick(pipeline)  # scored once
    assert len(pipeline.capabilities[RunForecasts].record.outcomes) == 3
    assert pipeline.capabilities[RunForecasts].record.compute_coverage()["p90"] == pytest.approx(2 / 3)
    page = board_of(tmp_path).text("metrics.fleet").decode()
    assert 'fleetcast_duration_coverage_ratio{bound="p90"} 0.6666666667' in page
    assert "fleetcast_duration_scored_runs 3" in page
    assert f'fleetcast_duration_model_info{{model="{BASELINE}"}} 1' in page
    assert "fleetcast_duration_model_trouble 0" in page


def test_jobs_that_are_over_before_the_first_look_tell_of_their_kinds_and_a_restart_keeps_them(tmp_path: Path) -> None:
    pipeline = pipeline_in(tmp_path)
    pipeline.apply_batch(batch(*past()))
    asyncio.run(pipeline.save())
    again = pipeline_in(tmp_path)
    for one in (pipeline, again):
        tick(one)
        known = find_expected_run_time(board_of(tmp_path), JobShape(user="ada", name="train-5", queue="train", gpus=2))
        assert known is not None
        assert (known.kind, known.model) == ("user, name and GPUs", BASELINE)
        assert 600 <= known.quantiles["p50"] <= known.quantiles["p99"] <= 720
        assert not one.capabilities[RunForecasts].record.outcomes  # told of too late to be a forecast


def test_runs_that_end_before_they_were_looked_at_are_scored_and_late_ones_are_not(tmp_path: Path) -> None:
    pipeline = pipeline_in(tmp_path)
    pipeline.apply_batch(batch(*past()))
    tick(pipeline)
    later(pipeline, 10)
    pipeline.apply_batch(batch(*run_of("train-98", NOW_MS + 9_000, 5.0), *run_of("train-97", NOW_MS + 9_000, 7200.0)))
    pipeline.apply_batch(batch(came("train-99", NOW_MS - 600_000), began("train-99", NOW_MS - 500_000)))
    tick(pipeline)
    pipeline.apply_batch(batch(*run_of("train-99", NOW_MS + 9_000, 509.0)[2:]))
    tick(pipeline)
    (only,) = pipeline.capabilities[RunForecasts].record.outcomes
    assert (only.below_p50, only.in_80) == (True, False)
    assert row_of(tmp_path, "train-98")["run_s"]["p50"] >= 600


def test_a_kind_is_not_capped_by_the_limit_of_its_newest_job(tmp_path: Path) -> None:
    pipeline = pipeline_in(tmp_path)
    pipeline.apply_batch(batch(*past(), came("train-98", NOW_MS, limit_s=36_000), came("train-99", NOW_MS, limit_s=60)))
    tick(pipeline)
    for shape in (JobShape(user="ada", name="train-5", queue="train", gpus=2), JobShape(queue="train", gpus=2)):
        known = find_expected_run_time(board_of(tmp_path), shape)
        assert known is not None
        assert known.quantiles["p50"] >= 600
    record = RunTimeRecord()
    for limit_s in (36_000.0, 60.0):
        record.mark_kinds_due(JobShape(user="ada", gpus=2, limit_s=limit_s))
    shapes = dict(record.pop_due_kinds(9))
    usual = {key: shape.limit_s for key, shape in shapes.items()}
    assert usual[make_kind_keys(JobShape(user="ada", gpus=2))["user"]] == 60
    assert usual[make_kind_keys(JobShape())["all jobs"]] == pytest.approx(36_000 * (60 / 36_000) ** 0.1)


def test_submissions_without_a_run_do_not_push_out_what_is_known_of_kinds_with_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fleetcast.service.pipeline.run_times.record.MOST_KINDS", 8)
    ada, record = JobShape(user="ada", name="train-5", queue="train", gpus=2), RunTimeRecord()
    record.mark_kinds_due(ada)
    record.mark_kinds_due(ada, is_over=True)
    for number in range(50):
        record.mark_kinds_due(JobShape(user=f"u{number}", name="flood", queue="train", gpus=2))
    known = {key for key, _ in record.pop_due_kinds(99)}
    assert len(known) == 8
    assert set(make_kind_keys(ada).values()) < known
    record.update_kinds([*make_kind_keys(ada).values()], np.ones((7, len(LEVELS)), np.float32))
    again = RunTimeRecord()
    again.load(*record.dump())
    assert again.make_table()[2].tolist() == [1] * 7
    for number in range(3):
        again.mark_kinds_due(
            JobShape(user=f"v{number}"), is_over=True
        )  # of those with a run the one of longest ago goes
    assert len(again.pop_due_kinds(99)) == 8


def test_a_kind_of_which_no_run_has_ended_leaves_the_word_to_one_that_has_some(tmp_path: Path) -> None:
    pipeline = pipeline_in(tmp_path)
    pipeline.apply_batch(batch(*past(), came("other-1", NOW_MS)))
    tick(pipeline)
    known = find_expected_run_time(board_of(tmp_path), JobShape(user="ada", name="other-1", queue="train", gpus=2))
    assert known is not None
    assert (known.kind, known.runs) == ("user and GPUs", len(past()) // 3)


def test_what_came_of_run_times_stands_beside_the_card_of_the_version_that_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = pipeline_in(tmp_path)
    registry, model = served(monkeypatch, tmp_path, v1=Flat(6000))
    registry.version, pipeline.capabilities[RunForecasts].model = "v1", model
    pipeline.apply_batch(batch(*past()))
    tick(pipeline)
    for number in range(4):
        pipeline.apply_batch(
            batch(came(f"train-{90 + number}", NOW_MS, gpus=1), began(f"train-{90 + number}", NOW_MS, 1, number))
        )
    tick(pipeline)
    for number in range(4):
        pipeline.apply_batch(batch(*run_of(f"train-{90 + number}", NOW_MS + 610_000, 610.0)[2:]))
    later(pipeline, 610)
    tick(pipeline)
    recent = pipeline.capabilities[RunForecasts].recent
    assert (recent.n, recent.coverage_80) == (4, 0.0)
    assert recent.loss_ratio is not None
    assert recent.loss_ratio > 10
    registry.version = "gone"
    tick(pipeline)
    assert pipeline.capabilities[RunForecasts].recent.n == 0  # similar jobs speak: no version to watch


def test_what_is_told_twice_counts_once(tmp_path: Path) -> None:
    once, twice = pipeline_in(tmp_path / "1"), pipeline_in(tmp_path / "2")
    events = [*past(), came("train-99", NOW_MS), began("train-99", NOW_MS)]
    once.apply_batch(batch(*events))
    twice.apply_batch(batch(*events))
    twice.apply_batch(batch(*reversed(events)))
    for pipeline in (once, twice):
        tick(pipeline)
    assert once.state.runs.dump() == twice.state.runs.dump()
    assert row_of(tmp_path / "1", "train-99") == row_of(tmp_path / "2", "train-99")
    shape = JobShape(user="ada", name="train-1", queue="train", gpus=2)
    np.testing.assert_array_equal(
        once.state.runs.compute_features(shape, NOW_MS), twice.state.runs.compute_features(shape, NOW_MS)
    )


def test_a_restart_goes_on_where_the_last_snapshot_was(tmp_path: Path) -> None:
    pipeline = pipeline_in(tmp_path)
    pipeline.apply_batch(batch(*past(), came("train-99", NOW_MS - 60_000), began("train-99", NOW_MS - 60_000)))
    pipeline.apply_batch(Batch(samples=(readings(pipeline.state.entities, NOW_MS, 40, 500),)))
    tick(pipeline)
    asyncio.run(pipeline.save())
    before = row_of(tmp_path, "train-99")
    known = find_expected_run_time(board_of(tmp_path), JobShape(user="ada", name="train-5", queue="train", gpus=2))

    again = pipeline_in(tmp_path, NOW_MS)
    again.apply_batch(batch(*past(), came("train-99", NOW_MS - 60_000)))  # a replay that overlaps
    asyncio.run(again.tick())  # before any new forecast
    assert row_of(tmp_path, "train-99") == before
    assert (
        find_expected_run_time(board_of(tmp_path), JobShape(user="ada", name="train-5", queue="train", gpus=2)) == known
    )
    tick(again)
    assert row_of(tmp_path, "train-99")["run_s"] == before["run_s"]
    assert (
        find_expected_run_time(board_of(tmp_path), JobShape(user="ada", name="train-5", queue="train", gpus=2))
        is not None
    )


def test_peaks_that_telemetry_saw_of_a_job_are_known_when_it_has_finished(tmp_path: Path) -> None:
    pipeline = pipeline_in(tmp_path)
    pipeline.apply_batch(batch(came("train-1", NOW_MS - 60_000), began("train-1", NOW_MS - 60_000)))
    pipeline.apply_batch(Batch(samples=(readings(pipeline.state.entities, NOW_MS, 40, 500),)))
    tick(pipeline)
    shape = JobShape(user="ada", name="train-2", queue="train", gpus=2)
    assert find_expected_needs(board_of(tmp_path), shape) is None
    pipeline.apply_batch(batch(*run_of("train-1", NOW_MS + 5000, 65)[2:]))
    tick(pipeline)
    known = find_expected_needs(board_of(tmp_path), shape)
    assert known is not None
    assert (known.gpu_memory_gib, known.power_w, known.kind, known.runs) == (40.0, 500.0, "user and name", 1)


class Flat:
    """Says the same of every job."""

    def __init__(self, run_s: float) -> None:
        self._run_s = run_s

    def predict_log_run(self, features: Any) -> Any:
        assert features.shape[1] == len(FEATURES)
        return np.full((len(features), len(LEVELS)), np.log(self._run_s) if self._run_s > 0 else -np.inf)

    def predict_remaining_s(self, features: Any, elapsed_s: Any, levels: tuple[float, ...]) -> Any:
        return np.full((len(features), len(levels)), self._run_s / 2)


class Registered(Registry):
    """A registry that says which version serves without any on disk."""

    version: str | None = None

    def find_current_version(self, kind: str) -> str | None:
        return self.version

    def find_serving_folder(self, kind: str) -> Path | None:
        return Path(self.version) if self.version else None

    def read_version_card(self, kind: str, version: str) -> Any:
        return msgspec.defstruct("Card", ["fitted_until_ms"])(NOW_MS - 86_400_000)


def served(monkeypatch: pytest.MonkeyPatch, folder: Path, **models: Any) -> tuple[Registered, ServedRunModel]:
    def load(path: Path) -> Any:
        if path.name not in models:
            raise ModelError(f"{path.name} is damaged")
        return models[path.name]

    monkeypatch.setattr("fleetcast.service.pipeline.run_times.model.load_model", load)
    registry = Registered(folder)
    return registry, ServedRunModel(registry)


def test_the_version_that_is_promoted_serves_from_the_next_look_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = pipeline_in(tmp_path)
    registry, model = served(monkeypatch, tmp_path, v1=Flat(1000), v2=Flat(2000))
    pipeline.capabilities[RunForecasts].model = model
    pipeline.apply_batch(batch(*past(), came("train-98", NOW_MS)))
    for version, run_s in (("v1", 1000), ("v2", 2000)):
        registry.version = version
        pipeline.apply_batch(batch(came(f"train-{version}", NOW_MS)))
        tick(pipeline)
        tick(pipeline)  # what is said of kinds follows the model
        assert row_of(tmp_path, f"train-{version}")["run_s"]["p50"] == run_s
        assert row_of(tmp_path, f"train-{version}")["model"] == f"duration-{version}"
        known = find_expected_run_time(board_of(tmp_path), JobShape(user="ada", gpus=2))
        assert known is not None
        assert (known.quantiles["p90"], known.model) == (run_s, f"duration-{version}")
    assert row_of(tmp_path, "train-v1")["run_s"]["p50"] == 1000  # as told then
    assert "fleetcast_duration_fit_age_seconds 86400" in board_of(tmp_path).text("metrics.fleet").decode()


@pytest.mark.parametrize("sick", ["missing", "none", "negative"])
def test_a_sick_model_leaves_the_word_to_similar_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, sick: str
) -> None:
    pipeline = pipeline_in(tmp_path)
    registry, model = served(monkeypatch, tmp_path, none=Flat(np.nan), negative=Flat(-1))
    registry.version = sick
    pipeline.capabilities[RunForecasts].model = model
    pipeline.apply_batch(batch(*past(), came("train-99", NOW_MS)))
    tick(pipeline)
    tick(pipeline)
    row = row_of(tmp_path, "train-99")
    assert row["model"] == BASELINE
    assert finite(list(row["run_s"].values()))
    assert "fleetcast_duration_model_trouble 1" in board_of(tmp_path).text("metrics.fleet").decode()
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


def test_many_jobs_are_told_of_in_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = pipeline_in(tmp_path)
    registry, model = served(monkeypatch, tmp_path, v1=Flat(1000))
    registry.version = "v1"
    calls = []
    monkeypatch.setattr(Flat, "predict_log_run", lambda self, rows: calls.append(len(rows)) or np.ones((len(rows), 8)))
    pipeline.capabilities[RunForecasts].model = model
    pipeline.apply_batch(batch(*past(), *(came(f"j-{number}", NOW_MS) for number in range(500))))
    tick(pipeline)
    assert len(calls) == 1
    assert calls[0] > 500


def test_gpu_memory_travels_between_pipelines() -> None:
    from fleetcast.service.pipeline.reports import SHOWN

    assert {"fb_used_bytes", "power_w"} <= set(SHOWN[EntityKind.GPU])


def fitted() -> DurationModel:
    """Small jobs run for about five minutes, large ones for about two hours."""
    rng = np.random.default_rng(3)
    gpus, at_s = rng.choice([1.0, 8.0], 300), np.sort(rng.uniform(0, 1e6, 300))
    run_s = np.where(gpus == 1, 300.0, 7200.0) * np.exp(rng.normal(0, 0.5, 300))
    features = np.full((300, len(FEATURES)), np.nan, np.float32)
    features[:, COLUMN["log_gpus"]] = np.log(gpus)
    return DurationModel(seed=1, threads=1).fit(RunRows(features, at_s, at_s, at_s + run_s), 2e6)


def test_a_fitted_model_of_the_registry_serves_and_a_damaged_one_does_not(tmp_path: Path) -> None:
    pipeline = pipeline_in(tmp_path)
    registry = Registry(pipeline.config.models_folder, pipeline.clock)
    card = Card(kind="duration", created_ms=NOW_MS, made_by="a test", seed=1, fitted_until_ms=NOW_MS - 3_600_000)
    model = fitted()
    version = registry.add_version("duration", model.save, card)
    registry.promote("duration", version, force=True)
    pipeline.apply_batch(batch(came("small", NOW_MS, gpus=1), came("large", NOW_MS, gpus=8), began("large", NOW_MS, 8)))
    tick(pipeline)
    small, large = row_of(tmp_path, "small"), row_of(tmp_path, "large")
    assert small["model"] == large["model"] == f"duration-{version}"
    assert small["run_s"]["p50"] == pytest.approx(300, rel=0.4)
    assert large["run_s"]["p50"] == pytest.approx(7200, rel=0.4)
    assert large["remaining_s"]["p50"] > 1000

    again = registry.add_version("duration", model.save, card)
    registry.promote("duration", again, force=True)
    for folder in (version, again):
        (registry.find_folder("duration", folder) / "duration.json").write_text("{}")
    pipeline.apply_batch(batch(*past(), came("train-99", NOW_MS)))
    tick(pipeline)
    assert row_of(tmp_path, "train-99")["model"] == BASELINE
    assert "duration 0002 is damaged" in pipeline.capabilities[RunForecasts].model.trouble


def test_what_is_told_moves_towards_what_came() -> None:
    record = RunTimeRecord()
    run_s = np.full((1, len(LEVELS)), 600.0)
    similar_s = np.full(len(LEVELS), 3000, np.float32)
    told = issue_run_time(run_s[0].astype(np.float32), similar_s, None, "m", in_time=True)
    record.use_model("m")
    for number in range(50):
        record.record_outcome(told, JobShape(queue="train"), 6000.0, NOW_MS + number * 600_000)
    moved = np.exp(record.tracker.correct_quantiles(np.log(run_s), np.log(run_s), [("train", 1)]))[0]
    assert moved[LEVELS.index(0.9)] > moved[LEVELS.index(0.5)] > 600
    again = RunTimeRecord()
    limited = issue_run_time(run_s[0].astype(np.float32) * 9, similar_s, 3599.9, "m", in_time=True)
    again.record_outcome(limited, JobShape(limit_s=3599.9), 3601.0, NOW_MS)  # stopped at its limit
    assert again.outcomes[0][1:5] == (True, True, True, True)
    assert again.outcomes[0].loss == pytest.approx(0, abs=1e-6)
    again = RunTimeRecord()
    about, arrays = record.dump()
    again.load(json.loads(json.dumps(about)), arrays)
    np.testing.assert_array_equal(again.tracker.offset, record.tracker.offset)
    assert again.summarise_recent() == record.summarise_recent()
    assert (record.summarise_recent().n, record.summarise_recent().coverage_80) == (50, 0.0)
    assert record.summarise_recent().loss_ratio == pytest.approx(math.log(10) / math.log(2))
    again.use_model("other")
    assert again.summarise_recent().n == 0
    assert not again.tracker.offset.any()
    assert again.compute_coverage() == record.compute_coverage() == {"p50": 0.0, "p90": 0.0, "p99": 0.0}
