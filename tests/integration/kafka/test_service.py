"""A whole Fleetcast that reads Kafka alone, written to by `fleetcast produce`, through a kill of the pipeline."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fleetcast.fleet.process import make_child_environment
from tests.integration.kafka.test_kafka import finished, now_ms
from tests.integration.kafka.topics import Topics
from tests.integration.service_process import Service
from tests.integration.test_main_path import GPUS, gpu_page

pytestmark = pytest.mark.integration

JOB = "through-kafka"


class Produce:
    """`fleetcast produce` with the topics of a test."""

    def __init__(self, folder: Path, topics: Topics) -> None:
        self.folder = folder
        self.config = folder / "produce.toml"
        options = {"brokers": topics.access.addresses, "telemetry": topics.telemetry, "events": topics.events}
        self.config.write_text(tomli_w.dumps({"pipeline": {"sources": [{"use": "kafka", "options": options}]}}))
        self._running: list[subprocess.Popen[bytes]] = []

    def _command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "fleetcast.cli.main", "produce", *arguments, "--config", str(self.config)]

    def run(self, *arguments: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(self._command(*arguments), input=given, capture_output=True, check=False, timeout=60)

    def start(self, *arguments: str) -> None:
        """Runs until the test is over."""
        with open(self.folder / "produce.log", "ab") as log:
            process = subprocess.Popen(self._command(*arguments), stdout=log, stderr=log, env=make_child_environment())
        self._running.append(process)

    def stop(self) -> None:
        for process in self._running:
            process.terminate()
            process.wait(20)


@pytest.fixture
def produce(tmp_path: Path, topics: Topics) -> Iterator[Produce]:
    made = Produce(tmp_path, topics)
    yield made
    made.stop()


def kafka_row(service: Service) -> dict[str, Any]:
    """What the ingestion document says of the source."""
    document = service.get("/v1/ingestion") or {"sources": []}
    return next((row for row in document["sources"] if row["kind"] == "kafka"), {})


def test_a_fleet_is_served_from_kafka_and_a_kill_loses_nothing(
    folder_server: tuple[Path, str], start_service: Callable[..., Service], topics: Topics, produce: Produce
) -> None:
    root, url = folder_server
    (root / "metrics").write_text(gpu_page())
    produce.start("telemetry", "--target", url, "--interval-s", "1")
    started = [{"rank": 0, "node": "hand01", "gpus": list(range(GPUS))}]
    events: list[dict[str, Any]] = [
        {"type": "submitted", "gpus_per_node": GPUS},
        {"type": "started", "ranks": started},
    ]
    lines = [
        json.dumps({"job": JOB, "sequence": number, "time_ms": now_ms()} | event)
        for number, event in enumerate(events, 1)
    ]
    told = produce.run("events", given="\n".join([*lines, '{"job": 1}']).encode())
    assert (told.returncode, b"record 3: " in told.stderr) == (1, True), told.stderr

    source = {"use": "kafka", "options": topics.options()}
    service = start_service(speed=1.0, pipeline={"tick_s": 1.0, "snapshot_s": 2.0, "sources": [source]})
    node = service.until("the node", lambda: service.get("/v1/nodes/hand01"), 60)
    assert len(node["gpus"]) == GPUS
    service.until("the job", lambda: service.get(f"/v1/jobs/{JOB}"))
    topics.send([(b"hand01", b"{poison")])
    service.until("the dead letter", lambda: kafka_row(service).get("dead_letters") == 1)
    service.until("no lag", lambda: kafka_row(service).get("lag_records") == 0)

    time.sleep(2.5)  # a snapshot, perhaps
    topics.send([(b"hand01", b"{more poison")])
    topics.send([(JOB.encode(), finished(JOB, 3))], topics.events)
    service.kill("pipeline")
    service.until("the end of the job", lambda: (service.get(f"/v1/jobs/{JOB}") or {}).get("state") == "finished", 60)
    service.until("reading again", lambda: kafka_row(service).get("lag_records") == 0)
    letters = topics.letters()
    assert sorted(letter.value or b"" for letter in letters) == [b"{more poison", b"{poison"]


def test_topics_and_pages_are_written_by_hand(topics: Topics, produce: Produce, tmp_path: Path) -> None:
    made = produce.run("topics")
    assert made.returncode == 0, made.stderr
    assert f"{topics.telemetry}: is there" in made.stdout.decode()
    (tmp_path / "hand01.prom").write_text(gpu_page())
    written = produce.run("page", str(tmp_path / "hand01.prom"), "--node", "renamed")
    assert written.returncode == 0, written.stderr
    refused = produce.run("page", str(tmp_path / "none.prom"))
    assert (refused.returncode, b"cannot read" in refused.stderr) == (2, True)
