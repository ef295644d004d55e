"""A real HorizontalPodAutoscaler asks two apis of Fleetcast through a real aggregator: fresh, stale, one gone, both."""

import base64
import json
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import tomli_w
import yaml

from fleetcast.fleet.clock import ScaledClock
from fleetcast.schedulers.external_metrics import GROUP, METRIC, VERSION
from fleetcast.schedulers.weather import DemandKey
from tests.docs.pages import ROOT
from tests.integration.built import needed
from tests.integration.forecast_board import ForecastBoard
from tests.integration.kubernetes.build import kubernetes
from tests.integration.kubernetes.control_plane import ControlPlane
from tests.integration.kubernetes.page_reader import reader_at
from tests.integration.kubernetes.relay import Relay
from tests.integration.kubernetes.stranger import Heard, stranger
from tests.ports import free_ports
from tests.service.certificate_files import Authority, Pair

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]  # the first run builds Kubernetes

EXAMPLE = Path(__file__).parents[3] / "examples" / "kubernetes-external-metrics.yaml"
SPEED = 15.0  # of fleet time: a board is stale after fifteen seconds of ours
SERIES = DemandKey("serve", "inference", "llama-70b", "request_rate")
LIMIT_S = 120.0
NAME = "front-proxy-client"
CONTROLLERS = ("deployment", "replicaset", "horizontal-pod-autoscaler", "namespace")
APISERVICES = "/apis/apiregistration.k8s.io/v1/apiservices"
DEPLOYMENTS = "/apis/apps/v1/namespaces/default/deployments"
AUTOSCALERS = "/apis/autoscaling/v2/namespaces/default/horizontalpodautoscalers"
VALUE = f"/apis/{VERSION}/namespaces/default/{METRIC}"
SELECTOR = "queue=serve,class=inference,group=llama-70b,target=request_rate,horizon_s=600"


class Aggregated:
    """A control plane with an aggregation layer, and two apis behind one Service: the second copies the first's board.

    `example`: the objects that the documents tell an operator to apply, by kind.
    """

    def __init__(self, plane: ControlPlane, folder: Path, front: Authority, service: int) -> None:
        self.plane, self.folder = plane, folder
        servers = Authority(folder / "servers", "fleetcast-ca")
        self.ours = servers.sign("fleetcast", "DNS:fleetcast-metrics.fleetcast.svc")
        self.example = {thing["kind"]: thing for thing in yaml.safe_load_all(EXAMPLE.read_text(encoding="utf-8"))}
        self.example["APIService"]["spec"]["caBundle"] = base64.b64encode(servers.cert.read_bytes()).decode()
        self.example["APIService"]["spec"]["service"]["port"] = service
        now_ms = time.time_ns() // 1_000_000
        self.clock = {"epoch_ms": now_ms, "wall_ms": now_ms, "speed": SPEED}
        self.forecast = ForecastBoard(folder / "first" / "board", SERIES, ScaledClock(now_ms, now_ms, SPEED))
        self.front = front
        ports = free_ports(4)
        self.ports = ports[:2]
        self.apis: list[subprocess.Popen[bytes]] = []
        self._configs = [
            self._config("first", ports[2], ports[0]),
            self._config("second", ports[3], ports[1], ports[2]),
        ]
        for number in range(2):
            self.start(number)
        self.relay = Relay(self.ports, service)

    def _config(self, name: str, port: int, metrics: int, board: int = 0) -> Path:
        files = {"tls_cert": str(self.ours.cert), "tls_key": str(self.ours.key), "client_ca": str(self.front.cert)}
        api = {"port": port} | ({"board": f"http://127.0.0.1:{board}/v1/board"} if board else {})
        config = {
            "state": str(self.folder / name),
            "clock": self.clock,
            "api": api,
            "placer": {"port": free_ports(1)[0]},
            "external_metrics": {"port": metrics, "names": [NAME], **files},
        }
        path = self.folder / f"{name}.toml"
        path.write_text(tomli_w.dumps(config))
        return path

    def start(self, number: int) -> None:
        command = [
            sys.executable,
            "-m",
            "fleetcast.cli.main",
            "run",
            "--role",
            "api",
            "--config",
            str(self._configs[number]),
        ]
        with open(self.folder / f"api-{number}.log", "ab") as log:
            self.apis[number : number + 1] = [subprocess.Popen(command, stdout=log, stderr=log)]

    def end(self, number: int, how: signal.Signals = signal.SIGKILL) -> None:
        self.apis[number].send_signal(how)
        self.apis[number].wait(60)

    def apply(self) -> None:
        """As an operator does; but the Service is a name, since nobody is here who makes addresses of Services."""
        self.plane.create("/api/v1/namespaces", {"metadata": {"name": "fleetcast"}})
        service = {
            "metadata": {"name": "fleetcast-metrics"},
            "spec": {"type": "ExternalName", "externalName": "localhost"},
        }
        self.plane.create("/api/v1/namespaces/fleetcast/services", service)
        self.register()
        self.plane.create(DEPLOYMENTS, deployment("llama"))
        self.plane.create(AUTOSCALERS, self.example["HorizontalPodAutoscaler"])

    def register(self) -> None:
        self.plane.create(APISERVICES, self.example["APIService"])
        self.until("the APIService is available", lambda: self.available()["status"] == "True")

    def available(self) -> dict[str, str]:
        found = self.get(f"{APISERVICES}/v1beta1.{GROUP}").get("status", {}).get("conditions", [])
        return next((row for row in found if row["type"] == "Available"), {"status": "", "reason": ""})

    def get(self, path: str) -> dict[str, Any]:
        answer = self.plane.http.get(path)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def value(self) -> httpx.Response:
        """As the autoscaler's controller asks for it, through the API server."""
        return self.plane.http.get(VALUE, params={"labelSelector": SELECTOR})

    def replicas(self) -> int:
        return int(self.get(f"{DEPLOYMENTS}/llama")["spec"]["replicas"])

    def sees(self) -> tuple[str, str]:
        """Status and reason of the autoscaler's ScalingActive."""
        rows = self.get(f"{AUTOSCALERS}/llama").get("status", {}).get("conditions", [])
        return next(((row["status"], row["reason"]) for row in rows if row["type"] == "ScalingActive"), ("", ""))

    def until(self, what: str, holds: Callable[[], bool]) -> float:
        """How many seconds it took."""
        began_s = time.monotonic()
        try:
            self.plane.until(what, holds, LIMIT_S)
        except AssertionError as error:
            logs = "\n".join(path.read_text()[-2000:] for path in sorted(self.folder.glob("api-*.log")))
            raise AssertionError(f"{error}\n{self.available()} {self.sees()}\n{logs}") from None
        return time.monotonic() - began_s

    def close(self) -> None:
        self.forecast.end()
        self.relay.close()
        for number, process in enumerate(self.apis):
            if process.poll() is None:
                self.end(number)


def deployment(name: str) -> dict[str, Any]:
    labels = {"app": name}
    pod = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "c", "image": "fake"}]}}
    return {
        "metadata": {"name": name},
        "spec": {"replicas": 1, "selector": {"matchLabels": labels}, "template": pod},
    }


@pytest.fixture(scope="module")
def aggregated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Aggregated]:
    folder = tmp_path_factory.mktemp("aggregated")
    front = Authority(folder / "front", "request-header-ca")
    pair, (service,) = front.sign(NAME), free_ports(1)
    flags = (
        *(f"--requestheader-client-ca-file={front.cert}", f"--requestheader-allowed-names={NAME}"),
        *("--requestheader-username-headers=X-Remote-User", "--requestheader-group-headers=X-Remote-Group"),
        *("--requestheader-extra-headers-prefix=X-Remote-Extra-",),
        *(f"--proxy-client-cert-file={pair.cert}", f"--proxy-client-key-file={pair.key}"),
    )
    plane = ControlPlane(needed(kubernetes, request), folder, authorization="RBAC", apiserver=flags)
    try:
        plane.start_controllers(
            *(f"{name}-controller" for name in CONTROLLERS), flags=("--horizontal-pod-autoscaler-sync-period=2s",)
        )
        made = Aggregated(plane, folder, front, service)
        try:
            made.forecast.value = 50.0
            made.apply()
            yield made
        finally:
            made.close()
    finally:
        plane.stop()


def test_an_autoscaler_follows_the_forecast(aggregated: Aggregated) -> None:
    took_s = aggregated.until("50 requests/s at 10 a replica", lambda: aggregated.replicas() == 5)
    print(f"\n50 requests/s forecast, 10 a replica: 5 replicas after {took_s:.1f} s (sync 2 s)")
    aggregated.forecast.value = 20.0
    aggregated.until("20 requests/s", lambda: aggregated.replicas() == 2)
    assert aggregated.sees()[0] == "True"
    role = aggregated.get("/apis/rbac.authorization.k8s.io/v1/clusterroles/system:controller:horizontal-pod-autoscaler")
    rights = [rule["verbs"] for rule in role["rules"] if GROUP in rule.get("apiGroups", ())]
    assert any("get" in verbs or "list" in verbs for verbs in rights), "it may ask without further rights"


def test_a_stale_forecast_leaves_the_replicas_and_says_so_and_a_fresh_one_moves_them_again(
    aggregated: Aggregated,
) -> None:
    aggregated.forecast.value = 30.0
    aggregated.until("30 requests/s", lambda: aggregated.replicas() == 3)
    aggregated.forecast.is_published = False
    aggregated.forecast.value = 10.0
    aggregated.until("it does not see", lambda: aggregated.sees() == ("False", "FailedGetExternalMetric"))
    began_s = time.monotonic()
    answer = aggregated.value()
    print(f"\nstale: {answer.status_code} after {1000 * (time.monotonic() - began_s):.0f} ms")
    assert (answer.status_code, answer.json()["reason"]) == (503, "ServiceUnavailable")
    assert aggregated.available()["status"] == "True", "discovery goes on"
    assert aggregated.replicas() == 3
    aggregated.forecast.is_published = True
    took_s = aggregated.until("10 requests/s", lambda: aggregated.replicas() == 1)
    print(f"fresh again: right after {took_s:.1f} s")


def test_a_selector_that_means_nothing_reaches_who_wrote_it(aggregated: Aggregated) -> None:
    answer = aggregated.plane.http.get(VALUE, params={"labelSelector": "app=web"})
    assert answer.status_code == 400
    assert "the labels are queue, pool, class" in answer.json()["message"]


def test_only_the_aggregator_is_let_in(aggregated: Aggregated) -> None:
    headers = {"x-remote-user": "system:admin"}
    other = Authority(aggregated.folder / "other", "other-ca").sign(NAME)
    for port in aggregated.ports:
        for pair in (None, other):
            with asking(pair) as client, pytest.raises(httpx.TransportError):
                client.get(f"https://127.0.0.1:{port}{VALUE}", headers=headers)
        with asking(aggregated.front.sign("stranger")) as client:
            answer = client.get(f"https://127.0.0.1:{port}{VALUE}", headers=headers)
        assert (answer.status_code, answer.json()["reason"]) == (403, "Forbidden")


def asking(pair: Pair | None) -> httpx.Client:
    tls = ssl.create_default_context()
    tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    if pair is not None:
        tls.load_cert_chain(pair.cert, pair.key)
    return httpx.Client(verify=tls, timeout=60)


def test_one_of_two_that_is_killed_is_not_missed(aggregated: Aggregated) -> None:
    aggregated.forecast.value = 40.0
    aggregated.until("40 requests/s", lambda: aggregated.replicas() == 4)
    aggregated.end(1)
    aggregated.forecast.value = 20.0
    aggregated.until("20 requests/s, from the first alone", lambda: aggregated.replicas() == 2)
    assert aggregated.available()["status"] == "True"
    deletes_a_namespace(aggregated, "spare")
    aggregated.start(1)
    aggregated.until("the second listens", lambda: listens(aggregated.ports[1]))


def test_a_second_whose_board_nobody_renews_says_so_and_keeps_the_registration_alive(aggregated: Aggregated) -> None:
    aggregated.end(0)
    aggregated.until("its copy is stale", lambda: aggregated.value().status_code == 503)
    aggregated.until("and seen so", lambda: aggregated.sees() == ("False", "FailedGetExternalMetric"))
    assert aggregated.available()["status"] == "True"
    deletes_a_namespace(aggregated, "another")
    aggregated.start(0)
    aggregated.until("it is fresh again", lambda: aggregated.value().status_code == 200)


def deletes_a_namespace(aggregated: Aggregated, name: str) -> None:
    http = aggregated.plane.http
    aggregated.plane.create("/api/v1/namespaces", {"metadata": {"name": name}})
    http.delete(f"/api/v1/namespaces/{name}")
    aggregated.until("a namespace goes", lambda: http.get(f"/api/v1/namespaces/{name}").status_code == 404)


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 10).close()
    except OSError:
        return False
    return True


def test_while_both_stand_still_replicas_stay_and_going_on_they_follow(aggregated: Aggregated) -> None:
    aggregated.forecast.value = 20.0
    aggregated.until("20 requests/s", lambda: (aggregated.replicas(), aggregated.sees()[0]) == (2, "True"))
    for api in aggregated.apis:
        api.send_signal(signal.SIGSTOP)
    try:
        aggregated.forecast.value = 40.0
        took_s = aggregated.until("the aggregator knows", lambda: aggregated.available()["status"] == "False")
        print(f"\nboth stand still: the APIService is unavailable after {took_s:.1f} s")
        assert aggregated.replicas() == 2
    finally:
        for api in aggregated.apis:
            api.send_signal(signal.SIGCONT)
    aggregated.until("40 requests/s", lambda: aggregated.replicas() == 4)


def test_while_somebody_else_or_a_bug_answers_replicas_stay(aggregated: Aggregated) -> None:
    """With our certificate: a proxy before us, or an error that we did not foresee."""
    aggregated.forecast.value = 20.0
    aggregated.until("20 requests/s", lambda: (aggregated.replicas(), aggregated.sees()[0]) == (2, "True"))
    for number in range(2):
        aggregated.end(number)
    for status, body in ((500, b"a bug"), (200, b"<html>"), (200, b"{}")):
        with stranger(aggregated.ports[0], status, body, aggregated.ours) as heard:
            asked = VALUE if status == 200 else ""  # after an error of its discovery it is asked for nothing else
            aggregated.until(f"{status} {body!r} was heard", partial(was_asked, heard, asked))
            aggregated.until("it does not see", lambda: aggregated.sees() == ("False", "FailedGetExternalMetric"))
            assert aggregated.replicas() == 2
    aggregated.forecast.value = 30.0
    for number in range(2):
        aggregated.start(number)
    aggregated.until("30 requests/s", lambda: aggregated.replicas() == 3)


def was_asked(heard: Heard, path: str) -> bool:
    """Whether it was asked three times for what begins so."""
    return sum(one.startswith(path) for one in heard.paths) >= 3


def test_every_command_of_the_page_works(aggregated: Aggregated, tmp_path: Path) -> None:
    """The example with the authority filled in. Its Service is a name: nothing here gives Services addresses."""
    aggregated.forecast.value = 20.0
    aggregated.until("20 requests/s", lambda: aggregated.replicas() == 2)
    reader = reader_at(aggregated.plane, tmp_path)
    (tmp_path / "examples").unlink()
    (tmp_path / "examples").mkdir()
    service = {"spec": {"type": "ExternalName", "externalName": "localhost", "selector": None}}
    things = [aggregated.example[kind] for kind in ("APIService", "HorizontalPodAutoscaler")]
    things.append({**aggregated.example["Service"], **service})
    (tmp_path / "examples" / EXAMPLE.name).write_text(yaml.safe_dump_all(things))

    def register_again() -> None:
        if aggregated.plane.http.get(f"{APISERVICES}/v1beta1.{GROUP}").status_code == 404:
            aggregated.register()

    available = partial(aggregated.until, "it is available", lambda: aggregated.available()["status"] == "True")
    before = {"kubectl get --raw": available, "kubectl delete apiservice": register_again}
    done = reader.run_page(ROOT / "docs/schedulers/external-metrics.md", "run in external_metrics", before=before)
    assert GROUP in done[0].output
    assert "BEGIN CERTIFICATE" in (tmp_path / "request-header-ca.crt").read_text()
    values = next(json.loads(row.output) for row in done if "--raw" in row.command)
    assert [row["value"] for row in values["items"]] == ["20"]
    aggregated.register()


def test_while_both_are_gone_no_namespace_can_go_until_the_registration_does(aggregated: Aggregated) -> None:
    plane = aggregated.plane
    replicas = aggregated.replicas()
    for number in range(2):
        aggregated.end(number)
    took_s = aggregated.until("the aggregator knows", lambda: aggregated.available()["status"] == "False")
    print(f"\nboth gone: the APIService is unavailable after {took_s:.1f} s")
    plane.create("/api/v1/namespaces", {"metadata": {"name": "doomed"}})
    plane.http.delete("/api/v1/namespaces/doomed")

    def why() -> list[str]:
        rows = aggregated.get("/api/v1/namespaces/doomed")["status"].get("conditions", [])
        return [row["type"] for row in rows if row["status"] == "True"]

    aggregated.until("it hangs", lambda: "NamespaceDeletionDiscoveryFailure" in why())
    assert aggregated.replicas() == replicas
    plane.http.delete(f"{APISERVICES}/v1beta1.{GROUP}")
    took_s = aggregated.until("it goes", lambda: plane.http.get("/api/v1/namespaces/doomed").status_code == 404)
    print(f"the APIService deleted: the namespace is gone after {took_s:.1f} s")
