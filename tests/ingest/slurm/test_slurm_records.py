"""Records of Slurm → events: both shapes of its JSON, its text, its failures."""

import json
import os
from datetime import UTC
from pathlib import Path
from typing import Any

import pytest

from fleetcast.fleet.errors import RecordError
from fleetcast.fleet.events import Failed, Finished, JobEvent, Preempted, Queued, Resized, Started, Submitted
from fleetcast.fleet.job_table import JobTable
from fleetcast.fleet.requests import RankPlacement
from fleetcast.ingest.lifecycle import ENDED, EXPLAINED, QUEUED, RESIZED, STARTED, SUBMITTED
from fleetcast.ingest.slurm.failures import classify_end
from fleetcast.ingest.slurm.gres import read_gres
from fleetcast.ingest.slurm.issued import make_checksums
from fleetcast.ingest.slurm.jobs import Site, encode_checked_event, make_job_events
from fleetcast.ingest.slurm.json import decode_accounted_jobs, decode_queued_jobs, read_nodes
from fleetcast.ingest.slurm.nodes import SlurmNode, find_changes
from fleetcast.ingest.slurm.scan import JobScan
from fleetcast.ingest.slurm.text import read_jobs
from fleetcast.ingest.slurm.text import read_nodes as read_node_lines
from tests.ingest.slurm_outputs import T, account, accounts, amount, new_job, node, nodes, old_job, queue

NOW_MS = (T + 200) * 1000
RECORDED = Path(__file__).parent.parent.parent / "data" / "slurm-24.11.5"
DATA = Path(os.environ.get("FLEETCAST_DATA", Path(__file__).parents[3] / ".." / "shared" / "data"))
FOLDER = DATA / "telemetry" / "slurm-meta-gcm"


def events_of(*jobs: dict[str, Any], site: Site = Site()) -> list[JobEvent]:  # noqa: B008
    read = decode_queued_jobs(queue(*jobs))
    assert not read.bad
    return [event for job in read.rows for event in make_job_events(job, site)]


def test_a_running_job_is_submitted_and_started_with_its_gpus() -> None:
    submitted, started = events_of(old_job())
    assert isinstance(submitted, Submitted)
    assert (submitted.job, submitted.attempt, submitted.sequence, submitted.time_ms) == ("7", 1, SUBMITTED, T * 1000)
    assert (submitted.tenant, submitted.queue, submitted.user, submitted.group) == (
        "vision",
        "train",
        "ada",
        "research",
    )
    assert (submitted.gang, submitted.gpus_per_node, submitted.gpu_model) == (2, 2, "H100")
    assert (submitted.limit_s, submitted.cpus, submitted.host_memory_gib) == (3600.0, 2, 8.0)
    assert (submitted.name, submitted.cluster, submitted.priority) == ("llama|7b", "made", 4_294_901_759)
    assert started == Started(
        job="7",
        sequence=STARTED,
        time_ms=(T + 10) * 1000,
        ranks=(RankPlacement(0, "n1", (0, 1)), RankPlacement(1, "n2", (2, 3))),
    )


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETED", "TIMEOUT"])
def test_both_shapes_of_the_json_give_the_same_events(state: str) -> None:
    assert events_of(old_job(7, state)) == events_of(new_job(7, (state,)))


def test_a_waiting_job_is_queued_with_slurms_reason() -> None:
    submitted, queued = events_of(old_job(7, "PENDING", start_time=T + 99_999))
    assert isinstance(submitted, Submitted)
    assert queued == Queued(job="7", sequence=QUEUED, time_ms=T * 1000, reason="Resources")


def test_the_end_of_a_job_that_still_completes_is_not_told() -> None:
    assert [type(event) for event in events_of(new_job(7, ("COMPLETED", "COMPLETING")))] == [Submitted, Started]
    assert [type(event) for event in events_of(old_job(7, "COMPLETING"))] == [Submitted, Started]


def test_restarts_number_the_attempts() -> None:
    assert {event.attempt for event in events_of(old_job(7, restart_cnt=2))} == {3}


def test_tasks_of_arrays_and_parts_of_heterogeneous_jobs_have_names_of_their_own() -> None:
    running = old_job(12, array_job_id=9, array_task_id=4)
    waiting = old_job(9, "PENDING", array_job_id=9, array_task_string="5-6,8%1")
    part = old_job(14, het_job_id=13, het_job_offset=1)
    assert list(dict.fromkeys(event.job for event in events_of(running, waiting, part))) == [
        *("9_4", "9_5", "9_6", "9_8", "13+1"),
    ]


def test_a_job_that_was_resized_tells_where_it_is_now() -> None:
    shrunk = old_job(nodes="n1", gres_detail=["gpu:h100:2(IDX:0-1)"], resize_time=T + 50)
    resized = events_of(shrunk)[-1]
    assert resized == Resized(
        job="7", sequence=RESIZED + 40, time_ms=(T + 50) * 1000, ranks=(RankPlacement(0, "n1", (0, 1)),)
    )


def test_a_site_gives_prefix_class_and_preemptible_queues() -> None:
    site = Site("east-", "east", {"debug": "interactive"}, frozenset({"train"}))
    first, second = events_of(old_job(), old_job(8, "PENDING", partition="debug"), site=site)[::2]
    assert isinstance(first, Submitted)
    assert isinstance(second, Submitted)
    assert (first.job, first.cluster, first.class_, first.preemptible) == ("east-7", "east", "training", True)
    assert (second.class_, second.preemptible) == ("interactive", None)


@pytest.mark.parametrize(
    ("comment", "partition", "expected"),
    [
        ("fleetcast.io/preemptible=false", "debug", False),
        ("resume from /ckpt; fleetcast/preemptible=No, thanks", "train", False),
        ("fleetcast.io/preemptible=true", "debug", True),
        ("fleetcast.io/preemptible=false fleetcast.io/preemptible=yes", "debug", True),
        ("preemptible=false", "debug", None),
        ("notfleetcast.io/preemptible=false", "train", True),
    ],
)
def test_a_comment_says_whether_a_job_may_be_stopped(comment: str, partition: str, expected: bool | None) -> None:
    (submitted, *_) = events_of(
        old_job(comment=comment, partition=partition), site=Site(preemptible=frozenset({"train"}))
    )
    assert isinstance(submitted, Submitted)
    assert submitted.preemptible is expected
    assert "unread_preemptible" not in submitted.labels


def test_a_word_that_is_neither_yes_nor_no_counts_once_and_stands_in_the_labels() -> None:
    jobs = decode_queued_jobs(queue(old_job(comment="fleetcast.io/preemptible=perhaps", partition="debug"))).rows
    scan = JobScan(Site(), NOW_MS, {})
    scan.add_jobs(jobs, {})
    scan.add_jobs(jobs, scan.issued)
    (submitted, *_) = scan.fresh
    assert isinstance(submitted, Submitted)
    assert (submitted.preemptible, submitted.labels["unread_preemptible"]) == (None, "perhaps")
    assert [str(error) for error in scan.unread] == [
        "bad_value: job 7: preemptible is 'perhaps', expected one of true, yes, 1, false, no, 0"
    ]
    assert not scan.bad


def test_a_job_that_says_nothing_has_the_checksum_that_it_had_when_this_was_false() -> None:
    def checksum(**fields: Any) -> int:
        found = make_checksums(events_of(old_job(**fields), site=Site(preemptible=frozenset({"train"}))))
        assert found is not None
        return found.submission

    silent, allowed = checksum(partition="debug"), checksum(partition="train")
    assert (silent, allowed) == (2_376_386_958, 578_563_602)  # of the version before
    assert checksum(partition="debug", comment="fleetcast.io/preemptible=false") not in (silent, allowed)


@pytest.mark.parametrize(
    ("state", "fields", "expected"),
    [
        ("FAILED", {"exit_code": 256}, "user"),
        ("FAILED", {"exit_code": 9, "comment": "epilog: NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen"}, "hardware"),
        ("FAILED", {"exit_code": 256, "admin_comment": "NCCL WARN IB: retry_exc_err on mlx5_3"}, "network"),
        ("FAILED", {"exit_code": 256, "comment": "Xid 31"}, "user"),
        ("FAILED", {"exit_code": 125}, "out_of_memory"),
        ("FAILED", {"exit_code": 1, "state_reason": "JobLaunchFailure"}, "hardware"),
        ("OUT_OF_MEMORY", {}, "out_of_memory"),
        ("TIMEOUT", {}, "timeout"),
        ("CANCELLED", {}, "cancelled"),
        ("NODE_FAIL", {}, "node_lost"),
        ("BOOT_FAIL", {}, "node_lost"),
        ("DEADLINE", {}, "timeout"),
    ],
)
def test_why_a_job_failed(state: str, fields: dict[str, Any], expected: str) -> None:
    end = events_of(old_job(7, state, **fields))[-1]
    assert isinstance(end, Failed)
    sequence = ENDED if expected == "user" else EXPLAINED
    assert (end.sequence, end.time_ms, end.category) == (sequence, (T + 100) * 1000, expected)
    assert end.message.startswith(state)


def test_who_knows_why_a_job_failed_is_believed_whoever_tells_first() -> None:
    """The completion plugin knows the status alone, the queue has the epilog's comment."""
    told = events_of(old_job(7, "FAILED", exit_code=256))
    knows = events_of(old_job(7, "FAILED", exit_code=256, admin_comment="Xid 79 on n1"))
    for order in (told + knows, knows + told, told + knows + told + knows):
        jobs = JobTable()
        for event in order:
            jobs.apply(event)
        attempt = jobs.get("7")
        assert attempt is not None
        assert attempt.failure is not None
        assert (attempt.failure.category, attempt.state) == ("hardware", "failed")
        assert attempt.ended_ms == (T + 100) * 1000


def test_the_exit_code_of_the_newer_shape_is_read() -> None:
    told = {"status": ["SIGNALED"], "return_code": amount(0), "signal": {"id": amount(125), "name": ""}}
    end = events_of(new_job(7, ("FAILED",), exit_code=told, failed_node="n2"))[-1]
    assert isinstance(end, Failed)
    assert (end.category, end.node) == ("out_of_memory", "n2")


def test_a_preempted_job_is_no_failure() -> None:
    assert isinstance(events_of(old_job(7, "PREEMPTED"))[-1], Preempted)
    assert isinstance(events_of(old_job(7, "COMPLETED"))[-1], Finished)


def test_a_job_that_never_started_ends_without_a_start() -> None:
    ended = old_job(7, "CANCELLED", nodes="", start_time=T + 20, end_time=T + 20)
    assert [type(event) for event in events_of(ended)] == [Submitted, Failed]


def test_a_bad_record_costs_itself() -> None:
    read = decode_queued_jobs(queue(old_job(), {"job_id": "x"}, old_job(8, nodes="n[1-"), old_job(9)))
    assert [job.id for job in read.rows] == ["7", "9"]
    assert [error.reason for error in read.bad] == ["wrong_type", "bad_nodes"]
    with pytest.raises(RecordError, match="no_state"):
        make_job_events(decode_queued_jobs(queue(old_job(job_state=None))).rows[0], Site())
    with pytest.raises(RecordError, match="future"):
        encode_checked_event(events_of(old_job(start_time=T + 900))[1], NOW_MS)


def test_what_slurm_answers_instead_of_jobs_is_an_error() -> None:
    body = b'{"errors": [{"description": "Unable to parse time format", "error": "Query empty"}]}'
    assert [error.reason for error in decode_queued_jobs(body).bad] == ["slurm_error"]
    assert [error.reason for error in decode_queued_jobs(b"{}").bad] == ["missing_field"]
    assert [error.reason for error in decode_queued_jobs(b'{"jobs": [').bad] == ["truncated"]


def test_accounts_in_json_of_both_shapes() -> None:
    old = {
        "job_id": 7,
        "state": {"current": "FAILED", "reason": "None"},
        "array": {"job_id": 0, "task_id": None, "task": None},
        "het": {"job_id": 0, "job_offset": None},
        "time": {"submission": T, "start": T + 10, "end": T + 90, "limit": 5},
        "nodes": "n[1-2]",
        "exit_code": {"status": "SIGNALED", "return_code": 0, "signal": {"signal_id": 9, "name": "KILL"}},
        "tres": {"allocated": [{"type": "gres", "name": "gpu", "count": 4}, {"type": "cpu", "name": None, "count": 2}]},
        "user": None,
        "comment": {"administrator": None, "job": "Xid 48", "system": None},
        "priority": 12,
    }
    new = old | {
        "state": {"current": ["FAILED"], "reason": "None"},
        "array": {"job_id": 0, "task_id": amount(None), "task": ""},
        "het": {"job_id": 0, "job_offset": amount(None)},
        "exit_code": {"status": ["SIGNALED"], "return_code": amount(0), "signal": {"id": amount(9), "name": "KILL"}},
        "time": {"submission": T, "start": T + 10, "end": T + 90, "limit": amount(5)},
        "priority": amount(12),
    }
    first, second = (decode_accounted_jobs(queue(row)).rows[0] for row in (old, new))
    assert first == second
    assert (first.attempt, first.gpus, first.status, first.limit_s) == (None, 4, (0, 9), 300.0)
    assert decode_accounted_jobs(queue(new | {"restart_cnt": 2})).rows[0].attempt == 3


def test_text_and_json_of_one_job_have_one_identity() -> None:
    from_text = make_job_events(read_jobs(accounts(account())).rows[0], Site())
    from_json = events_of(old_job(7, "COMPLETED"))
    assert [(event.job, event.attempt, event.sequence, event.time_ms) for event in from_text] == [
        (event.job, event.attempt, event.sequence, event.time_ms) for event in from_json
    ]


def test_what_breaks_the_lines_of_text() -> None:
    body = b"\n".join(
        (
            b"JobID|State|Submit|Start|End|NodeList|AllocTRES|JobName",
            b"1|COMPLETED|2021-04-05T02:07:20|2021-04-07T23:59:38|2021-04-08T00:00:22|n1|gres/gpu=8|over\nmidnight",
            b"1.batch|COMPLETED|||||gres/gpu=8|batch",
            b"2|RUNNING|1617588440|1617588440|Unknown|n[1-2]|gres/gpu=16|bad \xff utf|8",
            b"3|CANCELLED by 1185300516|1617588440|Unkn",
            b"4|FAILED|1617588440|1617588441|1617588442|n3|gres/gpu=1|x",
        )
    )
    read = read_jobs(body, UTC)
    assert [(job.id, job.states) for job in read.rows] == [
        ("1", ("COMPLETED",)),
        ("2", ("RUNNING",)),
        ("4", ("FAILED",)),
    ]
    assert read.rows[0].end_ms == 1617840022000
    assert read.rows[1].name == "bad � utf|8"
    assert [error.reason for error in read.bad] == ["field_count"]


def test_a_name_of_two_lines_in_the_middle_of_a_record() -> None:
    lines = "JobID|#JobName|#State|#Submit\n7|#two\nlines|#RUNNING|#1617588440\n8|#x|#PENDING|#1617588441\n"
    read = read_jobs(lines.encode())
    assert [(job.id, job.name) for job in read.rows] == [("7", "two lines"), ("8", "x")]
    assert not read.bad


def test_text_without_a_header_is_refused() -> None:
    assert [error.reason for error in read_jobs(b"7|RUNNING\n").bad] == ["no_header"]
    assert not read_jobs(b"\n\n").bad


def test_nodes_in_every_form() -> None:
    drained = SlurmNode("n1", ("IDLE", "DRAIN"), "fan", T * 1000, read_gres("gpu:h100:8"))
    assert read_nodes(nodes(node("n1", "idle", "DRAIN", reason="fan", at=T))).rows == [drained]
    listed = {
        "name": "n1",
        "state": ["IDLE", "DRAIN"],
        "reason": "fan",
        "reason_changed_at": amount(T),
        "gres": "gpu:h100:8",
    }
    assert read_nodes(nodes(listed)).rows == [drained]
    text = f"NODELIST|STATECOMPLETE|GRES|TIMESTAMP|REASON|\nn1|idle+drain|gpu:h100:8|{T}|fan|\n"
    assert read_node_lines((text + text.splitlines()[1]).encode()).rows == [drained]
    group = {
        "sinfo": [
            {
                "node": {"state": ["DOWN"]},
                "nodes": {"nodes": ["n3", "n4"]},
                "reason": {"description": "psu", "time": amount(T), "user": "root"},
            }
        ]
    }
    found = read_nodes(json.dumps(group).encode()).rows
    assert [(row.name, row.list_conditions(), row.reason) for row in found] == [
        ("n3", ["lost"], "psu"),
        ("n4", ["lost"], "psu"),
    ]


def grouped(names: list[str], hosts: list[str], addresses: list[str]) -> bytes:
    """`sinfo --json` of 23.02 and later: one group of nodes in one state."""
    listed = {"nodes": names, "hostnames": hosts, "addresses": addresses}
    return json.dumps({"sinfo": [{"node": {"state": ["IDLE"]}, "nodes": listed, "gres": {"total": "gpu:8"}}]}).encode()


def test_a_group_of_nodes_joins_no_host_that_may_be_of_another_node() -> None:
    """sinfo sorts the names of a group, and neither its hosts nor its addresses."""
    (one,) = read_nodes(grouped(["p5-1"], ["ip-10-0-0-9"], ["10.0.0.9"])).rows
    assert one.other_names == ("ip-10-0-0-9", "10.0.0.9")
    for addresses in (["10.0.0.9", "10.0.0.5"], ["10.0.0.[9,5]"]):
        pair = read_nodes(grouped(["p5-1", "p5-2"], ["ip-10-0-0-9", "ip-10-0-0-5"], addresses)).rows
        assert [(row.name, row.other_names) for row in pair] == [("p5-1", ()), ("p5-2", ())]


def test_what_becomes_of_a_node() -> None:
    drained = SlurmNode("n1", ("IDLE", "DRAIN"), "Xid 79", T * 1000)
    events, now = find_changes(drained, {}, "slurm", NOW_MS)
    assert [(event.type, event.time_ms, event.message) for event in events] == [("drain", T * 1000, "Xid 79")]
    assert find_changes(drained, now, "slurm", NOW_MS + 5) == ([], now)
    assert find_changes(drained, {}, "slurm", NOW_MS + 5)[0] == events
    events, now = find_changes(SlurmNode("n1", ("DOWN", "DRAIN"), "Xid 79", T * 1000), now, "slurm", NOW_MS)
    assert [event.type for event in events] == ["lost"]
    assert find_changes(SlurmNode("n1", ("UNKNOWN",)), now, "slurm", NOW_MS) == ([], now)
    events, now = find_changes(SlurmNode("n1", ("IDLE",)), now, "slurm", NOW_MS)
    assert ([event.type for event in events], now) == (["undrain", "returned"], {})


def test_words_of_people_and_scripts() -> None:
    assert classify_end("FAILED", "", "node n4 not responding", (1, 0)) == "node_lost"
    assert classify_end("FAILED", "", "killed by oom-killer", (0, 9)) == "out_of_memory"
    assert classify_end("FAILED", "", "", (0, 0)) == "unknown"


def test_what_a_slurm_of_24_11_wrote_is_read() -> None:
    """Recorded from 24.11.5: a gang, an exit code, a signal, a preempted part of a job, a task, a held array."""
    read = decode_queued_jobs((RECORDED / "queue.json").read_bytes())
    assert not read.bad
    rows = {job.id: job for job in read.rows}
    assert list(rows) == ["1", "2", "4+0", "3_4", "11_1", "11_2", "11_3", "11_7", "12"]
    assert (rows["1"].nodes, rows["1"].indices, rows["1"].holds_nodes) == (("n1", "n2"), ((0, 1), (0, 1)), True)
    assert [rows[job].end_state for job in ("2", "3_4", "11_1", "12")] == ["FAILED", "COMPLETED", "", "FAILED"]
    assert (rows["2"].status, rows["12"].status, rows["4+0"].attempt) == ((3, 0), (0, 9), 2)
    assert (rows["11_7"].gpus, rows["11_7"].reason, rows["1"].limit_s) == (16, "JobHeldUser", 1800.0)
    accounted = {job.id: job for job in decode_accounted_jobs((RECORDED / "accounting.json").read_bytes()).rows}
    assert (accounted["4+0"].end_state, accounted["4+0"].attempt) == ("PREEMPTED", 1)
    for job in ("1", "2", "3_4", "12"):
        told, booked = (
            {event.sequence: event.time_ms for event in make_job_events(row, Site())}
            for row in (rows[job], accounted[job])
        )
        assert told == booked
    found = read_nodes((RECORDED / "nodes.json").read_bytes()).rows
    assert [(row.name, row.gpus, row.list_conditions(), row.reason) for row in found] == [
        ("n1", 4, [], ""),
        ("n4", 4, ["drain"], "fan 3"),
    ]


@pytest.mark.skipif(not FOLDER.exists(), reason="FLEETCAST_DATA has no telemetry/slurm-meta-gcm")
def test_real_outputs_are_read() -> None:
    counts = {}
    for name in ("one-multiline", "output-invalid-utf8", "output-midnight-edge-case", "output-with-invalid-lines"):
        read = read_jobs((FOLDER / f"sample-sacct-{name}.txt").read_bytes(), UTC)
        counts[name] = (len(read.rows), len(read.bad))
        for job in read.rows:
            make_job_events(job, Site())
    assert counts == {
        "one-multiline": (2, 0),
        "output-invalid-utf8": (2, 0),
        "output-midnight-edge-case": (306, 0),
        "output-with-invalid-lines": (0, 1),
    }
    read = read_node_lines((FOLDER / "sample-sinfo-output.txt").read_bytes(), UTC)
    assert [(row.name, row.gpus, row.list_conditions()) for row in read.rows] == [
        *(("node0201", 8, ["drain", "not_responding"]), ("node1537", 8, []), ("node4180", 2, [])),
    ]
    assert not read.bad


def test_an_exit_code_that_no_machine_gives_costs_its_record_and_no_other() -> None:
    read = decode_queued_jobs(queue(old_job(1), old_job(2, "FAILED", exit_code=10**400), old_job(3)))
    assert [job.id for job in read.rows] == ["1", "3"]
    assert [error.reason for error in read.bad] == ["out_of_range"]
