"""States of Slurm's nodes: which are faults, which only keep a node from other work, and how each of them ends."""

import pytest

from fleetcast.fleet.events import NodeEvent
from fleetcast.fleet.nodes import NodeState, NodeTable
from fleetcast.ingest.slurm.json import read_nodes
from fleetcast.ingest.slurm.nodes import SlurmNode, find_changes
from fleetcast.ingest.slurm.text import read_nodes as read_node_lines
from tests.ingest.slurm.test_changing_records import NOW_MS, field
from tests.ingest.slurm_outputs import node, nodes

IN_SERVICE, DRAINED, LOST = NodeState.IN_SERVICE, NodeState.DRAINED, NodeState.LOST
MAINTENANCE, RESERVED, WITHHELD = NodeState.MAINTENANCE, NodeState.RESERVED, NodeState.WITHHELD


def events_of(*rows: SlurmNode) -> list[NodeEvent]:
    return [event for row in rows for event in find_changes(row, {}, "slurm", NOW_MS)[0]]


def state_of(row: SlurmNode) -> NodeState:
    table = NodeTable()
    for event in events_of(row):
        table.apply(event)
    return table.nodes[row.name].state if row.name in table.nodes else IN_SERVICE


def test_a_node_in_maintenance_is_withheld_and_its_neighbour_is_not() -> None:
    rows = read_nodes(field("26-slurm-maintenance-nodes.json")).rows
    assert [(row.name, state_of(row)) for row in rows] == [("g10", MAINTENANCE), ("g11", IN_SERVICE)]
    said = [(event.check, event.message) for event in events_of(*rows)]
    assert said == [(check, "Slurm: idle+maintenance+reserved") for check in ("maintenance", "reserved")]


@pytest.mark.parametrize(
    ("states", "state"),
    [
        (("IDLE",), IN_SERVICE),
        (("UNKNOWN",), WITHHELD),
        (("UNKNOWN", "NOT_RESPONDING"), WITHHELD),
        (("MIXED", "CLOUD"), IN_SERVICE),
        (("ALLOCATED", "DYNAMIC_NORM"), IN_SERVICE),
        (("IDLE", "COMPLETING"), IN_SERVICE),
        (("IDLE", "MAINTENANCE"), MAINTENANCE),
        (("ALLOCATED", "MAINTENANCE", "RESERVED"), MAINTENANCE),
        (("IDLE", "REBOOT_ISSUED"), MAINTENANCE),
        (("IDLE", "REBOOT_REQUESTED"), MAINTENANCE),
        (("IDLE", "RESERVED"), RESERVED),
        (("IDLE", "PLANNED"), RESERVED),
        (("IDLE", "CLOUD", "POWERED_DOWN"), WITHHELD),
        (("IDLE", "POWERING_DOWN"), WITHHELD),
        (("ALLOCATED", "POWERING_UP"), WITHHELD),
        (("IDLE", "NOT_RESPONDING"), WITHHELD),
        (("IDLE", "BLOCKED"), WITHHELD),
        (("IDLE", "DRAIN"), DRAINED),
        (("IDLE", "FAIL"), DRAINED),
        (("ALLOCATED", "FAIL"), DRAINED),
        (("IDLE", "INVALID_REG"), DRAINED),
        (("DOWN", "NOT_RESPONDING"), LOST),
        (("ERROR",), LOST),
    ],
)
def test_each_state_and_flag_has_its_meaning(states: tuple[str, ...], state: NodeState) -> None:
    assert state_of(SlurmNode("n1", states)) is state


@pytest.mark.parametrize(
    ("text", "state"),
    [
        *(("idle", IN_SERVICE), ("mix", IN_SERVICE), ("maint", MAINTENANCE), ("idle$", MAINTENANCE)),
        *(("idle+maintenance+reserved", MAINTENANCE), ("resv", RESERVED), ("plnd", RESERVED), ("idle-", RESERVED)),
        *(("idle~", WITHHELD), ("idle%", WITHHELD), ("alloc#", WITHHELD), ("idle!", WITHHELD), ("idle*", WITHHELD)),
        *(("idle@", MAINTENANCE), ("idle^", MAINTENANCE), ("drng", DRAINED), ("failg", DRAINED), ("down*", LOST)),
    ],
)
def test_the_words_and_marks_of_sinfo_mean_the_same(text: str, state: NodeState) -> None:
    (row,) = read_node_lines(f"NODELIST|STATECOMPLETE|GRES|TIMESTAMP|REASON|\nn1|{text}|gpu:8|0|none|\n".encode()).rows
    assert state_of(row) is state


def test_every_condition_ends_as_it_began() -> None:
    table = NodeTable()
    busy = SlurmNode("n1", ("IDLE", "MAINTENANCE", "RESERVED", "NOT_RESPONDING", "DRAIN", "PLANNED"))
    events, now = find_changes(busy, {}, "slurm", NOW_MS)
    assert find_changes(busy, now, "slurm", NOW_MS + 5) == ([], now)
    over, then = find_changes(SlurmNode("n1", ("IDLE",)), now, "slurm", NOW_MS + 5)
    for event in (*events, *over):
        assert table.apply(event) is not None, "each event has an identity of its own"
    assert (table.nodes["n1"].state, then) == (IN_SERVICE, {})


def test_a_reservation_is_named() -> None:
    (row,) = read_nodes(nodes(node("n1", "idle", "RESERVED") | {"reservation": "course"})).rows
    assert [event.message for event in events_of(row)] == ["Slurm: idle+reserved: reservation course"]


@pytest.mark.parametrize("lines", ["n1|unk*|none|gpu:h100:8", "n1|unknown|none|gpu:h100:8"])
def test_a_node_that_slurm_has_not_heard_since_it_started_is_no_candidate_until_it_is_heard(lines: str) -> None:
    """The state of all nodes is unknown after a cold start of slurmctld, and of one that never registered."""
    (row,) = read_node_lines(f"NODELIST|STATE|REASON|GRES\n{lines}\n".encode()).rows
    events, now = find_changes(row, {}, "slurm", NOW_MS)
    assert [(event.type, event.check) for event in events] == [("withhold", "not_responding")]
    assert find_changes(row, now, "slurm", NOW_MS + 1000) == ([], now)
    events, now = find_changes(SlurmNode("n1", ("IDLE",)), now, "slurm", NOW_MS + 2000)
    assert ([(event.type, event.check) for event in events], now) == ([("release", "not_responding")], {})
    drained, _ = find_changes(SlurmNode("n1", ("IDLE", "DRAIN"), "Xid 79", NOW_MS), {}, "slurm", NOW_MS)
    assert [event.type for event in drained] == ["drain"]
