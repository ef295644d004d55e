"""One rule for names of nodes: each entrance takes exactly the names that `fleetcast.fleet.node_names` allows."""

import contextlib
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import ConfigError, RecordError, RequestError
from fleetcast.fleet.node_names import explain_node_name_fault, is_node_name
from fleetcast.fleet.requests import PlacementRequest, check_avoided_nodes
from fleetcast.ingest.inbox.job_events import decode_event
from fleetcast.ingest.kernel_log.events import KernelReader
from fleetcast.ingest.node_names import check_name, expand_nodes, find_or_register_node
from fleetcast.ingest.pages.target_spec import parse_target
from fleetcast.ingest.slurm.jobs import expand_node_list
from fleetcast.ingest.topology.load import parse_topology
from fleetcast.placement.queues.queues_file import read_queues

NOW_MS = 1_760_000_000_000
REAL = (
    *("n001", "gpu_7", "DGX-H100-01", "n1.cluster.example", "ip-10-0-0-1.ec2.internal", "x1000c0s0b0n0", "7", "_n"),
    *("10.0.0.1", "10.0.0.1:9400", "::1", "2001:db8::1", "fe80::1%eth0", "n" * 253),
)
HOSTILE = (
    *(" n005 high", "n005 high", "n005 ", " n005", "n005\thigh", "n005\nn006", "n005\x1f", "n[1-4]", "n1,n2", "n/1"),
    *("", ".", "..", "-n", "--help", "n;reboot", "$(reboot)", "`id`", "n'1", 'n"1', "n\\1", "n|1", "n=1", "n*", "n?"),
    *("n#1", "n<b>", "n&1", "n{1}", "n@1", "n~1", "n!1", "é", "n\u2028", "n\xa01", "ｎ1", "١", "n" * 254, "\ud800"),
    *("job 7", ":%"),
)


def event(**fields: Any) -> bytes:
    body = {"sequence": 1, "time_ms": NOW_MS, "job": "a", **fields}
    return msgspec.json.encode({key: value for key, value in body.items() if value is not None})


def by_event(name: str, **fields: Any) -> bool:
    given_ = {key: json.loads(json.dumps(value).replace('"NODE"', json.dumps(name))) for key, value in fields.items()}
    decode_event(event(**given_), NOW_MS)
    return True


def by_topology(text: str, name: str) -> bool:
    return [node.name for node in parse_topology(text)] == [name]


def by_kernel_log(name: str) -> bool:
    reader = KernelReader(name or "?")
    events, _ = reader.read([b"[ 100.0] NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus."], NOW_MS)
    return [event.node for event in events] == [name]


WINDOW = "[queue.a]\n[[maintenance]]\nfrom = 2026-01-01T00:00:00Z\nto = 2026-01-02T00:00:00Z\nnodes = [%s]\n"
ENTRANCES: dict[str, Callable[[str], bool]] = {
    "node event": lambda name: by_event(name, job=None, node="NODE", source="s", type="drain"),
    "nodes of a start": lambda name: by_event(name, type="started", nodes=["NODE"]),
    "ranks of a start": lambda name: by_event(name, type="started", ranks=[{"rank": 0, "node": "NODE"}]),
    "nodes of a resize": lambda name: by_event(name, type="resized", nodes=["NODE"]),
    "node of a lost node": lambda name: by_event(name, type="node_lost", node="NODE"),
    "labels and pages": lambda name: find_or_register_node(name, Entities()) == name,
    "configuration": lambda name: check_name(name) == name,
    "kernel log": by_kernel_log,
    "lists": lambda name: expand_nodes(name) == [name],
    "slurm": lambda name: expand_node_list(name) == (name,),
    "targets": lambda name: bool(name) and parse_target(f"http://h:9400 {name}").node == name,
    "topology as TOML": lambda name: by_topology(f'[[rack]]\nname = "r"\nnodes = {json.dumps(name)}\n', name),
    "topology as labels": lambda name: by_topology(json.dumps({name: {}}), name),
    "avoided nodes": lambda name: check_avoided_nodes(PlacementRequest(request_id="r", avoid_nodes=(name,))) is None,
    "maintenance": lambda name: bool(read_queues(WINDOW % json.dumps(name)).windows),
}


def takes(entrance: str, name: str) -> bool:
    """Whether the name comes in, and as it is."""
    with contextlib.suppress(ConfigError, RecordError, RequestError, UnicodeError):
        return ENTRANCES[entrance](name)
    return False


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_each_entrance_takes_the_names_of_real_fleets_and_no_other(entrance: str) -> None:
    assert [name for name in REAL if not takes(entrance, name)] == []
    assert [name for name in HOSTILE if takes(entrance, name)] == []


@given(st.text(st.sampled_from("an0._-:% \n\t/[],;|\x1fé\\\"'$"), min_size=1, max_size=8))
@example("n\r")
def test_the_sets_of_all_entrances_are_equal(name: str) -> None:
    assert {entrance for entrance in ENTRANCES if takes(entrance, name)} == (
        set(ENTRANCES) if is_node_name(name) else set()
    )


def test_a_refused_name_is_quoted_with_what_is_allowed() -> None:
    assert explain_node_name_fault("n001") == ""
    assert explain_node_name_fault(" n005 high").startswith("' n005 high' is no name of a node: 1 to 253 ASCII letters")
    assert len(explain_node_name_fault("n" * 100_000)) < 400
