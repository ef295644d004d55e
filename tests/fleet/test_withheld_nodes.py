"""Nodes that a scheduler withholds: no candidates and no faults, until it, or somebody, releases them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.events import NodeEvent
from fleetcast.fleet.nodes import NodeRecord, NodeState, NodeTable
from fleetcast.models.risk.node_events import _is_fault
from tests.fuzz.bounds import examples


def event(kind: Any, check: str = "", sequence: int = 1, time_ms: int = 10, **more: str) -> NodeEvent:
    more = {"source": "slurm", **more}
    return NodeEvent(node="n1", sequence=sequence, time_ms=time_ms, type=kind, check=check, **more)


def record_of(*events: NodeEvent) -> NodeRecord:
    table = NodeTable()
    for one in events:
        table.apply(one)
    return table.nodes["n1"]


@pytest.mark.parametrize(
    ("check", "state"),
    [
        ("maintenance", NodeState.MAINTENANCE),
        ("reboot", NodeState.MAINTENANCE),
        ("reserved", NodeState.RESERVED),
        ("planned", NodeState.RESERVED),
        ("to_be_deleted", NodeState.WITHHELD),
        ("of my own", NodeState.WITHHELD),
    ],
)
def test_each_reason_withholds_a_node_until_it_is_released(check: str, state: NodeState) -> None:
    withheld = event("withhold", check, message="until noon")
    record = record_of(withheld)
    assert (record.state, record.withheld_reason) == (state, "until noon")
    assert record_of(withheld, event("release", check, 2, 20)).state is NodeState.IN_SERVICE


def test_a_release_ends_its_own_reason_or_all_of_its_source() -> None:
    both = event("withhold", "maintenance"), event("withhold", "reserved", 2)
    other = event("withhold", "reserved", source="kubernetes")
    assert record_of(*both, event("release", "maintenance", 3, 20)).state is NodeState.RESERVED
    assert record_of(*both, event("release", "", 3, 20)).state is NodeState.IN_SERVICE
    assert record_of(*both, other, event("release", "", 3, 20)).state is NodeState.RESERVED


def test_a_drain_and_a_reservation_end_apart() -> None:
    both = event("drain", message="fan"), event("withhold", "reserved", 2)
    assert record_of(*both).state is NodeState.DRAINED
    assert record_of(*both, event("undrain", sequence=3, time_ms=20)).state is NodeState.RESERVED
    assert record_of(*both, event("release", "reserved", 3, 20)).state is NodeState.DRAINED


def test_what_withholds_a_node_is_no_fault_of_it() -> None:
    records = {"n1": record_of(event("withhold", "maintenance"), event("withhold", "not_responding", 2))}
    assert not any(_is_fault(one, records["n1"]) for one in records["n1"].events)


kinds = st.sampled_from(("withhold", "release"))
checks = st.sampled_from(("", "maintenance", "reserved", "x"))


@given(st.data())
@examples(200)
def test_order_and_repeats_change_nothing(data: st.DataObject) -> None:
    made = st.tuples(kinds, checks, st.integers(1, 4), st.sampled_from("ab"))
    drawn = data.draw(st.lists(made, min_size=1, max_size=8))
    events = [event(kind, check, at, ms, source=source) for at, (kind, check, ms, source) in enumerate(drawn)]
    again = data.draw(st.permutations(events + events[:2]))
    assert record_of(*events).withheld == record_of(*again).withheld
