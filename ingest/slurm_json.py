"""Slurm's JSON → jobs and nodes, in the shapes that its versions give it.

    22.05 (openapi v0.0.38)      "job_state": "RUNNING",   "time_limit": 5 | null,    "exit_code": 768
    24.11 (data_parser v0.0.42)  "job_state": ["RUNNING"], "time_limit": {"set": true, "infinite": false, "number": 5},
                                 "exit_code": {"status": ["SUCCESS"], "return_code": {…}, "signal": {…}}

`squeue --json` and slurmrestd's /slurm/…/jobs have one shape, `sacct --json` and /slurmdb/…/jobs another; nodes come
from `sinfo --json` (22.05), `scontrol show nodes --json` and /nodes, or as sinfo's groups (24.11). A record that cannot
be read costs itself.
"""

from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import msgspec

from fleet.errors import RecordError
from ingest.job_events import malformed
from ingest.slurm_fields import gpus, size_gib, tasks, tres, wait_status
from ingest.slurm_jobs import SlurmJob, each_task, job_id, node_list
from ingest.slurm_nodes import SlurmNode

MAX_SECONDS = 2**40
MAX_NUMBER = 2**53
Told = TypeVar("Told")


class Amount(msgspec.Struct, frozen=True):
    """A number of the newer shape; what is not set, or infinite, is None to us."""

    set: bool = True
    infinite: bool = False
    number: float | None = None


Number = float | str | Amount | None
Words = str | list[str] | None


class _Signal(msgspec.Struct, frozen=True):
    id: Number = None
    signal_id: Number = None


class _Exit(msgspec.Struct, frozen=True):
    return_code: Number = None
    signal: _Signal | None = None


class _Queued(msgspec.Struct, kw_only=True):
    """A job of slurmctld."""

    job_id: int
    job_state: Words = None
    array_job_id: Number = None
    array_task_id: Number = None
    array_task_string: str | None = None
    het_job_id: Number = None
    het_job_offset: Number = None
    restart_cnt: Number = None
    submit_time: Number = None
    start_time: Number = None
    end_time: Number = None
    resize_time: Number = None
    nodes: str | None = None
    node_count: Number = None
    gres_detail: list[str] | None = None
    tres_req_str: str | None = None
    tres_alloc_str: str | None = None
    tres_per_node: str | None = None
    user_name: str | None = None
    group_name: str | None = None
    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    name: str | None = None
    cluster: str | None = None
    priority: Number = None
    time_limit: Number = None
    cpus: Number = None
    state_reason: str | None = None
    state_description: str | None = None
    comment: str | None = None
    admin_comment: str | None = None
    system_comment: str | None = None
    exit_code: int | _Exit | None = None
    failed_node: str | None = None


class _Tres(msgspec.Struct, frozen=True):
    type: str = ""
    name: str | None = None
    count: int | None = None


class _TresLists(msgspec.Struct, frozen=True):
    allocated: list[_Tres] = []
    requested: list[_Tres] = []


class _Times(msgspec.Struct, frozen=True):
    submission: Number = None
    start: Number = None
    end: Number = None
    limit: Number = None


class _State(msgspec.Struct, frozen=True):
    current: Words = None
    reason: str | None = None


class _Pair(msgspec.Struct, frozen=True):
    job_id: Number = None
    task_id: Number = None
    task: str | None = None
    job_offset: Number = None


class _Comments(msgspec.Struct, frozen=True):
    administrator: str | None = None
    job: str | None = None
    system: str | None = None


class _Required(msgspec.Struct, frozen=True):
    cpus: Number = msgspec.field(default=None, name="CPUs")


class _Accounted(msgspec.Struct, kw_only=True):
    """A job of slurmdbd."""

    job_id: int
    state: _State = _State()
    array: _Pair = _Pair()
    het: _Pair = _Pair()
    restart_cnt: Number = None
    time: _Times = _Times()
    nodes: str | None = None
    allocation_nodes: Number = None
    tres: _TresLists = _TresLists()
    user: str | None = None
    group: str | None = None
    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    name: str | None = None
    cluster: str | None = None
    priority: Number = None
    required: _Required = _Required()
    comment: _Comments | str | None = None
    exit_code: int | _Exit | None = None
    failed_node: str | None = None


class _Node(msgspec.Struct, kw_only=True):
    name: str
    state: Words = None
    state_flags: list[str] | None = None
    reason: str | None = None
    reason_changed_at: Number = None
    gres: str | None = None


class _Names(msgspec.Struct, frozen=True):
    nodes: list[str] = []


class _Reason(msgspec.Struct, frozen=True):
    description: str | None = None
    time: Number = None


class _GroupState(msgspec.Struct, frozen=True):
    state: Words = None


class _Group(msgspec.Struct, kw_only=True):
    """Nodes of one partition in one state, as sinfo of 23.02 and later lists them."""

    nodes: _Names
    node: _GroupState = _GroupState()
    reason: _Reason | str | None = None


class _Error(msgspec.Struct, frozen=True):
    description: str | None = None
    error: str | None = None


class _Answer(msgspec.Struct):
    errors: list[_Error] | None = None
    jobs: list[msgspec.Raw] | None = None
    nodes: list[msgspec.Raw] | None = None
    sinfo: list[msgspec.Raw] | None = None


class Read(Generic[Told]):
    """What a text held: good records and errors."""

    __slots__ = ("bad", "rows")

    def __init__(self) -> None:
        self.rows: list[Told] = []
        self.bad: list[RecordError] = []

    def take(self, make: Callable[[], Iterable[Told]]) -> None:
        """The rows that `make` gives, or its error."""
        try:
            self.rows += make()
        except RecordError as error:
            self.bad.append(error.with_traceback(None))


_answer = msgspec.json.Decoder(_Answer).decode
_queued = msgspec.json.Decoder(_Queued).decode
_accounted = msgspec.json.Decoder(_Accounted).decode
_node = msgspec.json.Decoder(_Node).decode
_group = msgspec.json.Decoder(_Group).decode


def read_queue(body: bytes) -> Read[SlurmJob]:
    """Jobs of `squeue --json`. A body that is no such answer is one error."""
    return _read(body, "jobs", lambda raw: _of_queue(_typed(_queued, raw)))


def read_accounting(body: bytes) -> Read[SlurmJob]:
    """Jobs of `sacct --json`; their steps are not looked at."""
    return _read(body, "jobs", lambda raw: _of_accounting(_typed(_accounted, raw)))


def read_nodes(body: bytes) -> Read[SlurmNode]:
    """Nodes of `sinfo --json` or `scontrol show nodes --json`."""
    if b'"sinfo"' in body[:100_000] or b'"sinfo"' in body[-100_000:]:
        read = _read(body, "sinfo", lambda raw: _of_group(_typed(_group, raw)))
        if read.rows:
            return read
    return _read(body, "nodes", lambda raw: [_of_node(_typed(_node, raw))])


def _read(body: bytes, key: str, make: Callable[[msgspec.Raw], Iterable[Told]]) -> Read[Told]:
    read: Read[Told] = Read()
    try:
        answer = _answer(body)
    except (ValueError, RecursionError) as error:
        read.bad.append(malformed(error))
        return read
    records = getattr(answer, key)
    if not records:
        read.bad += [RecordError("slurm_error", f"{row.description}: {row.error}"[:300]) for row in answer.errors or ()]
    if records is None and not read.bad:
        read.bad.append(RecordError("missing_field", f"the answer has no list `{key}`"))
    for raw in records or ():
        read.take(lambda raw=raw: make(raw))  # type: ignore[misc]
    return read


def _typed(decode: Callable[[msgspec.Raw], Told], raw: msgspec.Raw) -> Told:
    try:
        return decode(raw)
    except (ValueError, RecursionError) as error:
        raise malformed(error, bytes(raw)) from None


def number(value: Number, most: float = MAX_NUMBER) -> int | None:
    """A whole number of either shape; None where it is not set, infinite, or out of 0..most."""
    found = (value.number if value.set and not value.infinite else None) if isinstance(value, Amount) else value
    if isinstance(found, str):
        return int(found) if found.isdecimal() and found.isascii() and len(found) < 16 else None
    return int(found) if found is not None and 0 <= found <= most else None


def _ms(value: Number) -> int | None:
    """A time; Slurm writes 0 where there is none."""
    seconds = number(value, MAX_SECONDS)
    return seconds * 1000 if seconds else None


def _words(value: Words) -> tuple[str, ...]:
    return () if value is None else (value,) if isinstance(value, str) else tuple(value)


def _upper(value: Words) -> tuple[str, ...]:
    return tuple(word.upper() for word in _words(value))


def _status(value: int | _Exit | None) -> tuple[int, int]:
    if not isinstance(value, _Exit):
        return wait_status(value or 0)
    signal = value.signal
    return number(value.return_code, 65_535) or 0, (
        number(signal.id, 255) or number(signal.signal_id, 255) or 0 if signal else 0
    )


def _limit_s(value: Number) -> float | None:
    minutes = number(value, MAX_SECONDS)
    return 60.0 * minutes if minutes else None


def _of_queue(row: _Queued) -> list[SlurmJob]:
    array, task = number(row.array_job_id) or 0, number(row.array_task_id)
    waiting = [] if task is not None or not array else tasks(row.array_task_string or "")
    asked, had = row.tres_req_str or "", row.tres_alloc_str or ""
    details = [gpus(text) for text in row.gres_detail or ()]
    total, kind, _ = max(gpus(had), gpus(asked), key=lambda found: found[0])
    per_node, kind_per_node, _ = gpus(row.tres_per_node or "")
    comments = (row.state_description, row.comment, row.admin_comment, row.system_comment)
    job = SlurmJob(
        id=job_id(row.job_id, (array, task), (number(row.het_job_id) or 0, number(row.het_job_offset) or 0)),
        states=_upper(row.job_state),
        attempt=(number(row.restart_cnt, 1e6) or 0) + 1,
        submit_ms=_ms(row.submit_time),
        start_ms=_ms(row.start_time),
        end_ms=_ms(row.end_time),
        resize_ms=_ms(row.resize_time),
        nodes=node_list(row.nodes or ""),
        node_count=number(row.node_count) or 0,
        gpus=total,
        gpus_per_node=per_node,
        gpu_kind=next((found[1] for found in details if found[1]), kind or kind_per_node),
        indices=tuple(found[2] for found in details),
        user=row.user_name or "",
        group=row.group_name or "",
        account=row.account or "",
        partition=row.partition or "",
        qos=row.qos or "",
        name=row.name or "",
        cluster=row.cluster or "",
        priority=number(row.priority) or 0,
        limit_s=_limit_s(row.time_limit),
        cpus=number(row.cpus),
        memory_gib=size_gib(tres(asked or had, "mem")),
        reason=row.state_reason or "",
        comment="; ".join(part for part in comments if part),
        status=_status(row.exit_code),
        failed_node=row.failed_node or "",
    )
    return each_task(job, array, waiting) if waiting else [job]


def _gpus_of(rows: list[_Tres]) -> tuple[int, str]:
    """(count, type) of the GPUs in a list of TRES, in which a typed count repeats the plain one."""
    named = [row for row in rows if row.type == "gres" and (row.name or "").partition(":")[0] == "gpu"]
    kinds = [(row.name or "").partition(":")[2] for row in named]
    return max((row.count or 0 for row in named), default=0), next((kind for kind in kinds if kind), "")


def _of_accounting(row: _Accounted) -> list[SlurmJob]:
    times = row.time
    asked, had = _gpus_of(row.tres.requested), _gpus_of(row.tres.allocated)
    total, kind = max(had, asked, key=lambda found: found[0])
    memory = next((found.count for found in row.tres.requested if found.type == "mem"), None)
    told = row.comment
    texts = (told.administrator, told.job, told.system) if isinstance(told, _Comments) else (told,)
    restarts = number(row.restart_cnt, 1e6)
    array, task = number(row.array.job_id) or 0, number(row.array.task_id)
    waiting = [] if task is not None or not array else tasks(row.array.task or "")
    job = SlurmJob(
        id=job_id(row.job_id, (array, task), (number(row.het.job_id) or 0, number(row.het.job_offset) or 0)),
        states=_upper(row.state.current),
        attempt=None if restarts is None else restarts + 1,
        submit_ms=_ms(times.submission),
        start_ms=_ms(times.start),
        end_ms=_ms(times.end),
        nodes=node_list(row.nodes or ""),
        node_count=number(row.allocation_nodes) or 0,
        gpus=total,
        gpu_kind=kind or asked[1],
        user=row.user or "",
        group=row.group or "",
        account=row.account or "",
        partition=row.partition or "",
        qos=row.qos or "",
        name=row.name or "",
        cluster=row.cluster or "",
        priority=number(row.priority) or 0,
        limit_s=_limit_s(times.limit),
        cpus=number(row.required.cpus),
        memory_gib=round(memory / 1024, 3) if memory and 0 < memory < 2**40 else None,
        reason=row.state.reason or "",
        comment="; ".join(part for part in texts if part),
        status=_status(row.exit_code),
        failed_node=row.failed_node or "",
    )
    return each_task(job, array, waiting) if waiting else [job]


def _of_node(row: _Node) -> SlurmNode:
    told_ms = _ms(row.reason_changed_at)
    states = (*_upper(row.state), *_upper(row.state_flags))
    return SlurmNode(row.name, states, row.reason or "", told_ms, gpus(row.gres or "")[0])


def _of_group(group: _Group) -> list[SlurmNode]:
    told = group.reason
    reason = told.description or "" if isinstance(told, _Reason) else told or ""
    told_ms = _ms(told.time) if isinstance(told, _Reason) else None
    states = _upper(group.node.state)
    names: Any = (name for entry in group.nodes.nodes for name in node_list(entry))
    return [SlurmNode(name, states, reason, told_ms, 0) for name in names]
