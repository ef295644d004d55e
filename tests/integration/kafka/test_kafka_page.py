"""The commands of the page on Kafka, with a real broker."""

import json
import time
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.docs.runner import Reader
from tests.integration.kafka.cluster import Cluster
from tests.integration.test_main_path import GPUS, gpu_page

pytestmark = pytest.mark.integration


def test_every_command_of_the_page_works(cluster: Cluster, folder_server: tuple[Path, str], tmp_path: Path) -> None:
    root, url = folder_server
    (root / "metrics").write_text(gpu_page())
    folder = tmp_path / "reader"
    folder.mkdir()
    event = {"job": "a", "sequence": 1, "time_ms": time.time_ns() // 1_000_000, "type": "submitted"}
    (folder / "events.jsonl").write_text(json.dumps(event) + "\n")
    (folder / "topology.toml").write_text(f'[[rack]]\nname = "r1"\nnodes = "hand01"\ngpus = {GPUS}\n')
    reader = Reader(folder, {"kafka-1:9092": ",".join(cluster.addresses), "http://n001:9400/metrics": url})
    done = reader.run_page(ROOT / "docs/sources/kafka.md", "run in kafka")
    assert len(done) == 4
    assert "fleetcast.telemetry" in done[0].output
