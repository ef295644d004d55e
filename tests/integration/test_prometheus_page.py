"""The commands of the page on Prometheus, with a real one that has scraped exporters for a while."""

import time
from pathlib import Path

import numpy as np
import pytest

from fleetcast.benchmarks.inputs.decode import make_page
from tests.docs.pages import ROOT
from tests.docs.runner import Reader
from tests.integration.prometheus_writer import PrometheusWriter
from tests.integration.test_remote_write import page_server
from tests.programs import needed

pytestmark = pytest.mark.integration

SCRAPES = 5


def test_every_command_of_the_page_works(tmp_path: Path) -> None:
    with page_server(make_page("n001", np.random.default_rng(1), gpus=2)) as target:
        writer = PrometheusWriter(Path(needed("prometheus")), tmp_path, [target], interval_s=1.0)
        try:
            deadline = time.monotonic() + 300
            while writer.sum("prometheus_target_interval_length_seconds_count") < SCRAPES:
                assert time.monotonic() < deadline, writer.log()
                time.sleep(0.2)
            reader = Reader(tmp_path / "reader", {"http://127.0.0.1:9090": writer.url})
            reader.run_page(ROOT / "docs/sources/prometheus.md", "run in prometheus")
        finally:
            writer.stop()
    assert list((tmp_path / "reader/var/archive/samples").rglob("*.parquet"))
