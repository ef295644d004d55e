"""The port to Slurm. It reads nodes and jobs, and groups the adapter's writes into few calls.

Slurm has no compare-and-set. So the port reads everything again right before a write. It leaves alone
what has changed since the adapter read it. Nodes with the same change share one call.
"""

import asyncio
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import msgspec

from fleetcast.clients.slurm_control import (
    ControlledJob,
    ControlledNode,
    NodeChange,
    ScontrolCommands,
    SlurmControl,
    SlurmRefused,
    drop_ambiguous_rows,
)
from fleetcast.clients.slurm_rest import FIRST_WITH_NODES, SlurmRestAccount, SlurmRestControl
from fleetcast.fleet.errors import ConfigError, SourceError
from fleetcast.schedulers.adapter import Door, Seen, Write, WriteOutcome
from fleetcast.schedulers.slurm import (
    COMMENT,
    DRAIN,
    EXTRA,
    FEATURE,
    FEATURES,
    JOB,
    OURS,
    PENDING,
    THEIRS,
    SlurmMarks,
    SlurmSettings,
)
from fleetcast.service.plugins import read_options

logger = logging.getLogger(__name__)

BATCH = 5_000
MOST_S = 20.0  # for a batch; what is left then is tried again
FRESH_S = 1.0  # what was read longer ago is read again before the next write
LONGEST_PAUSE_S = 60.0
RISK = "risk_level"  # the key of ours in Extra
_JOB_ID = re.compile(r"[0-9]+(?:_[0-9]+)?(?:\+[0-9]+)?")


class SlurmDoorOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of the adapter: what it writes, and how it reaches Slurm.

    It uses slurmrestd if `url` is set, and Slurm's commands otherwise. `requeue`: of earlier versions, and refused.
    """

    drain: bool = True
    features: bool = True
    extra: bool = False
    comments: bool = False
    requeue: bool = False
    prefix: str = ""
    zone: str = "UTC"
    shell: list[str] = []
    url: str = ""
    api_version: str = ""
    user: str = ""
    token_file: str = ""
    timeout_s: float = 3.0


def make_slurm_door(options: Mapping[str, Any]) -> Door:
    """Make the built-in adapter `slurm`. Raises ConfigError."""
    given = read_options(options, SlurmDoorOptions)
    _check_options(given)
    try:
        zone = ZoneInfo(given.zone)
    except (OSError, ValueError, LookupError):
        raise ConfigError(f"options.zone = {given.zone!r}: no such time zone; give one like Europe/Berlin") from None
    aims = SlurmSettings(given.drain, given.features, given.extra, given.comments, given.prefix, zone)
    if given.url:
        account = SlurmRestAccount(given.url, given.user, given.token_file, given.api_version)
        control: SlurmControl = SlurmRestControl(account, given.timeout_s)
    else:
        control = ScontrolCommands(given.shell, given.timeout_s)
    port = SlurmPort(control, with_jobs=given.comments)
    return Door(SlurmMarks(aims), port, needs_starts=given.comments, batch=BATCH)


def _check_options(given: SlurmDoorOptions) -> None:
    """Check the options. Raises ConfigError if they are invalid."""
    if not 0.1 <= given.timeout_s <= 10:
        raise ConfigError(f"options.timeout_s = {given.timeout_s:g}: must be 0.1 to 10")
    if given.url and not re.match(r"https?://.|unix:/", given.url):
        raise ConfigError(f"options.url = {given.url!r}: must be like http://HOST:6820 or unix:/run/slurmrestd.sock")
    if given.url and given.shell:
        raise ConfigError("options.shell: there are no commands where `url` is set; give one of the two")
    if given.requeue:
        raise ConfigError(
            "options.requeue: a requeue is an action on a running job now; leave the option out, add "
            '[[adapters.executor]] use = "slurm" with mode = "write", and set [policy] reclaim = "act" in the file of '
            "queues (docs/schedulers/slurm.md)"
        )
    if given.api_version:
        found = re.fullmatch(r"v(\d+)\.(\d+)\.(\d+)", given.api_version)
        if found is None or tuple(int(part) for part in found.groups()) < FIRST_WITH_NODES:
            raise ConfigError(f"options.api_version = {given.api_version!r}: must be v0.0.40 or newer, or empty")


@dataclass(slots=True)
class _Snapshot:
    nodes: dict[str, ControlledNode] = field(default_factory=dict)
    jobs: dict[str, ControlledJob] = field(default_factory=dict)

    def read_values(self, key: str) -> Mapping[str, str] | None:
        """Return the values of a node or job, as in Seen. Returns None if Slurm does not have it."""
        if key.startswith(JOB):
            job = self.jobs.get(key.removeprefix(JOB))
            return read_job_fields(job) if job else None
        node = self.nodes.get(key)
        return read_node_fields(node) if node else None

    def allows(self, write: Write) -> bool:
        """Return whether a field still has the value that the adapter read."""
        values = self.read_values(write.key)
        if values is None or values.get(write.field) != write.seen or THEIRS + write.field in values:
            return False
        return write.field != COMMENT or write.value is None or PENDING in values


class SlurmPort:
    """The port that reads Slurm's nodes and jobs, and writes the adapter's changes to them.

    After each failure, it waits longer before it polls Slurm again, at most a minute. Until the next poll,
    every read fails at once with SourceError.
    """

    def __init__(self, control: SlurmControl, *, with_jobs: bool = False) -> None:
        self._control, self._with_jobs = control, with_jobs
        self._failures, self._until_s, self._error = 0, 0.0, ""

    async def read(self) -> Seen:
        shot = await self._read_slurm(self._with_jobs)
        return {
            **{name: read_node_fields(node) for name, node in shot.nodes.items()},
            **{JOB + name: read_job_fields(job) for name, job in shot.jobs.items()},
        }

    async def write(self, batch: Sequence[Write]) -> Sequence[WriteOutcome]:
        outcomes: dict[int, WriteOutcome] = {}
        due = dict(enumerate(batch))
        ends_s = asyncio.get_running_loop().time() + MOST_S
        try:
            while due and asyncio.get_running_loop().time() < ends_s:
                outcomes |= await self._write_while_fresh(due)
                due = {at: write for at, write in due.items() if at not in outcomes}
        except SourceError:
            pass  # what is not done is tried again later
        return [outcomes.get(at, WriteOutcome.UNREACHABLE) for at in range(len(batch))]

    async def _write_while_fresh(self, due: Mapping[int, Write]) -> dict[int, WriteOutcome]:
        """Carry out writes while the snapshot is fresh, but at least one, and return their outcomes.

        After a failed call, the remaining writes wait for a later step. Raises SourceError if Slurm is
        unreadable.
        """
        shot = await self._read_slurm(any(_is_job(write) for write in due.values()))
        outcomes = {at: WriteOutcome.CONFLICT for at, write in due.items() if not shot.allows(write)}
        ends_s = asyncio.get_running_loop().time() + FRESH_S
        for call in _group_into_calls({at: write for at, write in due.items() if at not in outcomes}, shot.nodes):
            try:
                outcomes |= dict.fromkeys(call.places, await self._execute_call(call))
            except SourceError as error:
                self._record_failure(error)
                break
            if asyncio.get_running_loop().time() > ends_s:
                break
        return outcomes

    async def close(self) -> None:
        await self._control.close()

    async def _read_slurm(self, with_jobs: bool) -> _Snapshot:
        """Read Slurm's nodes, and its jobs if `with_jobs`. Raises SourceError."""
        if asyncio.get_running_loop().time() < self._until_s:
            raise SourceError(self._error)
        try:
            nodes = await self._control.read_nodes()
            jobs = await self._control.read_jobs() if with_jobs else []
        except SourceError as error:
            self._record_failure(error)
            raise
        except SlurmRefused as error:
            raise SourceError(str(error)) from None
        self._failures, self._error = 0, ""
        known = {job.id: job for job in drop_ambiguous_rows(jobs, lambda job: job.id) if _JOB_ID.fullmatch(job.id)}
        return _Snapshot({node.name: node for node in drop_ambiguous_rows(nodes, lambda node: node.name)}, known)

    def _record_failure(self, error: SourceError) -> None:
        self._error = str(error)
        pause_s = min(2.0**self._failures, LONGEST_PAUSE_S)
        self._failures += 1
        self._until_s = asyncio.get_running_loop().time() + pause_s

    async def _execute_call(self, call: "_Call") -> WriteOutcome:
        """Execute a call to Slurm, and return its outcome. Raises SourceError."""
        try:
            if call.change is not None:
                await self._control.change_nodes(call.names, call.change)
            elif call.write is not None:
                await self._control.change_job(call.write.key.removeprefix(JOB), comment=call.write.value or "")
        except SlurmRefused as error:
            logger.warning("slurm: %s: %s", call.names[:3] or (call.write and call.write.key), error)
            return WriteOutcome.REFUSED
        return WriteOutcome.DONE


class _Call(NamedTuple):
    """One call to Slurm: a change, and the writes of the batch that it carries out.

    places: the indices of these writes in the batch. names: the nodes to change, empty for a job. write: the
    write to a job, None for nodes.
    """

    places: tuple[int, ...]
    names: tuple[str, ...]
    change: NodeChange | None
    write: Write | None = None


def _is_job(write: Write) -> bool:
    return write.key.startswith(JOB)


def _group_into_calls(due: Mapping[int, Write], nodes: Mapping[str, ControlledNode]) -> list[_Call]:
    """Group the writes into calls, in order of urgency.

    The order is: nodes with the same change together (drains first), then jobs.
    """
    groups: dict[NodeChange, list[int]] = {}
    for at, write in due.items():
        if not _is_job(write):
            groups.setdefault(_make_node_change(write, nodes[write.key]), []).append(at)
    order = sorted(groups.items(), key=lambda pair: pair[0].drain is None)
    calls = [_Call(tuple(places), tuple(due[at].key for at in places), change) for change, places in order]
    jobs = [_Call((at,), (), None, write) for at, write in due.items() if _is_job(write)]
    return [*calls, *jobs]


def _make_node_change(write: Write, node: ControlledNode) -> NodeChange:
    if write.field == DRAIN:
        return NodeChange(drain=write.value or "")
    if write.field == FEATURE:
        ours = (write.value,) if write.value else ()
        others = [tuple(name for name in held if name not in FEATURES) for held in (node.available, node.active)]
        return NodeChange(available=(*others[0], *ours), active=(*others[1], *ours))
    return NodeChange(extra=_set_risk_in_extra(node.extra, write.value))


def read_node_fields(node: ControlledNode) -> dict[str, str]:
    """Return field → value for the fields of a node that the port uses.

    >>> node = ControlledNode("n1", True, "[fleetcast] p", ("a", "risk_low"), ("risk_low",), '{"risk_level": 0}')
    >>> read_node_fields(node)
    {'drain': '[fleetcast] p', 'feature': 'risk_low', 'extra': '0'}
    >>> read_node_fields(ControlledNode("n2", True, "fan 3", ("risk_low", "risk_high"), (), "rack 7"))
    {'theirs: drain': 'fan 3', 'feature': 'risk_low,risk_high only available', 'theirs: extra': 'rack 7'}
    """
    values: dict[str, str] = {}
    is_ours = node.reason.startswith(OURS)
    if node.is_drained and is_ours:
        values[DRAIN] = node.reason
    elif node.is_drained or (node.reason and not is_ours):
        values[THEIRS + DRAIN] = node.reason
    held = [name for name in node.available if name in FEATURES]
    active = [name for name in node.active if name in FEATURES]
    if held or active:
        values[FEATURE] = ",".join(held) + ("" if held == active else " only available")
    values.update(_read_extra_fields(node.extra))
    return values


def _read_extra_fields(extra: str) -> dict[str, str]:
    if not extra:
        return {}
    held = _parse_object(extra)
    if held is None:
        return {THEIRS + EXTRA: extra}
    return {EXTRA: str(held[RISK])} if RISK in held else {}


def _parse_object(extra: str) -> dict[str, Any] | None:
    try:
        held = json.loads(extra)
    except (ValueError, RecursionError):
        return None
    return held if isinstance(held, dict) else None


def _set_risk_in_extra(extra: str, risk: str | None) -> str:
    """Return a node's Extra as JSON with a new risk. If `risk` is None, the result has none.

    >>> _set_risk_in_extra('{"rack": 7}', "2"), _set_risk_in_extra('{"rack": 7, "risk_level": 2}', None)
    ('{"rack": 7, "risk_level": 2}', '{"rack": 7}')
    """
    held = {key: value for key, value in (_parse_object(extra) or {}).items() if key != RISK}
    values_of = held if risk is None else {**held, RISK: int(risk)}
    return json.dumps(values_of) if values_of else ""


def read_job_fields(job: ControlledJob) -> dict[str, str]:
    """Return field → value for the fields of a job that the port uses.

    >>> read_job_fields(ControlledJob("7", "PENDING", comment="[fleetcast] start 2026-11-24T10:05"))
    {'comment': '[fleetcast] start 2026-11-24T10:05', 'pending': 'yes'}
    >>> read_job_fields(ControlledJob("7", "PENDING", 1, True, True, "mine"))
    {'theirs: comment': 'mine', 'pending': 'yes'}
    """
    values: dict[str, str] = {}
    if job.comment:
        values[COMMENT if job.comment.startswith(OURS) else THEIRS + COMMENT] = job.comment
    if job.state == "PENDING" and "_" not in job.id:
        values[PENDING] = "yes"
    return values
