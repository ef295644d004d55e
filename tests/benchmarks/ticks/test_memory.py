from pathlib import Path

from fleetcast.benchmarks.ticks.memory import MeasuredFleet


def test_the_watched_fleet_is_whole_and_healthy(tmp_path: Path) -> None:
    fleet = MeasuredFleet(3, 1, tmp_path)
    for _ in range(2):
        fleet.ingest_scrape()
        fleet.run_tick()
    store = fleet.pipeline.state.store
    assert {kind.value: ring.size for kind, ring in store.rings.items()} == {"gpu": 24, "port": 24, "node": 3}
