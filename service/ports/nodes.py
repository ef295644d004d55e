"""The port to the nodes of a Kubernetes cluster, read by list and watch.

Marks are written in three ways:

label, condition   server-side apply as `fleetcast`, never forced: another manager's values stay
annotation         the same as `fleetcast-slinky`, since an apply replaces all that its manager has written
taint              JSON patch under a test of the version, since the list of taints is one field
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec

from fleetcast.clients.kube_api import KubeAccount, KubeApi, KubeRefused
from fleetcast.fleet.decode_faults import explain_decode_error
from fleetcast.fleet.errors import ConfigError, SourceError
from fleetcast.fleet.nodes import FAILURE_EXPECTED
from fleetcast.schedulers.adapter import Door, Seen, Write, WriteOutcome
from fleetcast.schedulers.nodes import CONDITION, EFFECTS, FEATURE, LABEL, MARK, SLINKY, TAINT, THEIRS, NodeMarks
from fleetcast.service.plugins import read_options
from fleetcast.service.ports.kube_objects import (
    KubeObjects,
    ManagedFields,
    check_server_address,
    get_nested_fields,
    write_by_key,
)

NODES = "/api/v1/nodes"
MANAGER, SLINKY_MANAGER = "fleetcast", "fleetcast-slinky"
TRIES = 6  # of a taint, when a heartbeat came between


class NodesOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of the adapter.

    `taint`: the effect of the taint. If empty, no taint is set. `slinky`: also write the band as an
    annotation for slurm-operator. The other options say how to reach the server. In a pod, their default is
    the pod's own account.
    """

    taint: str = ""
    slinky: bool = False
    server: str = ""
    token_file: str = ""
    ca_file: str = ""


def make_nodes_door(options: Mapping[str, Any]) -> Door:
    """Make the built-in adapter `nodes`. Raises ConfigError."""
    given = read_options(options, NodesOptions)
    if given.taint not in EFFECTS:
        raise ConfigError(f"options.taint = {given.taint!r}: must be empty, PreferNoSchedule or NoSchedule")
    check_server_address(given.server)
    account = KubeAccount(given.server, given.token_file, given.ca_file)
    return Door(NodeMarks(given.taint, given.slinky), NodesPort(KubeApi(account)))


class _Taint(msgspec.Struct):
    key: str
    effect: str
    value: str = ""


class _Condition(msgspec.Struct):
    type: str
    status: str
    reason: str = ""


class _Meta(msgspec.Struct, rename="camel"):
    name: str
    uid: str = ""
    resource_version: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    managed_fields: list[ManagedFields] | None = None


class _Spec(msgspec.Struct):
    taints: list[_Taint] | None = None


class _Status(msgspec.Struct):
    conditions: list[_Condition] | None = None


class _Node(msgspec.Struct):
    metadata: _Meta
    spec: _Spec = msgspec.field(default_factory=_Spec)
    status: _Status = msgspec.field(default_factory=_Status)


_decode_node = msgspec.json.Decoder(_Node).decode


@dataclass(frozen=True, slots=True)
class MarkedNode:
    """The part of a Kubernetes node that the port reads: our marks, and its taints."""

    key: str  # its name
    uid: str
    version: str = field(compare=False)
    values: Mapping[str, str]  # as in Seen
    taints: Sequence[str]  # keys of all, in order


def decode_node_marks(body: bytes | msgspec.Raw) -> MarkedNode:
    """Decode a v1.Node. Raises SourceError if the body is not one."""
    try:
        node = _decode_node(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SourceError(f"a node that is none: {explain_decode_error(error, _decode_node, body)}") from None
    meta, taints = node.metadata, node.spec.taints or ()
    ours = [row.fields_v1 for row in meta.managed_fields or () if (row.manager, row.operation) == (MANAGER, "Apply")]
    values: dict[str, str] = {}
    if meta.labels and MARK in meta.labels:
        is_ours = any(f"f:{MARK}" in get_nested_fields(row, "f:metadata", "f:labels") for row in ours)
        values[LABEL if is_ours else THEIRS + LABEL] = meta.labels[MARK]
    if meta.annotations and SLINKY in meta.annotations:
        managers = {row.manager for row in meta.managed_fields or () if row.operation == "Apply"}
        values[FEATURE if SLINKY_MANAGER in managers else THEIRS + FEATURE] = meta.annotations[SLINKY]
    for row in node.status.conditions or ():
        if row.type == FAILURE_EXPECTED:
            key = f'k:{{"type":"{FAILURE_EXPECTED}"}}'
            is_ours = any(key in get_nested_fields(fields, "f:status", "f:conditions") for fields in ours)
            values[CONDITION if is_ours else THEIRS + CONDITION] = f"{row.status} {row.reason}"
    for taint in taints:
        if taint.key == MARK:
            values[TAINT] = f"{taint.value}:{taint.effect}"
    return MarkedNode(meta.name, meta.uid, meta.resource_version, values, [taint.key for taint in taints])


class NodesPort:
    """The port that reads and writes marks on the nodes of a Kubernetes cluster.

    It follows the nodes from the first `read` on. `read` raises SourceError while the server is
    unreachable.
    """

    def __init__(self, api: KubeApi) -> None:
        self._api = api
        self._nodes = KubeObjects(api, _get_path, decode_node_marks)

    async def read(self) -> Seen:
        return {name: node.values for name, node in (await self._nodes.read_all()).items()}

    async def write(self, batch: Sequence[Write]) -> Sequence[WriteOutcome]:
        """Write to several nodes concurrently. The writes to one node run one after another."""
        return await write_by_key(batch, self._write_object)

    async def _write_object(self, writes: list[Write]) -> list[WriteOutcome]:
        """Carry out the writes to one node, one after another."""
        return [await self._write_one(write) for write in writes]

    async def close(self) -> None:
        await self._nodes.close()
        await self._api.close()

    async def _write_one(self, write: Write) -> WriteOutcome:
        return await self._nodes.await_write(write.key, self._send_write(write), conflicts=(404, 409, 422))

    async def _send_write(self, write: Write) -> bytes | None:
        """Send a write, and return the changed node as JSON. Raises KubeRefused or SourceError.

        Returns None if the node is gone or its taint has changed.
        """
        node = self._nodes.get(write.key)
        if node is None:
            return None
        thing: dict[str, Any] = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": node.key, "uid": node.uid}}
        path = f"{NODES}/{node.key}"
        if write.field == LABEL:
            thing["metadata"]["labels"] = {} if write.value is None else {MARK: write.value}
            return await self._api.apply(path, thing, MANAGER)
        if write.field == FEATURE:
            thing["metadata"]["annotations"] = {} if write.value is None else {SLINKY: write.value}
            return await self._api.apply(path, thing, SLINKY_MANAGER)
        if write.field == CONDITION:
            thing["status"] = {"conditions": [] if write.value is None else [_make_node_condition(write)]}
            return await self._api.apply(f"{path}/status", thing, MANAGER)
        return await self._change_taint(write, node)

    async def _change_taint(self, write: Write, node: MarkedNode) -> bytes | None:
        """Change the taint in the version of the node that was read, and return the changed node as JSON.

        Every heartbeat makes a new version, so a conflict is retried. Returns None if another writer has
        changed the taint. Raises KubeRefused or SourceError.
        """
        path = f"{NODES}/{node.key}"
        for _ in range(TRIES):
            if node.values.get(TAINT) != write.seen:
                return None  # another owner changed it
            try:
                return await self._api.send_json_patch(path, make_taint_patch(node, write.value), MANAGER)
            except KubeRefused as error:
                if error.status not in (409, 422):
                    raise
            node = decode_node_marks(await self._api.get(path))
        raise SourceError(f"another writer changes it all the time: {TRIES} tries")


async def _get_path() -> str:
    return NODES


def make_taint_patch(node: MarkedNode, value: str | None) -> list[dict[str, Any]]:
    """Make a JSON patch (RFC 6902) that sets or removes our taint and leaves all others unchanged."""
    steps: list[dict[str, Any]] = [{"op": "test", "path": "/metadata/resourceVersion", "value": node.version}]
    held = [number for number, key in enumerate(node.taints) if key == MARK]
    steps += [{"op": "remove", "path": f"/spec/taints/{number}"} for number in reversed(held)]
    if value is not None:
        band, _, effect = value.partition(":")
        taint = {"key": MARK, "value": band, "effect": effect}
        whole = {"op": "add", "path": "/spec/taints", "value": [taint]}
        steps.append({"op": "add", "path": "/spec/taints/-", "value": taint} if node.taints else whole)
    return steps


def _make_node_condition(write: Write) -> dict[str, str]:
    status, _, reason = (write.value or "").partition(" ")
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    times = {"lastHeartbeatTime": now, "lastTransitionTime": now}  # it is written when its status changes
    return {"type": FAILURE_EXPECTED, "status": status, "reason": reason, "message": write.why[:1024], **times}
