import pytest

from fleetcast.benchmarks.inputs.decode import run
from fleetcast.benchmarks.kit.case import Peer, measure


def test_the_benchmark_beats_its_peer_and_reports_every_field() -> None:
    steady, written, changed, reordered, cold = run(sizes=(24,))
    cases = [record["case"] for record in (steady, written, changed, reordered, cold)]
    assert cases == ["steady", "steady, into the ring", "changed", "reordered", "cold"]
    assert steady["size"] == {"nodes": 3, "gpus": 24, "series": 960}
    assert steady["peer"]["name"] == "prometheus_client.parser"
    assert steady["ratio"] == pytest.approx(steady["value"] / steady["peer"]["value"])
    assert steady["ratio"] > 5
    assert steady["min"] <= steady["median"] <= steady["max"]
    assert steady["machine"]["cores"] >= 1
    assert cold["peer"] is None
    assert cold["ratio"] is None


def test_a_run_that_does_nothing_is_no_measurement() -> None:
    with pytest.raises(AssertionError, match="worked on nothing"):
        measure("x", "idle", {}, lambda: 0, "items/s")


def test_times_and_rates_are_two_views_of_one_run() -> None:
    rate = measure("x", "rate", {}, lambda: sum(1 for _ in range(20_000)), "items/s", repeats=3)
    per_item = measure("x", "time", {}, lambda: sum(1 for _ in range(20_000)), "ns/item", repeats=3)
    assert rate["value"] * per_item["value"] / 1e9 == pytest.approx(1.0, rel=0.9)
    slow = measure("x", "peer", {}, lambda: 1, "ms", peer=Peer("same", lambda: 1), repeats=2)
    assert slow["peer"]["value"] > 0
