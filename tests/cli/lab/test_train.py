"""`fleetcast train`, `backtest` and `drift` on a site's archive and on data sets: small ones, with few trees."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from typer.testing import CliRunner

from fleetcast.cli.main import app
from fleetcast.fleet.errors import FleetcastError
from fleetcast.models.demand import trees as demand_trees
from fleetcast.models.demand.trees import DemandTrees, Settings
from fleetcast.models.run_times.boosted_quantiles import BoostedQuantiles
from fleetcast.models.run_times.duration import DurationModel
from fleetcast.models.versions.registry import Registry
from tests.training.made_archive import T0, events_of, live
from tests.training.made_data import make_data

DAY_MS = 86_400_000
MADE = ("--set", "demand/made")  # one target: a fit of all sets takes four times as long


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state folder with four days of archive."""
    folder = tmp_path_factory.mktemp("state")
    live(folder / "archive", events_of(days=3, jobs_a_day=12))
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with a daily square wave of active nodes, and jobs."""
    folder = tmp_path_factory.mktemp("data")
    make_data(folder)
    return folder


@pytest.fixture(autouse=True)
def few_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = demand_trees.fit_target
    small = Settings(trees=2, rows=400, leaf_rows=20, threads=1)
    monkeypatch.setattr(demand_trees, "fit_target", lambda pasts, settings, seed: fit(pasts, small, seed))
    monkeypatch.setattr("fleetcast.training.fits.retrain.render_card", lambda card: f"<p>{card.version}")
    monkeypatch.setattr(DurationModel.__init__, "__defaults__", (0, 1))
    monkeypatch.setattr(BoostedQuantiles.__init__, "__kwdefaults__", {"seed": 0, "threads": 1, "trees": 2})


def run(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None:
        raise result.exception
    assert result.exit_code == 0
    return result.output


@pytest.mark.integration  # five targets of four pools take ten seconds
def test_demand_on_the_site_s_own_archive_becomes_a_version_with_a_card(state: Path, tmp_path: Path) -> None:
    said = run("train", "demand", "--state", state, "--models", tmp_path, "--seed", 3)
    registry = Registry(tmp_path)
    (card,) = registry.list_cards("demand")
    assert (card.version, card.seed) == ("0001", 3)
    assert T0 + 2.9 * DAY_MS < card.fitted_until_ms <= T0 + 3 * DAY_MS
    assert {span.dataset for span in card.data} >= {"archive running", "archive wanted"}
    assert {row.method for row in card.metrics} >= {"ours", "persistence"}
    assert card.gate is not None
    assert card.calibration
    model = DemandTrees.load(registry.find_folder("demand", "0001"))
    assert model.fitted_until_ms == card.fitted_until_ms
    assert "gate: " in said
    assert (registry.find_current_version("demand") == "0001") == card.gate.won
    assert "does not serve: " in said or "demand 0001 serves" in said


def test_what_wins_serves_and_what_is_not_to_serve_does_not(data: Path, tmp_path: Path) -> None:
    words = ("train", "demand", "--data", data, "--set", "demand/made", "--models", tmp_path)
    said = run(*words, "--no-promote", "--until", "2020-04-08")
    assert "does not serve: it was not asked for" in said
    assert "fitting active_nodes: 0 of 1 targets done" in said
    registry = Registry(tmp_path)
    (first,) = registry.list_cards("demand")
    asked = f"--data {data} --set demand/made --until 2020-04-08 --models {tmp_path} --no-promote"
    assert first.made_by == f"fleetcast train demand {asked}"
    assert registry.find_current_version("demand") is None
    assert registry.read_version_card("demand", "1").fitted_until_ms == pd.Timestamp("2020-04-08").value // 10**6
    said = run(*words)
    second = registry.read_version_card("demand", "2")
    assert second.gate is not None
    assert registry.find_current_version("demand") == ("0002" if second.gate.won else None), said


def test_if_drift_does_nothing_while_a_version_is_fine(data: Path, tmp_path: Path) -> None:
    words = ("train", "demand", "--data", data, "--state", tmp_path)
    run(*words, "--no-promote")
    registry = Registry(tmp_path / "models")
    registry.promote("demand", "1", force=True)
    words = (*words, *MADE)  # the first run had no --set and so learnt from all sets
    run(*words, "--no-promote", "--if-drift")  # its data ended years ago
    assert registry.list_names("demand") == ["0001", "0002"]
    config = tmp_path / "config.toml"
    config.write_text("[models]\nretrain_after_days = 0\n")
    assert "nothing asks for another" in run(*words, "--if-drift", "--config", config)
    assert registry.list_names("demand") == ["0001", "0002"]


def test_durations_of_a_data_set(data: Path, tmp_path: Path) -> None:
    run("train", "duration", "--data", data, "--models", tmp_path)
    registry = Registry(tmp_path)
    (card,) = registry.list_cards("duration")
    assert card.data[0].dataset == "jobs/made"
    assert card.settings["trees"] > 0
    DurationModel.load(registry.find_folder("duration", card.version))
    assert any(row.metric == "pinball_90" and row.method == "ours" for row in card.metrics)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("train", "demand", "--data", "/no/such"), "no such folder"),
        (("train", "demand", "--data", "{data}", "--archive", "x"), "name one of"),
        (("train", "demand", "--data", "{data}", "--set", "nothing"), "among nothing"),
        (("train", "demand", "--data", "{data}", "--until", "soon"), "--until 'soon'"),
        (("train", "duration", "--archive", "{tmp}/none"), "no job events"),
        (("backtest", "starts"), "task 'starts'"),
        (("drift", "demand", "--data", "{data}"), "say --since"),
        (("drift", "risk"), "kind 'risk'"),
        (("drift", "demand", "--data", "{data}", "--since", "2020-04-10"), "ends at 2020-04-10 00:00:00 .* come back"),
        (("train", "duration", "--archive", "{state}/archive", "--until", "2020-01-01"), "the first is at 20.* UTC"),
    ],
)
def test_what_is_wrong_is_named(words: tuple[str, ...], says: str, data: Path, state: Path, tmp_path: Path) -> None:
    named = [word.format(data=data, tmp=tmp_path, state=state) for word in words]
    with pytest.raises(FleetcastError, match=says):
        run(*named, "--state", tmp_path)
    assert not list(tmp_path.rglob("card.json"))


def test_a_back_test_writes_its_numbers_and_a_page(data: Path, tmp_path: Path) -> None:
    files = tmp_path / "b.json", tmp_path / "b.html"
    run(
        "backtest",
        "demand",
        "--data",
        data,
        "--set",
        "demand/made",
        "--windows",
        2,
        "--json",
        files[0],
        "--html",
        files[1],
    )
    body = json.loads(files[0].read_text())
    assert (body["task"], body["windows"]) == ("demand", 2)
    assert {row["dataset"] for row in body["rows"]} == {"demand/made"}
    assert "<svg" in files[1].read_text()


def test_drift_names_what_moved(data: Path, tmp_path: Path) -> None:
    files = tmp_path / "d.json", tmp_path / "d.html"
    words = ("drift", "demand", "--data", data, "--since", "2020-04-08", "--state", tmp_path)
    said = run(*words, "--json", files[0], "--html", files[1])
    assert "no version serves" in said
    rows: list[dict[str, Any]] = json.loads(files[0].read_text())["moved"]
    assert {row["series"] for row in rows} >= {"demand/made active_nodes"}
    assert all(0 <= row["ks"] <= 1 for row in rows)
    assert {row["verdict"] for row in rows} <= {"same", "drifted", "too_few"}
    assert "demand/made active_nodes: " in said
    assert " features drifted" in said
    assert "Nothing asks for a new fit" in files[1].read_text()
    said = run("drift", "duration", "--data", data, "--since", "400000", "--state", tmp_path)
    assert "jobs/made: " in said


def test_a_fit_that_breaks_leaves_nothing(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save: Callable[[DemandTrees, Path], None] = DemandTrees.save

    def half(self: DemandTrees, folder: Path) -> None:
        save(self, folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(DemandTrees, "save", half)
    words = ("train", "demand", "--data", data, *MADE, "--models", tmp_path, "--no-promote")
    CliRunner().invoke(app, [str(word) for word in words])
    assert Registry(tmp_path).list_names("demand") == []
    monkeypatch.setattr(DemandTrees, "save", save)
    run(*words)
    assert Registry(tmp_path).list_names("demand") == ["0001"]
