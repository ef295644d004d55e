"""What node risk says of itself: its parts, and how true its forecasts were, over a restart."""

import asyncio
from pathlib import Path

from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.samples import SampleBatch
from fleetcast.ingest.source import Batch
from fleetcast.models.risk.hazard import PUBLISHED
from fleetcast.service.api.app import create_app
from tests.service.api_world import Client
from tests.service.pipeline.test_recovery import GPU, NOW_MS, XID, board, live, pipeline

HOUR = 3600.0


def test_a_site_with_a_fit_of_its_own_has_no_multiple_of_the_published_rate(tmp_path: Path) -> None:
    clock = ManualClock(NOW_MS)
    work = pipeline(tmp_path, clock)
    for fit, has_multiple in ((None, True), (PUBLISHED, False)):
        work.memory.faults.fit = fit
        clock.advance(15)
        asyncio.run(work.tick())
        assert ("times" in board(work).json("doc.risk_calibration")["history"]) is has_multiple
        with Client(create_app(work.config, clock)) as client:
            metrics = client.get("/metrics").text
        assert ("\nfleetcast_fault_rate_ratio " in metrics) is has_multiple


def test_the_ranking_tells_parts_and_how_true_it_was_over_a_restart(tmp_path: Path) -> None:
    clock = ManualClock(NOW_MS)
    work = pipeline(tmp_path, clock)
    live(work, 120)
    for _ in range(9):
        clock.advance(HOUR / 8)
        asyncio.run(work.tick())
    row = work.state.entities.add_to_node(GPU, "n3", 4)
    live(work, 60)
    clock.advance(15)
    work.apply_batch(Batch(samples=(SampleBatch.from_rows(GPU, [(XID, row, clock.now_ms(), 79.0)]),)))
    asyncio.run(work.tick())
    asyncio.run(work.save())
    before = board(work).json("doc.risk_calibration")
    assert before["rows"][0]["matured"] > 0
    again = pipeline(tmp_path, clock)
    asyncio.run(again.tick())
    with Client(create_app(work.config, clock)) as client:
        body = client.get("/v1/risk/nodes?horizon_s=86400").json()
        metrics = client.get("/metrics").text
    assert body["calibration"][0]["matured"] == before["rows"][0]["matured"]
    assert [row["horizon_s"] for row in body["calibration"]] == [3600, 18000, 86400, 604800]
    assert "InfiniteHBD" in body["history"]["source"]
    assert {row["part"] for row in body["usual"]} == {"gpu", "link", "port", "rail"}
    (own,) = [row for row in body["rows"] if row["node"] == "n3"]
    (part,) = own["parts"]
    assert (part["entity"], part["part"]) == ("n3/4", "gpu")
    assert 0.5 < part["p"][0] < part["p"][3] < 1
    assert 'fleetcast_node_risk_matured_forecasts{horizon="1h"}' in metrics
