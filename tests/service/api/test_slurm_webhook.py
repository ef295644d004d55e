"""What Slurm pushes: in the inbox as events, once, before it is acknowledged."""

import asyncio
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.events import Failed, Finished, JobEvent, NodeEvent, Queued, Started, Submitted
from fleetcast.ingest.inbox.inbox import read_newest_events
from fleetcast.ingest.lifecycle import ENDED
from fleetcast.ingest.slurm.jobcomp import MAX_ATTEMPTS, Attempts, read_completions
from fleetcast.service.api.app import create_app
from fleetcast.service.api.routes.webhooks_slurm import translate_completions
from fleetcast.service.board.board import BoardWriter, Section
from tests.ingest.slurm_outputs import T, old_job, queue
from tests.service.api_world import Client, config

PATH = "/v1/webhooks/slurm-jobcomp"
NOW_MS = (T + 200) * 1000
TRES = "cpu=4,mem=16G,node=2,billing=4,gres/gpu=4"


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with Client(create_app(config(tmp_path), ManualClock(NOW_MS))) as made:
        yield made


def kept(folder: Path) -> list[JobEvent]:
    return [event for event in read_newest_events(folder / "inbox", 100) if not isinstance(event, NodeEvent)]


def stamp(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def completed(job: int = 7, state: str = "COMPLETED", submit: int = T, **fields: Any) -> dict[str, Any]:
    """A document of jobcomp/elasticsearch."""
    return {
        "jobid": job,
        "state": state,
        "@submit": stamp(submit),
        "@start": stamp(submit + 10),
        "@end": stamp(submit + 100),
        "nodes": "n[1-2]",
        "total_nodes": 2,
        "total_cpus": 4,
        "exit_code": "0:0",
        "username": "ada",
        "partition": "train",
        "job_name": "llama",
        "time_limit": 3600,
        "tres_alloc": TRES,
        "script": "#!/bin/sh\nexport TOKEN=secret\n",
        **fields,
    }


def test_a_completed_job_is_told_whole_and_answered_as_slurm_wants_it(client: Client, tmp_path: Path) -> None:
    answer = client.post(PATH, json=completed())
    assert (answer.status_code, answer.json()) == (200, {"accepted": 3, "duplicates": 0, "rejected": []})
    submitted, started, ended = kept(tmp_path)
    assert isinstance(submitted, Submitted)
    assert (submitted.user, submitted.queue, submitted.gang, submitted.gpus_per_node) == ("ada", "train", 2, 2)
    assert started == Started(job="7", sequence=3, time_ms=(T + 10) * 1000, nodes=("n1", "n2"))
    assert ended == Finished(job="7", sequence=ENDED, time_ms=(T + 100) * 1000)
    assert client.post(PATH, json=completed()).json()["duplicates"] == 3
    segments = b"".join(path.read_bytes() for path in (tmp_path / "inbox").iterdir())
    assert b"secret" not in segments


def test_an_exit_code_of_400_digits_costs_its_record_and_no_other(client: Client, tmp_path: Path) -> None:
    rows = [completed(1), completed(2, "FAILED", exit_code=int("9" * 400)), completed(3, exit_code=768)]
    answer = client.post(PATH, json=rows)
    assert (answer.status_code, answer.json()["accepted"]) == (200, 6)
    (rejected,) = answer.json()["rejected"]
    assert rejected["reason"] == "out_of_range: an exit code of 400 digits"
    assert {event.job for event in kept(tmp_path)} == {"1", "3"}


def test_a_requeued_job_ends_an_attempt_and_begins_another(client: Client, tmp_path: Path) -> None:
    again = completed(7, "CANCELLED", T + 50, nodes="", **{"@end": stamp(T + 60)})
    for row in (completed(7, "PENDING", tres_req=TRES), again, completed(7, "PENDING", tres_req=TRES)):
        assert client.post(PATH, json=row).status_code == 200
    ends = [event for event in kept(tmp_path) if isinstance(event, Failed)]
    assert [(end.attempt, end.category) for end in ends] == [(1, "unknown"), (2, "cancelled")]


def test_the_board_tells_which_attempt_was_submitted_when(client: Client, tmp_path: Path) -> None:
    row = {"job": "7", "attempt": 3, "state": "running", "submitted_ms": T * 1000}
    BoardWriter(tmp_path / "board").publish([Section("doc.jobs", json.dumps([row]).encode(), NOW_MS)], NOW_MS)
    client.post(PATH, json=[completed(), completed(7, "PENDING", T - 100)])
    assert {event.attempt for event in kept(tmp_path)} == {2, 3}


def shown_on_board(folder: Path, **row: Any) -> None:
    rows = [{"job": "7", "attempt": 1, "submitted_ms": T * 1000, **row}]
    BoardWriter(folder / "board").publish([Section("doc.jobs", json.dumps(rows).encode(), NOW_MS)], NOW_MS)


def test_a_completed_job_names_the_queue_of_one_that_waited_in_several(client: Client, tmp_path: Path) -> None:
    shown_on_board(tmp_path, state="queued", queue="debug", queues=["debug", "train"])
    for _ in range(2):
        client.post(PATH, json=completed())
    submitted = [event for event in kept(tmp_path) if isinstance(event, Submitted)]
    assert [(event.queue, event.sequence > ENDED) for event in submitted] == [("train", True)]


@pytest.mark.parametrize("again", [{"username": "bob"}, {}])
def test_a_number_that_was_given_again_is_another_job(client: Client, tmp_path: Path, again: dict[str, Any]) -> None:
    """By its user, or by its restarts where the record counts them."""
    shown_on_board(tmp_path, state="finished", queue="train", user="ada")
    if again:
        client.post(PATH, json=completed(7, "COMPLETED", T + 50, **again))
    else:
        client.post(PATH, content=queue(old_job(7, "COMPLETED", submit_time=T + 50)))
    assert {(event.job, event.attempt) for event in kept(tmp_path)} == {(f"7@{T + 50}", 1)}


def test_a_job_that_was_requeued_under_its_number_is_no_other_job(client: Client, tmp_path: Path) -> None:
    shown_on_board(tmp_path, state="failed", queue="train", user="ada")
    client.post(PATH, json=completed(7, "COMPLETED", T + 50))
    assert {(event.job, event.attempt) for event in kept(tmp_path)} == {("7", 2)}


@pytest.mark.parametrize("state", ["queued", "blocked"])
def test_a_pushed_queue_holds_and_releases_a_job(client: Client, tmp_path: Path, state: str) -> None:
    shown_on_board(tmp_path, state=state, queue="train")
    reason = "JobHeldUser" if state == "queued" else "Resources"
    client.post(PATH, content=queue(old_job(7, "PENDING", state_reason=reason)))
    (queued,) = (event for event in kept(tmp_path) if isinstance(event, Queued))
    assert (queued.blocked, queued.time_ms) == (state == "queued", NOW_MS)
    assert queued.sequence > ENDED


def test_a_job_without_gpus_is_passed_unless_it_is_known(client: Client, tmp_path: Path) -> None:
    plain = completed(tres_alloc="cpu=4,node=2")
    assert client.post(PATH, json=plain).json() == {"accepted": 0, "duplicates": 0, "rejected": []}
    started = "SLURM_SCRIPT_CONTEXT=prolog_slurmctld\nSLURM_JOB_ID=7\nSLURM_JOB_NODELIST=n[1-2]\n"
    assert client.post(PATH, content=started).json()["accepted"] == 1
    assert client.post(PATH, json=plain).json()["accepted"] == 1
    assert [type(event) for event in kept(tmp_path)] == [Started, Finished]


def test_an_array_whose_tasks_have_all_started_is_no_job_of_its_own(client: Client, tmp_path: Path) -> None:
    waiting = old_job(500, "PENDING", array_job_id=500, array_task_string="0x0%4")
    running = old_job(501, array_job_id=500, array_task_id=1, nodes="n1", gres_detail=["gpu:h100:4(IDX:0-3)"])
    assert client.post(PATH, content=queue(waiting, running)).json()["rejected"] == []
    assert {event.job for event in kept(tmp_path)} == {"500_1"}


def test_prolog_and_epilog_tell_the_moment(client: Client, tmp_path: Path) -> None:
    common = "SLURM_JOB_ID=12\nSLURM_ARRAY_JOB_ID=9\nSLURM_ARRAY_TASK_ID=4\nSLURM_JOB_RESTART_COUNT=1\n"
    client.post(PATH, content=f"SLURM_SCRIPT_CONTEXT=prolog_slurmctld\n{common}SLURM_JOB_NODELIST=n[1-2]\n")
    client.post(PATH, content=f"SLURM_SCRIPT_CONTEXT=epilog_slurmctld\n{common}SLURM_JOB_EXIT_CODE2=3:0\n")
    started, ended = kept(tmp_path)
    assert started == Started(job="9_4", attempt=2, sequence=3, time_ms=NOW_MS, nodes=("n1", "n2"))
    assert isinstance(ended, Failed)
    assert (ended.attempt, ended.category, ended.time_ms) == (2, "user", NOW_MS)
    refused = client.post(PATH, content=f"SLURM_SCRIPT_CONTEXT=epilog_slurmd\n{common}").json()["rejected"]
    assert "bad_context" in refused[0]["reason"]


def test_the_other_plugins_tell_the_same(client: Client, tmp_path: Path) -> None:
    client.post(PATH, json=completed())
    script = f"""JOBID=7\nJOBSTATE=COMPLETED\nSUBMIT={T}\nSTART={T + 10}\nEND={T + 100}\nNODES=n[1-2]\nNODECNT=2
TRES={TRES}\nEXITCODE=0:0\nUSERNAME=ada\nPARTITION=train\nLIMIT=01:00:00\nJOBNAME=llama\nSTDERR=/dev/null"""
    line = (
        f"JobId=7 UserId=ada(1) GroupId=ada(1) Name=a = b JobState=COMPLETED Partition=train TimeLimit=60 "
        f"StartTime={stamp(T + 3610)} EndTime={stamp(T + 3700)} NodeList=n[1-2] NodeCnt=2 ProcCnt=4 WorkDir=/x y "
        f"ReservationName= Tres={TRES} Account= QOS= WcKey= Cluster=unknown SubmitTime={stamp(T + 3600)} "
        f"EligibleTime=Unknown DerivedExitCode=0:0 ExitCode=0:0 \n"
    )
    assert client.post(PATH, content=script).json()["duplicates"] == 3
    assert client.post(PATH, params={"utc_offset_s": 3600}, content=line).json()["duplicates"] == 3
    assert client.post(PATH, content=queue(old_job(7, "COMPLETED"))).json()["duplicates"] == 3
    assert len(kept(tmp_path)) == 3


def test_clusters_have_prefixes(client: Client, tmp_path: Path) -> None:
    client.post(PATH, params={"prefix": "east-"}, json=completed())
    assert {event.job for event in kept(tmp_path)} == {"east-7"}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"jobid": "x", "state": "COMPLETED"}', "no_job_id"),
        (b'{"jobid": 7}', "missing_field"),
        (b'{"jobid": 7', "truncated"),
        (b"hello", "no_job_id"),
        (b"JobId=", "no_job_id"),
        (b"JOBID=7\n", "no_state"),
        (json.dumps(completed(nodes="n[1-")).encode(), "bad_nodes"),
        (json.dumps(completed(submit=T + 10_000)).encode(), "future"),
    ],
)
def test_a_bad_record_is_told_and_not_sent_again(client: Client, body: bytes, reason: str) -> None:
    answer = client.post(PATH, content=body)
    assert answer.status_code == 200  # slurmctld sends what is refused for ever
    assert answer.json()["rejected"][0]["reason"].startswith(reason)


def test_what_is_no_request_is_refused(client: Client) -> None:
    assert client.post(PATH, content=b"").status_code == 422
    for params in ({"zone": "Asia/Tokyo"}, {"prefix": "a\nb"}, {"prefix": "x" * 65}, {"utc_offset_s": "1e9"}):
        assert client.post(PATH, params=params, json=completed()).status_code == 422


def test_the_attempts_of_many_jobs_are_bounded() -> None:
    attempts = Attempts(most=2)
    assert [attempts.find_attempt(job, 1000) for job in ("a", "b", "c")] == [1, 1, 1]
    assert attempts.find_attempt("a", 2000) == 1
    numbers = [attempts.find_attempt("a", 2000 + later) for later in range(3 * MAX_ATTEMPTS)]
    assert numbers == list(range(1, 3 * MAX_ATTEMPTS + 1))
    assert attempts.find_attempt("a", 2000 + 3 * MAX_ATTEMPTS - 1) == 3 * MAX_ATTEMPTS
    assert len(attempts._known["a"]) <= MAX_ATTEMPTS


def test_many_records_leave_turns_to_others() -> None:
    read = read_completions(json.dumps([completed(job) for job in range(200)]).encode(), NOW_MS)
    context: Any = SimpleNamespace(cache=SimpleNamespace(latest=lambda: None), slurm_attempts=Attempts(), recent=set())

    async def turns() -> int:
        work = asyncio.ensure_future(translate_completions(read, "", context, NOW_MS))
        count = 0
        while not work.done():
            await asyncio.sleep(0)
            count += 1
        assert len((await work).records) == 600
        return count

    assert asyncio.run(turns()) >= 10
    assert len(read_completions(b"[" + b"1," * 20_000 + b"1]", NOW_MS).bad) == 10_001
