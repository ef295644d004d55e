"""The gRPC door of a real api process under uvloop, with the certificate and the callers of the api."""

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from fleetcast.clients.grpc_stubs import externalscaler_pb2 as scaler
from tests.service.certificate_files import Authority, Pair
from tests.service.grpc_process import ApiProcess, DemandBoard
from tests.service.grpc_world import KEDA, METADATA

PATIENCE_S = 60.0


@dataclass
class TlsSite:
    api: ApiProcess
    shown: Pair
    servers: Authority
    reader: Pair
    stranger: Pair

    def ask(self, client: Pair | None, servers: Authority | None = None, method: str = "IsActive") -> bytes:
        """On a connection of its own. Raises grpc.RpcError."""
        trusted = (servers or self.servers).cert.read_bytes()
        key, cert = (client.key.read_bytes(), client.cert.read_bytes()) if client else (None, None)
        credentials = grpc.ssl_channel_credentials(trusted, key, cert)
        body = scaler.ScaledObjectRef(scalerMetadata=METADATA | {"pool": "serve"}).SerializeToString()
        with grpc.secure_channel(f"localhost:{self.api.grpc_port}", credentials) as channel:
            answer: bytes = channel.unary_unary(f"{KEDA}{method}")(body, timeout=PATIENCE_S)
            return answer


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsSite]:
    folder = tmp_path_factory.mktemp("tls")
    state = folder / "state"
    state.mkdir()
    servers, clients = Authority(folder / "servers", "servers"), Authority(folder / "clients", "clients")
    signed, shown = servers.sign("fleetcast"), Pair(folder / "tls.pem", folder / "tls.key")
    shutil.copy(signed.cert, shown.cert)
    shutil.copy(signed.key, shown.key)
    board = DemandBoard([state])
    board.values["serve"] = 20.0
    api = ApiProcess(state, shown, clients)
    try:
        yield TlsSite(api, shown, servers, clients.sign("keda.example"), clients.sign("stranger"))
    finally:
        api.stop()
        board.stop()


def until(check: Any) -> Any:
    """The first answer that is not an error."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return check()
        except grpc.RpcError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def test_a_client_with_a_known_certificate_is_answered(site: TlsSite) -> None:
    answer = until(lambda: site.ask(site.reader))
    assert scaler.IsActiveResponse.FromString(answer).result is True


def test_a_client_with_a_strange_name_is_refused(site: TlsSite) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        site.ask(site.stranger)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED  # type: ignore[attr-defined]
    assert "no name of your certificate" in refused.value.details()  # type: ignore[attr-defined]


def test_a_client_without_a_certificate_does_not_get_in(site: TlsSite) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        site.ask(None)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]


def test_a_new_certificate_is_shown_to_who_comes_then(site: TlsSite, tmp_path: Path) -> None:
    others = Authority(tmp_path / "others", "others")
    signed = others.sign("fleetcast")
    for source, target in ((signed.cert, site.shown.cert), (signed.key, site.shown.key)):
        new = target.with_suffix(".new")
        shutil.copy(source, new)
        new.replace(target)
    answer = until(lambda: site.ask(site.reader, others))
    assert scaler.IsActiveResponse.FromString(answer).result is True
