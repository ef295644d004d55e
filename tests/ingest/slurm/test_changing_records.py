"""Records of Slurm that change while a job waits: the last word counts, and what cannot start is told apart."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.features.demand_series import DemandSeries
from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.events import JobEvent, Queued, Submitted
from fleetcast.fleet.job_table import JobTable
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.ingest.slurm.jobs import SITE
from fleetcast.ingest.slurm.json import decode_accounted_jobs, decode_queued_jobs
from fleetcast.ingest.slurm.reasons import is_blocked
from fleetcast.ingest.slurm.scan import JobScan
from fleetcast.ingest.slurm.source import SlurmSource
from fleetcast.ingest.slurm.text import read_jobs
from tests.fuzz.bounds import examples
from tests.ingest.slurm_outputs import FakeSlurm, T, account, accounts, new_job, old_job, queue

FIELD = Path(__file__).parents[2] / "field"
NOW_MS = (T + 200) * 1000
FIELD_MS = 1_795_650_000_000


def field(name: str) -> bytes:
    return (FIELD / name).read_bytes()


class Polled:
    """A source over prepared answers, and the job table that its events make. Polls are ten seconds apart."""

    def __init__(self, queues: Sequence[bytes], now_ms: int = NOW_MS, book: bytes | None = None) -> None:
        self.clock = ManualClock(now_ms)
        self.fake = FakeSlurm(queues, book=book)
        self.source = SlurmSource(Entities(), self.clock, {}, client=self.fake)
        self.table, self.demand = JobTable(), DemandSeries()
        self.events: list[JobEvent] = []

    def poll(self, times: int = 1) -> list[JobEvent]:
        """Poll that often, whether an answer is news or not, and fold what comes."""
        found: list[JobEvent] = []
        for _ in range(times):
            self.clock.advance(10.0)
            state = self.source._state.copy()
            batch = asyncio.run(self.source._poll(state))
            self.source._state = state
            assert not batch.bad
            found += batch.events
        for event in found:
            attempt = self.table.apply(event)
            if attempt is not None:
                self.demand.update(attempt)
        self.events += found
        return found

    def job(self, name: str) -> JobAttempt:
        attempt = self.table.get(name)
        assert attempt is not None
        return attempt

    def queued(self, pool: str = "all") -> float:
        return float(self.demand.read_series(pool, "queued", self.clock.now_ms(), 60, 1)[-1])


# -- the partition of the start ---------------------------------------------------------------------------------------


def test_a_job_waits_in_each_of_its_partitions_and_runs_in_that_of_its_start() -> None:
    polled = Polled([field("20-slurm-two-partitions-1.json"), field("20-slurm-two-partitions-2.json")], FIELD_MS)
    polled.poll()
    assert (polled.job("203").queue, polled.job("203").queues) == ("debug", ("debug", "batch"))
    assert [polled.queued(pool) for pool in ("debug", "batch", "all")] == [8, 8, 8]
    polled.poll()
    job = polled.job("203")
    assert (job.state, job.queue, job.queues, job.hosts) == ("running", "batch", ("batch",), ("g04",))
    assert [polled.queued(pool) for pool in ("debug", "batch", "all")] == [0, 0, 0]


def test_a_job_that_is_moved_while_it_waits_waits_where_it_was_moved() -> None:
    polled = Polled([queue(old_job(7, "PENDING")), queue(old_job(7, "PENDING", partition="night", time_limit=5))])
    polled.poll(2)
    assert (polled.job("7").queue, [polled.queued(pool) for pool in ("train", "night")]) == ("night", [0, 4])
    submission = polled.job("7").submission
    assert submission is not None
    assert submission.limit_s == 300.0


def test_a_limit_that_an_administrator_raises_on_a_running_job_counts() -> None:
    polled = Polled([queue(new_job()), queue(new_job(time_limit={"set": True, "infinite": False, "number": 90}))])
    polled.poll(2)
    submission = polled.job("7").submission
    assert submission is not None
    assert submission.limit_s == 5400.0
    assert polled.job("7").state == "running"


def test_accounts_name_the_partition_of_a_job_that_came_and_went_between_two_polls() -> None:
    waits = queue(old_job(7, "PENDING", partition="debug,train", submit_time=T))
    polled = Polled([waits, queue()], book=accounts(account("7", "COMPLETED")))
    polled.poll(2)
    assert (polled.job("7").state, polled.job("7").queue) == ("finished", "train")


def test_a_record_that_says_the_same_is_no_event() -> None:
    polled = Polled([queue(old_job(7, "PENDING", priority=1000)), queue(old_job(7, "PENDING", priority=1003))])
    assert len(polled.poll()) == 2
    assert polled.poll(3) == []


def test_a_restarted_source_corrects_what_changed_meanwhile_once() -> None:
    polled = Polled([queue(old_job(7, "PENDING")), queue(old_job(7, "PENDING", partition="night"))])
    polled.poll()
    position = json.loads(json.dumps(polled.source.position()))
    polled.source = SlurmSource(Entities(), polled.clock, {}, client=polled.fake)
    polled.source.seek(position)
    polled.poll()
    assert polled.job("7").queue == "night"
    assert [event for event in polled.poll() if isinstance(event, Submitted)] == []


# -- arrays -----------------------------------------------------------------------------------------------------------


def tasks_of(polled: Polled) -> int:
    return sum(row.tasks for row in polled.table.list_queued())


def array(text: str, **fields: Any) -> dict[str, Any]:
    return old_job(500, "PENDING", array_job_id=500, array_task_string=text, node_count=1, **fields)


def running_task(task: int) -> dict[str, Any]:
    return old_job(1000 + task, array_job_id=500, array_task_id=task, nodes="n1", gres_detail=["gpu:h100:4(IDX:0-3)"])


def test_a_big_array_counts_whole() -> None:
    polled = Polled([field("21-slurm-big-array.json")], FIELD_MS)
    polled.poll()
    gpus = sum(row.gpus for row in polled.table.list_queued())
    assert (tasks_of(polled), gpus, polled.queued()) == (5000, 5000, 5000)
    assert (polled.job("500_7").gpus, polled.job("500_rest").tasks) == (1, 4000)


def test_an_array_counts_whole_while_its_tasks_start() -> None:
    queues = [queue(array("0-1999:1"))]
    queues.append(queue(array("2-1999"), running_task(0), running_task(1)))
    queues.append(queue(array("1500-1999"), running_task(1499)))
    polled = Polled(queues)
    polled.poll()
    assert (tasks_of(polled), polled.queued()) == (2000, 8000)
    polled.poll()
    assert (tasks_of(polled), polled.queued(), len(polled.table.list_running())) == (1998, 7992, 2)
    polled.poll()
    assert polled.job("500_rest").state == "finished"
    assert "500_rest" not in polled.source.position()["live"]


def test_steps_count_in_a_big_array_and_a_list_that_slurm_cut_is_said_to_be_cut() -> None:
    polled = Polled([queue(array("0-100000:4%7", array_task_id=None))])
    polled.poll()
    assert tasks_of(polled) == 25_001
    read = decode_queued_jobs(queue(array("0,2,4,...")))
    assert [job.id for job in read.rows] == ["500_0", "500_2", "500_4"]
    assert [error.reason for error in read.bad] == ["array_cut"]


@pytest.mark.parametrize(
    ("text", "tasks"),
    [("0x1F", 5), ("0x1E%2", 4), ("0x" + "F" * 500, 2000), ("0xa0", 2), ("0x" + "F" * 30_000, 120_000)],
)
def test_a_mask_of_slurmdbd_names_the_tasks_that_wait(text: str, tasks: int) -> None:
    listed = {"job_id": 500, "state": {"current": ["PENDING"]}, "array": {"job_id": 500, "task": text}}
    for read in (
        decode_accounted_jobs(queue(listed)),
        decode_queued_jobs(queue(array(text))),
        read_jobs(accounts(account(f"500_[{text}]"))),
    ):
        assert (sum(job.tasks for job in read.rows), read.bad) == (tasks, [])
    rows = decode_queued_jobs(queue(array("0xa0"))).rows
    assert [job.id for job in rows] == ["500_5", "500_7"]


EMPTY = ["0x0", "0x0000%4", "%4"]


@pytest.mark.parametrize("text", EMPTY)
def test_an_array_without_a_waiting_task_is_no_job_and_no_bad_record(text: str) -> None:
    """Slurm clears the bit of a task that starts, and keeps the record of the array."""
    polled = Polled([queue(array("0-1")), queue(array(text), running_task(0), running_task(1))])
    polled.poll()
    assert (tasks_of(polled), polled.queued()) == (2, 8)
    polled.poll()
    assert (tasks_of(polled), polled.queued(), len(polled.table.list_running())) == (0, 0, 2)
    assert polled.source.health()["bad"] == 0
    listed = {"job_id": 500, "state": {"current": ["PENDING"]}, "array": {"job_id": 500, "task": text}}
    line = account(f"500_[{text}]", "PENDING", end="Unknown").replace("n[1-2]", "None assigned")
    for read in (decode_accounted_jobs(queue(listed)), read_jobs(accounts(line))):
        assert (sum(job.tasks for job in read.rows), read.bad) == (0, [])


def test_a_line_whose_list_of_tasks_ends_with_dots_is_an_array_and_no_step() -> None:
    read = read_jobs(accounts(account("500_[0,2,4,...]"), account("7.batch"), account("7.extern"), account("8_1.0")))
    assert [job.id for job in read.rows] == ["500_0", "500_2", "500_4"]
    assert [error.reason for error in read.bad] == ["array_cut"]


@pytest.mark.parametrize("text", EMPTY)
def test_a_record_that_holds_nodes_counts_although_its_array_has_no_waiting_task(text: str) -> None:
    row = old_job(500, array_job_id=500, array_task_string=text, nodes="n1", gres_detail=["gpu:h100:4(IDX:0-3)"])
    polled = Polled([queue(row)])
    polled.poll()
    assert [(row.job, row.state) for row in polled.table.list_running()] == [("500", "running")]


@examples(100)
@given(mask=st.integers(0, 2**80), digits=st.integers(0, 40))
def test_an_array_has_as_many_waiting_tasks_as_its_mask_has_bits(mask: int, digits: int) -> None:
    for text in (f"0x{mask:0{digits}X}", f"0x{mask:0{digits}x}%3"):
        read = decode_queued_jobs(queue(array(text)))
        assert (sum(job.tasks for job in read.rows), read.bad) == (mask.bit_count(), [])


@pytest.mark.parametrize("text", ["all", "1-3;5", "0xZZ", "1-3,?", "0x", "..."])
def test_an_array_whose_tasks_cannot_be_read_stays_one_job_and_is_a_bad_record(text: str) -> None:
    for read in (decode_queued_jobs(queue(array(text))), read_jobs(accounts(account(f"500_[{text}]")))):
        assert [job.id for job in read.rows] == ["500"]
        assert [error.reason for error in read.bad] == ["array_cut"]
        assert "counts as one task" in read.bad[0].detail
    text = b"JobID|State|Submit|ReqTRES|JobName\n8_[1-3000%9]|PENDING|1760000000|gres/gpu=2|x\n"
    assert sum(job.tasks for job in read_jobs(text).rows) == 3000


@pytest.mark.parametrize("state", ["FROZEN", "RUNNING_ON_MARS"])
def test_a_job_in_a_state_that_is_not_known_holds_its_nodes_and_the_state_is_named(state: str) -> None:
    """Slurm gets new states. A job without nodes waits, whatever they are called."""
    row = old_job(9, state, nodes="n1", gres_detail=["gpu:h100:4(IDX:0-3)"])
    polled = Polled([queue(row, old_job(10, state, nodes=""))])
    polled.poll()
    assert [(row.job, row.state) for row in polled.table.list_running()] == [("9", "running")]
    assert [row.job for row in polled.table.list_queued()] == ["10"]
    batch = asyncio.run(polled.source._poll(polled.source._state.copy()))
    assert (batch.get_tally().names, batch.get_tally().refused) == ((f"state {state}",), 0)


def test_accounts_of_a_state_that_is_not_known_are_bad_records_and_cut_words_are_completed() -> None:
    scan = JobScan(SITE, NOW_MS)
    rows = read_jobs(accounts(account("9", "FROZEN"), account("10", "OUT_OF_ME+"), account("11", "CANCELLED+"))).rows
    scan.add_jobs(rows, set(), is_queue=False)
    assert [error.reason for error in scan.bad] == ["unknown_state"]
    assert scan.ended == {("10", 1), ("11", 1)}


# -- what may not start -----------------------------------------------------------------------------------------------


def test_held_and_dependent_jobs_are_blocked_and_no_demand() -> None:
    polled = Polled([field("28-slurm-held-jobs.json")], FIELD_MS)
    polled.poll()
    assert [(row.job, row.queued_reason) for row in polled.table.list_blocked()] == [
        *(("204", "JobHeldUser"), ("205", "Dependency"))
    ]
    assert polled.table.list_queued() == []
    assert not polled.queued() > 0


def test_a_released_job_waits_from_its_release() -> None:
    held, released = old_job(7, "PENDING", state_reason="JobHeldUser", priority=0), old_job(7, "PENDING")
    polled = Polled([queue(held), queue(released), queue(held)])
    polled.poll()
    assert polled.job("7").state == "blocked"
    polled.poll()
    assert (polled.job("7").state, polled.job("7").eligible_ms) == ("queued", polled.clock.now_ms())
    assert polled.queued() == 4
    polled.poll()
    assert polled.job("7").state == "blocked"
    assert not polled.queued() > 0


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({"state_reason": "BeginTime"}, "blocked"),
        ({"state_reason": "None", "priority": 0}, "blocked"),
        ({"state_reason": "None", "job_state": ["PENDING", "REQUEUE_HOLD"]}, "blocked"),
        ({"state_reason": "launch_failed_requeued_held"}, "blocked"),
        ({"state_reason": "QOSMaxGRESPerJob"}, "blocked"),
        ({"state_reason": "Priority", "priority": {"set": False, "infinite": False, "number": 0}}, "queued"),
        ({"state_reason": "QOSGrpGRES"}, "queued"),
        ({"state_reason": "ReqNodeNotAvail"}, "queued"),
    ],
)
def test_which_reasons_keep_a_job_from_starting(fields: dict[str, Any], state: str) -> None:
    polled = Polled([queue(old_job(7, "PENDING", **fields))])
    polled.poll()
    assert polled.job("7").state == state


def test_a_held_job_of_the_text_form_is_blocked() -> None:
    head = "JOBID|STATE|RESTART_COUNT|SUBMIT_TIME|NODES|TRES_PER_NODE|PRIORITY|REASON|NAME|"
    rows = [
        f"7|PENDING|0|{T}|1|gres/gpu:8|0|JobHeldUser|x|",
        f"8|PENDING|0|{T}|1|gres/gpu:8|10|(BeginTime)|x|",
        f"9|PENDING|0|{T}|1|gres/gpu:8|10|Nodes required for job are DOWN, DRAINED or reserved|x|",
    ]
    polled = Polled(["\n".join([head, *rows, ""]).encode()])
    polled.poll()
    assert [row.job for row in polled.table.list_blocked()] == ["7", "8"]
    assert [row.job for row in polled.table.list_queued()] == ["9"]


def test_a_reason_that_changes_is_issued_with_a_later_sequence() -> None:
    polled = Polled([queue(old_job(7, "PENDING")), queue(old_job(7, "PENDING", state_reason="Priority"))])
    first = [event for event in polled.poll() if isinstance(event, Queued)]
    second = [event for event in polled.poll() if isinstance(event, Queued)]
    assert [event.reason for event in first + second] == ["Resources", "Priority"]
    assert first[0].sequence < second[0].sequence
    assert (polled.job("7").queued_reason, polled.job("7").eligible_ms) == ("Priority", T * 1000)


def test_words_of_a_reason_behind_a_comma_decide_nothing() -> None:
    assert not is_blocked("Resources, JobHeldUser")
    assert is_blocked("(Dependency)")
