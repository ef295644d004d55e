"""A forecaster of one's own, judged offline: a row beside the baselines, and an error that names it."""

import json
import threading
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fleetcast.checks import make_walks
from fleetcast.cli.main import app
from fleetcast.fleet.errors import ConfigError, FleetcastError
from fleetcast.models.demand.boosting import Settings
from fleetcast.models.demand.naive import Persistence
from fleetcast.models.forecast import QUANTILES
from fleetcast.training.judges.own_forecasters import OwnForecaster
from tests.training.demand_folders import nodes, write_split

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
HERE = __name__
never = threading.Event()


class Fails(Persistence):
    name = "fails"

    def forecast(self, panel, origins, steps):
        raise KeyError("weights")


class Hangs(Persistence):
    name = "hangs"

    def forecast(self, panel, origins, steps):
        never.wait()


class Crosses(Persistence):
    name = "crosses"

    def forecast(self, panel, origins, steps):
        return super().forecast(panel, origins, steps)[::-1]


class Flat(Persistence):
    name = "flat"

    def forecast(self, panel, origins, steps):
        return np.zeros((len(QUANTILES), len(steps)))


class Theta(Persistence):
    name = "theta"


@pytest.fixture
def small(monkeypatch):
    fast = Settings(trees=2, rows=300, threads=1)
    monkeypatch.setattr("fleetcast.training.judges.demand.TREES", fast)
    monkeypatch.setattr("fleetcast.training.judges.demand.WARM_TREES", fast)
    monkeypatch.setattr("fleetcast.training.judges.demand.HORIZONS_S", (3600,))
    monkeypatch.syspath_prepend(str(EXAMPLES))


def asked(name, **wanted):
    return OwnForecaster.from_path(f"{HERE}:{name}", **wanted).forecast(make_walks(200), np.array([150]), (1, 6))


@pytest.mark.parametrize(
    ("name", "said"),
    [("Fails", "KeyError: 'weights'"), ("Flat", r"answers \(7, 2\) where \(7, 2, 1, 3\) is asked for")],
)
def test_one_that_fails_is_named_with_what_it_said(name, said):
    with pytest.raises(FleetcastError, match=rf"--forecaster {HERE}:{name}: .*{said}"):
        asked(name)


def test_one_that_never_ends_is_named_with_the_limit():
    with pytest.raises(
        FleetcastError, match=rf"{HERE}:Hangs: 1 origins of 3 series of running took longer than 0\.05 s"
    ):
        asked("Hangs", limit_s=0.05)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("nowhere:Mine", "No module named 'nowhere'"),
        (f"{HERE}:Nobody", "no attribute 'Nobody'"),
        (f"{HERE}:Theta", "its name is 'theta'; give it one that no other method has"),
    ],
)
def test_a_path_or_name_that_will_not_do_is_refused(path, said):
    with pytest.raises(ConfigError, match=said):
        OwnForecaster.from_path(path)


def invoke(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.mark.usefixtures("small")
def test_the_example_is_judged_as_a_row_beside_the_baselines(tmp_path):
    train, test = write_split(nodes(np.arange(1440.0) % 144 + 100), tmp_path, "demand/a", 1200)
    out = tmp_path / "found.json"
    mine = ("--forecaster", "own_forecaster:LastWeek")
    done = invoke("evaluate", "demand", "--train", train, "--test", test, *mine, "--json", out)
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert any(row["method"] == "last_week" and row["metric"] == "wql" for row in found["rows"])
    assert {row["method"] for row in found["windows"]} >= {"ours", "last_week", "ets", "mstl", "autoreg", "theta"}
    assert {row["windows"] for row in found["over_windows"]} == {1}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("command", ["backtest", "train"])
def test_it_is_judged_by_a_backtest_and_in_training(command, tmp_path, monkeypatch):
    write_split(nodes(np.arange(1440.0) % 144 + 100), tmp_path, "demand/a", 1440)
    words = {
        "backtest": ("--windows", "1", "--json", tmp_path / "found.json"),
        "train": ("--models", tmp_path / "models", "--no-promote"),
    }
    monkeypatch.setattr("fleetcast.models.demand.trees.Settings", lambda: Settings(trees=2, rows=300, threads=1))
    mine = ("--forecaster", "own_forecaster:LastWeek")
    done = invoke(command, "demand", "--data", tmp_path / "train", *words[command], *mine)
    assert done.exit_code == 0, done.output
    file = tmp_path / ("found.json" if command == "backtest" else "models/demand/0001/card.json")
    assert '"last_week"' in file.read_text()


def test_the_contract_is_checked_before_anything_is_judged(tmp_path):
    train, test = write_split(nodes(np.arange(288.0)), tmp_path, "demand/a", 200)
    done = invoke("evaluate", "demand", "--train", train, "--test", test, "--forecaster", f"{HERE}:Crosses")
    assert isinstance(done.exception, ConfigError)
    assert f"{HERE}:Crosses: fleetcast.checks.check_forecaster says: quantiles cross" in str(done.exception)


@pytest.mark.parametrize(
    "words",
    [
        ("evaluate", "duration", "--train", ".", "--test", "."),
        ("backtest", "duration", "--data", "."),
        ("train", "duration", "--data", "."),
    ],
)
def test_it_forecasts_demand_and_nothing_else(words):
    done = invoke(*words, "--forecaster", f"{HERE}:Walker")
    assert isinstance(done.exception, ConfigError)
    assert "forecasts demand, not duration" in str(done.exception)


class Walker(Persistence):
    name = "walker"


def test_windows_are_refused_where_there_are_none(tmp_path):
    done = invoke("evaluate", "risk", "--train", tmp_path, "--test", tmp_path, "--windows", "3")
    assert isinstance(done.exception, ConfigError)
    assert "--windows 3: risk has none" in str(done.exception)
