"""Trees: what they learn, whom they serve, and that a saved model is the same or says what is wrong with it."""

import msgspec
import numpy as np
import pytest

from fleetcast.checks import check_forecaster, make_walks
from fleetcast.fleet.errors import ModelError
from fleetcast.models.demand.boosting import Settings
from fleetcast.models.demand.naive import Persistence
from fleetcast.models.demand.trees import DemandTrees
from fleetcast.models.forecast import QUANTILES, Panel

FEW = Settings(trees=8, learning_rate=0.3, leaf_rows=20, rows=1500, threads=1)
DAY = 144


def waves(days, series=1, size=100.0, target="running", seed=0):
    """Half the pool runs at night and all of it by day, with some noise."""
    rng = np.random.default_rng(seed)
    hour = np.arange(days * DAY) % DAY / 6
    values = size * np.where((hour >= 9) & (hour < 17), 0.9, 0.4) + rng.normal(0, 0.01 * size, (series, days * DAY))
    names = tuple(f"s{row}" for row in range(series))
    return Panel(target, names, 600, 0, values, np.full(series, size))


@pytest.fixture(scope="module")
def fitted():
    panel = waves(14)
    return DemandTrees(1, FEW).fit([panel, waves(14, target="arriving", seed=5)], [panel.bins] * 2)


def test_the_forecaster_holds_what_every_forecaster_holds():
    panel = make_walks(2000)
    model = DemandTrees(0, Settings(trees=3, rows=1000, threads=1)).fit([panel], [panel.bins])
    check_forecaster(lambda: model)


def test_a_daily_wave_is_foretold_where_persistence_is_wrong(fitted):
    panel = waves(20, seed=9)
    origins = np.arange(16 * DAY, 18 * DAY, 6)
    outcomes = panel.values[0, origins + 36]
    errors = [
        np.abs(one.forecast(panel, origins, (36,))[3, 0, :, 0] - outcomes).mean() for one in (fitted, Persistence())
    ]
    assert errors[0] < 0.3 * errors[1]


def test_a_pool_it_never_saw_of_another_size_is_served(fitted):
    panel = waves(10, series=2, size=6400.0, seed=4)
    values = fitted.forecast(panel, np.array([9 * DAY]), (1, 36, 432))
    assert values.shape == (len(QUANTILES), 3, 1, 2)
    assert np.isfinite(values).all()
    assert (np.diff(values, axis=0) >= 0).all()
    assert 2500 < values[3, 1].min() <= values[3, 1].max() < 6400


def test_it_has_no_answer_with_less_than_a_day_of_history_or_without_a_fit(fitted):
    panel = waves(2)
    values = fitted.forecast(panel, np.array([DAY - 2, DAY - 1]), (6,))
    assert np.isnan(values[:, :, 0]).all()
    assert np.isfinite(values[:, :, 1]).all()
    assert np.isnan(DemandTrees().forecast(panel, np.array([DAY]), (6,))).all()


def test_another_level_stands_in_for_a_target_without_a_model_but_not_for_counts(fitted):
    known = waves(3, target="wanted")
    assert np.isfinite(fitted.forecast(known, np.array([400]), (6,))).all()
    counts = waves(3, target="arriving_jobs")
    assert np.isnan(fitted.forecast(counts, np.array([400]), (6,))).all()


def test_bins_after_the_end_of_the_fit_are_not_read():
    panel, spoilt = waves(6), waves(6)
    spoilt.values[:, 4 * DAY :] = 1e9
    origins = np.array([3 * DAY])
    told = [DemandTrees(2, FEW).fit([one], [4 * DAY]).forecast(panel, origins, (6,)) for one in (panel, spoilt)]
    np.testing.assert_array_equal(*told)


def test_the_same_seed_gives_the_same_model_on_any_number_of_threads():
    panel = waves(5)
    two = msgspec.structs.replace(FEW, threads=2)
    fits = [DemandTrees(3, how).fit([panel], [panel.bins]) for how in (FEW, two)]
    told = [fit.forecast(panel, np.arange(200, 700), (1, 30)) for fit in fits]
    np.testing.assert_array_equal(*told)


def test_too_little_history_is_refused_in_words():
    with pytest.raises(ModelError, match="nothing to fit on"):
        DemandTrees(0, FEW).fit([waves(1)], [100])


def test_a_saved_model_forecasts_the_same(fitted, tmp_path):
    fitted.save(tmp_path)
    again = DemandTrees.load(tmp_path)
    assert (again.seed, again.fitted_until_ms, again.settings) == (1, 14 * 86_400_000, FEW)
    panel = waves(10, seed=8)
    origins = np.array([1000, 1300])
    np.testing.assert_array_equal(again.forecast(panel, origins, (1, 20)), fitted.forecast(panel, origins, (1, 20)))


def test_a_damaged_folder_says_which_file(fitted, tmp_path):
    with pytest.raises(ModelError, match=r"model\.json: cannot be read"):
        DemandTrees.load(tmp_path)
    fitted.save(tmp_path)
    one = tmp_path / "0-near-05.txt"
    whole = one.read_bytes()
    one.write_bytes(whole[:-40])
    with pytest.raises(ModelError, match=r"0-near-05\.txt: damaged"):
        DemandTrees.load(tmp_path)
    one.unlink()
    with pytest.raises(ModelError, match=r"0-near-05\.txt: cannot be read"):
        DemandTrees.load(tmp_path)
    (tmp_path / "model.json").write_text('{"layout": 1}')
    with pytest.raises(ModelError, match=r"model\.json: damaged"):
        DemandTrees.load(tmp_path)
