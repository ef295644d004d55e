"""The models that serve are watched: their records beside their cards, and what asks for a new fit."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fleetcast.models.versions.card import Card, Coverage, GateVerdict
from fleetcast.models.versions.drift import DriftLimits
from fleetcast.models.versions.registry import Registry
from fleetcast.service.answers.fitted_models import BandShare, FittedModels
from fleetcast.service.config import Config
from fleetcast.service.pipeline.model_monitor import ModelMonitor, make_drift_limits

DAY_MS = 86_400_000
NOW_MS = 1_760_000_000_000
GATE = GateVerdict(True, "WQL 20 % below persistence", "wql", "persistence", 0.8, 1.0, 500)


def card(days_ago: float = 1.0) -> Card:
    return Card(
        kind="demand",
        created_ms=NOW_MS,
        made_by="a test",
        seed=0,
        fitted_until_ms=round(NOW_MS - days_ago * DAY_MS),
        calibration=(Coverage("running", 3600, 0.8, 0.8, 100),),
        gate=GATE,
    )


def version(registry: Registry, **about: Any) -> str:
    name = registry.add_version("demand", lambda folder: (folder / "model.txt").write_text("x") and None, card(**about))
    registry.promote("demand", name)
    return name


def demand(coverage: float, loss: float) -> list[Any]:
    record = {"coverage_80": coverage, "wql_vs_best_naive": loss, "origins": 500}
    return [SimpleNamespace(pool="all", target=target, record=record) for target in ("running", "queued")]


def wanted(page: bytes) -> set[str]:
    lines = [line for line in page.decode().splitlines() if line.startswith("fleetcast_model_retrain_wanted{")]
    return {line.split('condition="')[1].split('"')[0] for line in lines if line.endswith(" 1")}


def test_without_a_version_there_is_nothing_to_say(tmp_path: Path) -> None:
    watch = ModelMonitor(Registry(tmp_path / "none"), DriftLimits())
    assert watch.review(demand(0.1, 9.0), NOW_MS) == FittedModels(NOW_MS, [], [])
    assert "retrain_wanted{" not in watch.page.decode()
    assert not (tmp_path / "none").exists()


def test_a_version_in_order_asks_for_nothing_and_one_that_drifted_says_why(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    watch = ModelMonitor(registry, DriftLimits())
    version(registry)
    (row,) = watch.review(demand(0.82, 0.9), NOW_MS).rows
    assert (row.kind, row.version, row.retrain, row.age_days) == ("demand", "0001", {}, 1.0)
    assert row.coverage_80 == BandShare(card=0.8, recent=0.82)
    assert (row.gate, row.loss_vs_best_naive, row.forecasts) == (GATE.sentence, 0.9, 1000)
    assert wanted(watch.page) == set()
    assert 'fleetcast_model_drift_coverage_ratio{kind="demand",of="recent"} 0.82' in watch.page.decode()
    (row,) = watch.review(demand(0.5, 1.2), NOW_MS).rows
    assert set(row.retrain) == wanted(watch.page) == {"coverage", "loss"}


def test_another_version_is_seen_when_it_serves(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    watch = ModelMonitor(registry, DriftLimits(after_days=7))
    version(registry, days_ago=8)
    assert set(watch.review([], NOW_MS).rows[0].retrain) == {"age"}
    assert 'fleetcast_model_age_seconds{kind="demand"} 691200' in watch.page.decode()
    version(registry, days_ago=2)
    (row,) = watch.review([], NOW_MS).rows
    assert (row.version, row.retrain, row.loss_vs_best_naive) == ("0002", {}, None)


def test_a_card_that_cannot_be_read_is_told_once_and_the_rest_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    registry = Registry(tmp_path)
    name = version(registry)
    (registry.find_folder("demand", name) / "card.json").write_text("{")
    watch = ModelMonitor(registry, DriftLimits())
    with caplog.at_level(logging.WARNING):
        assert watch.review([], NOW_MS).rows == watch.review([], NOW_MS).rows == []
    assert len([line for line in caplog.messages if "card of demand" in line]) == 1


def test_limits_are_the_configuration_s() -> None:
    assert make_drift_limits(Config()) == DriftLimits()


def test_a_pointer_to_a_version_that_is_gone_is_said_and_no_more(tmp_path: Path) -> None:
    (tmp_path / "demand").mkdir()
    (tmp_path / "demand" / "current").write_text("0007\n")
    watch = ModelMonitor(Registry(tmp_path), DriftLimits(0.1, 1.02, 30.0))
    assert watch.review(demand(0.8, 0.9), NOW_MS).rows == []


def test_what_is_told_is_of_the_version_that_is_loaded(tmp_path: Path) -> None:
    """As where the newer one is damaged: the one before it speaks."""
    registry = Registry(tmp_path)
    version(registry, days_ago=8)
    version(registry)
    watch = ModelMonitor(registry, DriftLimits())
    (row,) = watch.review([], NOW_MS, loaded={"demand": "demand-0001"}).rows
    assert (row.version, row.age_days) == ("0001", 8.0)
    assert watch.review([], NOW_MS, loaded={"demand": "", "duration": "similar jobs"}).rows == []
    assert watch.review([], NOW_MS).rows[0].version == "0002"
