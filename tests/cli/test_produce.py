"""`fleetcast produce`: what it refuses at the start, and what it does with what it is given."""

import io
from pathlib import Path

import pytest

from fleetcast.cli import produce
from fleetcast.fleet.errors import ConfigError


def test_where_kafka_is_must_be_said() -> None:
    with pytest.raises(ConfigError, match="give --brokers HOST:PORT"):
        produce._read_options(None, "")


def test_topics_and_brokers_come_from_the_source_of_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('[[pipeline.sources]]\nuse = "kafka"\noptions = {brokers = "k1:9092", telemetry = "gpus"}\n')
    _, options = produce._read_options(path, "")
    assert (options.addresses, options.telemetry, options.events) == (["k1:9092"], "gpus", "fleetcast.events")
    _, options = produce._read_options(path, "k2:9092, k3:9092")
    assert (options.addresses, options.telemetry) == (["k2:9092", "k3:9092"], "gpus")


def test_lines_are_taken_as_they_come_and_numbered_through() -> None:
    class Slow(io.BytesIO):
        def read1(self, size: int | None = -1) -> bytes:
            return self.read(5)

    assert list(produce._read_stdin_chunks(Slow(b"one\ntwo\n\nthree\nfour"))) == [
        (0, b"one"),
        (1, b"two\n"),
        (2, b"three"),
        (3, b"four"),
    ]
