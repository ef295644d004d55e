"""A reader of pushed Slurm data: jobs from jobcomp plugins, and environments of prologs and epilogs.

    jobcomp/elasticsearch, /kafka   {"jobid": 7, "state": "FAILED", "@end": "2026-11-21T17:03:39", …}, times in UTC
    jobcomp/script                  the environment of the script: JOBID=7, JOBSTATE=FAILED, END=1795280721, …
    jobcomp/filetxt                 JobId=7 UserId=ada(1) Name=x JobState=FAILED …, local times
    PrologSlurmctld, EpilogSlurmctld  SLURM_SCRIPT_CONTEXT=epilog_slurmctld, SLURM_JOB_ID=7, …: now it starts, or ends
    squeue --json                   as the source reads it

A job's name can hold line breaks and keys of other records. `env -0` ends each variable with a NUL, which
no value can hold. If only lines or blanks divide a record, it is refused if a key occurs twice. An
array's task or a part of a heterogeneous job is also refused if it has variables of free text, because its
id might be a part of such a text.

A requeued job completes as PENDING. Records omit restarts: `Attempts` distinguishes attempts by their
time of submission.
"""

import re
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, tzinfo

import msgspec

from fleetcast.fleet.errors import RecordError
from fleetcast.ingest.inbox.event_body import split_body
from fleetcast.ingest.inbox.job_events import make_malformed_error
from fleetcast.ingest.slurm.fields import parse_exit_code, parse_limit_s, parse_time_ms, split_wait_status
from fleetcast.ingest.slurm.gres import make_resource_fields
from fleetcast.ingest.slurm.jobs import SlurmJob, expand_node_list, format_job_id
from fleetcast.ingest.slurm.json import decode_queued_jobs, parse_number
from fleetcast.ingest.slurm.records import ReadRecords
from fleetcast.ingest.slurm.shapes import Number

MAX_RECORDS = 10_000
MAX_JOBS = 10_000
MAX_ATTEMPTS = 1_000  # of one job
_KEYS = (
    *("JobId", "ArrayJobId", "ArrayTaskId", "HetJobId", "HetJobOffset", "UserId", "GroupId", "Name", "JobState"),
    *("Partition", "TimeLimit", "StartTime", "EndTime", "NodeList", "NodeCnt", "ProcCnt", "WorkDir", "ReservationName"),
    *("Tres", "Account", "QOS", "WcKey", "Cluster", "SubmitTime", "EligibleTime", "DerivedExitCode", "ExitCode"),
)
_SCRIPT_NAMES = {  # where jobcomp/script has another name than the capitals of filetxt's
    **{"SubmitTime": "SUBMIT", "StartTime": "START", "EndTime": "END", "NodeList": "NODES", "ProcCnt": "PROCS"},
    **{"UserId": "USERNAME", "GroupId": "GROUPNAME", "Name": "JOBNAME", "TimeLimit": "LIMIT"},
}
_OF_USERS = ("JOBNAME", "ACCOUNT", "WCKEY", "WORK_DIR", "COMMENT", "SLURM_JOB_NAME", "SLURM_JOB_ACCOUNT")
_OF_PARTS = re.compile(r"(?:SLURM_)?(?:ARRAY|HET)_?(?:JOB|TASK)_?(?:ID|OFFSET)")
_PAIR = re.compile(rf"(?:^|(?<= ))({'|'.join(_KEYS)})=")


class _CompletedJob(msgspec.Struct, kw_only=True):
    """A completed job as jobcomp/elasticsearch or jobcomp/kafka writes it."""

    jobid: Number
    state: str
    submit: str = msgspec.field(default="", name="@submit")
    start: str = msgspec.field(default="", name="@start")
    end: str = msgspec.field(default="", name="@end")
    array_job_id: Number = None
    array_task_id: Number = None
    het_job_id: Number = None
    het_job_offset: Number = None
    username: str | None = None
    groupname: str | None = None
    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    job_name: str | None = None
    cluster: str | None = None
    nodes: str | None = None
    total_nodes: Number = None
    total_cpus: Number = None
    time_limit: Number = None
    tres_req: str | None = None
    tres_alloc: str | None = None
    exit_code: str | int | None = None
    state_reason_prev: str | None = None


_completed = msgspec.json.Decoder(_CompletedJob).decode


def read_completions(body: bytes, now_ms: int, zone: tzinfo | None = UTC) -> ReadRecords[SlurmJob]:
    """Read the jobs of a pushed body in any of the forms.

    `zone`: the time zone of jobcomp/filetxt's local times.
    """
    read: ReadRecords[SlurmJob]
    text = body.strip()
    if b"\0" in text and text[:1] not in (b"{", b"["):
        read = ReadRecords()
        variables = text.decode("utf-8", "replace").split("\0")
        read.add_rows(lambda: [_parse_environment(variables, now_ms)])
        return read
    if text[:1] == b"{" and b'"jobs"' in text and b'"jobid"' not in text:
        return decode_queued_jobs(text)
    read = ReadRecords()
    if text[:1] in (b"{", b"["):
        for place, part in enumerate(split_body(text, {})):
            if place >= MAX_RECORDS:
                read.bad.append(RecordError("too_many", f"at most {MAX_RECORDS} records in a body"))
                break
            if isinstance(part, RecordError):
                read.bad.append(part)
            else:
                read.parse_json(part, lambda document: [_parse_document(document)])
        return read
    lines = text.decode("utf-8", "replace").split("\n")
    if _PAIR.match(lines[0]):
        for at, line in enumerate(lines[:MAX_RECORDS]):
            if at + 1 < len(lines) and not _PAIR.match(lines[at + 1]):
                read.bad.append(RecordError("ambiguous", f"a name goes on behind this line: {line[:80]!r}"))
            else:
                read.add_rows(lambda line=line: [_parse_filetxt_line(line, zone)])  # type: ignore[misc]
        return read
    read.add_rows(lambda: [_parse_environment_lines(lines, now_ms)])
    return read


def _parse_document(part: bytes) -> SlurmJob:
    try:
        row = _completed(part)
    except (ValueError, RecursionError) as error:
        raise make_malformed_error(error, part, _completed) from None
    id_, array, task = parse_number(row.jobid), parse_number(row.array_job_id) or 0, parse_number(row.array_task_id)
    if id_ is None:
        raise RecordError("no_job_id", f"jobid {row.jobid!r}")
    limit = parse_number(row.time_limit)
    code = row.exit_code
    return _normalise_completed_job(
        SlurmJob(
            id=format_job_id(
                id_, (array, task), (parse_number(row.het_job_id) or 0, parse_number(row.het_job_offset) or 0)
            ),
            states=(row.state.partition(" ")[0].upper(),),
            submit_ms=parse_time_ms(row.submit, UTC),
            start_ms=parse_time_ms(row.start, UTC),
            end_ms=parse_time_ms(row.end, UTC),
            nodes=expand_node_list(row.nodes or ""),
            node_count=parse_number(row.total_nodes) or 0,
            **make_resource_fields(row.tres_alloc or row.tres_req or ""),
            user=row.username or "",
            group=row.groupname or "",
            account=row.account or "",
            partition=row.partition or "",
            qos=row.qos or "",
            name=row.job_name or "",
            cluster=row.cluster or "",
            limit_s=float(limit) if limit else None,
            cpus=parse_number(row.total_cpus),
            reason=row.state_reason_prev or "",
            status=parse_exit_code(code) if isinstance(code, str) else split_wait_status(code or 0),
        )
    )


def _parse_filetxt_line(line: str, zone: tzinfo | None) -> SlurmJob:
    """Parse a line of jobcomp/filetxt. A job's name may hold blanks and `=`, but not the next key.

    Raises RecordError `ambiguous` or `no_job_id`.
    """
    marks = list(_PAIR.finditer(line))
    ends = [*(mark.start() for mark in marks), len(line)][1:]
    row = {mark[1]: line[mark.end() : end].strip() for mark, end in zip(marks, ends, strict=bool(marks))}
    if len(row) != len(marks):
        raise RecordError("ambiguous", f"a key comes twice: {line[:80]!r}")
    if not row.get("JobId"):
        raise RecordError("no_job_id", line[:80])
    renamed = {_SCRIPT_NAMES.get(key, key.upper()): value for key, value in row.items()}
    for name in ("USERNAME", "GROUPNAME"):
        renamed[name] = renamed.get(name, "").partition("(")[0]
    return _parse_script_environment(renamed, zone)


def _parse_environment_lines(lines: list[str], now_ms: int) -> SlurmJob:
    """Parse an environment with one variable per line.

    Raises RecordError `ambiguous` if a value may hold another line.
    """
    names = [line.partition("=")[0] for line in lines if "=" in line]
    doubled = next((name for name, count in Counter(names).items() if count > 1), None)
    if doubled is not None:
        raise RecordError("ambiguous", f"{doubled[:80]!r} comes twice; send `env -0`")
    if any(map(_OF_PARTS.fullmatch, names)) and (words := set(_OF_USERS).intersection(names)):
        raise RecordError("ambiguous", f"{min(words)} can hold the lines of another job's id; send `env -0`")
    return _parse_environment(lines, now_ms)


def _parse_environment(lines: list[str], now_ms: int) -> SlurmJob:
    row = dict(line.partition("=")[::2] for line in lines if "=" in line)
    if "JOBID" in row:
        return _parse_script_environment(row, UTC)
    if "SLURM_JOB_ID" in row:
        return _parse_hook_environment(row, now_ms)
    raise RecordError("no_job_id", "neither JSON nor JobId=… nor JOBID=… nor SLURM_JOB_ID=…")


def _parse_whole_number(row: Mapping[str, str], name: str) -> int | None:
    return parse_number(row.get(name, "").strip())


def _parse_script_environment(row: Mapping[str, str], zone: tzinfo | None) -> SlurmJob:
    """Parse the environment of a jobcomp/script. It lacks the variables that do not apply to the job."""
    array, het = (
        _parse_whole_number(row, "ARRAYJOBID") or 0,
        (_parse_whole_number(row, "HETJOBID") or 0, _parse_whole_number(row, "HETJOBOFFSET") or 0),
    )
    restarts = _parse_whole_number(row, "RESTARTS")
    return _normalise_completed_job(
        SlurmJob(
            id=format_job_id(row["JOBID"].strip(), (array, _parse_whole_number(row, "ARRAYTASKID")), het),
            states=(row.get("JOBSTATE", "").strip().partition(" ")[0].upper(),),
            attempt=None if restarts is None else min(restarts, 1_000_000) + 1,
            submit_ms=parse_time_ms(row.get("SUBMIT", ""), zone),
            start_ms=parse_time_ms(row.get("START", ""), zone),
            end_ms=parse_time_ms(row.get("END", ""), zone),
            nodes=expand_node_list(row.get("NODES", "")),
            node_count=_parse_whole_number(row, "NODECNT") or 0,
            **make_resource_fields(row.get("TRES", "")),
            user=row.get("USERNAME", ""),
            group=row.get("GROUPNAME", ""),
            account=row.get("ACCOUNT", ""),
            partition=row.get("PARTITION", ""),
            qos=row.get("QOS", ""),
            name=row.get("JOBNAME", ""),
            cluster=row.get("CLUSTER", "").replace("unknown", ""),
            limit_s=parse_limit_s(row.get("LIMIT", "").strip()),
            cpus=_parse_whole_number(row, "PROCS"),
            reason=row.get("STATEREASONPREV", ""),
            status=parse_exit_code(row.get("EXITCODE", "").strip()),
        )
    )


def _normalise_completed_job(job: SlurmJob) -> SlurmJob:
    if not job.states[0]:
        raise RecordError("no_state", f"job {job.id}")
    return replace(job, states=("REQUEUED",)) if job.states == ("PENDING",) else job


def _parse_hook_environment(row: Mapping[str, str], now_ms: int) -> SlurmJob:
    """Parse the environment of a prolog or epilog of slurmctld. The job of a prolog starts now.

    The job of an epilog ends now. The environment names neither GPUs nor why a job ended. Raises RecordError
    `bad_context`.
    """
    context = row.get("SLURM_SCRIPT_CONTEXT", "").strip()
    starts = context.startswith("prolog")
    if not starts and context != "epilog_slurmctld":
        raise RecordError("bad_context", f"SLURM_SCRIPT_CONTEXT {context!r}: expected prolog_… or epilog_slurmctld")
    status = parse_exit_code(row.get("SLURM_JOB_EXIT_CODE2", "").strip())
    array = _parse_whole_number(row, "SLURM_ARRAY_JOB_ID") or 0, _parse_whole_number(row, "SLURM_ARRAY_TASK_ID")
    het = _parse_whole_number(row, "SLURM_HET_JOB_ID") or 0, _parse_whole_number(row, "SLURM_HET_JOB_OFFSET") or 0
    restarts = _parse_whole_number(row, "SLURM_JOB_RESTART_COUNT")
    return SlurmJob(
        id=format_job_id(row["SLURM_JOB_ID"].strip(), array, het),
        states=("RUNNING",) if starts else ("FAILED",) if any(status) else ("COMPLETED",),
        attempt=None if restarts is None else min(restarts, 1_000_000) + 1,
        start_ms=now_ms if starts else None,
        end_ms=None if starts else now_ms,
        nodes=expand_node_list(row.get("SLURM_JOB_NODELIST", "")),
        status=status,
    )


class Attempts:
    """The attempts of jobs by their time of submission.

    Once it is full, it drops the least recently used job. A job with too many attempts loses its oldest ones.
    """

    def __init__(self, most: int = MAX_JOBS) -> None:
        self._most = most
        self._known: OrderedDict[str, dict[int, int]] = OrderedDict()

    def find_attempt(self, job: str, submit_ms: int | None, recorded: Iterable[tuple[int, int]] = ()) -> int:
        """Return the attempt of `job` with this submission, numbered from 1.

        `recorded`: (submission in Unix ms, attempt) from other records.

        >>> attempts = Attempts()
        >>> [attempts.find_attempt("7", submit_ms) for submit_ms in (1000, 5000, 1000)]
        [1, 2, 1]
        >>> attempts.find_attempt("8", 1000, [(5000, 3)])
        2
        """
        known = self._known.setdefault(job, {})
        self._known.move_to_end(job)
        if len(self._known) > self._most:
            self._known.popitem(last=False)
        known.update(recorded)
        while len(known) >= MAX_ATTEMPTS:
            del known[min(known)]
        if submit_ms is None:
            return max(known.values(), default=1)
        if submit_ms not in known:
            later = [attempt for then, attempt in known.items() if then > submit_ms]
            earlier = max((attempt for then, attempt in known.items() if then < submit_ms), default=0)
            known[submit_ms] = max(earlier + 1, 1, min(later) - 1) if later else earlier + 1
        return known[submit_ms]
