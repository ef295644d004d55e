import builtins
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetcast.fleet.errors import ConfigError, FleetcastError
from fleetcast.models.versions.card import Card, make_card_metrics
from fleetcast.models.versions.registry import Registry
from fleetcast.training.fits import tracking
from fleetcast.training.fits.tracking import ENVIRONMENT, log_version_to_mlflow, make_mlflow_params
from tests.models.versions.test_registry import LOST, card, write
from tests.training.made_results import demand_results


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """MLflow reads its settings from the environment: what a test leaves there is taken away."""
    before = dict(os.environ)
    yield
    for name in ENVIRONMENT:
        os.environ.pop(name, None)
    os.environ.update({name: value for name, value in before.items() if name in ENVIRONMENT})


@pytest.fixture
def version(tmp_path: Path) -> tuple[Card, Path]:
    registry = Registry(tmp_path / "models")
    settings = {"trees": 200, "odd=name": "x" * 2000}
    full = msgspec.structs.replace(
        card(LOST), metrics=make_card_metrics(demand_results(origins=1).rows), settings=settings
    )
    name = registry.add_version("demand", write, full)
    return registry.read_version_card("demand", name), registry.find_folder("demand", name)


def runs_of(uri: str) -> Sequence[Any]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("fleetcast-demand")
    found: Sequence[Any] = client.search_runs([experiment.experiment_id])
    return found


def test_a_version_becomes_a_run_with_its_numbers_and_files(tmp_path: Path, version: tuple[Card, Path]) -> None:
    uri = (tmp_path / "runs").as_uri()
    first, second = log_version_to_mlflow(uri, *version), log_version_to_mlflow(uri, *version)
    runs = {run.info.run_id: run for run in runs_of(uri)}
    assert set(runs) == {first, second}
    run = runs[first]
    assert run.info.status == "FINISHED"
    assert (run.data.params["seed"], run.data.params["setting.trees"]) == ("7", "200")
    assert len(run.data.params["setting.odd_name"]) == 500
    assert run.data.metrics["venus/running/wql/1 h/ours"] == pytest.approx(0.00768)
    assert run.data.metrics["venus/running/wql/1 h/ours high"] == pytest.approx(0.00768 * 1.05)
    assert "venus/running/wql/1 h/theta high" not in run.data.metrics
    assert run.data.tags["fleetcast.gate"] == "lost"
    kept = {path.name for path in (tmp_path / "runs").rglob(f"{first}/artifacts/**/*") if path.is_file()}
    assert kept == {"card.json", "model.json", "1h.txt"}


def test_a_run_that_fails_half_way_is_marked_as_failed(tmp_path: Path, version: tuple[Card, Path]) -> None:
    uri = (tmp_path / "runs").as_uri()
    twice = msgspec.structs.replace(version[0], settings={"a:": 1, "a=": 2})  # MLflow has one name for both
    with pytest.raises(FleetcastError, match="does not take the run"):
        log_version_to_mlflow(uri, twice, version[1])
    assert [run.info.status for run in runs_of(uri)] == ["FAILED"]


def test_a_server_that_is_not_there_is_an_error(version: tuple[Card, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: refused at once
        with pytest.raises(FleetcastError, match=r"mlflow http://127\.0\.0\.1:\d+ does not take the run"):
            log_version_to_mlflow(f"http://127.0.0.1:{taken.getsockname()[1]}", *version)


def test_without_mlflow_the_error_names_the_extra(version: tuple[Card, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(
        name: str, globals: Mapping[str, object] | None = None, locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] = (), level: int = 0,
    ) -> object:  # fmt: skip
        if name.startswith("mlflow"):
            raise ImportError(name)
        return real(name, globals, locals, fromlist, level)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match=r"pip install 'fleetcast\[mlflow\]'"):
        log_version_to_mlflow("file:///nowhere", *version)


def test_a_card_of_nothing_has_few_parameters_and_no_metrics() -> None:
    bare = Card(kind="risk", created_ms=0, made_by="", seed=1, fitted_until_ms=2)
    assert make_mlflow_params(bare) == {"version": "", "seed": "1", "fitted_until_ms": "2", "features": "0"}
    assert list(tracking.list_card_metrics(bare)) == []
