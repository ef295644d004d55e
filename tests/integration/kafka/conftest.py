"""One broker for all tests, and three for those that kill some."""

import uuid
from collections.abc import Iterator

import pytest

from fleetcast.clients.kafka_access import KafkaAccess
from tests.integration.built import needed
from tests.integration.kafka.build import Kafka, kafka
from tests.integration.kafka.cluster import Cluster
from tests.integration.kafka.topics import Topics


@pytest.fixture(scope="session")
def kafka_program(request: pytest.FixtureRequest) -> Kafka:
    """The first run ever fetches it."""
    return needed(kafka, request)


@pytest.fixture(scope="session")
def cluster(kafka_program: Kafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    started = Cluster(kafka_program, tmp_path_factory.mktemp("kafka"))
    yield started
    started.stop()


@pytest.fixture
def topics(cluster: Cluster) -> Iterator[Topics]:
    """Topics of this test alone: four partitions of telemetry, one of events."""
    made = Topics(KafkaAccess(brokers=cluster.addresses), uuid.uuid4().hex[:8])
    yield made
    made.close()


@pytest.fixture(scope="session")
def three(kafka_program: Kafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    started = Cluster(kafka_program, tmp_path_factory.mktemp("kafka3"), brokers=3)
    yield started
    started.stop()
