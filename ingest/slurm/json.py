"""A reader of Slurm's JSON of all versions into jobs and nodes.

    22.05 (openapi v0.0.38)      "job_state": "RUNNING",   "time_limit": 5 | null,    "exit_code": 768
    24.11 (data_parser v0.0.42)  "job_state": ["RUNNING"], "time_limit": {"set": true, "infinite": false, "number": 5},
                                 "exit_code": {"status": ["SUCCESS"], "return_code": {…}, "signal": {…}}

`squeue --json` and slurmrestd's /slurm/…/jobs have one form. `sacct --json` and /slurmdb/…/jobs have
another. Nodes come from `sinfo --json` (22.05; in 24.11 in groups), `scontrol show nodes --json` and
/nodes.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

import msgspec

from fleetcast.fleet.errors import RecordError
from fleetcast.ingest.inbox.job_events import YEAR_2000_MS, make_malformed_error
from fleetcast.ingest.slurm.fields import (
    WaitingTasks,
    find_tres_amount,
    parse_size_gib,
    parse_waiting_tasks,
    split_wait_status,
)
from fleetcast.ingest.slurm.gres import make_resource_fields, read_gres
from fleetcast.ingest.slurm.jobs import SlurmJob, expand_node_list, format_job_id, split_array
from fleetcast.ingest.slurm.nodes import SlurmNode
from fleetcast.ingest.slurm.records import ReadRecords, replace_invalid_text
from fleetcast.ingest.slurm.shapes import (
    AccountedJob,
    Amount,
    Comments,
    Exit,
    NodeGroup,
    NodeInfo,
    Number,
    SlurmAnswer,
    SlurmQueuedJob,
    SlurmReason,
    Tres,
    Words,
)
from fleetcast.ingest.tally import count_unknown_fields

MAX_SECONDS = 2**40
MAX_NUMBER = 2**53
MAX_CPUS = 1_000_000
Parsed = TypeVar("Parsed")


_answer = msgspec.json.Decoder(SlurmAnswer).decode
_queued = msgspec.json.Decoder(SlurmQueuedJob).decode
_accounted = msgspec.json.Decoder(AccountedJob).decode
_node = msgspec.json.Decoder(NodeInfo).decode
_group = msgspec.json.Decoder(NodeGroup).decode


def decode_queued_jobs(body: bytes) -> ReadRecords[SlurmJob]:
    """Decode the jobs of `squeue --json`. A body of another form gives one error."""
    return report_cut_arrays(
        _read_records(body, "jobs", SlurmQueuedJob, lambda raw: _convert_queued_job(_decode_or_refuse(_queued, raw)))
    )


def decode_accounted_jobs(body: bytes) -> ReadRecords[SlurmJob]:
    """Decode the jobs of `sacct --json`, without their steps."""
    return report_cut_arrays(
        _read_records(
            body, "jobs", AccountedJob, lambda raw: _convert_accounted_job(_decode_or_refuse(_accounted, raw))
        )
    )


def report_cut_arrays(read: ReadRecords[SlurmJob]) -> ReadRecords[SlurmJob]:
    """Add an error for each array whose list of tasks is cut or unreadable, and return the records.

    Readable tasks count. An array without any readable task counts as one task.
    """
    cut = "Slurm listed only some of its tasks; set SLURM_BITSTR_LEN=0 where its commands run"
    unread = "its list of tasks is no list of numbers such as 0-99:2, so it counts as one task"
    for job in read.rows:
        if job.is_cut:
            array, _, task = job.id.partition("_")
            read.bad.append(RecordError("array_cut", f"array {array}: {cut if task else unread}"))
    return read


def read_nodes(body: bytes) -> ReadRecords[SlurmNode]:
    """Decode the nodes of `sinfo --json` or `scontrol show nodes --json`."""
    if b'"sinfo"' in body[:100_000] or b'"sinfo"' in body[-100_000:]:
        read = _read_records(body, "sinfo", NodeGroup, lambda raw: _convert_node_group(_decode_or_refuse(_group, raw)))
        if read.rows:
            return read
    return _read_records(body, "nodes", NodeInfo, lambda raw: _convert_node(_decode_or_refuse(_node, raw)))


def _read_records(
    body: bytes, key: str, kind: type[msgspec.Struct], make: Callable[[bytes], Iterable[Parsed]]
) -> ReadRecords[Parsed]:
    read: ReadRecords[Parsed] = ReadRecords()
    try:
        answer = _answer(body)
    except (ValueError, RecursionError) as error:
        mended = replace_invalid_text(body)
        if mended is None:
            read.bad.append(make_malformed_error(error, body, _answer))
            return read
        read = _read_records(mended, key, kind, make)
        read.replaced += 1
        return read
    records = getattr(answer, key)
    if not records:
        read.bad += [RecordError("slurm_error", f"{row.description}: {row.error}"[:300]) for row in answer.errors or ()]
    if records is None and not read.bad:
        read.bad.append(RecordError("missing_field", f"the answer has no list `{key}`"))
    for raw in records or ():
        read.parse_json(bytes(raw), make)
        read.unknown_fields += count_unknown_fields(bytes(raw), kind)
    return read


def _decode_or_refuse(decode: Callable[[bytes], Parsed], raw: bytes) -> Parsed:
    try:
        return decode(raw)
    except (ValueError, RecursionError) as error:
        raise make_malformed_error(error, raw, decode) from None


def parse_number(value: Number, most: float = MAX_NUMBER) -> int | None:
    """Return a whole number in the older or newer form. Returns None if it is not set, infinite, or outside 0..most."""
    found = (value.number if value.set and not value.infinite else None) if isinstance(value, Amount) else value
    if isinstance(found, str):
        return int(found) if found.isdecimal() and found.isascii() and len(found) < 16 else None
    return int(found) if found is not None and 0 <= found <= most else None


def _parse_time_ms(value: Number) -> int | None:
    """Convert Unix s to Unix ms. Returns None for 0 and NO_VAL, with which Slurm marks an unknown time."""
    seconds = parse_number(value, MAX_SECONDS)
    return seconds * 1000 if seconds and seconds * 1000 >= YEAR_2000_MS else None


def _list_words(value: Words) -> tuple[str, ...]:
    return () if value is None else (value,) if isinstance(value, str) else tuple(value)


def _uppercase_words(value: Words) -> tuple[str, ...]:
    return tuple(word.upper() for word in _list_words(value))


def _parse_status(value: int | Exit | None) -> tuple[int, int]:
    if not isinstance(value, Exit):
        return split_wait_status(value or 0)
    signal = value.signal
    return parse_number(value.return_code, 65_535) or 0, (
        parse_number(signal.id, 255) or parse_number(signal.signal_id, 255) or 0 if signal else 0
    )


def _parse_limit_s(value: Number) -> float | None:
    minutes = parse_number(value, MAX_SECONDS)
    return 60.0 * minutes if minutes else None


def _convert_queued_job(row: SlurmQueuedJob) -> list[SlurmJob]:
    array, task, text = (
        parse_number(row.array_job_id) or 0,
        parse_number(row.array_task_id),
        row.array_task_string or "",
    )
    waiting = WaitingTasks() if task is not None or not array else parse_waiting_tasks(text)
    asked, had = row.tres_req_str or "", row.tres_alloc_str or ""
    comments = (row.state_description, row.comment, row.admin_comment, row.system_comment)
    job = SlurmJob(
        id=format_job_id(
            row.job_id, (array, task), (parse_number(row.het_job_id) or 0, parse_number(row.het_job_offset) or 0)
        ),
        states=_uppercase_words(row.job_state),
        attempt=(parse_number(row.restart_cnt, 1e6) or 0) + 1,
        submit_ms=_parse_time_ms(row.submit_time),
        start_ms=_parse_time_ms(row.start_time),
        end_ms=_parse_time_ms(row.end_time),
        resize_ms=_parse_time_ms(row.resize_time),
        nodes=expand_node_list(row.nodes or ""),
        node_count=parse_number(row.node_count) or 0,
        **make_resource_fields(
            had,
            asked,
            per_node=row.tres_per_node or "",
            per_job=row.tres_per_job or "",
            per_task=row.tres_per_task or "",
            tasks=parse_number(row.tasks),
            details=row.gres_detail or (),
        ),
        user=row.user_name or "",
        group=row.group_name or "",
        account=row.account or "",
        partition=row.partition or "",
        qos=row.qos or "",
        name=row.name or "",
        cluster=row.cluster or "",
        priority=parse_number(row.priority),
        limit_s=_parse_limit_s(row.time_limit),
        cpus=parse_number(row.cpus),
        memory_gib=parse_size_gib(find_tres_amount(asked or had, "mem")),
        reason=row.state_reason or "",
        comment="; ".join(part for part in comments if part),
        status=_parse_status(row.exit_code),
        failed_node=row.failed_node or "",
    )
    return split_array(job, array, waiting) if text and array and task is None else [job]


def _format_gpu_tres(rows: list[Tres]) -> str:
    """Format the GPUs of a list of TRES like Slurm's text.

    >>> _format_gpu_tres([Tres("gres", "gpu:a100", 4), Tres("cpu", None, 2)])
    'gres/gpu:a100=4'
    """
    return ",".join(f"gres/{row.name}={row.count or 0}" for row in rows if row.type == "gres" and row.name)


def _convert_accounted_job(row: AccountedJob) -> list[SlurmJob]:
    times = row.time
    memory = next((found.count for found in row.tres.requested if found.type == "mem"), None)
    stated = row.comment
    texts = (stated.administrator, stated.job, stated.system) if isinstance(stated, Comments) else (stated,)
    restarts = parse_number(row.restart_cnt, 1e6)
    array, task, text = parse_number(row.array.job_id) or 0, parse_number(row.array.task_id), row.array.task or ""
    waiting = WaitingTasks() if task is not None or not array else parse_waiting_tasks(text)
    job = SlurmJob(
        id=format_job_id(
            row.job_id, (array, task), (parse_number(row.het.job_id) or 0, parse_number(row.het.job_offset) or 0)
        ),
        states=_uppercase_words(row.state.current),
        attempt=None if restarts is None else restarts + 1,
        submit_ms=_parse_time_ms(times.submission),
        start_ms=_parse_time_ms(times.start),
        end_ms=_parse_time_ms(times.end),
        nodes=expand_node_list(row.nodes or ""),
        node_count=parse_number(row.allocation_nodes) or 0,
        **make_resource_fields(_format_gpu_tres(row.tres.allocated), _format_gpu_tres(row.tres.requested)),
        user=row.user or "",
        group=row.group or "",
        account=row.account or "",
        partition=row.partition or "",
        qos=row.qos or "",
        name=row.name or "",
        cluster=row.cluster or "",
        priority=parse_number(row.priority),
        limit_s=_parse_limit_s(times.limit),
        cpus=parse_number(row.required.cpus),
        memory_gib=round(memory / 1024, 3) if memory and 0 < memory < 2**40 else None,
        reason=row.state.reason or "",
        comment="; ".join(part for part in texts if part),
        status=_parse_status(row.exit_code),
        failed_node=row.failed_node or "",
    )
    return split_array(job, array, waiting) if text and array and task is None else [job]


def _convert_node(row: NodeInfo) -> list[SlurmNode]:
    stated_ms = _parse_time_ms(row.reason_changed_at)
    states = (*_uppercase_words(row.state), *_uppercase_words(row.state_flags))
    gres = read_gres(row.gres or "")
    one = SlurmNode(
        name="",
        states=states,
        reason=row.reason or "",
        reason_ms=stated_ms,
        gres=gres,
        reservation=row.reservation or "",
        other_names=tuple(name for name in (row.hostname, row.address) if name),
        cpus=parse_number(row.cpus, MAX_CPUS) or 0,
        memory_gib=round((parse_number(row.real_memory) or 0) / 1024, 3),
    )
    names = expand_node_list(row.name)
    return [replace(one, name=name) for name in names] if len(names) == 1 else _copy_node_per_name(one, names)


def _copy_node_per_name(one: SlurmNode, names: Iterable[str]) -> list[SlurmNode]:
    """Return a copy of a record for each node name.

    The copies lack the record's other names, which fit only one node.
    """
    return [replace(one, name=name, other_names=()) for name in names]


def _convert_node_group(group: NodeGroup) -> list[SlurmNode]:
    stated = group.reason
    reason = stated.description or "" if isinstance(stated, SlurmReason) else stated or ""
    stated_ms = _parse_time_ms(stated.time) if isinstance(stated, SlurmReason) else None
    states = _uppercase_words(group.node.state)
    names, hosts, addresses = (
        [name for entry in entries for name in expand_node_list(entry)]
        for entries in (group.nodes.nodes, group.nodes.hostnames, group.nodes.addresses)
    )
    gres = read_gres(group.gres.total or "")
    # sinfo sorts the names of a group, but neither its hosts nor its addresses: only a single node is sure of its host.
    others = (*hosts, *addresses) if len(names) == len(hosts) == 1 else ()
    return [SlurmNode(name, states, reason, stated_ms, gres, other_names=others) for name in names]
