"""The aggregated API over its own TLS port: who may ask, what is told, and that discovery never depends on a board."""

import asyncio
import http.client
import json
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.errors import ConfigError
from fleetcast.schedulers.external_metrics import GROUP, METRIC, VERSION
from fleetcast.service.api.app import create_app
from fleetcast.service.api.external_metrics import serve_external_metrics
from fleetcast.service.api.routes.context import Context
from fleetcast.service.board.board import BoardWriter
from fleetcast.service.config import Config, ExternalMetricsConfig
from fleetcast.service.http.connection_pool import ConnectionLimits, ConnectionPool
from fleetcast.service.pipeline.demand.sections import make_demand_sections
from tests.ports import free_port
from tests.schedulers.small_demand import small_demand
from tests.schedulers.small_fleet import NOW_MS
from tests.service.api_world import Client
from tests.service.certificate_files import Authority, Pair

USER = {"x-remote-user": "system:serviceaccount:kube-system:horizontal-pod-autoscaler"}
LLAMA = "group=llama-70b,pool=serve,class=inference,target=request_rate"
VALUE = f"/apis/{VERSION}/namespaces/default/{METRIC}"


@dataclass
class Site:
    """A cluster's authorities: `servers` signs ours, `front` the aggregator's, `others` somebody else's."""

    servers: Authority
    ours: Pair
    front: Authority
    aggregator: Pair
    stranger: Pair
    other: Pair


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = tmp_path_factory.mktemp("authorities")
    servers, front, others = (Authority(folder / name, "ca") for name in ("servers", "front", "others"))
    aggregator, stranger = front.sign("front-proxy-client"), front.sign("stranger")
    return Site(servers, servers.sign("fleetcast"), front, aggregator, stranger, others.sign("front-proxy-client"))


class Door:
    """The port of `config`, asked as `pair`."""

    def __init__(self, site: Site, port: int, clock: ManualClock, context: Context) -> None:
        self.site, self.port, self.clock, self.context = site, port, clock, context

    def ask(self, path: str, pair: Pair | None, headers: dict[str, str], method: str = "GET") -> tuple[int, Any]:
        tls = ssl.create_default_context(cafile=str(self.site.servers.cert))
        if pair is not None:
            tls.load_cert_chain(pair.cert, pair.key)
        connection = http.client.HTTPSConnection("localhost", self.port, context=tls, timeout=60)
        try:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read() or b"null")
        finally:
            connection.close()

    def asked(self, path: str, selector: str = "") -> tuple[int, Any]:
        return self.ask(f"{path}?labelSelector={selector}", self.site.aggregator, USER)


@pytest.fixture
def opened(site: Site, tmp_path: Path) -> Callable[[Callable[[Door], None]], None]:
    """Runs a check beside an open door. The board is a second old."""
    port, clock = free_port(), ManualClock(NOW_MS + 1000)
    files = {"tls_cert": str(site.ours.cert), "tls_key": str(site.ours.key), "client_ca": str(site.front.cert)}
    config = Config(
        state=str(tmp_path),
        external_metrics=ExternalMetricsConfig(port=port, names=("front-proxy-client",), **files),
    )
    rows = list(small_demand().values())
    BoardWriter(config.board).publish(make_demand_sections(rows, {}, [], NOW_MS), NOW_MS)

    def run(check: Callable[[Door], None]) -> None:
        context: Context = create_app(config, clock).state.context

        async def play() -> None:
            async with serve_external_metrics(context, ConnectionPool(ConnectionLimits()), lambda: None):
                await asyncio.to_thread(check, Door(site, port, clock, context))

        asyncio.run(play())

    return run


Opened = Callable[[Callable[[Door], None]], None]


def test_the_aggregator_is_told_the_documents_and_the_value(opened: Opened) -> None:
    def check(door: Door) -> None:
        kinds = [door.asked(path)[1]["kind"] for path in ("/apis", f"/apis/{GROUP}", f"/apis/{VERSION}")]
        assert kinds == ["APIGroupList", "APIGroup", "APIResourceList"]
        status, body = door.asked(VALUE, "quantile=0.5,horizon_s=59")
        assert (status, body["items"][0]["value"]) == (200, "801"), "the forecast is a second old"
        assert door.context.metrics.requests[f"/apis/{GROUP}", "GET", 200] == 4
        assert "fleetcast_tls_certificate_expiry_timestamp_seconds 4.1" in door.context.metrics.make_page(), "in 2099"

    opened(check)


def test_who_has_no_certificate_of_the_aggregators_authority_is_cut_in_the_handshake(opened: Opened) -> None:
    def check(door: Door) -> None:
        for pair in (None, door.site.other):
            with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
                door.ask(VALUE, pair, USER)

    opened(check)


def test_a_certificate_of_another_name_and_a_request_for_nobody_are_refused(opened: Opened) -> None:
    def check(door: Door) -> None:
        status, body = door.ask(VALUE, door.site.stranger, USER)
        assert (status, body["kind"], body["reason"]) == (403, "Status", "Forbidden")
        assert "names has front-proxy-client" in body["message"]
        status, body = door.ask(VALUE, door.site.aggregator, {})
        assert (status, body["reason"]) == (401, "Unauthorized")

    opened(check)


@pytest.mark.parametrize(
    ("path", "selector", "status", "reason"),
    [
        (VALUE, "pool=nowhere", 404, "NotFound"),
        (VALUE.replace(METRIC, "other"), "", 404, "NotFound"),
        ("/apis/apps/v1", "", 404, "NotFound"),
        (VALUE, "app=web", 400, "BadRequest"),
        (VALUE, "quantile=%00", 400, "BadRequest"),
        (
            VALUE,
            "group=llama-70b,pool=serve,class=inference,target=request_rate,horizon_s=600",
            503,
            "ServiceUnavailable",
        ),
    ],
)
def test_every_error_is_a_status_of_kubernetes(
    opened: Opened, path: str, selector: str, status: int, reason: str
) -> None:
    def check(door: Door) -> None:
        got, body = door.asked(path, selector)
        assert (got, body["kind"], body["reason"], body["code"]) == (status, "Status", reason, status)

    opened(check)


def test_what_writes_is_not_allowed(opened: Opened) -> None:
    def check(door: Door) -> None:
        status, body = door.ask(VALUE, door.site.aggregator, USER, "DELETE")
        assert (status, body["reason"]) == (405, "MethodNotAllowed")

    opened(check)


def test_a_stale_board_is_an_error_at_once_and_discovery_goes_on(opened: Opened) -> None:
    def check(door: Door) -> None:
        door.clock.advance(61)
        status, body = door.asked(VALUE)
        assert (status, body["reason"]) == (503, "ServiceUnavailable")
        assert "no fresh board" in body["message"]
        assert door.asked(f"/apis/{VERSION}")[0] == 200

    opened(check)


def test_a_door_without_a_port_is_closed_and_a_file_that_is_not_there_is_named(site: Site, tmp_path: Path) -> None:
    context: Context = create_app(Config(state=str(tmp_path)), ManualClock(NOW_MS)).state.context

    async def play() -> None:
        async with serve_external_metrics(context, ConnectionPool(ConnectionLimits()), lambda: None):
            pass

    asyncio.run(play())
    pair = str(site.ours.cert), str(site.ours.key)
    given = ExternalMetricsConfig(port=1, tls_cert=pair[0], tls_key=pair[1], client_ca="/nowhere/ca.pem")
    context.config = Config(state=str(tmp_path), external_metrics=given)
    with pytest.raises(ConfigError, match=r"external_metrics.client_ca = /nowhere/ca.pem: cannot be"):
        asyncio.run(play())


def test_the_api_itself_believes_no_remote_user(tmp_path: Path) -> None:
    from fleetcast.service.http.access import load_access

    access = load_access("0.0.0.0", {"FLEETCAST_TOKENS": "reader read " + "r" * 40})
    with Client(create_app(Config(state=str(tmp_path)), ManualClock(NOW_MS), access=access)) as client:
        assert client.get("/v1/demand", headers=USER).status_code == 401
