"""Benchmarks of what comes in, cut short: each must still measure a success."""

import pytest

from fleetcast.benchmarks.inputs import ingest, remote_write

pytestmark = pytest.mark.integration


def test_remote_write_from_the_door_to_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_write, "ROUNDS", 2)
    monkeypatch.setattr(remote_write, "REPEATS", 1)
    records = list(remote_write.run([64]))
    assert len(records) == 4
    assert all(record["value"] > 0 for record in records)


def test_a_whole_fleetcast_beside_a_prometheus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest, "MINUTES", 0.1)
    monkeypatch.setattr(ingest, "INTERVAL_S", 1.0)
    for periods in ("PERIODS", "WRITTEN_PERIODS"):
        monkeypatch.setattr(ingest, periods, {"tick_s": 0.5, "snapshot_s": 1.0})
    monkeypatch.setattr(ingest, "WRITTEN_NODES", 2)
    monkeypatch.setattr(ingest, "WRITTEN_ROUNDS", 2)
    records = list(ingest.run([4]))
    assert [record["case"] for record in records[:2]] == ["scraped, pipeline and api", "scraped, all roles"]
    assert all(record["value"] > 0 for record in records)
