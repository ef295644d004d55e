"""The port to Kueue's workloads and admission checks. It reads them by list and watch.

It writes their status in two ways:

check of a workload    JSON patch under a test of the version. Kueue owns the list. An apply that is not
                       forced would be refused, and a forced one could undo what Kueue has just done.
condition of a check   server-side apply as `fleetcast`, never forced
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from fleetcast.clients.kube_api import KubeAccount, KubeApi, KubeRefused
from fleetcast.fleet.decode_faults import explain_json_error
from fleetcast.fleet.errors import ConfigError, SourceError
from fleetcast.fleet.topology import DOMAIN_LEVELS
from fleetcast.schedulers.adapter import Door, Seen, Write, WriteOutcome
from fleetcast.schedulers.kueue import ACTIVE, CHECK, HOLD, NOTE, PENDING, RETRY, GateRule, WorkloadChecks
from fleetcast.service.plugins import read_options
from fleetcast.service.ports.kube_objects import KubeObjects, check_server_address, write_by_key
from fleetcast.service.ports.kueue_objects import KueueCheck, KueueWorkload, decode_kueue_check, decode_kueue_workload

logger = logging.getLogger(__name__)

GROUP = "/apis/kueue.x-k8s.io"
VERSIONS = ("v1beta2", "v1beta1")  # that we speak, the newest first
CONTROLLER = "fleetcast.io/forecast"
MANAGER = "fleetcast"
TRIES = 6  # of a workload that others change at the same time
LONGEST = 1024  # characters of a message
READY = "Ready"


class KueueOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of the adapter, described in docs/schedulers/kueue.md."""

    controller: str = CONTROLLER
    gate: bool = False
    max_risk: float = 0.5
    level: str = "block"
    retry_s: int = 60
    hold_s: int = 600
    prefix: str = ""
    server: str = ""
    token_file: str = ""
    ca_file: str = ""


def make_kueue_door(options: Mapping[str, Any]) -> Door:
    """Make the built-in adapter `kueue`. Raises ConfigError."""
    given = read_options(options, KueueOptions)
    check_server_address(given.server)
    for key, value, ok, wanted in (
        ("controller", given.controller, "/" in given.controller, f"like {CONTROLLER}"),
        ("max_risk", given.max_risk, 0 < given.max_risk <= 1, "above 0 and at most 1"),
        ("level", given.level, given.level in DOMAIN_LEVELS, f"any of {', '.join(DOMAIN_LEVELS)}"),
        ("retry_s", given.retry_s, 1 <= given.retry_s <= 3600, "1 to 3600"),
        ("hold_s", given.hold_s, 0 <= given.hold_s <= 86400, "0 to 86400"),
    ):
        if not ok:
            raise ConfigError(f"options.{key} = {value!r}: must be {wanted}")
    rule = GateRule(given.gate, given.max_risk, given.level, given.retry_s, given.hold_s, given.prefix)
    port = KueuePort(KubeApi(KubeAccount(given.server, given.token_file, given.ca_file)), given.controller)
    return Door(WorkloadChecks(rule), port, needs_starts=True, news=port.news, follow_news=port.follow_news)


class _Version(msgspec.Struct):
    version: str


class _Group(msgspec.Struct):
    versions: list[_Version]


class KueuePort:
    """The port that reads Kueue's workloads and admission checks, and writes their status.

    It follows both collections from the first `read` on. `read` raises SourceError while the server is
    unreachable, or if Kueue is not installed.
    """

    def __init__(self, api: KubeApi, controller: str) -> None:
        self._api, self._controller = api, controller
        self._workloads: KubeObjects[KueueWorkload] = KubeObjects(
            api, self._make_path_reader("workloads"), decode_kueue_workload
        )
        self._checks: KubeObjects[KueueCheck] = KubeObjects(
            api, self._make_path_reader("admissionchecks"), decode_kueue_check
        )
        self._ours: frozenset[str] = frozenset()

    def news(self) -> int:
        return self._workloads.changes + self._checks.changes

    def follow_news(self, wake: Callable[[], None]) -> None:
        """Call `wake` whenever `news` changes."""
        self._workloads.on_change = self._checks.on_change = wake

    async def read(self) -> Seen:
        """Return our admission checks, and the workloads that wait for them."""
        checks = [row for row in (await self._checks.read_all()).values() if row.controller == self._controller]
        self._ours = frozenset(row.key for row in checks)
        seen = {row.key: {CHECK: self._controller} | ({ACTIVE: row.active} if row.active else {}) for row in checks}
        for key, workload in (await self._workloads.read_all()).items():
            values = workload.make_values(self._ours)
            if values:
                seen[key] = values
        return seen

    async def write(self, batch: Sequence[Write]) -> Sequence[WriteOutcome]:
        """Write to several objects concurrently."""
        return await write_by_key(batch, self._write_object)

    async def _write_object(self, writes: list[Write]) -> list[WriteOutcome]:
        """Carry out the writes to one object, one after another."""
        return [await self._write_one(write) for write in writes]

    async def close(self) -> None:
        await self._workloads.close()
        await self._checks.close()
        await self._api.close()

    def _make_path_reader(self, plural: str) -> Any:
        async def find_path() -> str:
            """Return the path in the newest version that both sides support. Raises SourceError or KubeRefused."""
            try:
                served = {row.version for row in msgspec.json.decode(await self._api.get(GROUP), type=_Group).versions}
            except KubeRefused as error:
                raise SourceError(f"Kueue is not installed: {error}") from None
            except msgspec.DecodeError as error:
                raise SourceError(f"an API server does not answer like that: {explain_json_error(error)}") from None
            version = next((version for version in VERSIONS if version in served), None)
            if version is None:
                raise SourceError(f"Kueue serves {sorted(served)}, and we speak {' and '.join(VERSIONS)}")
            return f"{GROUP}/{version}/{plural}"

        return find_path

    async def _write_one(self, write: Write) -> WriteOutcome:
        if write.field == ACTIVE:
            return await self._checks.await_write(write.key, self._write_active_condition(write))
        return await self._workloads.await_write(write.key, self._answer_workload(write))

    async def _write_active_condition(self, write: Write) -> bytes | None:
        """Set the Active condition of a check. Raises KubeRefused or SourceError.

        Returns the changed check as JSON, or None if the check is gone or has changed.
        """
        check = self._checks.get(write.key)
        if check is None or check.active != write.seen:
            return None
        status, _, reason = (write.value or "").partition(" ")
        condition = {
            "type": "Active",
            "status": status,
            "reason": reason,
            "message": write.why,
            **_make_transition_time(),
        }
        thing = {
            "apiVersion": self._checks.path.removeprefix("/apis/").rpartition("/")[0],
            "kind": "AdmissionCheck",
            "metadata": {"name": check.key, "uid": check.uid},
            "status": {"conditions": [condition]},
        }
        return await self._api.apply(f"{self._checks.path}/{check.key}/status", thing, MANAGER)

    async def _answer_workload(self, write: Write) -> bytes | None:
        """Answer the checks of a workload if they have not changed since the last read.

        Returns the changed workload as JSON, or None if the workload is gone or its checks have changed. Raises
        KubeRefused or SourceError.
        """
        workload = self._workloads.get(write.key)
        folder, _, plural = self._workloads.path.rpartition("/")
        namespace, _, name = write.key.partition("/")
        path = f"{folder}/namespaces/{namespace}/{plural}/{name}"
        for _ in range(TRIES):
            if workload is None or workload.make_values(self._ours).get(write.field) != write.seen:
                return None
            steps = make_answer_patch(workload, self._ours, write)
            try:
                return await self._api.send_json_patch(f"{path}/status", steps, MANAGER)
            except KubeRefused as error:
                newest = decode_kueue_workload(await self._api.get(path))
                if error.status not in (409, 422) or newest.version == workload.version:
                    raise
                workload = newest
        raise SourceError(f"another writer changes it all the time: {TRIES} tries")


def make_answer_patch(workload: KueueWorkload, ours: frozenset[str], write: Write) -> list[dict[str, Any]]:
    """Make a JSON patch (RFC 6902) that answers those of our checks that wait for an answer.

    It leaves all other checks unchanged.
    """
    steps: list[dict[str, Any]] = [{"op": "test", "path": "/metadata/resourceVersion", "value": workload.version}]
    for at, check in enumerate(workload.checks):
        if check.get("name") in ours and check.get("state") in (PENDING, RETRY):
            steps.append(
                {"op": "replace", "path": f"/status/admissionChecks/{at}", "value": _make_answered_check(check, write)}
            )
    return steps


def _make_answered_check(check: Mapping[str, Any], write: Write) -> dict[str, Any]:
    if write.field == NOTE:
        return {**check, "message": (write.value or "")[:LONGEST]}
    assert write.field == HOLD
    state, _, seconds = (write.value or READY).partition(" ")
    fields = {key: value for key, value in check.items() if key != "requeueAfterSeconds"}
    after = {"requeueAfterSeconds": int(seconds)} if seconds else {}
    return {**fields, "state": state, "message": write.why[:LONGEST], **_make_transition_time(), **after}


def _make_transition_time() -> dict[str, str]:
    return {"lastTransitionTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}
