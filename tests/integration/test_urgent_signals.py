"""A small site under its own benchmark: real pipeline, real api, samples and ticks meanwhile."""

import pytest

from benchmarks import urgent

pytestmark = pytest.mark.integration


def test_drains_and_xids_are_on_their_nodes_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urgent, "NODES_DRAINED", 3)
    monkeypatch.setattr(urgent, "NODES_WITH_XID", 3)
    monkeypatch.setattr(urgent, "INTERVAL_S", 2.0)
    lines = list(urgent.run([400]))
    assert [line["case"] for line in lines] == [
        "event to answer, median",
        "event to answer, worst",
        "scrape to answer, median",
        "scrape to answer, worst",
    ]
    assert all(line["size"] == {"gpus": 400, "signals": 3} and line["value"] > 0 for line in lines)
