"""Run times at submission and while jobs run: fitted on little data of our own."""

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from fleetcast.features.past_runs import COLUMN, EMPIRICAL, FEATURES
from fleetcast.features.run_past import LEVELS
from fleetcast.fleet.errors import ModelError
from fleetcast.models.run_times.duration import DurationModel
from fleetcast.models.run_times.remaining import estimate_left_s
from fleetcast.models.run_times.rows import RunRows, Survival, make_fit_rows
from fleetcast.models.run_times.tracker import RunTracker

DAY_S = 86_400.0
KIND = ("train", 8.0)


def features_of(gpus: NDArray[np.float64], limit_s: float = np.nan) -> NDArray[np.float32]:
    features = np.full((len(gpus), len(FEATURES)), np.nan, np.float32)
    features[:, COLUMN["log_gpus"]] = np.log(gpus)
    features[:, COLUMN["log_limit"]] = np.log(limit_s)
    return features


def history(count: int = 600, seed: int = 3) -> RunRows:
    """Jobs of 1 GPU run for about 5 min, jobs of 8 GPUs for about 2 h; each with a row after 10 min if it runs on."""
    rng = np.random.default_rng(seed)
    gpus = rng.choice([1.0, 8.0], count)
    at_s = np.sort(rng.uniform(0, 20 * DAY_S, count))
    run_s = np.where(gpus == 1, 300.0, 7200.0) * np.exp(rng.normal(0, 0.7, count))
    late = run_s > 600
    features = features_of(gpus)
    order = np.argsort(np.concatenate((at_s, at_s[late] + 600)), kind="stable")
    return RunRows(
        np.concatenate((features, features[late])),
        np.concatenate((at_s, at_s[late] + 600)),
        np.concatenate((at_s, at_s[late])),
        np.concatenate((at_s + run_s, (at_s + run_s)[late])),
    ).select_rows(order)


@pytest.fixture(scope="module")
def model() -> DurationModel:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fleetcast.models.run_times.boosted_quantiles.TREES", 40)
        return DurationModel(seed=1, threads=1).fit(history(), 20 * DAY_S)


@pytest.fixture(autouse=True)
def few_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetcast.models.run_times.boosted_quantiles.TREES", 8)


def test_quantiles_follow_the_size_and_cover_what_they_say(model: DurationModel) -> None:
    rows = history(seed=4)
    first = rows.select_rows(rows.elapsed_s == 0)
    told_s = model.predict_run_s(first.features)
    assert told_s.shape == (len(first), len(LEVELS))
    assert (np.diff(told_s, axis=1) >= 0).all()
    run_s = first.end_s - first.begin_s
    for at, level in enumerate(LEVELS):
        assert np.mean(run_s <= told_s[:, at]) == pytest.approx(level, abs=0.07)
    small, large = model.predict_median_s(features_of(np.array([1.0, 8.0])))
    assert small == pytest.approx(300, rel=0.3)
    assert large == pytest.approx(7200, rel=0.3)


def test_remaining_time_knows_the_job_and_how_long_it_ran(model: DurationModel) -> None:
    small, large = model.predict_remaining_s(features_of(np.array([1.0, 8.0])), np.array([600.0, 600.0]), (0.5,))[:, 0]
    assert small < 1000 < large
    assert large == pytest.approx(6800, rel=0.4)


def test_the_limit_caps_run_and_remaining_time(model: DurationModel) -> None:
    features = features_of(np.array([8.0]), limit_s=1800)
    assert model.predict_run_s(features, (0.99,))[0, 0] == pytest.approx(1818, rel=1e-3)
    assert model.predict_remaining_s(features, np.array([1200.0]), (0.9,))[0, 0] <= 618.1


def test_nothing_known_still_gives_an_answer_and_the_group_a_better_one() -> None:
    unfitted = DurationModel()
    features = features_of(np.array([1.0, 1.0]))
    features[1, [COLUMN[name] for name in EMPIRICAL]] = np.log([10, 20, 30, 40, 50, 60, 70, 80])
    told_s = unfitted.predict_run_s(features, (0.5, 0.9))
    assert np.isfinite(told_s).all()
    assert told_s[1] == pytest.approx([40, 60], rel=1e-4)
    left_s = unfitted.predict_remaining_s(features, np.array([0.0, 45.0]), (0.5,))[:, 0]
    assert np.isfinite(left_s).all()
    assert 1 <= left_s[1] < 20


def test_a_run_that_goes_on_at_the_fit_changes_nothing_before_its_end() -> None:
    rows, until_s = history(200), 10 * DAY_S
    running = (rows.begin_s <= until_s) & (rows.end_s > until_s)
    assert running.any()
    other = RunRows(rows.features, rows.at_s, rows.begin_s, np.where(running, rows.end_s + 5 * DAY_S, rows.end_s))
    features = features_of(np.array([1.0, 2.0, 8.0]))
    answers = [DurationModel(threads=1).fit(one, until_s) for one in (rows, other)]
    np.testing.assert_array_equal(*(one.predict_run_s(features) for one in answers))
    elapsed_s = np.array([60.0, 600.0, 6000.0])
    np.testing.assert_array_equal(*(one.predict_remaining_s(features, elapsed_s) for one in answers))


def test_running_jobs_make_the_tail_longer_than_the_ended_ones_alone() -> None:
    # six jobs ended after 10 s, four have been running for 100 s
    features = features_of(np.ones(10))
    rows = RunRows(features, np.zeros(10), np.zeros(10), np.where(np.arange(10) < 6, 10.0, np.nan))
    outcomes, survival = make_fit_rows(rows, 100.0)
    assert survival.alive.tolist() == pytest.approx([0.4, 0.4])
    assert outcomes.weight.sum() == pytest.approx(10)
    assert (outcomes.run_s[outcomes.weight < 1] > 100).all()
    assert (outcomes.row[outcomes.weight < 1] >= 6).all()


def test_survival_conditions_on_what_has_run() -> None:
    curve = Survival.from_run_times(np.array([10.0, 20.0, 30.0, 40.0]), np.ones(4, np.bool_))
    assert curve.estimate_run_s(np.array([0.0, 20.0]), 0.5).tolist() == [20, 30]
    assert curve.estimate_run_s(np.array([50.0]), 0.5)[0] == pytest.approx(100)  # past all: as long again


def test_quantiles_conditioned_on_the_elapsed_time_stay_beyond_it() -> None:
    row = np.log([[10.0, 20, 30, 40, 50, 60, 70, 80]])
    assert estimate_left_s(row, np.array([0.0]), 0.5)[0] == pytest.approx(40, rel=0.01)
    assert estimate_left_s(row, np.array([200.0]), 0.5)[0] == pytest.approx(200)
    assert np.isnan(estimate_left_s(row * np.nan, np.array([5.0]), 0.5)[0])


def test_a_saved_model_answers_the_same(model: DurationModel, tmp_path: Path) -> None:
    model.save(tmp_path)
    loaded = DurationModel.load(tmp_path, threads=1)
    features = features_of(np.array([1.0, 8.0]), limit_s=3600)
    np.testing.assert_allclose(loaded.predict_run_s(features), model.predict_run_s(features))
    elapsed_s = np.array([60.0, 600.0])
    np.testing.assert_allclose(
        loaded.predict_remaining_s(features, elapsed_s), model.predict_remaining_s(features, elapsed_s)
    )
    assert loaded.fitted_until_ms == model.fitted_until_ms
    assert not [path for path in tmp_path.iterdir() if path.suffix not in (".txt", ".json")]


def test_a_damaged_folder_is_refused(model: DurationModel, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot read"):
        DurationModel.load(tmp_path)
    model.save(tmp_path)
    trees = tmp_path / "run_3.txt"
    whole = trees.read_bytes()
    trees.write_bytes(whole[:-40])
    with pytest.raises(ModelError, match="damaged"):
        DurationModel.load(tmp_path)
    trees.write_bytes(whole)
    about = tmp_path / "duration.json"
    text = about.read_text()
    about.write_text(text.replace('"log_gpus"', '"other"'))
    with pytest.raises(ModelError, match="other features"):
        DurationModel.load(tmp_path)
    about.write_text(text[:200])
    with pytest.raises(ModelError, match="no fitted duration model"):
        DurationModel.load(tmp_path)


def test_the_tracker_restores_coverage_after_a_shift() -> None:
    rng = np.random.default_rng(0)
    tracker, issued = RunTracker(), np.log([10.0, 20, 40, 80, 160, 320, 500, 900])
    unknown = np.full(len(LEVELS), np.nan)
    covered = []
    for number in range(6000):
        served = tracker.correct_quantiles(issued[None], unknown[None], [KIND])[0]
        log_run = float(rng.normal(np.log(300), 1.2))
        if number > 3000:
            covered.append(log_run <= served)
        tracker.learn_outcome(served, unknown, KIND, log_run, number * 180.0)
    assert np.mean(covered, axis=0) == pytest.approx(LEVELS, abs=0.03)


def test_where_similar_jobs_know_better_they_are_believed_and_where_they_do_not_they_are_not() -> None:
    rng = np.random.default_rng(0)
    tracker, model = RunTracker(), np.log([10.0, 20, 40, 80, 160, 320, 500, 900])
    fresh = np.stack((model + 0.8, model + 0.8))  # what similar jobs say of either kind
    both, kinds = np.stack((model, model)), [("moved", 8.0), ("same", 8.0)]
    first = tracker.correct_quantiles(both, fresh, kinds)
    for number in range(1500):
        served = tracker.correct_quantiles(both, fresh, kinds)
        for row, center in enumerate((0.8, 0.0)):
            log_run = float(rng.normal(np.log(80) + center, 1.3))
            tracker.learn_outcome(served[row], fresh[row], kinds[row], log_run, number * 3600.0)
    moved, same = tracker.correct_quantiles(both, fresh, kinds)
    assert (moved - same > 0.3).all()
    assert (
        tracker.correct_quantiles(both, fresh + 9, kinds) - tracker.offset - model <= 1
    ).all()  # however far apart they are
    other = RunTracker()
    other.load(json.loads(json.dumps(tracker.dump())))
    np.testing.assert_array_equal(other.correct_quantiles(both, fresh, kinds), np.stack((moved, same)))
    np.testing.assert_array_equal(
        tracker.correct_quantiles(both, fresh * np.nan, kinds)[0], np.sort(model + tracker.offset)
    )
    assert (first[0] == first[1]).all()
