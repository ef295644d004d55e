"""A site's own risk and interference in a live service: what is promoted speaks, and `GET /v1/models` says so."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.metrics import find_metric_row
from fleetcast.fleet.samples import EntityKind, SampleBatch
from fleetcast.fleet.topology import NodeSpec, Topology
from fleetcast.ingest.source import Batch, MemorySource
from fleetcast.models.jobs.co_run_fit import CO_RUN_FILE, CoRunFit, PastCoRun
from fleetcast.models.risk.hazard import HorizonFit
from fleetcast.models.risk.site_risk import SITE_FILE, SiteFit
from fleetcast.models.versions.card import Card, GateVerdict
from fleetcast.models.versions.registry import Registry
from fleetcast.service.api.app import create_app
from fleetcast.service.pipeline.pipeline import Pipeline
from tests.service.api_world import Client, config

NOW_MS = 1_789_000_000_000
PAST = CoRunFit((PastCoRun("gpu", (1, 2), (3, 4), 0.5),))


class Service:
    """A pipeline of two nodes, the API over its board, and the registry that both read."""

    def __init__(self, folder: Path) -> None:
        self.config, self.clock = config(folder), ManualClock(NOW_MS)
        self.registry = Registry(self.config.models_folder, self.clock)
        topology = Topology.build([NodeSpec("n1", 8), NodeSpec("n2", 8)])
        self.pipeline = Pipeline(self.config, self.clock, topology, lambda _: [MemorySource([])])
        power, gpu = find_metric_row(EntityKind.GPU, "power_w"), self.pipeline.state.entities.add_to_node
        heard = SampleBatch.from_rows(
            EntityKind.GPU, [(power, gpu(EntityKind.GPU, name, 0), NOW_MS, 90.0) for name in topology.names]
        )
        self.pipeline.apply_batch(Batch((heard,)))

    def promote(self, kind: str, fit: SiteFit | CoRunFit) -> str:
        gate = GateVerdict(True, "20 % below what served", "log_loss", "shipped", 0.8, 1.0, 500)
        card = Card(kind=kind, created_ms=NOW_MS, made_by="a test", seed=0, fitted_until_ms=NOW_MS, gate=gate)
        version = self.registry.add_version(kind, fit.save, card)
        self.registry.promote(kind, version)
        return version

    def ask(self, path: str) -> Any:
        """The answer after another tick, when the registry was looked at again."""
        self.clock.advance(15.0)
        asyncio.run(self.pipeline.tick())
        with Client(create_app(self.config, self.clock)) as client:
            answer = client.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def rows(self) -> dict[str, dict[str, Any]]:
        return {row["kind"]: row for row in self.ask("/v1/models")["rows"]}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    made = Service(tmp_path)
    yield made
    asyncio.run(made.pipeline.close())


def fails(intercept: float) -> SiteFit:
    """Nodes of this site fail within a day with the probability of that logit."""
    return SiteFit({"fail": {1: HorizonFit(intercept, {}), 7: HorizonFit(intercept, {})}})


def test_a_promoted_risk_of_the_site_is_served_and_rolled_back(service: Service) -> None:
    day = "/v1/risk/nodes?horizon_s=86400"
    assert service.ask(day)["model"].startswith("rules+logistic")
    service.promote("risk", fails(-6.0))
    service.promote("risk", fails(-1.0))
    body = service.ask(day)
    assert (body["model"], [row["p"] > 0.2 for row in body["rows"]]) == ("risk-0002", [True, True])
    assert service.rows()["risk"]["gate"] == "20 % below what served"
    service.registry.roll_back("risk")
    body = service.ask(day)
    assert (body["model"], [row["p"] > 0.2 for row in body["rows"]]) == ("risk-0001", [False, False])
    assert service.rows()["risk"]["version"] == "0001"


def test_the_challenger_of_a_risk_fit_has_a_record_and_interference_has_none(service: Service) -> None:
    service.promote("risk", fails(-6.0))
    newer = service.promote("risk", fails(-1.0))
    service.registry.roll_back("risk")
    service.promote("interference", PAST)
    shadows = service.ask("/v1/models")["shadows"]
    assert [(row["kind"], row["version"]) for row in shadows] == [("risk", newer)]
    row = service.rows()["interference"]
    assert (row["version"], row["forecasts"], row["loss_vs_best_naive"]) == ("0001", 0, None)


@pytest.mark.parametrize(
    ("kind", "fit", "file"), [("risk", fails(-6.0), SITE_FILE), ("interference", PAST, CO_RUN_FILE)]
)
def test_a_damaged_version_is_not_shown_as_the_one_that_serves(
    service: Service, kind: str, fit: SiteFit | CoRunFit, file: str
) -> None:
    service.promote(kind, fit)
    damaged = service.promote(kind, fit)
    (service.registry.find_folder(kind, damaged) / file).write_text("{}")
    assert service.rows()[kind]["version"] == "0001"
