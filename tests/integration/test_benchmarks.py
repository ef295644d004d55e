"""Benchmarks that start processes of their own, cut short: each must still measure a success."""

import pytest

from fleetcast.benchmarks.answers import http, placements, queue
from fleetcast.benchmarks.inputs import events, names

pytestmark = pytest.mark.integration


def test_nodes_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "CLOSED_S", 1.5)
    monkeypatch.setattr(http, "OPEN_S", 1.0)
    monkeypatch.setattr(http, "REPEATS", 1)
    monkeypatch.setattr(http, "RATE", 200.0)
    records = list(http.run([64]))
    assert [record["unit"] for record in records] == ["requests/s", "us/request", "ms"]
    assert all(record["value"] > 0 for record in records)
    assert records[0]["peer"]["value"] > 0


def test_events_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "SECONDS", 0.3)
    monkeypatch.setattr(events, "REPEATS", 1)
    monkeypatch.setattr(events, "PEER_ROWS", 200)
    records = list(events.run())
    assert [record["case"] for record in records] == ["batch", "single"]
    assert all(record["value"] > 0 and record["peer"]["value"] > 0 for record in records)


def test_placing_beside_a_long_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "SECONDS", 1.0)
    monkeypatch.setattr(queue, "QUEUED", 60)
    monkeypatch.setattr(queue, "WAITING", 60)
    records = list(queue.run([512]))
    assert [record["case"] for record in records[:2]] == ["pass", "pass with queues"]
    assert len(records) == 3
    assert all(record["value"] > 0 for record in records)


def test_placements_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placements, "REPEATS", 1)
    monkeypatch.setattr(placements, "ASKED", 20)
    records = list(placements.run([512]))
    assert [record["size"]["connections"] for record in records] == [1, 8]
    assert all(record["value"] > 0 and record["peer"]["value"] > 0 for record in records)


def test_a_flood_of_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many roles as there are, and bounds that a small flood meets."""
    monkeypatch.setattr(names, "WATCHED_S", 2.0)
    monkeypatch.setattr(names, "CASES", {"small": {"live_jobs": 300, "unknown_nodes": 200, "names_at_once": 100_000}})
    (line,) = names.run([1_000])
    assert line["answers"][429] == names.REQUESTS - line["answers"][202] > 0
    assert line["used"]["live_jobs"] == {"used": 300, "most": 300}
    assert line["used"]["unknown_nodes"] == {"used": 200, "most": 200}
    assert set(line["peak_mib"]) == set(names.ROLES)
