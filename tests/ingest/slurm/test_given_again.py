"""Numbers that Slurm gives again: a job is its number and its submission, in every form and from every source."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.entities import Entities
from fleetcast.fleet.events import Failed, Submitted
from fleetcast.ingest.slurm.job_numbers import JobNumbers
from fleetcast.ingest.slurm.jobs import SlurmJob
from fleetcast.ingest.slurm.json import decode_queued_jobs
from fleetcast.ingest.slurm.source import SlurmSource
from tests.ingest.slurm.test_changing_records import FIELD_MS, NOW_MS, Polled, field
from tests.ingest.slurm_outputs import T, account, accounts, new_job, old_job, queue

AGAIN = T + 100
OTHER = "7@1760000100"


def states(polled: Polled) -> dict[str, str]:
    return {row.job: row.state for row in polled.table}


def accounted(job: int = 7, submit: int = T, restarts: int | None = 0, **fields: Any) -> dict[str, Any]:
    """A job of `sacct --json`."""
    row = {
        "job_id": job,
        "state": {"current": ["COMPLETED"]},
        "time": {"submission": submit, "start": submit + 5, "end": submit + 50},
        "nodes": "n9",
        "user": "ada",
        "name": "llama|7b",
        "tres": {"allocated": [{"type": "gres", "name": "gpu", "count": 4}]},
    }
    return {**row, **({} if restarts is None else {"restart_cnt": restarts}), **fields}


def test_accounts_of_a_recycled_number_end_no_running_job() -> None:
    early, late = field("18-slurm-recycled-id-accounting-early.txt"), field("18-slurm-recycled-id-accounting-late.txt")
    polled = Polled([field("18-slurm-recycled-id-queue.json"), queue()], FIELD_MS, early)
    polled.poll(3)
    job = polled.job("12728301")
    assert (job.state, job.attempt, job.hosts) == ("running", 1, ("g08",))
    polled.fake.book = late
    polled.poll()
    job = polled.job("12728301")
    assert (job.state, job.attempt, job.ended_ms) == ("failed", 1, 1_795_640_500_000)
    assert isinstance(job.failure, Failed)


def test_numbers_that_begin_anew_are_other_jobs() -> None:
    names = ("19-slurm-ids-begin-anew-1.json", "19-slurm-ids-begin-anew-2.json")
    polled = Polled([field(name).replace(b"1795726400", b"1795643000") for name in names], FIELD_MS)
    polled.poll(3)
    old, new = polled.job("7"), polled.job("7@1795645000")
    assert (old.state, old.hosts, old.attempt) == ("finished", ("g01",), 1)
    assert (new.state, new.hosts, new.attempt) == ("running", ("g07",), 1)
    assert new.submission is not None
    assert (new.submission.user, new.queue) == ("bob", "batch2")


@pytest.mark.parametrize("restarts", [0, None])
def test_accounts_in_json_end_only_the_job_that_they_are_of(restarts: int | None) -> None:
    polled = Polled([queue(old_job(submit_time=AGAIN, start_time=AGAIN + 5)), queue()], NOW_MS + 100_000)
    polled.fake.book = queue(accounted(7, T - 90_000, restarts))
    polled.poll(3)
    assert polled.job("7").state == "running"
    failed = accounted(7, AGAIN, restarts, state={"current": ["FAILED"]})
    polled.fake.book = queue(accounted(7, T - 90_000, restarts), failed)
    polled.poll()
    assert (polled.job("7").state, polled.job("7").attempt) == ("failed", 1)


def test_a_requeued_job_stays_the_same_job() -> None:
    queues = [queue(old_job()), queue(old_job(7, "COMPLETING", restart_cnt=1))]
    queues += [queue(old_job(7, "PENDING", restart_cnt=1, submit_time=AGAIN))]
    queues += [queue(old_job(7, restart_cnt=1, submit_time=AGAIN + 1, start_time=AGAIN + 5))]
    polled = Polled(queues, NOW_MS, accounts(account("7", "PREEMPTED", T, AGAIN)))
    polled.poll(4)
    assert {row.job for row in polled.table} == {"7"}
    assert (polled.job("7").attempt, polled.job("7").state) == (2, "running")
    first = polled.table.get("7", 1)
    assert first is not None
    assert first.state == "preempted"


def test_requeues_that_no_record_counts_are_attempts_of_one_job() -> None:
    rows = [account("7", "PREEMPTED", T + at, T + at + 20) for at in (0, 30, 60)]
    polled = Polled([queue()], NOW_MS, accounts(*rows))
    polled.poll(2)
    polled.source._accounts_due_ms = 0
    polled.poll()
    assert sorted((row.job, row.attempt) for row in polled.table) == [("7", 1), ("7", 2), ("7", 3)]


def test_tasks_of_an_array_are_given_again_as_a_whole() -> None:
    def task(number: int, submit: int, **fields: Any) -> dict[str, Any]:
        return old_job(90 + number, array_job_id=7, array_task_id=number, submit_time=submit, nodes="n1", **fields)

    polled = Polled([queue(task(1, T), task(2, T)), queue(task(1, AGAIN, start_time=AGAIN + 5, user_name="bob"))])
    polled.poll(2)
    assert states(polled)["7_1@1760000100"] == "running"
    again = queue(task(1, T), task(2, AGAIN, restart_cnt=1), task(3, T))
    assert {job.id for job in JobNumbers().name_all_jobs(decode_queued_jobs(again).rows)} == {"7_1", "7_2", "7_3"}


def test_a_number_that_was_given_again_is_known_after_a_restart() -> None:
    polled = Polled([queue(old_job(7, "COMPLETED")), queue(old_job(submit_time=AGAIN, start_time=AGAIN + 5))])
    polled.poll()
    position = json.loads(json.dumps(polled.source.position()))
    polled.source = SlurmSource(Entities(), polled.clock, {}, client=polled.fake)
    polled.source.seek(position)
    polled.poll(2)
    assert states(polled) == {"7": "finished", OTHER: "running"}


def test_a_job_of_a_number_given_again_is_looked_up_by_its_number() -> None:
    second = old_job(submit_time=AGAIN, start_time=AGAIN + 5, user_name="bob")
    polled = Polled([queue(old_job(7, "COMPLETED")), queue(second), queue()], NOW_MS, accounts())
    polled.poll(2)
    bob = account("7", "FAILED", AGAIN, AGAIN + 60).replace("|ada|", "|bob|")
    polled.fake.book = accounts(account("7", "COMPLETED"), bob)
    polled.poll()
    assert (polled.fake.asked[-1], states(polled)) == ((0, ["7"]), {"7": "finished", OTHER: "failed"})


jobs = st.builds(
    lambda submit, attempt, user: SlurmJob(id="7", states=("RUNNING",), attempt=attempt, submit_ms=submit, user=user),
    st.sampled_from([1_760_000_000_000, 1_760_000_100_000, 1_760_000_200_000]),
    st.sampled_from([1]),
    st.sampled_from(["ada", "bob"]),
)


@given(st.lists(jobs, min_size=1, max_size=8))
def test_first_attempts_have_one_name_a_submission(records: list[SlurmJob]) -> None:
    numbers = JobNumbers()
    names = {(record.submit_ms, numbers.name_job(record).id) for record in records}
    assert len({name for _, name in names}) == len({submit for submit, _ in names}) == len(names)


def test_what_names_no_submission_is_the_newest_job() -> None:
    numbers = JobNumbers()
    for submit in (T, AGAIN):
        numbers.name_job(SlurmJob(id="7", states=("RUNNING",), attempt=1, submit_ms=submit * 1000))
    assert numbers.name_job(SlurmJob(id="7", states=("COMPLETED",), attempt=1)).id == OTHER
    assert numbers.find_newest_name("7") == OTHER


def test_the_events_of_both_jobs_have_identities_of_their_own() -> None:
    polled = Polled([queue(new_job(7, ("COMPLETED",))), queue(new_job(submit_time={"number": AGAIN}))])
    found = polled.poll(2)
    submitted = [event.job for event in found if isinstance(event, Submitted)]
    assert submitted == ["7", OTHER]
