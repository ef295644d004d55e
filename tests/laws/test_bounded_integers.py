"""Every integer of an event or a request is bounded: what is accepted can be folded, placed and stored."""

import json
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import msgspec
import pytest

from fleetcast.fleet.errors import RecordError, RequestError
from fleetcast.fleet.events import NodeEvent
from fleetcast.fleet.job_table import JobTable, encode_job
from fleetcast.fleet.nodes import NodeTable
from fleetcast.fleet.requests import PlacementRequest, check_request
from fleetcast.ingest.inbox.job_events import MAX_COUNT, decode_event

NOW_MS = 1_760_000_000_000
HEAD = {"job": "a", "sequence": 1, "attempt": 1, "time_ms": NOW_MS}
GANG = {"min": 1, "desired": 2, "step": 1}
PLACE = {"rank": 0, "node": "n1", "gpus": [0], "gpu_share": 500}
FULL: dict[str, dict[str, Any]] = {
    "submitted": {
        "gang": GANG,
        "gpus_per_node": 1,
        "gpu_share": 5,
        "priority": 1,
        "deadline_ms": NOW_MS,
        "cpus": 1,
        "tasks": 1,
    },
    "queued": {},
    "started": {"ranks": [PLACE]},
    "phase": {"name": "evaluation", "rank": 0, "node": "n1", "gpus": [0]},
    "step": {"step": 1, "duration_s": 1.0, "rank": 0, "stage": 0, "tokens": 1, "node": "n1", "gpus": [0]},
    "checkpoint": {"edge": "end", "bytes": 1},
    "resized": {"ranks": [PLACE]},
    "preempted": {},
    "failed": {"category": "hardware"},
    "finished": {},
    "node_lost": {"node": "n1"},
}
NODE = {"node": "n1", "source": "s", "sequence": 1, "time_ms": NOW_MS, "type": "xid", "gpu": 0, "code": 79}
EVENTS = [*(HEAD | {"type": kind} | more for kind, more in FULL.items()), NODE]
REQUEST = {
    **{"request_id": "r", "attempt": 1, "priority": 1, "gang": GANG, "gpus_per_node": 1, "gpu_share": 500},
    **{"cpus": 1, "deadline_ms": NOW_MS},
}
HUGE = (2**63 - 1, 2**63, 2**64, 10**30, -(2**63) - 1, -(10**30))
Path = tuple[str | int, ...]


def integers(value: Any, path: Path = ()) -> Iterator[Path]:
    """The places of all integers of a document."""
    if isinstance(value, int):
        yield path
    elif isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from integers(part, (*path, key))


def changed(document: Any, path: Path, value: int) -> bytes:
    made = deepcopy(document)
    at = made
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return json.dumps(made).encode()


CASES = [(event, path) for event in EVENTS for path in integers(event)]


def test_the_documents_hold_every_integer_of_their_types() -> None:
    named = {part for _, path in CASES for part in path}
    kinds = [*msgspec.inspect.type_info(msgspec.json.Decoder(NodeEvent).type).fields]  # type: ignore[attr-defined]
    for info in msgspec.inspect.multi_type_info([*map(type, map(decoded, EVENTS))]):
        kinds += info.fields  # type: ignore[attr-defined]
    wanted = {field.encode_name for field in kinds if holds_integer(field.type)}
    assert wanted - named == set()
    request = msgspec.inspect.type_info(PlacementRequest).fields  # type: ignore[attr-defined]
    assert {field.encode_name for field in request if holds_integer(field.type)} <= set(REQUEST)


def decoded(event: dict[str, Any]) -> Any:
    return decode_event(json.dumps(event).encode(), NOW_MS)


def holds_integer(kind: Any) -> bool:
    inner = getattr(kind, "types", None) or [one for one in [getattr(kind, "item_type", None)] if one]
    return isinstance(kind, msgspec.inspect.IntType) or any(map(holds_integer, inner))


@pytest.mark.parametrize("value", HUGE)
@pytest.mark.parametrize(("event", "path"), CASES, ids=str)
def test_an_integer_that_no_snapshot_holds_is_refused(event: dict[str, Any], path: Path, value: int) -> None:
    try:
        found = decode_event(changed(event, path, value), NOW_MS)
    except RecordError:
        return
    if isinstance(found, NodeEvent):
        nodes = NodeTable()
        nodes.apply(found)
        msgspec.msgpack.encode(nodes.nodes)
    else:
        jobs = JobTable()
        jobs.apply(found)
        encode_job([*jobs.attempts.values()])
    assert abs(value) <= MAX_COUNT


@pytest.mark.parametrize("value", HUGE)
@pytest.mark.parametrize("path", [*integers(REQUEST)], ids=str)
def test_an_integer_that_no_pass_computes_with_is_refused(path: Path, value: int) -> None:
    with pytest.raises((RequestError, msgspec.ValidationError)):
        check_request(msgspec.json.decode(changed(REQUEST, path, value), type=PlacementRequest))
