"""TLS with certificates on both sides, and SASL: with the right password everything goes, with a wrong one nothing."""

import asyncio
import gc
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from kafka import KafkaAdminClient
from kafka.admin import UserScramCredentialUpsertion

from fleetcast.clients.kafka_access import PASSWORD, KafkaAccess, make_client_settings
from fleetcast.fleet.errors import ConfigError, SourceError
from fleetcast.ingest.kafka.columnar import encode_json_record
from tests.integration.kafka.build import Kafka
from tests.integration.kafka.cluster import Cluster
from tests.integration.kafka.test_kafka import now_ms, scrape
from tests.integration.kafka.topics import Topics, take_until
from tests.programs import needed

# The client leaves the sockets of closed TLS connections to the collector, which the test does not let wait.
pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

USER, SECRET = "fleetcast", "a-long-secret-of-the-test"


@pytest.fixture(autouse=True)
def _collect() -> Iterator[None]:
    yield
    gc.collect()


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run([needed("openssl"), *arguments], cwd=folder, capture_output=True, check=True, timeout=60)


def make_certificates(folder: Path) -> None:
    """ca.pem, and broker.pem and client.pem with their keys."""
    openssl(
        folder,
        *("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=test-ca"),
        *("-keyout", "ca.key", "-out", "ca.pem"),
    )
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    for name in ("broker", "client"):
        openssl(
            folder,
            *("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}"),
            *("-keyout", f"{name}.key", "-out", f"{name}.csr"),
        )
        openssl(
            folder,
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"),
            *("-days", "2", "-extfile", "names", "-out", f"{name}.crt"),
        )
        both = (folder / f"{name}.key").read_text() + (folder / f"{name}.crt").read_text()
        (folder / f"{name}.pem").write_text(both)


@pytest.fixture(scope="module")
def safe(kafka_program: Kafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Path]]:
    """A broker with a listener that wants certificates and passwords."""
    folder = tmp_path_factory.mktemp("safe")
    make_certificates(folder)
    jaas = "org.apache.kafka.common.security"
    plain = f'{jaas}.plain.PlainLoginModule required user_{USER}="{SECRET}";'
    cluster = Cluster(
        kafka_program,
        folder,
        extra={
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(folder / "broker.pem"),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(folder / "ca.pem"),
            "listener.name.safe.ssl.client.auth": "required",
            "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-512",
            "listener.name.safe.plain.sasl.jaas.config": plain,
            "listener.name.safe.scram-sha-512.sasl.jaas.config": f"{jaas}.scram.ScramLoginModule required;",
        },
    )
    yield cluster, folder
    cluster.stop()


def access_to(cluster: Cluster, folder: Path, mechanism: str) -> KafkaAccess:
    return KafkaAccess(
        brokers=[f"127.0.0.1:{port}" for port in cluster.safe_ports.values()],
        security="sasl_ssl",
        sasl_mechanism=mechanism,
        username=USER,
        ca_file=str(folder / "ca.pem"),
        cert_file=str(folder / "client.crt"),
        key_file=str(folder / "client.key"),
    )


def options_of(access: KafkaAccess) -> dict[str, str]:
    names = ("security", "sasl_mechanism", "username", "ca_file", "cert_file", "key_file")
    return {name: getattr(access, name) for name in names}


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-512"])
def test_records_pass_a_listener_with_tls_and_sasl(
    safe: tuple[Cluster, Path], mechanism: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, folder = safe
    if mechanism != "PLAIN":
        admin = KafkaAdminClient(**make_client_settings(KafkaAccess(brokers=cluster.addresses)))
        admin.alter_user_scram_credentials([UserScramCredentialUpsertion(USER, mechanism, SECRET)])
        admin.close()
    monkeypatch.setenv(PASSWORD, SECRET)
    access = access_to(cluster, folder, mechanism)
    topics = Topics(access, uuid.uuid4().hex[:8], 1)
    topics.send([(b"b1", encode_json_record(scrape("n1", now_ms())))])
    source = topics.source(**options_of(access))

    async def read() -> int:
        try:
            return sum(map(len, await take_until(source, bool)))
        finally:
            await source.close()

    assert asyncio.run(read()) == 16
    topics.close()


def test_a_wrong_password_is_said_and_none_is_refused_at_the_start(
    safe: tuple[Cluster, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, folder = safe
    access = access_to(cluster, folder, "PLAIN")
    topics = Topics(KafkaAccess(brokers=cluster.addresses), uuid.uuid4().hex[:8], 1)
    with pytest.raises(ConfigError, match=PASSWORD):
        topics.source(**options_of(access))
    monkeypatch.setenv(PASSWORD, "wrong")
    source = topics.source(**options_of(access) | {"brokers": access.addresses})

    async def read() -> None:
        try:
            await source.next()
        finally:
            await source.close()

    with pytest.raises(SourceError) as caught:
        asyncio.run(read())
    assert "wrong" not in str(caught.value)
    topics.close()
