"""The newest version that does not serve, or a chosen one, is scored beside the one that does, and never served."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from fleetcast.models.forecast import QUANTILES, Panel
from fleetcast.models.versions.card import Card, GateVerdict, TargetVerdict
from fleetcast.models.versions.registry import Registry
from fleetcast.service.answers.fitted_models import ShadowModel
from fleetcast.service.config import Config
from fleetcast.service.pipeline.demand import served_trees
from fleetcast.service.pipeline.demand.served_trees import ServedTrees, ShadowTrees, make_shadow_model
from fleetcast.service.pipeline.model_monitor import ModelMonitor
from fleetcast.service.pipeline.stateful import make_demand_forecaster

CARD = Card(kind="demand", created_ms=0, made_by="a test", seed=0, fitted_until_ms=0)
PANEL = Panel("running", ("a",), 600, 0, np.arange(300.0)[None], np.full(1, np.nan))


class Says:
    """Foretells its number."""

    def __init__(self, number: float) -> None:
        self.number = number

    def forecast(self, panel: Panel, origins: NDArray[np.intp], steps: list[int]) -> NDArray[np.float64]:
        return np.full((len(QUANTILES), len(steps), len(origins), len(panel.names)), self.number)


@pytest.fixture(autouse=True)
def plain_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version is a number in a file."""
    monkeypatch.setattr(served_trees, "load_trees", lambda folder: (Says(float((folder / "n").read_text())), 0))


def add(registry: Registry, number: float) -> str:
    return registry.add_version("demand", lambda folder: (folder / "n").write_text(str(number)) and None, CARD)


def said(trees: ServedTrees) -> float:
    return float(trees.forecast(PANEL, np.array([200]), [6])[0, 0, 0, 0])


def test_the_newest_version_runs_in_the_shadow_until_it_serves(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    serving, shadow = ServedTrees(registry), ShadowTrees(registry)
    assert not shadow.refresh()
    assert np.isnan(said(shadow))
    registry.promote("demand", add(registry, 1.0), force=True)
    assert serving.refresh()
    assert not shadow.refresh()  # what serves is no challenger
    add(registry, 2.0)
    assert shadow.refresh()
    assert not serving.refresh()
    assert (said(serving), said(shadow)) == (1.0, 2.0)
    assert (serving.version, shadow.version) == ("demand-0001", "demand-0002")
    add(registry, 3.0)
    assert shadow.refresh()
    assert said(shadow) == 3.0
    registry.choose_shadow("demand", "2")  # by name, while it runs
    assert shadow.refresh()
    assert said(shadow) == 2.0
    registry.choose_shadow("demand", "off")
    assert shadow.refresh()
    assert (shadow.version, np.isnan(said(shadow))) == ("", True)
    registry.choose_shadow("demand", "newest")
    assert shadow.refresh()
    registry.promote("demand", "3", force=True)
    assert serving.refresh()
    assert shadow.refresh()
    assert (said(serving), shadow.version) == (3.0, "")
    assert np.isnan(said(shadow))


def test_a_version_does_not_serve_a_target_that_it_lost(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    targets = (TargetVerdict("running", True, 0.8), TargetVerdict("queued", False, 2.78, "worse"))
    gate = GateVerdict(True, "won one", "wql", "persistence", 0.8, 1.0, 50, targets)
    card = msgspec.structs.replace(CARD, gate=gate)
    registry.add_version("demand", lambda folder: (folder / "n").write_text("1.0") and None, card)
    shadow = ShadowTrees(registry)
    assert shadow.refresh()
    queued = dataclasses.replace(PANEL, target="queued")
    assert shadow.forecast(queued, np.array([200]), [6])[0, 0, 0, 0] == 1.0, "its record shows how it would do"
    registry.promote("demand", "1")
    serving = ServedTrees(registry)
    assert serving.refresh()
    assert said(serving) == 1.0
    assert np.isnan(serving.forecast(queued, np.array([200]), [6])).all()
    add(registry, 2.0)
    registry.promote("demand", "2", force=True)
    assert serving.refresh()
    assert serving.forecast(queued, np.array([200]), [6])[0, 0, 0, 0] == 2.0


def test_a_damaged_challenger_is_said_and_nothing_else_happens(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    (registry.find_folder("demand", add(registry, 1.0)) / "n").write_text("9")
    shadow = ShadowTrees(registry)
    assert not shadow.refresh()
    assert "damaged" in shadow.trouble
    assert np.isnan(said(shadow))
    registry.choose_shadow("demand", "off")
    assert not shadow.refresh()
    assert shadow.trouble == ""


def test_what_the_disk_does_not_give_is_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry(tmp_path)
    registry.promote("demand", add(registry, 1.0), force=True)
    trees = ServedTrees(registry)
    assert trees.refresh()
    for sick in ("_read_served", "find_current_version"):
        registry.promote("demand", add(registry, 2.0), force=True)
        registry.roll_back("demand")
        monkeypatch.setattr(trees, "_pointer", "another")
        with monkeypatch.context() as context:
            context.setattr(registry, sick, _no_disk)
            assert not trees.refresh()
            assert (trees.version, trees.trouble) == ("", "no disk")
            assert np.isnan(said(trees))
        assert not trees.refresh()  # the same as before: its record goes on
        assert (trees.version, trees.trouble, said(trees)) == ("demand-0001", "", 1.0)


def _no_disk(kind: str) -> None:
    raise OSError("no disk")


def test_its_record_is_beside_the_champion_s(tmp_path: Path) -> None:
    shadow, serving = (
        SimpleNamespace(name=name, version=f"demand-000{at}") for at, name in ((2, "shadow"), (1, "trees"))
    )
    losses = {
        "running": {"persistence": (1.0, 300), "trees": (0.9, 300), "shadow": (0.7, 300)},
        "queued": {"persistence": (1.0, 100), "trees": (1.0, 100), "shadow": (0.9, 100)},
    }
    record = make_shadow_model(losses, shadow, serving)  # type: ignore[arg-type]
    assert record == ShadowModel("demand", "0002", 0.75, 0.925, 400)
    assert make_shadow_model(losses, SimpleNamespace(name="shadow", version=""), serving) is None  # type: ignore[arg-type]
    watch = ModelMonitor.from_config(Config(state=str(tmp_path)))
    assert msgspec.to_builtins(watch.review([], 0, record).shadows) == [
        {
            "kind": "demand",
            "version": "0002",
            "loss_vs_persistence": 0.75,
            "serving_vs_persistence": 0.925,
            "forecasts": 400,
        }
    ]
    assert 'fleetcast_model_shadow_loss_ratio{kind="demand",of="shadow"} 0.75' in watch.page.decode()


def test_a_pipeline_s_desk_scores_it_and_never_serves_it(tmp_path: Path) -> None:
    forecaster = make_demand_forecaster(Config(state=str(tmp_path)))
    names = [forecaster.name for forecaster in forecaster.forecasters]
    assert {"trees", "shadow"} <= set(names)
    assert forecaster._shadows == ("shadow",)
