"""A real KEDA and the real autoscaler of Kubernetes ask real api processes, and scale Deployments by what they say."""

import contextlib
import signal
import ssl
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import grpc
import httpx
import pytest
import yaml

from fleetcast.clients.grpc_stubs import externalscaler_pb2 as scaler
from tests.docs.pages import ROOT, blocks_of
from tests.integration.built import needed
from tests.integration.kubernetes.build import kubernetes
from tests.integration.kubernetes.control_plane import ControlPlane
from tests.integration.kubernetes.keda_build import keda
from tests.integration.kubernetes.keda_process import KedaCluster
from tests.integration.kubernetes.page_reader import reader_at
from tests.integration.kubernetes.relay import Relay
from tests.integration.kubernetes.stranger import stranger
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
    authority: Path  # that signed it
    clients: Authority
    reader: Pair
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
                yield Autoscaled(cluster, servers.sign("fleetcast"), servers.cert, clients, reader, folder)
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

    def tell(self, site: Autoscaled, pool: str, value: float) -> None:
        """Returns once both answer of this pool."""
        self.board.values[pool] = value
        reader = ssl.create_default_context()
        reader.check_hostname, reader.verify_mode = False, ssl.CERT_NONE
        reader.load_cert_chain(site.reader.cert, site.reader.key)
        for api in (self.first, self.second):
            url = f"https://localhost:{api.port}/v1/demand?pool={pool}"
            known = lambda url=url: httpx.get(url, verify=reader).json().get("series")  # noqa: E731
            site.cluster.plane.until(f"a forecast of {pool}", known)


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
    served.tell(site, "pushed", 0.0)
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
    site.cluster.scale("believed", [by_http(served.second.port, "old")], fallback=FALLBACK)
    for name in ("old", "believed"):
        site.cluster.until_replicas(name, 2)
    served.board.hold(True)
    try:
        site.cluster.until_replicas("old", FALLBACK["replicas"])
        assert site.cluster.replicas("believed") == 2
    finally:
        served.board.hold(False)
    site.cluster.until_replicas("old", 2)
    for name in ("old", "believed"):
        site.cluster.remove(name)


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


def by_http(port: int, pool: str) -> dict[str, Any]:
    """The documented trigger of `metrics-api`."""
    metadata = documented("metrics-api")
    url = metadata["url"].replace("fleetcast.fleetcast.svc:8080", f"localhost:{port}")
    metadata |= {"url": url.replace("queue=serve", f"queue={pool}"), "targetValue": str(PER_REPLICA)}
    metadata["valueLocation"] = metadata["valueLocation"].replace("values.5", f"values.{QUANTILES.index(0.9)}")
    return {"type": "metrics-api", "metadata": metadata, "authenticationRef": {"name": "http"}}


def test_a_quantile_by_http_alone_scales(site: Autoscaled, served: Served) -> None:
    served.board.values["plain"] = 30.0
    site.cluster.scale("plain", [by_http(served.second.port, "plain")])
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
    served.first.stop()
    served.first.start()
    site.cluster.remove("two")


LOST = "got empty metric spec"  # KEDA of a trigger whose scaler it cannot ask


def until_said(site: Autoscaled, what: str, name: str, times: int = 5) -> None:
    """KEDA's operator says this so often of a ScaledObject from now on."""
    before = len(site.cluster.log())

    def said() -> bool:
        lines = site.cluster.log()[before:].splitlines()
        return sum(what in line and f'"{name}"' in line for line in lines) >= times

    site.cluster.plane.until(f"{times} times {what!r}", said, 120)


def test_while_no_api_can_be_reached_replicas_stay_whatever_other_triggers_say(
    site: Autoscaled, served: Served
) -> None:
    """Dead, then somebody else is on its port. A trigger by HTTP falls back instead, since KEDA knows its metric."""
    served.board.values |= {"down": 20.0, "beside": 20.0, "asked": 30.0}
    api, cluster = served.first, site.cluster
    counting = {"type": "kubernetes-workload", "metadata": {"podSelector": "app=asked", "value": "1"}}
    cluster.scale("asked", [by_http(api.port, "asked")], fallback=FALLBACK)
    cluster.scale("down", [trigger(api.grpc_port, "down")], fallback=FALLBACK)
    cluster.scale("beside", [trigger(api.grpc_port, "beside"), counting], fallback=FALLBACK)
    for name, replicas in (("down", 2), ("beside", 3), ("asked", 3)):
        cluster.until_replicas(name, replicas)
    api.stop()
    until_said(site, LOST, "down")
    cluster.until_replicas("asked", FALLBACK["replicas"])  # as many as the other trigger of `beside` counts
    until_said(site, LOST, "beside")
    assert cluster.replicas("beside") == 3
    with stranger(api.grpc_port) as heard:
        until_said(site, LOST, "down")
        assert heard.connections > 0
    assert cluster.replicas("down") == 2
    served.board.values["down"] = 50.0
    api.start()
    cluster.until_replicas("down", 5)
    for name in ("asked", "beside"):
        cluster.until_replicas(name, 3)
    for name in ("down", "beside", "asked"):
        cluster.remove(name)


class Buggy:
    """A scaler of the test: two replicas, or INTERNAL from the methods that are in `fails`."""

    METHODS: ClassVar[dict[str, Any]] = {
        "GetMetricSpec": scaler.GetMetricSpecResponse(
            metricSpecs=[scaler.MetricSpec(metricName="buggy", targetSize=10, targetSizeFloat=10.0)]
        ),
        "GetMetrics": scaler.GetMetricsResponse(
            metricValues=[scaler.MetricValue(metricName="buggy", metricValue=20, metricValueFloat=20.0)]
        ),
        "IsActive": scaler.IsActiveResponse(result=True),
    }

    def __init__(self) -> None:
        self.fails: set[str] = set()
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        handlers = {name: grpc.unary_unary_rpc_method_handler(self._answer(name)) for name in self.METHODS}
        known = grpc.method_handlers_generic_handler("externalscaler.ExternalScaler", handlers)
        self._server.add_generic_rpc_handlers((known,))
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def _answer(self, name: str) -> Callable[[bytes, Any], bytes]:
        def answer(body: bytes, rpc: Any) -> bytes:
            if name in self.fails:
                rpc.abort(grpc.StatusCode.INTERNAL, "a bug")
            told: bytes = self.METHODS[name].SerializeToString()
            return told

        return answer

    def stop(self) -> None:
        self._server.stop(None).wait()


@pytest.fixture
def buggy() -> Iterator[Buggy]:
    made = Buggy()
    yield made
    made.stop()


def test_a_bug_of_ours_begins_the_fallback_and_one_that_hides_the_specification_freezes_the_replicas(
    site: Autoscaled, buggy: Buggy
) -> None:
    metadata = {"scalerAddress": f"localhost:{buggy.port}"}
    site.cluster.scale("buggy", [{"type": "external", "metadata": metadata}], fallback=FALLBACK)
    site.cluster.until_replicas("buggy", 2)
    buggy.fails = set(Buggy.METHODS)
    until_said(site, LOST, "buggy")
    assert site.cluster.replicas("buggy") == 2
    buggy.fails = {"GetMetrics", "IsActive"}
    site.cluster.until_replicas("buggy", FALLBACK["replicas"])
    buggy.fails = set()
    site.cluster.until_replicas("buggy", 2)
    site.cluster.remove("buggy")


def test_before_there_is_any_board_the_specification_is_answered_so_the_fallback_begins(site: Autoscaled) -> None:
    api = site.api("new")
    with contextlib.ExitStack() as ends:
        ends.callback(api.stop)
        site.cluster.scale("new", [trigger(api.grpc_port, "web")], fallback=FALLBACK)
        site.cluster.until_replicas("new", FALLBACK["replicas"])
        board = DemandBoard([api.folder])
        ends.callback(board.stop)
        board.values["web"] = 20.0
        site.cluster.until_replicas("new", 2)
        site.cluster.remove("new")


def test_every_command_of_the_page_works(site: Autoscaled, served: Served, tmp_path: Path) -> None:
    served.tell(site, "serve", 20.0)
    site.cluster.scale("llama", [trigger(served.relay.port, "serve")], fallback=FALLBACK)
    site.cluster.until_replicas("llama", 2)
    site.cluster.plane.until("health of the metric", lambda: site.cluster.status("llama").get("health"))
    reader = reader_at(
        site.cluster.plane, tmp_path, **{"fleetcast.fleetcast.svc:8080": f"localhost:{served.first.port}"}
    )
    for name, path in (("ca.crt", site.authority), ("tls.crt", site.reader.cert), ("tls.key", site.reader.key)):
        (tmp_path / name).symlink_to(path)
    done = reader.run_page(PAGE, "run in keda")
    assert "Deployment/llama" in done[0].output
    assert "Happy" in done[1].output
    assert 'method="GRPC"' in done[2].output
    site.cluster.remove("llama")
