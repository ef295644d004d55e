"""A reader of Slurm's text with separators: `sacct -P`, `squeue -O`, `sinfo -O`, with a header line.

Real outputs are broken. If a name or comment holds a newline, lines are joined until the record is
complete. If a complete line follows first, the collected parts are dropped. A name or comment may also hold
the separator. If the last column is a name, this column then gets the rest of the line. Otherwise the
record is bad (`field_count`). Bytes that are not UTF-8 are replaced. If a column occurs twice, the
first one counts. The separator may be `|#`. Numbers may be `N/A`. Steps (`7.batch`) are not jobs.

A name can also hold a whole line that looks like another job. So if `squeue` shows an id more than
once, all lines with this id are dropped. Our own commands leave the names out of these lines
(`clients/slurm.py`).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import tzinfo
from typing import TypeVar

from fleetcast.fleet.errors import RecordError
from fleetcast.ingest.slurm.failures import ENDED
from fleetcast.ingest.slurm.fields import (
    find_tres_amount,
    parse_exit_code,
    parse_limit_s,
    parse_size_gib,
    parse_time_ms,
    parse_waiting_tasks,
    split_wait_status,
)
from fleetcast.ingest.slurm.gres import make_resource_fields, read_gres
from fleetcast.ingest.slurm.jobs import HOLDS, WAITS, SlurmJob, expand_node_list, split_array
from fleetcast.ingest.slurm.json import report_cut_arrays
from fleetcast.ingest.slurm.nodes import SlurmNode
from fleetcast.ingest.slurm.records import ReadRecords, count_invalid_lines

MOST_LINES = 64  # of one record
FREE_TEXT = ("JobName", "NAME", "REASON", "Comment")
_FLAGS = {
    "*": "NOT_RESPONDING",
    "~": "POWERED_DOWN",
    "#": "POWERING_UP",
    "!": "POWER_DOWN",
    "%": "POWERING_DOWN",
    "$": "MAINTENANCE",
    "@": "REBOOT",
    "^": "REBOOT",
    "-": "PLANNED",
}
_SHORT = {
    **{"ALLOC": "ALLOCATED", "COMP": "COMPLETING", "DRNG": "DRAINING", "MAINT": "MAINTENANCE", "MIX": "MIXED"},
    **{"RESV": "RESERVED", "PLND": "PLANNED", "FAILG": "FAILING", "POW_DN": "POWERING_DOWN", "POW_UP": "POWERING_UP"},
    **{"UNK": "UNKNOWN", "FUTR": "FUTURE", "INVAL": "INVALID_REG", "BOOT": "REBOOT", "PLANNED": "PLANNED"},
}

Row = Mapping[str, str]
Parsed = TypeVar("Parsed")


def read_jobs(body: bytes, zone: tzinfo | None = None) -> ReadRecords[SlurmJob]:
    """Read the jobs of `sacct -P` or `squeue -O` with a header.

    `zone`: the time zone of their local times.
    """
    read = report_cut_arrays(_read_records(body, ("JobID", "JOBID"), lambda row: _make_jobs(row, zone)))
    if b"JOBID" in body[:4096].lstrip().partition(b"\n")[0]:  # of squeue; accounts have a line an attempt
        _drop_doubled_jobs(read)
    return read


def _drop_doubled_jobs(read: ReadRecords[SlurmJob]) -> None:
    """Drop all records of each id that occurs more than once.

    One of the records is the free text of a user, such as a job name. Nothing shows which one it is.
    """
    counts = Counter(job.id for job in read.rows)
    read.doubled = {name for name, count in counts.items() if count > 1}
    if read.doubled:
        read.rows = [job for job in read.rows if job.id not in read.doubled]
        read.bad += [RecordError("doubled", f"job {name} is in {counts[name]} lines") for name in sorted(read.doubled)]


def read_nodes(body: bytes, zone: tzinfo | None = None) -> ReadRecords[SlurmNode]:
    """Read the nodes of `sinfo -N` with a header. A node in two partitions is returned once."""
    read = _read_records(body, ("NODELIST", "HOSTNAMES"), lambda row: _make_nodes(row, zone))
    read.rows = list({node.name: node for node in reversed(read.rows)}.values())[::-1]
    return read


def _read_records(body: bytes, keys: tuple[str, ...], make: Callable[[Row], list[Parsed]]) -> ReadRecords[Parsed]:
    read: ReadRecords[Parsed] = ReadRecords()
    read.replaced = count_invalid_lines(body)
    for row in _split_rows(body, keys):
        if isinstance(row, RecordError):
            read.bad.append(row)
        else:
            read.add_rows(lambda row=row: make(row))  # type: ignore[misc]
    return read


def _split_rows(body: bytes, keys: tuple[str, ...]) -> Iterator[Row | RecordError]:
    """Yield each record as column → text, or an error.

    A header without any of `keys` gives a single error.
    """
    lines = body.decode("utf-8", "replace").replace("\r\n", "\n").split("\n")
    start = next((at for at, line in enumerate(lines) if line.strip()), len(lines))
    if start == len(lines):
        return
    separator = "|#" if "|#" in lines[start] else "|"
    names = [name.strip() for name in lines[start].split(separator)]
    if not set(keys) & set(names):
        yield RecordError("no_header", f"{lines[start][:80]!r} names no column {' or '.join(keys)}")
        return
    yield from _join_lines(lines[start + 1 :], names, separator)


def _join_lines(lines: list[str], names: list[str], separator: str) -> Iterator[Row | RecordError]:
    """Join lines until a record has as many columns as the header, and yield the records."""
    most, held, size = len(names) - 1, "", 0
    ends_free = next((name for name in reversed(names) if name), "") in FREE_TEXT
    for line in lines:
        count = line.count(separator)
        if (size and count >= most) or size >= MOST_LINES:  # whole by itself: what was held will never be
            yield RecordError("field_count", f"{held.count(separator) + 1} instead of {most + 1}: {held[:80]!r}")
            held, size = "", 0
        if not size and (not line.strip() or (ends_free and not count)):  # the rest of the name before
            continue
        held, size = (f"{held} {line}" if size else line), size + 1
        if held.count(separator) >= most:
            yield _parse_fields(held, names, separator)
            held, size = "", 0
    if held.strip():
        yield RecordError("field_count", f"{held.count(separator) + 1} instead of {most + 1}: {held[:80]!r}")


def _parse_fields(line: str, names: list[str], separator: str) -> Row | RecordError:
    values = line.split(separator)
    if names[-1] == "":  # `squeue -O` ends each line with a separator
        names, values = names[:-1], values[: -1 if values[-1] == "" else None]
    while len(values) > len(names) and not values[-1].strip():
        values.pop()
    if len(values) > len(names) and names[-1] in FREE_TEXT:
        values[len(names) - 1 :] = [separator.join(values[len(names) - 1 :])]
    if len(values) != len(names):
        return RecordError("field_count", f"{len(values)} instead of {len(names)}: {line[:80]!r}")
    return dict(zip(reversed(names), (value.strip() for value in reversed(values)), strict=True))


def _find_first_value(row: Row, *names: str) -> str:
    return next((row[name] for name in names if row.get(name)), "")


def _make_jobs(row: Row, zone: tzinfo | None) -> list[SlurmJob]:
    """Return the job of a line, or no job if the line is a step.

    A waiting array in one line gives a job for each task.
    """
    name = _find_first_value(row, "JobID", "JOBID")
    if "." in name.partition("[")[0]:  # in brackets, dots end a list of tasks that Slurm cut
        return []
    asked, had = _find_first_value(row, "ReqTRES"), _find_first_value(row, "AllocTRES", "TRES_ALLOC")
    resources = make_resource_fields(
        had or _find_first_value(row, "AllocGRES"),
        asked,
        per_node=_find_first_value(row, "TRES_PER_NODE", "ReqGRES"),
        per_job=_find_first_value(row, "TRES_PER_JOB"),
        per_task=_find_first_value(row, "TRES_PER_TASK"),
        tasks=_parse_whole_number(_find_first_value(row, "TASKS")),
    )
    restarts = _parse_whole_number(_find_first_value(row, "RESTART_COUNT", "Restarts"))
    job = SlurmJob(
        id=name,
        states=_parse_states(_find_first_value(row, "State", "STATE")),
        attempt=None if restarts is None else restarts + 1,
        submit_ms=parse_time_ms(_find_first_value(row, "Submit", "SUBMIT_TIME"), zone),
        start_ms=parse_time_ms(_find_first_value(row, "Start", "START_TIME"), zone),
        end_ms=parse_time_ms(_find_first_value(row, "End", "END_TIME"), zone),
        resize_ms=parse_time_ms(_find_first_value(row, "RESIZE_TIME"), zone),
        nodes=expand_node_list(_find_first_value(row, "NodeList", "NODELIST")),
        node_count=_parse_whole_number(_find_first_value(row, "NNodes", "ReqNodes", "NODES")) or 0,
        **resources,
        user=_find_first_value(row, "User", "USER"),
        group=_find_first_value(row, "Group", "GROUP"),
        account=_find_first_value(row, "Account", "ACCOUNT"),
        partition=_find_first_value(row, "Partition", "PARTITION"),
        qos=_find_first_value(row, "QOS"),
        name=_find_first_value(row, "JobName", "NAME"),
        cluster=_find_first_value(row, "Cluster", "CLUSTER"),
        priority=_parse_whole_number(_find_first_value(row, "Priority", "PRIORITY")),
        limit_s=parse_limit_s(_find_first_value(row, "TimelimitRaw", "Timelimit", "TIME_LIMIT")),
        cpus=_parse_whole_number(_find_first_value(row, "ReqCPUS", "CPUS")),
        memory_gib=parse_size_gib(find_tres_amount(asked or had, "mem")),
        reason=_find_first_value(row, "Reason", "REASON"),
        comment="; ".join(row[name] for name in ("Comment", "AdminComment", "SystemComment") if row.get(name)),
        status=_parse_status(_find_first_value(row, "ExitCode", "EXIT_CODE")),
    )
    array, _, waiting = name.partition("_")
    if waiting.startswith("[") and array.isdecimal() and len(array) < 16:
        return split_array(job, int(array), parse_waiting_tasks(waiting))
    return [job]


def _parse_whole_number(text: str) -> int | None:
    return int(text) if text.isdecimal() and text.isascii() and len(text) < 16 else None


def _parse_status(text: str) -> tuple[int, int]:
    return parse_exit_code(text) if ":" in text else split_wait_status(_parse_whole_number(text) or 0)


def _parse_states(text: str) -> tuple[str, ...]:
    """Return the states in a text, the base state first, then flags.

    >>> [_parse_states(value) for value in ("CANCELLED by 0", "idle+drain", "drng*", "OUT_OF_ME+")]
    [('CANCELLED',), ('IDLE', 'DRAIN'), ('DRAINING', 'NOT_RESPONDING'), ('OUT_OF_MEMORY',)]
    """
    words = text.partition(" ")[0].upper()
    if words.endswith("+"):  # sacct cuts a long word so
        words = next((state for state in sorted(ENDED | HOLDS | WAITS) if state.startswith(words[:-1])), words)
    bare = words.rstrip("".join(_FLAGS))
    flags = tuple(_FLAGS[mark] for mark in words[len(bare) :])
    return (*(_SHORT.get(part, part) for part in bare.split("+") if part), *flags)


def _make_nodes(row: Row, zone: tzinfo | None) -> list[SlurmNode]:
    names = expand_node_list(_find_first_value(row, "NODELIST", "HOSTNAMES"))
    states = _parse_states(_find_first_value(row, "STATECOMPLETE", "STATE"))
    reason = _find_first_value(row, "REASON")
    stated_ms = parse_time_ms(_find_first_value(row, "TIMESTAMP"), zone)
    gres = read_gres(_find_first_value(row, "GRES"))
    others = [row[key] for key in ("HOSTNAMES", "NODE_ADDR") if row.get(key)] if len(names) == 1 else []
    return [
        SlurmNode(
            name=name,
            states=states,
            reason="" if reason == "none" else reason,
            reason_ms=stated_ms,
            gres=gres,
            other_names=tuple(others),
            cpus=_parse_whole_number(_find_first_value(row, "CPUS")) or 0,
            memory_gib=round((_parse_whole_number(_find_first_value(row, "MEMORY")) or 0) / 1024, 3),
        )
        for name in names
    ]
