"""The record of a node does not depend on the order in which its events arrive."""

from fleetcast.fleet.events import NodeEvent
from fleetcast.fleet.nodes import NodeTable


def test_a_release_leaves_the_same_record_before_and_after_the_reason_that_it_ends() -> None:
    withhold = NodeEvent(node="n1", source="admin", sequence=1, time_ms=1_000, type="withhold", check="disk")
    release = NodeEvent(node="n1", source="admin", sequence=0, time_ms=2_000, type="release")
    records = []
    for order in ((withhold, release), (release, withhold)):
        table = NodeTable()
        for event in order:
            table.apply(event)
        records.append(table.nodes["n1"])
    assert records[0] == records[1]
