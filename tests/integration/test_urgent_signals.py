"""A small site under its own benchmark: real pipeline, real api, samples and ticks meanwhile."""

import pytest

from fleetcast.benchmarks.ticks import urgent

pytestmark = pytest.mark.integration


def test_drains_and_xids_are_on_their_nodes_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urgent, "NODES_DRAINED", 3)
    monkeypatch.setattr(urgent, "NODES_WITH_XID", 3)
    monkeypatch.setattr(urgent, "INTERVAL_S", 2.0)
    lines = list(urgent.run([400]))
    assert [line["case"] for line in lines] == [
        "start to a whole board",
        "event to answer, median",
        "event to answer, worst",
        "scrape to answer, median",
        "scrape to answer, worst",
        "CPU of the pipeline",
        "memory of the pipeline",
    ]
    assert [line["size"].get("signals") for line in lines] == [None, 3, 3, 3, 3, None, None]
    assert all(line["size"]["gpus"] == 400 and line["value"] > 0 for line in lines)
