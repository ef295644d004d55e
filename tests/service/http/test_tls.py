"""TLS of the api's own, with certificates that `openssl` made, against a real api process under uvloop."""

import http.client
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fleetcast.fleet.errors import ConfigError
from fleetcast.service.config import ApiConfig
from fleetcast.service.http.certificates import ClientCertificate, read_certificate_validity_s
from fleetcast.service.http.tls import Tls
from tests.forked import run_command
from tests.ports import free_port
from tests.service.api_world import publish
from tests.service.certificate_files import Authority, Pair, openssl

TOKEN = "0123456789abcdef"
PAUSE_S = 0.005  # between the requests of a client: some hundred a second are load enough
EXPIRED = "20210101000000Z"


@dataclass
class Site:
    """An authority for servers, one for clients, one of somebody else, and what they signed."""

    folder: Path
    servers: Authority = field(init=False)
    clients: Authority = field(init=False)
    others: Authority = field(init=False)

    def __post_init__(self) -> None:
        self.servers, self.clients, self.others = (
            Authority(self.folder / name, name) for name in ("servers", "clients", "others")
        )
        self.server = self.servers.sign("fleetcast")
        self.reader = self.clients.sign("keda.example")
        self.poster = self.clients.sign("nobody", "URI:spiffe://site/poster")
        self.nobody = self.clients.sign("stranger")
        self.late = self.clients.sign("late.example", until=EXPIRED)
        self.forged = self.others.sign("keda.example")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("site"))


class Api:
    """One api process; requests to it with the certificates and tokens that are given."""

    def __init__(self, folder: Path, site: Site) -> None:
        self.folder, self.port, self.ca = folder, free_port(), site.servers.cert
        self.shown = Pair(folder / "tls.pem", folder / "tls.key")
        self.show(site.server)
        publish(folder)
        api = {"port": self.port, "client_ca": str(site.clients.cert)}
        subjects = {"keda.example": ["read"], "spiffe://site/poster": ["events"], "late.example": ["admin"]}
        config = {
            "state": str(folder),
            "api": api | {"tls_cert": str(self.shown.cert), "tls_key": str(self.shown.key)},
            "access": {"subjects": subjects},
            "placer": {"port": self.port + 1},
        }
        (folder / "api.toml").write_text(tomli_w.dumps(config))
        command = [
            sys.executable,
            "-m",
            "fleetcast.cli.main",
            "run",
            "--role",
            "api",
            "--config",
            str(folder / "api.toml"),
        ]
        environment = {**os.environ, "FLEETCAST_TOKENS": f"reader read {TOKEN}", "FLEETCAST_LOG_LEVEL": "info"}
        self.log = folder / "api.log"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        self.until(lambda: "listening on https://" in self.log.read_text())

    def show(self, pair: Pair) -> None:
        """Put a certificate, and then its key, in the place of those before; each whole."""
        for source, target in ((pair.cert, self.shown.cert), (pair.key, self.shown.key)):
            new = target.with_suffix(".new")
            shutil.copy(source, new)
            new.chmod(0o600)
            new.replace(target)

    def until(self, check: Any) -> None:
        deadline = time.monotonic() + 60
        while not check():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def context(self, pair: Pair | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.ca))
        if pair is not None:
            context.load_cert_chain(pair.cert, pair.key)
        return context

    def connect(self, pair: Pair | None = None) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection("localhost", self.port, timeout=30, context=self.context(pair))

    def ask(self, path: str, pair: Pair | None = None, token: str = "", method: str = "GET") -> tuple[int, str]:
        connection = self.connect(pair)
        try:
            headers = {"authorization": f"Bearer {token}"} if token else {}
            connection.request(method, path, body=b"[]" if method == "POST" else None, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def serial(self) -> str:
        """Return the serial number of the certificate that a new connection gets."""
        raw = socket.create_connection(("127.0.0.1", self.port), 30)
        with self.context().wrap_socket(raw, server_hostname="localhost") as connection:
            return str((connection.getpeercert() or {})["serialNumber"])

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        finally:
            self.process.kill()


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory, site: Site) -> Iterator[Api]:
    started = Api(tmp_path_factory.mktemp("api"), site)
    yield started
    started.end()


def test_a_token_opens_what_it_opens_without_tls(api: Api) -> None:
    assert api.ask("/v1/fleet", token=TOKEN)[0] == 200
    assert api.ask("/v1/fleet")[0] == 401
    assert api.ask("/healthz")[0] == 200


@pytest.mark.parametrize("path", ["/v1/fleet", "/v1/nodes/n002"])
def test_a_name_of_a_certificate_stands_for_its_scopes(api: Api, site: Site, path: str) -> None:
    assert api.ask(path, site.reader)[0] == 200
    status, body = api.ask(path, site.poster)
    assert status == 403
    assert "a certificate with the scope read; that of spiffe://site/poster has events" in body
    status, body = api.ask(path, site.nobody)
    assert status == 401
    assert "no name of your certificate is in [access] subjects: 'stranger', 'localhost'" in body
    assert api.ask("/v1/events", site.poster, method="POST")[0] in (200, 202)


def test_a_token_that_is_shown_counts_more_than_the_certificate(api: Api, site: Site) -> None:
    assert api.ask("/v1/fleet", site.nobody, TOKEN)[0] == 200
    assert api.ask("/v1/fleet", site.reader, "fedcba9876543210")[0] == 401


@pytest.mark.parametrize("kind", ["forged", "late"])
def test_a_certificate_of_another_authority_or_an_expired_one_gets_no_answer(api: Api, site: Site, kind: str) -> None:
    with pytest.raises((ssl.SSLError, OSError)):
        api.ask("/healthz", getattr(site, kind))
    assert api.ask("/healthz")[0] == 200


def test_who_does_not_know_the_authority_does_not_talk_to_us(api: Api) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        http.client.HTTPSConnection("localhost", api.port, timeout=30).request("GET", "/healthz")


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tls_is_of_version_1_2_at_least(api: Api, version: ssl.TLSVersion) -> None:
    context = api.context()
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version = min(version, ssl.TLSVersion.TLSv1_1)
    context.maximum_version = version
    connection = http.client.HTTPSConnection("localhost", api.port, timeout=30, context=context)
    if version < ssl.TLSVersion.TLSv1_2:
        with pytest.raises((ssl.SSLError, OSError)):
            connection.request("GET", "/healthz")
    else:
        connection.request("GET", "/healthz")
        assert connection.getresponse().status == 200
    connection.close()


def test_what_is_no_tls_is_dropped_counted_and_no_line_of_the_log(api: Api) -> None:
    for said in (b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n", b"\x16\x03\x01\x00\x01x", b""):
        with socket.create_connection(("127.0.0.1", api.port), 30) as raw:
            raw.sendall(said)
            raw.shutdown(socket.SHUT_WR)
            answer = b""
            try:
                while piece := raw.recv(4096):
                    answer += piece
            except ConnectionResetError:
                pass
            assert not answer.startswith(b"HTTP")
    page = api.ask("/metrics", token=TOKEN)[1]
    assert 'fleetcast_api_refused_connections_total{status="no_tls"}' in page
    assert "Traceback" not in api.log.read_text()


def test_the_end_of_the_certificate_is_a_metric(api: Api, site: Site) -> None:
    line = next(line for line in api.ask("/metrics", token=TOKEN)[1].splitlines() if line.startswith("fleetcast_tls_"))
    assert line.startswith("fleetcast_tls_certificate_expiry_timestamp_seconds ")
    assert float(line.split()[1]) == read_certificate_validity_s(site.server.cert.read_text())[1]


def test_certificates_change_under_load_and_no_request_fails(api: Api, site: Site) -> None:
    """Clients that keep a connection and clients that come anew, while certificate and key are swapped one by one."""
    failures: list[str] = []
    asked = [0]
    over = threading.Event()

    def load(keeps: bool) -> None:
        connection = api.connect(site.reader)
        while not over.is_set() and not failures and asked[0] < 20_000:
            try:
                connection.request("GET", "/v1/nodes/n002")
                answer = connection.getresponse()
                if answer.status != 200 or not json.loads(answer.read()):
                    failures.append(f"answered {answer.status}")
                asked[0] += 1
                over.wait(PAUSE_S)
                if not keeps:
                    connection.close()
            except (OSError, http.client.HTTPException) as error:
                failures.append(repr(error))
        connection.close()

    threads = [threading.Thread(target=load, args=(keeps,)) for keeps in (True, False, False)]
    for thread in threads:
        thread.start()
    try:
        pairs = [site.servers.sign(f"fleetcast-{number}") for number in range(3)]
        for pair in (*pairs, site.server):
            api.show(pair)
            wanted = openssl("x509", "-in", pair.cert, "-noout", "-serial").strip().partition("=")[2]
            api.until(lambda wanted=wanted: api.serial() == wanted)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert failures == []
    assert asked[0] > 0


def test_files_that_cannot_be_used_leave_the_old_certificate_in_place(api: Api, site: Site) -> None:
    before = api.serial()
    api.show(Pair(site.nobody.cert, site.reader.key))
    api.until(lambda: "is not the key of api.tls_cert" in api.log.read_text())
    api.shown.cert.write_text("nonsense")
    api.until(lambda: "there is no certificate in it" in api.log.read_text())
    assert api.serial() == before
    taken = api.log.read_text().count("took over the certificate")
    api.show(site.server)
    api.until(lambda: api.log.read_text().count("took over the certificate") > taken)


# -- what is refused at the start


def files(site: Site, **more: Any) -> ApiConfig:
    given = {"tls_cert": site.server.cert, "tls_key": site.server.key, "client_ca": site.clients.cert} | more
    return ApiConfig(**{key: str(path) for key, path in given.items()})


def test_files_that_belong_together_are_taken_without_a_word(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    assert Tls(files(site)).until_s == read_certificate_validity_s(site.server.cert.read_text())[1]
    assert caplog.messages == []


@pytest.mark.parametrize("key", ["tls_cert", "tls_key", "client_ca"])
def test_a_file_that_cannot_be_read_is_named(site: Site, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"api\.{key} = /nowhere/x\.pem: cannot be read: No such file"):
        Tls(files(site, **{key: "/nowhere/x.pem"}))


def test_a_key_of_another_certificate_is_refused(site: Site) -> None:
    with pytest.raises(ConfigError, match=r"api\.tls_key = .*keda\.example\.key: is not the key of api\.tls_cert"):
        Tls(files(site, tls_key=site.reader.key))


def test_an_expired_certificate_is_refused_with_its_date(site: Site) -> None:
    late = site.servers.sign("late", until=EXPIRED)
    with pytest.raises(ConfigError, match=r"late\.pem: expired on 2021-01-01 00:00 UTC: put a new certificate there"):
        Tls(files(site, tls_cert=late.cert, tls_key=late.key))


def test_what_is_no_certificate_or_no_key_is_refused(site: Site, tmp_path: Path) -> None:
    cut = tmp_path / "cut.pem"
    cut.write_text(site.server.cert.read_text()[:200])
    empty = tmp_path / "empty.pem"
    empty.write_text("")
    short = tmp_path / "short.pem"
    short.write_text("-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n")
    for path in (cut, empty, short):
        with pytest.raises(ConfigError, match=r"api\.tls_cert = .* in (it|PEM)"):
            Tls(files(site, tls_cert=path))
    for key in ("tls_key", "client_ca"):
        with pytest.raises(ConfigError, match=rf"api\.{key} = .* in PEM"):
            Tls(files(site, **{key: empty}))


def test_an_encrypted_key_is_refused_and_nobody_is_asked_for_its_passphrase(site: Site, tmp_path: Path) -> None:
    path = tmp_path / "encrypted.key"
    openssl("ec", "-in", site.server.key, "-out", path, "-aes128", "-passout", "pass:s3cret")
    with pytest.raises(ConfigError, match=r"api\.tls_key = .*encrypted\.key: is encrypted"):
        Tls(files(site, tls_key=path))


def test_a_key_that_others_may_read_is_warned_of(site: Site, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "open.key"
    shutil.copy(site.server.key, path)
    path.chmod(0o640)
    Tls(files(site, tls_key=path))
    assert [
        message for message in caplog.messages if "open.key: others than its owner may use it (mode 0640)" in message
    ]


def test_check_config_tells_the_certificate_and_what_is_wrong_with_it(site: Site, tmp_path: Path) -> None:
    def check(**api: Any) -> subprocess.CompletedProcess:
        document = {"api": {name: str(value) for name, value in api.items()}, "access": {"subjects": {"a.b": ["read"]}}}
        (tmp_path / "c.toml").write_text(tomli_w.dumps(document))
        return run_command("check-config", str(tmp_path / "c.toml"))

    given = {"tls_cert": site.server.cert, "tls_key": site.server.key, "client_ca": site.clients.cert}
    fine = check(**given)
    assert fine.returncode == 0, fine.stderr
    assert "api: https://127.0.0.1:8080/" in fine.stdout
    assert f"tls: {site.server.cert}, valid until 2099-12-31 23:59 UTC; 1 names of certificates of" in fine.stdout
    bad = check(**given | {"tls_key": site.reader.key})
    assert (bad.returncode, "is not the key of api.tls_cert" in bad.stderr) == (2, True)


# -- certificates


@pytest.mark.parametrize(
    "until", ["20301231235959Z", "20491231235959Z", "20500101000000Z", "20991231235959Z", "99991231235959Z"]
)
def test_dates_are_read_as_openssl_reads_them(site: Site, until: str) -> None:
    pair = site.others.sign("dated", until=until)
    _, until_s = read_certificate_validity_s("text before\n" + pair.cert.read_text() + site.server.cert.read_text())
    told = openssl("x509", "-in", pair.cert, "-noout", "-enddate").strip().partition("=")[2]
    assert until_s == ssl.cert_time_to_seconds(told)


def test_a_certificate_that_expires_while_its_connection_lives_names_nobody() -> None:
    assert ClientCertificate(("a",), time.time() + 3600).list_valid_names() == ("a",)
    assert ClientCertificate(("a",), time.time() - 1).list_valid_names() == ()
