"""The port that writes topology labels to the nodes of a Kubernetes cluster, by server-side apply.

The labels have their own field manager.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fleetcast.clients.kube_api import KubeAccount, KubeApi
from fleetcast.fleet.decode_faults import explain_decode_error
from fleetcast.fleet.errors import ConfigError, SourceError
from fleetcast.fleet.topology import DOMAIN_LEVELS
from fleetcast.schedulers.adapter import Door, Seen, Write, WriteOutcome
from fleetcast.schedulers.nodes import THEIRS
from fleetcast.schedulers.topology import LABELS, TopologyLabels, make_label_field
from fleetcast.service.plugins import read_options
from fleetcast.service.ports.kube_objects import (
    KubeObjects,
    ManagedFields,
    check_server_address,
    get_nested_fields,
    write_by_key,
)
from fleetcast.service.ports.nodes import NODES

logger = logging.getLogger(__name__)

MANAGER = "fleetcast-topology"  # an apply replaces all labels of its manager, so `nodes` has another
_LABEL = re.compile(r"([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


class TopologyOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of the adapter.

    `labels`: level → key of its label. The other options say how to reach the server. In a pod, their
    default is the pod's own account.
    """

    labels: dict[str, str] = msgspec.field(default_factory=lambda: dict(LABELS))
    server: str = ""
    token_file: str = ""
    ca_file: str = ""


def make_topology_door(options: Mapping[str, Any]) -> Door:
    """Make the built-in adapter `topology`. Raises ConfigError."""
    given = read_options(options, TopologyOptions)
    check_server_address(given.server)
    for level, key in given.labels.items():
        if level not in DOMAIN_LEVELS:
            known = ", ".join(DOMAIN_LEVELS)
            raise ConfigError(f"options.labels.{level}: no level of a topology; expected any of {known}")
        if not _LABEL.fullmatch(key) or key.partition("/")[0].endswith("kubernetes.io"):
            raise ConfigError(
                f"options.labels.{level} = {key!r}: must be a label like {LABELS['rack']}, none of kubernetes.io"
            )
    if len(set(given.labels.values())) < max(1, len(given.labels)):
        raise ConfigError(f"options.labels = {given.labels}: must have a label of its own for each level")
    api = KubeApi(KubeAccount(given.server, given.token_file, given.ca_file))
    return Door(TopologyLabels(given.labels), TopologyPort(api, tuple(given.labels.values())))


class _Meta(msgspec.Struct, rename="camel"):
    name: str
    uid: str = ""
    resource_version: str = ""
    labels: dict[str, str] | None = None
    managed_fields: list[ManagedFields] | None = None


class _Node(msgspec.Struct):
    metadata: _Meta


_decode = msgspec.json.Decoder(_Node).decode


@dataclass(frozen=True, slots=True)
class LabelledNode:
    """The part of a Kubernetes node that the port reads: its topology labels."""

    key: str  # its name
    uid: str
    version: str = field(compare=False)
    values: Mapping[str, str]  # as in Seen


def decode_labelled_node(body: bytes | msgspec.Raw, labels: Sequence[str]) -> LabelledNode:
    """Decode a v1.Node. Raises SourceError if the body is not one. labels: the keys of the labels to read."""
    try:
        meta = _decode(body).metadata
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SourceError(f"a node that is none: {explain_decode_error(error, _decode, body)}") from None
    ours: set[str] = set()
    for row in meta.managed_fields or ():
        if (row.manager, row.operation) == (MANAGER, "Apply"):
            ours |= get_nested_fields(row.fields_v1, "f:metadata", "f:labels").keys()
    held = meta.labels or {}
    values = {
        ("" if f"f:{key}" in ours else THEIRS) + make_label_field(key): held[key] for key in labels if key in held
    }
    return LabelledNode(meta.name, meta.uid, meta.resource_version, values)


class TopologyPort:
    """The port that reads and writes topology labels of nodes. It follows the nodes from the first `read` on.

    `read` raises SourceError while the server is unreachable.
    """

    def __init__(self, api: KubeApi, labels: Sequence[str]) -> None:
        self._api, self._labels = api, labels
        self._nodes = KubeObjects(api, self._get_path, self._decode_node)

    async def read(self) -> Seen:
        return {name: node.values for name, node in (await self._nodes.read_all()).items()}

    async def write(self, batch: Sequence[Write]) -> Sequence[WriteOutcome]:
        """Write to several nodes concurrently, with one apply for each node."""
        return await write_by_key(batch, self._write_object)

    async def close(self) -> None:
        await self._nodes.close()
        await self._api.close()

    async def _get_path(self) -> str:
        return NODES

    def _decode_node(self, body: bytes | msgspec.Raw) -> LabelledNode:
        return decode_labelled_node(body, self._labels)

    async def _write_object(self, writes: list[Write]) -> list[WriteOutcome]:
        return [await self._nodes.await_write(writes[0].key, self._send_writes(writes))] * len(writes)

    async def _send_writes(self, writes: Sequence[Write]) -> bytes | None:
        """Send the writes to one node, and return the changed node as JSON. Raises KubeRefused or SourceError.

        An apply must name every label of ours that is to remain. Returns None if the node is gone or its labels
        have changed.
        """
        node = self._nodes.get(writes[0].key)
        if node is None or any(node.values.get(write.field) != write.seen for write in writes):
            return None
        wanted = {**node.values, **{write.field: write.value for write in writes}}
        labels = {key: value for key in self._labels if (value := wanted.get(make_label_field(key))) is not None}
        thing = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": node.key, "uid": node.uid, "labels": labels}}
        return await self._api.apply(f"{NODES}/{node.key}", thing, MANAGER)
