"""Decoders of what Slurm says: its JSON in both shapes, its text, what its plugins and hooks push."""

import functools
from collections.abc import Callable, Sequence
from datetime import UTC

import msgspec

from fleetcast.fleet.errors import RecordError
from fleetcast.fleet.events import JobEvent, NodeEvent
from fleetcast.ingest.inbox.job_events import decode_event
from fleetcast.ingest.slurm import json as slurm_json
from fleetcast.ingest.slurm import text as slurm_text
from fleetcast.ingest.slurm.jobcomp import read_completions
from fleetcast.ingest.slurm.jobs import Site, SlurmJob, make_job_events
from fleetcast.ingest.slurm.nodes import SlurmNode, find_changes
from fleetcast.ingest.slurm.scan import JobScan, assign_attempt_numbers
from fleetcast.ingest.source import Batch
from tests.fuzz.bounds import MIB
from tests.fuzz.decoder import Decoder
from tests.fuzz.door_decoders import NOW_MS, take
from tests.ingest.slurm_outputs import account, accounts, new_job, node, nodes, old_job, queue

SITE = Site("east-", "east", {"train": "batch"}, frozenset({"train"}), cpu_jobs=True)
HOOK = b"SLURM_SCRIPT_CONTEXT=prolog_slurmctld\nSLURM_JOB_ID=7\nSLURM_JOB_NODELIST=n[1-2]\nSLURM_JOB_EXIT_CODE2=3:0\n"
SCRIPT = b"JOBID=7\nJOBSTATE=FAILED\nSUBMIT=1760000000\nSTART=1760000010\nEND=1760000020\nNODES=n[1-2]\nEXITCODE=3:0\n"
LINE = (
    b"JobId=7 UserId=a(1) Name=x y JobState=FAILED TimeLimit=UNLIMITED StartTime=2025-10-09T08:53:30 NodeList=n[1-2] "
    b"Tres=cpu=1,gres/gpu=8 SubmitTime=2025-10-09T08:53:20 EndTime=2025-10-09T08:54:20 ExitCode=3:0"
)
DOCUMENT = (
    b'{"jobid":7,"state":"FAILED","@submit":"2025-10-09T08:53:20","@start":"2025-10-09T08:53:30","nodes":"n[1-2]",'
    b'"@end":"2025-10-09T08:54:20","exit_code":"0:9","tres_alloc":"gres/gpu=16","array_job_id":7,"array_task_id":2}'
)
WORDS = (
    *(b'"job_state": ', b'["PENDING"]', b'{"set": true, "infinite": false, "number": 1e300}', b"n[1-99999]", b"n[01-"),
    *(b"gpu:h100:8(IDX:0-7)", b"gres/gpu=99999999999", b"IDX:0-4095", b"COMPLETED", b"REQUEUED", b"1-9999999:1"),
    *(b"\"restart_cnt\": 1e6", b"18446744073709551615", b"-1", b"2025-10-09T08:53:20", b"9999-12-31T23:59:59", b"|#"),
    *(b'"jobs": [', b'"sinfo": [', b"\x00", b"\xff", b"Xid 79 ", b"1-00:00:00", b"4294967295", b"7_[1-99999999]"),
)  # fmt: skip


def _check(events: Sequence[JobEvent | NodeEvent]) -> None:
    """What the source makes of a record, the door would let in."""
    for event in events:
        assert decode_event(msgspec.json.encode(event), NOW_MS) == event


def _jobs(read: Callable[[bytes], slurm_json.ReadRecords[SlurmJob]], body: bytes) -> None:
    found = read(body)
    look = JobScan(SITE, NOW_MS)
    look.add_jobs(assign_attempt_numbers(found.rows, SITE.prefix, look, {}), set())
    _check(look.fresh)
    take(Batch(events=tuple(look.fresh), bad=(*found.bad, *look.bad)))
    for job in found.rows[:10]:
        try:
            _check(make_job_events(job, Site()))
        except RecordError:
            continue


def _nodes(read: Callable[[bytes], slurm_json.ReadRecords[SlurmNode]], body: bytes) -> None:
    for row in read(body).rows[:1000]:
        events, now = find_changes(row, {"drain": 5}, "slurm", NOW_MS)
        again, _ = find_changes(row, now, "slurm", NOW_MS)
        assert not again
        _check(events)


SLURM = {
    "slurm queue": Decoder(
        functools.partial(_jobs, slurm_json.decode_queued_jobs),
        (
            queue(old_job(), old_job(8, "FAILED", comment="Xid 79"), old_job(9, "PENDING", array_job_id=9)),
            queue(new_job(), new_job(8, ("COMPLETED", "COMPLETING")), new_job(9, ("PENDING",))),
            b'{"errors": [{"description": "x"}]}',
        ),
        WORDS,
        base_bytes=8 * MIB,
        times=300,
    ),
    "slurm accounts": Decoder(
        functools.partial(_jobs, slurm_json.decode_accounted_jobs),
        (b'{"jobs": [{"job_id": 7, "state": {"current": "FAILED"}, "time": {"submission": 1760000000, "end": 5}}]}',),
        WORDS,
        base_bytes=8 * MIB,
        times=300,
    ),
    "slurm text": Decoder(
        functools.partial(_jobs, functools.partial(slurm_text.read_jobs, zone=UTC)),
        (accounts(account(), account("8_[1-3]", "PENDING"), account("9.batch")), b"JOBID|#STATE|#NAME\n7|#RUNNING|#x"),
        WORDS,
        base_bytes=8 * MIB,
        times=300,
    ),
    "slurm nodes": Decoder(
        functools.partial(_nodes, slurm_json.read_nodes),
        (
            nodes(node(), node("n2", "down", "DRAIN", reason="psu", at=1_760_000_000)),
            b'{"sinfo": [{"node": {"state": ["DOWN"]}, "nodes": {"nodes": ["n[1-2]"]}, "reason": {"time": 5}}]}',
        ),
        WORDS,
        base_bytes=8 * MIB,
        times=300,
    ),
    "slurm node lines": Decoder(
        functools.partial(_nodes, functools.partial(slurm_text.read_nodes, zone=UTC)),
        (b"NODELIST|STATECOMPLETE|GRES|TIMESTAMP|REASON|\nn[1-2]|idle+drain*|gpu:8|1760000000|fan|\n",),
        WORDS,
        base_bytes=8 * MIB,
        times=300,
    ),
    "slurm pushes": Decoder(
        functools.partial(_jobs, functools.partial(read_completions, now_ms=NOW_MS)),
        (DOCUMENT, b"[" + DOCUMENT + b"," + DOCUMENT + b"]", LINE, SCRIPT, HOOK, queue(old_job())),
        WORDS,
        base_bytes=16 * MIB,
        times=600,
    ),
}
