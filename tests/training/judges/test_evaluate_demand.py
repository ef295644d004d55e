"""The judge of demand, end to end on small folders: who serves, what it says, and that it cannot see ahead."""

import json

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from fleetcast.cli.main import app
from fleetcast.models.demand.boosting import Settings
from fleetcast.training.judges import demand as evaluate_demand
from fleetcast.training.judges.demand import evaluate
from fleetcast.training.judges.demand_metrics import METRICS
from fleetcast.training.sets import demand_sets
from tests.training.demand_folders import flows, nodes, times, write, write_split

DAY = 144


@pytest.fixture(autouse=True)
def small_trees(monkeypatch):
    small = Settings(trees=3, rows=600, threads=1)
    monkeypatch.setattr(evaluate_demand, "WARM_TREES", small)
    monkeypatch.setattr(evaluate_demand, "TREES", small)


def quiet(line):
    pass


def wql(results, horizon_s, method, dataset="demand/a"):
    (row,) = results.select(
        dataset=dataset, horizon_s=horizon_s, method=method, metric="wql", series="all", target="active_nodes"
    )
    return row


def test_random_walks_are_served_by_persistence_at_its_price(tmp_path):
    rng = np.random.default_rng(1)
    for name in "ab":
        walk = nodes(5000 + np.cumsum(rng.normal(0, 5, 16 * DAY)))
        write_split(walk, tmp_path, f"demand/{name}", 11 * DAY)
    results = evaluate(tmp_path / "train", tmp_path / "test", 0, quiet)
    for name in "ab":
        for horizon_s in (600, 3600, 21600, 86400):
            ours, base = (wql(results, horizon_s, method, f"demand/{name}") for method in ("ours", "persistence"))
            assert ours.value <= 1.01 * base.value
        assert wql(results, 3600, "ours", f"demand/{name}").model == "persistence"


def test_a_daily_square_wave_is_served_by_another_and_much_better(tmp_path):
    wave = 100 + 400 * (np.arange(26 * DAY) % DAY < 72) + np.random.default_rng(1).normal(0, 3, 26 * DAY)
    train, test = write_split(nodes(wave), tmp_path, "demand/a", 22 * DAY)
    results = evaluate(train, test, 0, quiet)
    for horizon_s in (10_800, 21_600, 43_200):
        ours, base = wql(results, horizon_s, "ours"), wql(results, horizon_s, "persistence")
        assert ours.value <= 0.7 * base.value
        assert ours.model.split("+")[0] != "persistence"


def predictions(results, before_ms):
    keys = ("dataset", "series", "target", "issued_ms", "horizon_s", "quantile")
    return {
        tuple(block[name][row] for name in keys): (block["value"][row], block["model"][row])
        for block in results.predictions
        for row in range(len(block["value"]))
        if block["issued_ms"][row] < before_ms
    }


def write_all_layouts(folder, train_rows, rows, at):
    """A set of each layout and one of the test folder alone; from row `at` on all is seven times as much."""
    more = np.where(np.arange(rows) < at, 1.0, 7.0)
    rng = np.random.default_rng(4)
    walk = np.round(500 + np.cumsum(rng.normal(0, 5, rows)))
    flow = flows(rows)
    flow[flow.columns.drop("time")] = flow[flow.columns.drop("time")].mul(more, axis=0)
    levels = {"running_gpu_num": walk * more, "pending_gpu_num": walk // 9 * more, "total_gpu_num": 700 * more}
    states = pd.concat(pd.DataFrame({"time": times(rows), **levels}).assign(vc=vc) for vc in "ab")
    rates = pd.DataFrame({"t_s": 600.0 * np.arange(rows), "model": "m", "rate_rps": walk * more})
    tables = {"demand/n": nodes(walk * more), "demand/f": flow, "demand/s": states, "serving/r": rates}
    for name, table in tables.items():
        late = (table["time"] - times(1)[0]).dt.total_seconds() if "time" in table else table["t_s"]
        write(table[late < train_rows * 600], folder / "train", name)
        write(table[late >= train_rows * 600], folder / "test", name)
    write(states.assign(pending_gpu_num=1.0), folder / "test", "demand/new")
    return folder / "train", folder / "test"


def test_what_comes_after_t_changes_no_forecast_before_it_in_any_set(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate_demand, "HORIZONS_S", (3600,))
    monkeypatch.setattr(evaluate_demand, "TREES", Settings(trees=1, rows=300, threads=1))
    monkeypatch.setattr(evaluate_demand, "WARM_TREES", Settings(trees=1, rows=300, threads=1))
    monkeypatch.setitem(demand_sets.TARGETS, "flows", ("queued",))
    monkeypatch.setitem(demand_sets.TARGETS, "states", ("running",))
    train_rows, at, rows = 300, 330, 360
    ours, theirs = (
        evaluate(*write_all_layouts(tmp_path / str(cut), train_rows, rows, cut), 0, quiet) for cut in (rows, at)
    )
    assert ours.skipped == theirs.skipped == []
    t_ms = 1_577_836_800_000 + at * 600_000
    before, same = predictions(ours, t_ms), predictions(theirs, t_ms)
    before = {key: value for key, value in before.items() if key[0] != "serving/r" or key[3] < at * 600_000}
    assert {key[0] for key in before} == {"demand/f", "demand/n", "demand/new", "demand/s", "serving/r"}
    assert {key: same[key] for key in before} == before
    assert predictions(ours, 2 * t_ms) != predictions(theirs, 2 * t_ms)


def test_the_same_seed_gives_the_same_numbers_and_all_metrics(tmp_path):
    values = 500 + np.cumsum(np.random.default_rng(6).normal(0, 5, 6 * DAY))
    train, test = write_split(nodes(values), tmp_path, "demand/a", 5 * DAY)
    first, second = (evaluate(train, test, 3, quiet) for _ in range(2))
    assert first.rows == second.rows
    assert {row.metric for row in first.rows} - {"stood_in"} == {*METRICS, "failed_fits"}
    naive = {"persistence", "seasonal_naive", "theta", "rolling_median"}
    assert {row.method for row in first.rows} == {"ours", *naive, "ets", "mstl", "autoreg"}


def test_an_unseen_cluster_is_judged_by_what_the_others_taught(tmp_path):
    values = 500 + np.cumsum(np.random.default_rng(5).normal(0, 5, 9 * DAY))
    train, test = write_split(nodes(values), tmp_path, "demand/a", 7 * DAY)
    write(nodes(values[::-1]), test, "demand/new")
    lines = []
    results = evaluate(train, test, 0, lines.append)
    assert any(row.dataset == "demand/new" and row.method == "ours" for row in results.rows)
    assert "demand/new: fitted on the other sets" in lines


def test_the_command_writes_numbers_and_predictions(tmp_path):
    train, test = write_split(nodes(np.arange(7.0 * DAY) % 50 + 100), tmp_path, "demand/a", 6 * DAY)
    files = tmp_path / "n.json", tmp_path / "p.parquet"
    arguments = ["--train", str(train), "--test", str(test), "--json", str(files[0]), "--predictions", str(files[1])]
    done = CliRunner().invoke(app, ["evaluate", "demand", *arguments])
    assert done.exit_code == 0, done.output
    assert {row["task"] for row in [json.loads(files[0].read_text())]} == {"demand"}
    columns = ["dataset", "issued_ms", "target", "series", "horizon_s", "quantile", "value", "actual", "model"]
    table = pq.read_table(files[1]).to_pandas()
    assert list(table) == columns
    assert (table["issued_ms"] >= pd.Timestamp("2020-01-07").value // 10**6).all()
