"""The judge of interference, on small sets whose truth is known."""

import os
from collections.abc import Iterator
from itertools import combinations_with_replacement
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fleetcast.training.judges import interference as evaluate_interference
from fleetcast.training.judges.interference import (
    CO_RUNS,
    draw_for_each_model,
    draw_revealed_co_runs,
    evaluate,
    make_splits,
)
from fleetcast.training.reports.results import Results
from fleetcast.training.sets.co_run_sets import read_co_run_sets

MODELS = {"Wide": 0.9, "Calm": 0.3, "Tiny": 0.1, "Deep50": 0.7, "Deep18": 0.6}
DATA = Path(os.environ.get("FLEETCAST_DATA", "../shared/data"))


@pytest.fixture(autouse=True, scope="module")
def _few_trees() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate_interference, "TREES", 15)
        yield


def world(touchy: dict[str, float] | None = None) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Co-runs as the rule has them; a touchy model loses that much more of its speed beside anybody."""
    configs = [(model, "data", size, 0) for model in MODELS for size in (16, 32)]
    alone = {config: min(1.0, MODELS[config[0]] * (1.0 if config[2] == 16 else 1.1)) for config in configs}
    rows = []
    for one, other in combinations_with_replacement(configs, 2):
        rule = min(1.0, 1 / (alone[one] + alone[other]))
        speeds = [rule - (touchy or {}).get(model[0], 0.0) for model in (one, other)]
        rows.append((*one, speeds[0], *other, speeds[1], 99.0, 99.0, 99.0))
    parts = ("model", "dataset", "batchsize", "amp")
    names = [part + n for n in "12" for part in (*parts, "speed")] + ["gpu_util", "gmem_util", "gmem"]
    profiles = [(*config, 100 * load, 40 * load, 4000.0, 1) for config, load in alone.items()]
    single = pd.DataFrame(profiles, columns=[*parts, "gpu_util", "gmem_util", "gmem", "label"])
    return pd.DataFrame(rows, columns=names), single


def put(folder: Path, co_runs: pd.DataFrame, single: pd.DataFrame) -> Path:
    (folder / "interference" / "made").mkdir(parents=True)
    co_runs.to_parquet(folder / "interference" / "made" / "colocate_info.parquet")
    single.to_parquet(folder / "interference" / "made" / "single_data.parquet")
    return folder


def judged(train: Path, test: Path, seed: int = 0) -> Results:
    return evaluate(train, test, seed, lambda line: None)


def value(results: Results, method: str, metric: str = "mae", target: str = "unseen_family") -> float:
    (row,) = results.select(method=method, metric=metric, target=target, series="all")
    assert row.value is not None
    return row.value


def split(folder: Path, model: str, touchy: dict[str, float] | None = None) -> tuple[Path, Path]:
    co_runs, single = world(touchy)
    new = (co_runs["model1"] == model) | (co_runs["model2"] == model)
    own = single["model"] == model
    return put(folder / "train", co_runs[~new], single[~own]), put(folder / "test", co_runs, single)


@pytest.fixture(scope="module")
def touchy(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return judged(*split(tmp_path_factory.mktemp("touchy"), "Wide", {"Wide": 0.2}))


def test_where_the_rule_is_the_truth_nothing_beats_it_and_ours_learns_it(tmp_path: Path) -> None:
    results = judged(*split(tmp_path, "Wide"))
    assert value(results, "rule") == pytest.approx(0, abs=1e-9)
    assert value(results, "trees") == pytest.approx(0, abs=1e-6)
    assert value(results, "ours") < 0.8 * value(results, "new_site")
    assert value(results, "constant") > 0.1
    assert value(results, "rule", "auc_085") == 1.0
    assert value(results, "rule", "harmful_at_73") < value(results, "constant", "harmful_at_73")


def test_three_co_runs_teach_what_a_new_model_loses(touchy: Results) -> None:
    assert value(touchy, "ours_3_co_runs") < 0.6 * value(touchy, "ours")
    assert value(touchy, "new_site_3_co_runs") < 0.6 * value(touchy, "new_site")
    assert value(touchy, "ours_3_of_model") < 0.6 * value(touchy, "ours")


def test_each_new_model_has_a_row_of_its_own_and_a_bound_that_nothing_makes_is_said_to_be_none(touchy: Results) -> None:
    for method in ("rule", "ours", "new_site_3_co_runs"):
        assert touchy.select(method=method, metric="mae", target="unseen_family", series="Wide")
    assert touchy.select(method="ours", metric="coverage_lower_90", series="all")
    assert not touchy.select(method="new_site", metric="coverage_lower_90")
    assert any("new_site has too few co-runs for a bound" in line for line in touchy.skipped)


def test_models_that_train_lacks_are_the_unseen_family(tmp_path: Path) -> None:
    train, test = split(tmp_path, "Deep50")
    (one,) = read_co_run_sets(train, test, [])
    assert one.new_models == {"Deep50"}
    parts = make_splits(one, 0)
    assert [target for target, *_ in parts] == ["unseen_pair", "unseen_family"]
    _, fitted, rows, new = parts[1]
    assert new == {"Deep50"}
    assert rows.has_any_model(new).all()
    assert not fitted.has_any_model(new).any()


def test_with_one_folder_for_both_families_are_left_out_in_turn(tmp_path: Path) -> None:
    folder = put(tmp_path, *world())
    (one,) = read_co_run_sets(folder, folder, [])
    out = [new for target, *_, new in make_splits(one, 0) if target == "unseen_family"]
    assert {"Deep18", "Deep50"} in out
    assert len(out) == 4
    for _, fitted, rows, new in make_splits(one, 0):
        assert not fitted.has_any_model(new).any()
        assert not set(fitted.pair) & set(rows.pair)


def test_what_was_observed_is_judged_by_nobody_and_is_never_more_than_half(tmp_path: Path) -> None:
    train, test = split(tmp_path, "Wide")
    (one,) = read_co_run_sets(train, test, [])
    rows = one.rows.select_rows(one.in_test)
    shown = draw_revealed_co_runs(rows, {"Wide"}, 0)
    configs = np.unique(rows.pairs.keys[rows.model == "Wide", 0])
    for config in configs:
        mine = rows.pairs.keys[:, 0] == config
        assert 3 <= len(np.unique(rows.pair[mine & shown])) <= len(np.unique(rows.pair[mine])) / 2 + 3
    assert not set(rows.pair[shown]) & set(rows.pair[~shown])
    few = draw_for_each_model(rows, shown, {"Wide"}, 0)
    assert len(np.unique(rows.pair[few])) == CO_RUNS
    assert (few <= shown).all()


def test_loads_measured_during_co_runs_and_labels_tell_ours_nothing(touchy: Results, tmp_path: Path) -> None:
    co_runs, single = world({"Wide": 0.2})
    rng = np.random.default_rng(0)
    co_runs[["gpu_util", "gmem_util", "gmem"]] = rng.uniform(0, 100, (len(co_runs), 3))
    single["label"] = rng.integers(0, 3, len(single))
    new = (co_runs["model1"] == "Wide") | (co_runs["model2"] == "Wide")
    train = put(tmp_path / "train", co_runs[~new], single[single["model"] != "Wide"])
    results = judged(train, put(tmp_path / "test", co_runs, single))
    for method in ("ours", "ours_3_co_runs", "new_site", "rule"):
        assert value(results, method) == value(touchy, method)


def test_without_labels_lucid_is_not_judged_and_bad_rows_are_counted(tmp_path: Path) -> None:
    co_runs, single = world()
    new = (co_runs["model1"] == "Wide") | (co_runs["model2"] == "Wide")
    co_runs.loc[0, "speed1"] = np.nan
    co_runs.loc[co_runs.index[~new][-1], "model2"] = "Nobody"
    train = put(tmp_path / "train", co_runs[~new], single.drop(columns="label"))
    said: list[str] = []
    results = evaluate(train, put(tmp_path / "test", co_runs[new], single.drop(columns="label")), 0, said.append)
    assert not results.select(method="lucid_label")
    assert results.select(method="sum_100", metric="harmful_at_73")
    assert sum("left out 1 co-runs: no speed" in line for line in said) == 1
    assert sum("left out 1 co-runs: no profile" in line for line in said) == 1


def test_the_same_seed_gives_the_same_numbers(touchy: Results, tmp_path: Path) -> None:
    again = judged(*split(tmp_path, "Wide", {"Wide": 0.2}))
    assert [row.value for row in again.rows] == [row.value for row in touchy.rows]


def test_a_folder_without_co_runs_is_skipped_with_a_line(tmp_path: Path) -> None:
    results = judged(tmp_path, tmp_path)
    assert not results.rows
    assert "no colocate_info" in results.skipped[0]


@pytest.mark.skipif(not (DATA / "interference" / "lucid").is_dir(), reason="the public data is not here")
def test_an_unseen_model_of_the_measured_pairs_is_told_better_than_by_the_rule() -> None:
    (one,) = read_co_run_sets(DATA, DATA, [])
    rows = one.rows
    found = [row for row in make_splits(one, 0) if row[3] == {"ResNet18"}]
    assert len(found) == 1
    assert len(rows) == 1426
