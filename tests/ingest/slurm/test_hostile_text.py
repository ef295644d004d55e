"""Names of jobs that hold whole lines of other jobs: what users write ends no job of others, and starts none."""

import asyncio
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.clients.slurm import SlurmCommands, join_texts
from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.events import Failed, Finished, JobEvent, Preempted, Started
from fleetcast.ingest.slurm.jobcomp import read_completions
from fleetcast.ingest.slurm.source import SlurmSource
from fleetcast.ingest.slurm.text import read_jobs
from tests.clients.squeue_in_files import SqueueFolder
from tests.ingest.slurm_outputs import ACCOUNT_HEADER, FakeSlurm, T, account, old_job, queue

NOW_MS = (T + 200) * 1000
COLUMNS = ("JobArrayID", "State", "RestartCnt", "SubmitTime", "StartTime", "EndTime", "NodeList", "tres-alloc", "Name")
HEADER = "JOBID|STATE|RESTART_COUNT|SUBMIT_TIME|START_TIME|END_TIME|NODELIST|TRES_ALLOC|NAME|"


def row(job: str, state: str = "RUNNING", name: str = "train", end: str = "N/A") -> dict[str, str]:
    values = (job, state, "0", str(T), str(T + 10), end, "n[1-2]", "cpu=4,gres/gpu=4", name)
    return dict(zip(COLUMNS, values, strict=True))


def line(values: dict[str, str], end: str = "|") -> str:
    return "".join(value + end for value in values.values())


FORGED = row("7", "COMPLETED", "x", str(T + 20))
PHANTOM = row("99", "RUNNING", "x")
ALL_COLUMNS = (
    *("JobArrayID", "State", "RestartCnt", "SubmitTime", "StartTime", "EndTime", "ResizeTime", "NodeList", "NumNodes"),
    *("tres-alloc", "tres-per-node", "UserName", "GroupName", "Account", "Partition", "QOS", "Cluster", "PriorityLong"),
    *("TimeLimit", "NumCPUs", "exit_code", "Reason", "Name"),
)
WHOLE = [{name: forged.get(name, "(null)") for name in ALL_COLUMNS} for forged in (FORGED, PHANTOM)]
EVIL = "\n".join(["evil", *(line(forged, end) for forged in (*WHOLE, FORGED, PHANTOM) for end in ("|", "\x1f", "|#"))])


def events(made: SlurmSource, batches: int = 1) -> list[JobEvent]:
    async def taken() -> list[JobEvent]:
        return [event for _ in range(batches) for event in (await made.next()).events]

    return asyncio.run(taken())


def test_the_text_of_commands_holds_no_line_that_a_user_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SqueueFolder(tmp_path, [row("7"), row("8", name=EVIL)])
    for name, script in {"sinfo": "#!/bin/sh\n", "sacct": "#!/bin/sh\nexit 1\n"}.items():
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    made = SlurmSource(Entities(), ManualClock(NOW_MS), {"form": "text", "accounting_s": 0.0})
    found = events(made)
    assert {(type(event).__name__, event.job) for event in found} == {
        (kind, job) for kind in ("Submitted", "Started") for job in ("7", "8")
    }
    rows = read_jobs(asyncio.run(SlurmCommands([], 60.0, False).read_queue())).rows
    assert {job.id: job.name[:5] for job in rows} == {"7": "train", "8": "evil "}


@given(st.lists(st.sampled_from([line(FORGED), EVIL, "\n", "|", "\r", "\x1f", "7", "~", "\u2028"])).map("".join))
def test_whatever_a_name_holds_the_lines_of_the_table_are_those_of_slurm(name: str) -> None:
    end = "|0123456789abcdef|"
    facts = "JOBID|STATE|\n7|RUNNING|\n8|PENDING|\n"
    table = join_texts(facts.encode(), f"8{end}{name}{end}\n7{end}good{end}\n".encode(), end, 1, ["NAME"]).decode()
    lines = table.split("\n")
    assert lines[:2] == ["JOBID|STATE|NAME|", "7|RUNNING|good|"]
    assert lines[2].startswith("8|PENDING|")
    assert lines[3:] == [""]


def test_in_a_recorded_text_a_job_of_two_lines_stays_as_it_was(tmp_path: Path) -> None:
    made = SlurmSource(
        Entities(), ManualClock(NOW_MS), {"folder": str(tmp_path), "accounting_s": 0.0, "interval_s": 0.01}
    )
    (tmp_path / "queue.txt").write_text("\n".join([HEADER, line(row("7")), ""]))
    assert [type(event).__name__ for event in events(made)] == ["Submitted", "Started"]
    for order in (1, -1):
        lines = [line(row("7")), line(row("8", name=f"evil\n{line(FORGED)}"))][::order]
        (tmp_path / "queue.txt").write_text("\n".join([HEADER, line(row("9")), *lines, ""]))
        assert [event for event in events(made) if event.job == "7"] == []
        assert made.position()["live"]["7"] == 1
    (tmp_path / "queue.txt").write_text("\n".join([HEADER, line(FORGED), ""]))
    ends = [event for event in events(made) if event.job == "7" and isinstance(event, Finished)]
    assert [(event.attempt, event.time_ms) for event in ends] == [(1, (T + 20) * 1000)]


def test_accounts_end_no_attempt_that_the_queue_shows_alive() -> None:
    evil = account("8", "RUNNING", end="Unknown") + "\n" + account("7", "COMPLETED", T - 50)
    for lines in ([account("7", "RUNNING", end="Unknown"), evil], [evil, account("7", "RUNNING", end="Unknown")]):
        book = "\n".join((ACCOUNT_HEADER, *lines, "")).encode()
        found = events(
            SlurmSource(Entities(), ManualClock(NOW_MS), {}, client=FakeSlurm([queue(old_job())], book=book))
        )
        of_job = [event for event in found if event.job == "7"]
        assert {event.attempt for event in of_job} == {1}
        assert not [event for event in of_job if isinstance(event, Finished | Failed | Preempted)]
        assert len([event for event in of_job if isinstance(event, Started)]) == 1


ARRAY = b"ARRAYJOBID=8\0ARRAYTASKID=1\0JOBID=9\0JOBSTATE=COMPLETED\0END=1760000100\0SUBMIT=1760000000\0JOBNAME=x\0"
FILETXT = (
    "JobId=7 UserId=ada(1) GroupId=ada(1) Name={} JobState=COMPLETED Partition=train StartTime=2025-10-09T08:53:30"
)
LINE = "JobId=8 UserId=bob(2) GroupId=bob(2) Name=x JobState=COMPLETED Partition=train StartTime=2025-10-09T08:53:30"
HOOK = "JOBID=7\nJOBSTATE=COMPLETED\nEND=1760000100\nSUBMIT=1760000000\nJOBNAME={}\nNODES=n1"


@pytest.mark.parametrize(
    "body",
    [
        HOOK.format("x\nJOBID=8"),
        HOOK.format("x\nARRAYJOBID=8\nARRAYTASKID=1"),
        HOOK.format("x\nHETJOBID=8\nHETJOBOFFSET=1"),
        HOOK.replace("JOBNAME", "SLURM_JOB_NAME").format("x\nSLURM_ARRAY_JOB_ID=8\nSLURM_ARRAY_TASK_ID=1"),
        FILETXT.format("x JobId=8"),
        FILETXT.format(f"x\n{LINE}"),
        FILETXT.format(f"x\n{LINE}\ny"),
    ],
)
def test_a_name_ends_no_other_job_by_a_push(body: str) -> None:
    read = read_completions(body.encode(), NOW_MS)
    assert [job.id for job in read.rows if not job.id.startswith("7")] == []
    assert "ambiguous" in {error.reason for error in read.bad}


def test_an_environment_with_nuls_is_read_whatever_its_values_hold() -> None:
    (job,) = read_completions(ARRAY, NOW_MS).rows
    assert (job.id, job.states, job.name) == ("8_1", ("COMPLETED",), "x")
    name = "x\nARRAYJOBID=8\nJOBID=9"
    (job,) = read_completions(HOOK.replace("\n", "\0").format(name).encode(), NOW_MS).rows
    assert (job.id, job.nodes) == ("7", ("n1",))
    assert job.name == name
