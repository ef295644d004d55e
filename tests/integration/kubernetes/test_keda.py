"""A real KEDA and the real autoscaler of Kubernetes ask real api processes, and scale Deployments by what they say."""

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.pages import ROOT, blocks_of
from tests.integration.built import needed
from tests.integration.kubernetes.build import kubernetes
from tests.integration.kubernetes.control_plane import ControlPlane
from tests.integration.kubernetes.keda_build import keda
from tests.integration.kubernetes.keda_process import KedaCluster
from tests.integration.kubernetes.relay import Relay
from tests.integration.prometheus_process import Prometheus
from tests.service.certificate_files import Authority, Pair
from tests.service.grpc_process import QUANTILES, ApiProcess, DemandBoard

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]

PAGE = ROOT / "docs" / "schedulers" / "keda.md"
STALE_S = 5
PER_REPLICA = 10
FALLBACK = {"failureThreshold": 2, "replicas": 6}


@dataclass
class Autoscaled:
    """One control plane with KEDA, and the certificates of Fleetcast and of its client."""

    cluster: KedaCluster
    shown: Pair
    clients: Authority
    folder: Path

    def api(self, name: str) -> ApiProcess:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        return ApiProcess(folder, self.shown, self.clients)


@pytest.fixture(scope="module")
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Autoscaled]:
    binaries, folder = needed(keda, request), tmp_path_factory.mktemp("keda")
    plane = ControlPlane(needed(kubernetes, request), tmp_path_factory.mktemp("kubernetes"))
    servers, clients = Authority(folder / "servers", "servers"), Authority(folder / "clients", "clients")
    reader = clients.sign("keda.example")
    try:
        plane.add_nodes(["n1", "n2"], 8)
        with plane.scheduler():
            cluster = KedaCluster(binaries, plane, folder)
            try:
                cluster.trust(
                    "grpc", {"caCert": servers.cert, "tlsClientCert": reader.cert, "tlsClientKey": reader.key}
                )
                cluster.trust("http", {"ca": servers.cert, "cert": reader.cert, "key": reader.key})
                yield Autoscaled(cluster, servers.sign("fleetcast"), clients, folder)
            finally:
                cluster.stop()
    finally:
        plane.stop()


@dataclass
class Served:
    """Two api processes with boards of their own, and the Service before them."""

    first: ApiProcess
    second: ApiProcess
    board: DemandBoard
    relay: Relay


@pytest.fixture(scope="module")
def served(site: Autoscaled) -> Iterator[Served]:
    folders = [site.folder / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    board = DemandBoard(folders)
    first, second = site.api("one"), site.api("two")
    relay = Relay([first.grpc_port, second.grpc_port])
    try:
        yield Served(first, second, board, relay)
    finally:
        relay.close()
        first.stop()
        second.stop()
        board.stop()


def trigger(port: int, pool: str, type: str = "external", **more: str) -> dict[str, Any]:
    metadata = {"scalerAddress": f"localhost:{port}", "enableTLS": "true", "pool": pool, "target": "running"}
    metadata |= {"targetPerReplica": str(PER_REPLICA), "horizonSeconds": "300", **more}
    return {"type": type, "metadata": metadata, "authenticationRef": {"name": "grpc"}}


def test_a_forecast_scales_from_zero_up_down_and_to_zero(site: Autoscaled, served: Served) -> None:
    served.board.values["web"] = 0.0
    site.cluster.scale("web", [trigger(served.relay.port, "web")])
    for value, replicas in ((35.0, 4), (120.0, 12), (15.0, 2), (0.0, 0)):
        served.board.values["web"] = value
        began = time.monotonic()
        site.cluster.until_replicas("web", replicas)
        print(f"\n{value:g} wanted: {replicas} replicas after {time.monotonic() - began:.1f} s")
    site.cluster.remove("web")


def test_a_push_activates_between_two_polls(site: Autoscaled, served: Served) -> None:
    served.board.values["pushed"] = 0.0
    pushing = trigger(served.relay.port, "pushed", "external-push")
    site.cluster.scale("pushed", [pushing], pollingInterval=100_000)
    site.cluster.plane.until("a metric", lambda: site.cluster.status("pushed").get("externalMetricNames"))
    time.sleep(5)  # the first poll is over
    assert site.cluster.replicas("pushed") == 0
    served.board.values["pushed"] = 25.0
    began = time.monotonic()
    site.cluster.until_replicas("pushed", 3)
    print(f"\npushed: 3 replicas after {time.monotonic() - began:.1f} s")
    site.cluster.remove("pushed")


def test_a_stale_forecast_begins_the_fallback_and_a_fresh_one_ends_it(site: Autoscaled, served: Served) -> None:
    served.board.values["old"] = 20.0
    site.cluster.scale("old", [trigger(served.relay.port, "old")], fallback=FALLBACK)
    site.cluster.until_replicas("old", 2)
    served.board.hold(True)
    try:
        site.cluster.until_replicas("old", FALLBACK["replicas"])
    finally:
        served.board.hold(False)
    site.cluster.until_replicas("old", 2)
    site.cluster.remove("old")


def test_a_series_that_nobody_forecasts_begins_the_fallback(site: Autoscaled, served: Served) -> None:
    served.board.values["gone"] = 20.0
    site.cluster.scale("gone", [trigger(served.relay.port, "gone")], fallback=FALLBACK)
    site.cluster.until_replicas("gone", 2)
    del served.board.values["gone"]
    site.cluster.until_replicas("gone", FALLBACK["replicas"])
    assert "no forecast of pool 'gone'" in site.cluster.log()
    site.cluster.remove("gone")


def test_bad_metadata_names_the_key_in_kedas_log_and_hurts_nobody_else(site: Autoscaled, served: Served) -> None:
    served.board.values["good"] = 20.0
    site.cluster.scale("bad", [trigger(served.relay.port, "good", quantile="ninety")], replicas=3)
    site.cluster.scale("good", [trigger(served.relay.port, "good")])
    site.cluster.until_replicas("good", 2)
    said = "scalerMetadata quantile = 'ninety': set a number from 0 to 1"
    site.cluster.plane.until("the sentence", lambda: said in site.cluster.log())
    assert site.cluster.replicas("bad") == 3
    site.cluster.remove("bad")
    site.cluster.remove("good")


def test_the_larger_of_forecast_and_reactive_trigger_wins(site: Autoscaled, served: Served) -> None:
    """The reactive one is KEDA's own `metrics-api`, on what runs now by our HTTP API: no code of ours."""
    served.board.values["both"] = 20.0
    url = f"https://localhost:{served.second.port}/v1/demand?pool=both&target=running"
    metadata = {"url": url, "valueLocation": "series.0.now", "targetValue": "5", "authMode": "tls"}
    reactive = {"type": "metrics-api", "metadata": metadata, "authenticationRef": {"name": "http"}}
    site.cluster.scale("both", [trigger(served.relay.port, "both"), reactive])
    site.cluster.until_replicas("both", 4)
    site.cluster.remove("both")


def documented(type: str) -> dict[str, Any]:
    """The metadata of the trigger of this type in the part of the docs that needs no gRPC."""
    blocks = [block.code for block in blocks_of(PAGE) if block.language == "yaml"]
    things = [thing for code in blocks for thing in yaml.safe_load_all(code)]
    found = [one for thing in things for one in thing.get("triggers", ()) if one["type"] == type]
    metadata: dict[str, Any] = found[0]["metadata"]
    return metadata


def test_a_quantile_by_http_alone_scales(site: Autoscaled, served: Served) -> None:
    served.board.values["plain"] = 30.0
    metadata = documented("metrics-api")
    url = metadata["url"].replace("fleetcast.fleetcast.svc:8080", f"localhost:{served.second.port}")
    metadata |= {"url": url.replace("pool=serve", "pool=plain"), "targetValue": str(PER_REPLICA)}
    metadata["valueLocation"] = metadata["valueLocation"].replace("values.5", f"values.{QUANTILES.index(0.9)}")
    plain = {"type": "metrics-api", "metadata": metadata, "authenticationRef": {"name": "http"}}
    site.cluster.scale("plain", [plain])
    site.cluster.until_replicas("plain", 3)
    site.cluster.remove("plain")


@pytest.fixture
def prometheus(site: Autoscaled, served: Served, tmp_path: Path) -> Iterator[Prometheus]:
    reader = site.clients.sign("keda.example")
    tls = {"insecure_skip_verify": True, "cert_file": str(reader.cert), "key_file": str(reader.key)}
    running = Prometheus(tmp_path, f"localhost:{served.second.port}", scheme="https", tls_config=tls)
    yield running
    running.stop()


def test_what_prometheus_scraped_scales_until_it_is_stale(
    site: Autoscaled, served: Served, prometheus: Prometheus
) -> None:
    served.board.values["llama"] = 30.0
    metadata = documented("prometheus")
    query = metadata["query"].replace('pool="serve"', 'pool="llama"').replace("< 60", f"< {STALE_S}")
    metadata |= {"serverAddress": prometheus.url, "query": query, "threshold": str(PER_REPLICA)}
    site.cluster.scale("llama", [{"type": "prometheus", "metadata": metadata}], fallback=FALLBACK)
    site.cluster.until_replicas("llama", 3)
    served.board.hold(True)
    try:
        site.cluster.until_replicas("llama", FALLBACK["replicas"])
    finally:
        served.board.hold(False)
    site.cluster.until_replicas("llama", 3)
    site.cluster.remove("llama")


def test_an_api_that_stands_still_freezes_its_replicas_and_going_on_it_scales_on(
    site: Autoscaled, served: Served
) -> None:
    served.board.values["still"] = 20.0
    site.cluster.scale("still", [trigger(served.first.grpc_port, "still")])
    site.cluster.until_replicas("still", 2)
    served.first.signal(signal.SIGSTOP)
    try:
        served.board.values["still"] = 50.0
        time.sleep(10)
        assert site.cluster.replicas("still") == 2
    finally:
        served.first.signal(signal.SIGCONT)
    site.cluster.until_replicas("still", 5)
    site.cluster.remove("still")


def test_a_second_api_answers_when_the_first_is_killed(site: Autoscaled, served: Served) -> None:
    served.board.values["two"] = 20.0
    site.cluster.scale("two", [trigger(served.relay.port, "two")], fallback=FALLBACK)
    site.cluster.until_replicas("two", 2)
    served.first.signal(signal.SIGKILL)
    served.board.values["two"] = 40.0
    site.cluster.until_replicas("two", 4)
    site.cluster.remove("two")
