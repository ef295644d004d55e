"""The port to the CapacityBuffers of a Kubernetes cluster, read by list and watch.

It writes replicas by server-side apply as `fleetcast`, never forced. So if another manager holds the
replicas of a buffer, the buffer stays unchanged.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from fleetcast.clients.kube_api import KubeAccount, KubeApi
from fleetcast.fleet.decode_faults import explain_decode_error
from fleetcast.fleet.errors import ConfigError, RequestError, SourceError
from fleetcast.schedulers.adapter import Door, Seen, Write, WriteOutcome
from fleetcast.schedulers.buffers import PREFIX, REPLICAS, THEIRS, CapacityBuffers, read_annotations, read_minimum
from fleetcast.service.plugins import read_options
from fleetcast.service.ports.kube_objects import KubeObjects, ManagedFields, check_server_address, write_by_key

logger = logging.getLogger(__name__)

VERSION, KIND, PLURAL = "autoscaling.x-k8s.io/v1beta1", "CapacityBuffer", "capacitybuffers"
MANAGER = "fleetcast"
NAMESPACE = re.compile(r"[a-z0-9-]{0,63}")


class BuffersOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of the adapter.

    `namespace`: the only namespace to read. If empty, the port reads all. The other options say how to
    reach the server. In a pod, their default is the pod's own account.
    """

    namespace: str = ""
    server: str = ""
    token_file: str = ""
    ca_file: str = ""


def make_buffers_door(options: Mapping[str, Any]) -> Door:
    """Make the built-in adapter `buffers`. Raises ConfigError."""
    given = read_options(options, BuffersOptions)
    check_server_address(given.server)
    if not NAMESPACE.fullmatch(given.namespace):
        raise ConfigError(f"options.namespace = {given.namespace!r}: must be the name of one, or empty for all")
    account = KubeAccount(given.server, given.token_file, given.ca_file)
    return Door(CapacityBuffers(), BuffersPort(KubeApi(account), given.namespace))


class _Meta(msgspec.Struct, rename="camel"):
    name: str
    namespace: str
    uid: str = ""
    resource_version: str = ""
    annotations: dict[str, str] | None = None
    managed_fields: list[ManagedFields] | None = None


class _Spec(msgspec.Struct):
    replicas: int | None = None


class _Buffer(msgspec.Struct):
    metadata: _Meta
    spec: _Spec = msgspec.field(default_factory=_Spec)


_decode_buffer = msgspec.json.Decoder(_Buffer).decode


@dataclass(frozen=True, slots=True)
class AnnotatedBuffer:
    """The part of a CapacityBuffer that the port reads.

    others: the other managers that hold its replicas. mistake: why the port ignores the buffer, or "".
    """

    key: str
    uid: str
    version: str
    values: Mapping[str, str]  # as in Seen
    others: tuple[str, ...]
    mistake: str


def decode_annotated_buffer(body: bytes | msgspec.Raw) -> AnnotatedBuffer:
    """Decode a CapacityBuffer. Raises SourceError if the body is not one."""
    try:
        buffer = _decode_buffer(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SourceError(f"a buffer that is none: {explain_decode_error(error, _decode_buffer, body)}") from None
    meta, replicas = buffer.metadata, buffer.spec.replicas
    holders = {(row.manager, row.operation) for row in meta.managed_fields or () if _holds_replicas(row.fields_v1)}
    others = tuple(sorted(manager for manager, _ in holders - {(MANAGER, "Apply")}))
    values = {name: value for name, value in (meta.annotations or {}).items() if name.startswith(PREFIX)}
    if others:
        values[THEIRS] = str(replicas)
    elif holders and replicas != read_minimum(values):
        values[REPLICAS] = str(replicas)
    return AnnotatedBuffer(
        f"{meta.namespace}/{meta.name}",
        meta.uid,
        meta.resource_version,
        values,
        others,
        _describe_mistake(values, others),
    )


def _holds_replicas(fields: Mapping[str, Any]) -> bool:
    spec = fields.get("f:spec")
    return isinstance(spec, dict) and "f:replicas" in spec


def _describe_mistake(values: Mapping[str, str], others: Sequence[str]) -> str:
    """Describe why the port ignores a buffer that opts in. Returns "" if it does not."""
    try:
        ask = read_annotations(values)
    except RequestError as error:
        return str(error)
    return f"its replicas are held by {', '.join(others)}" if ask and others else ""


class BuffersPort:
    """The port that reads CapacityBuffers and writes their replicas. It follows them from the first `read` on.

    `read` raises SourceError while the server is unreachable.
    """

    def __init__(self, api: KubeApi, namespace: str = "") -> None:
        self._api = api
        self._buffers: KubeObjects[AnnotatedBuffer] = KubeObjects(api, self._get_path, decode_annotated_buffer)
        self._namespace = namespace
        self._reported: dict[str, str] = {}  # mistakes by key

    async def _get_path(self) -> str:
        return _make_collection_path(self._namespace)

    async def read(self) -> Seen:
        """Return the buffers that opt in, and the buffers that still have a value of ours."""
        known = await self._buffers.read_all()
        mistakes = {key: buffer.mistake for key, buffer in known.items() if buffer.mistake}
        for key in (key for key, mistake in mistakes.items() if self._reported.get(key) != mistake):
            logger.warning("buffer %s is left alone: %s", key, mistakes[key])
        self._reported = mistakes
        return {key: buffer.values for key, buffer in known.items() if buffer.values.keys() - {THEIRS}}

    async def write(self, batch: Sequence[Write]) -> Sequence[WriteOutcome]:
        return await write_by_key(batch, self._write_object)

    async def _write_object(self, writes: list[Write]) -> list[WriteOutcome]:
        """Carry out the writes to one buffer, one after another."""
        return [await self._write_one(write) for write in writes]

    async def close(self) -> None:
        await self._buffers.close()
        await self._api.close()

    async def _write_one(self, write: Write) -> WriteOutcome:
        return await self._buffers.await_write(write.key, self._send_write(write))

    async def _send_write(self, write: Write) -> bytes | None:
        """Send a write, and return the changed buffer as JSON. Raises KubeRefused or SourceError.

        Returns None if the buffer is gone or has changed, or if another manager holds its replicas.
        """
        buffer = self._buffers.get(write.key)
        if buffer is None or buffer.values.get(REPLICAS) != write.seen or buffer.others:
            return None
        namespace, _, name = write.key.partition("/")
        replicas = read_minimum(buffer.values) if write.value is None else int(write.value)
        thing = {
            "apiVersion": VERSION,
            "kind": KIND,
            "metadata": {"name": name, "namespace": namespace, "uid": buffer.uid},
            "spec": {"replicas": replicas},
        }
        return await self._api.apply(f"{_make_collection_path(namespace)}/{name}", thing, MANAGER)


def _make_collection_path(namespace: str) -> str:
    return f"/apis/{VERSION}/{f'namespaces/{namespace}/' if namespace else ''}{PLURAL}"
