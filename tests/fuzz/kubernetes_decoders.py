"""Decoders of what a Kubernetes API server and elastic launchers say."""

import asyncio
import json
from collections.abc import Iterator, Mapping

from fleetcast.clients.kubernetes import Changes, ExpiredError, watch
from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import SourceError
from fleetcast.ingest.health.torchelastic import Sender, decode
from fleetcast.ingest.kubernetes.source import KINDS, KubernetesSource
from fleetcast.schedulers.nodes import MARK
from fleetcast.service.ports.nodes import decode_node_marks, make_taint_patch
from tests.fuzz.bounds import MIB
from tests.fuzz.decoder import Decoder
from tests.fuzz.door_decoders import FUTURE_MS, NOW_MS, take
from tests.ingest.small_kubernetes import Reply, condition, ended, job, pod, running


class _Line:
    """A server whose watch tells these bytes, in pieces, and nothing else."""

    def __init__(self, body: bytes) -> None:
        self.body = body

    def get(self, path: str, query: Mapping[str, str], read_s: float) -> Reply:
        return Reply(200, b"", self._pieces())

    def _pieces(self) -> Iterator[bytes]:
        half = len(self.body) // 2
        yield from (self.body[:half], self.body[half:] + b"\n")


def decode_watch(body: bytes) -> None:
    """Whatever a watch tells of any collection, the source folds it, remembers it, and goes on from what it kept."""
    for collection in _source().list_collections():
        source = _source()
        try:
            for changes in watch(_Line(body), collection, "7"):
                _fold(source, changes)
        except (ExpiredError, SourceError):
            continue
        again = _source()
        again.seek(json.loads(json.dumps(source.position())))
        assert again.position() == source.position()


def _source() -> KubernetesSource:
    source = KubernetesSource(Entities(), ManualClock(NOW_MS), {}, server=_Line(b""))
    source.apply_messages([Changes(name, (), "1") for name in KINDS])
    return source


def _fold(source: KubernetesSource, changes: Changes) -> None:
    batch = source.apply_messages([changes])
    assert len(batch.bad) <= len(changes.changes) + len(batch)
    take(batch)
    asyncio.run(source.close())


def decode_marked_node(body: bytes) -> None:
    """Whatever a server tells of a node, a patch of our taint leaves as many others as there are."""
    try:
        node = decode_node_marks(body)
    except SourceError:
        return
    others = [key for key in node.taints if key != MARK]
    test, *steps = make_taint_patch(node, "high:NoSchedule")
    assert test["op"] == "test"
    assert len([step for step in steps if step["op"] == "remove"]) == len(node.taints) - len(others)


def decode_elastic(body: bytes) -> None:
    decoded = decode(body, {}, Sender("", 0), NOW_MS, FUTURE_MS)
    for record in decoded.records:
        assert record.raw


def _told(thing: object, kind: str = "ADDED") -> bytes:
    return json.dumps({"type": kind, "object": thing}).encode()


def _versioned(thing: dict[str, object]) -> dict[str, object]:
    return {**thing, "metadata": {**thing["metadata"], "resourceVersion": "9"}}  # type: ignore[dict-item]


NODE = {
    "metadata": {"name": "n1", "uid": "1", "resourceVersion": "9", "creationTimestamp": "2025-01-01T00:00:00Z"},
    "spec": {"unschedulable": True, "taints": [{"key": "a/b", "effect": "NoSchedule"}]},
    "status": {"conditions": [condition("Ready", status="Unknown"), condition("GpuMemWatch")]},
}
MARKED_NODE = {
    "metadata": {
        **{"name": "n1", "uid": "1", "resourceVersion": "9", "labels": {MARK: "high"}},
        "managedFields": [
            {
                "manager": "fleetcast",
                "operation": "Apply",
                "fieldsV1": {"f:metadata": {"f:labels": {f"f:{MARK}": {}}}},
            }
        ],
    },
    "spec": {"taints": [{"key": MARK, "value": "high", "effect": "NoSchedule"}]},
    "status": {"conditions": [condition("GpuFailureExpected")]},
}
POD = _versioned(running(pod("train", 0), "n1", restarts=2))
OBJECTS = (NODE, POD, _versioned(ended(POD, 137, "OOMKilled")), _versioned(job("train", 1)))
WATCH = (
    *(_told(thing) for thing in OBJECTS),
    b"\n".join((_told(OBJECTS[3]), _told(POD), _told(POD, "DELETED"), _told(OBJECTS[3], "DELETED"))),
    _told({"metadata": {"resourceVersion": "11"}}, "BOOKMARK"),
    _told({"code": 410, "message": "too old"}, "ERROR"),
    b"",
)
ELASTIC = (
    b'{"name":"e","source":"WORKER","timestamp":1760000000000,"metadata":{"run_id":"a","state":"FAILED","raw_error":'
    b'"{\\"message\\": {\\"message\\": \\"NCCL error: timeout\\"}}","agent_restarts":1,"hostname":"n1"}}',
    b'{"name":"r","run_id":"a","node_state":"RUNNING","rank":1,"hostname":"n1"}',
    b'[{"job_id":7,"attempt_index":1,"cycle_number":2,"cycle_start_time":"2025-10-09","active_nodes":"n[1-9]"}]',
)

KUBERNETES = {
    "kubernetes watch": Decoder(
        decode_watch,
        WATCH,
        (
            *(b'"metadata":{', b'"labels":null', b'"nvidia.com/gpu":"8"', b'"status":{', b'"phase":"Failed"', b"1e99"),
            *(b'"resourceVersion":"18446744073709551615"', b'"restartCount":-1', b'"parallelism":2147483648', b"\n"),
            *(b"9999-12-31T23:59:59Z", b"0001-01-01T00:00:00Z", b'"DELETED"', b'"jobset.sigs.k8s.io/jobset-name":"a"'),
        ),
        base_bytes=8 * MIB,
    ),
    "kubernetes nodes": Decoder(
        decode_marked_node,
        (json.dumps(NODE).encode(), json.dumps(MARKED_NODE).encode()),
        (b'"labels":null', b'"fieldsV1":{"f:metadata":5}', b'"fleetcast.io/risk"', b'"taints":[', b'"fleetcast"'),
    ),
    "torchelastic": Decoder(
        decode_elastic,
        ELASTIC,
        (
            b'"FAILED"',
            b'"agent_restarts":-1',
            b'"timestamp":1e300',
            b'"active_nodes":["',
            b"n[1-200001]",
            b"got signal",
        ),
        base_bytes=24 * MIB,
        times=600,
    ),
}
