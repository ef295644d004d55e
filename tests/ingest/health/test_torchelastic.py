import json
from typing import Any

import pytest

from fleetcast.fleet.events import Failed, Finished, JobEvent, Phase, Resized, Started
from fleetcast.fleet.job_table import JobTable
from fleetcast.ingest.health.torchelastic import Sender, decode, parse_failure
from fleetcast.ingest.inbox.event_body import DecodedBody

NOW_MS = 1_760_000_000_000
ANYBODY = Sender()


def event(state: str, source: str = "WORKER", **metadata: Any) -> dict[str, Any]:
    """An Event as torchelastic serialises it."""
    about = {
        "run_id": "train-42",
        "global_rank": 9 if source == "WORKER" else None,
        "group_rank": 1,
        "worker_id": "4242" if source == "WORKER" else None,
        "role": "default",
        "hostname": "n042.example",
        "state": state,
        "total_run_time": 12,
        "rdzv_backend": "c10d",
        "raw_error": None,
        "metadata": '{"group_world_size": 2, "entry_point": "train.py"}',
        "agent_restarts": 0,
        "duration_ms": None,
    }
    return {
        "name": f"torchelastic.worker.status.{state}",
        "source": source,
        "timestamp": 0,
        "metadata": about | metadata,
    }


def rendezvous(state: str, **more: Any) -> dict[str, Any]:
    return {
        **{"name": "_BackendRendezvousStateHolder.sync", "run_id": "train-42", "message": "…", "hostname": "n042"},
        **{"pid": 7, "node_state": state, "master_endpoint": "", "rank": None, "local_id": 1, "error_trace": ""},
        **more,
    }


def cycle(number: int, nodes: Any, **more: Any) -> dict[str, Any]:
    return {
        **{"job_id": "4711", "attempt_index": 0, "cycle_number": number, "cycle_start_time": "2025-10-09T08:53:20Z"},
        **{"cycle_end_time": None, "cycle_log_file": "/x", "active_nodes": nodes, "standby_nodes": "n9"},
        **{"generation": 3, "active_ranks": 16, **more},
    }


def take(*records: dict[str, Any], sender: Sender = ANYBODY) -> DecodedBody:
    return decode(json.dumps(list(records)).encode(), {}, sender, NOW_MS, 60_000)


def told(*records: dict[str, Any], sender: Sender = ANYBODY) -> list[Any]:
    decoded = take(*records, sender=sender)
    assert not decoded.rejected
    return [record.event for record in decoded.records]


def test_a_failed_worker_says_why_and_where() -> None:
    error = {"message": {"message": "RuntimeError: NCCL error: remote process exited", "extraInfo": {"timestamp": "1"}}}
    (failed,) = told(event("FAILED", raw_error=json.dumps(error), agent_restarts=2))
    assert failed == Failed(
        job="train-42",
        attempt=3,
        sequence=1 << 20,
        time_ms=NOW_MS,
        category="network",
        node="n042.example",
        message="rank 9: RuntimeError: NCCL error: remote process exited",
    )


@pytest.mark.parametrize(
    ("raw_error", "category"),
    [
        ('{"message": "CUDA out of memory. Tried to allocate 2 GiB"}', "out_of_memory"),
        ('{"message": {"message": "ValueError: bad shape"}}', "user"),
        ('{"message": {"message": "CUDA error: uncorrectable ECC error encountered"}}', "hardware"),
        ('{"message": {"message": "Signal 9 (SIGKILL) received"}, "exitcode": -9}', "unknown"),
        ("Traceback …\nSignalException: Process 7 got signal: 15", "cancelled"),
        ("Traceback …\nKeyError: 'x'", "user"),
        ("", "unknown"),
    ],
)
def test_an_error_has_a_category(raw_error: str, category: str) -> None:
    assert parse_failure(raw_error).category == category


def test_the_first_agent_tells_that_all_have_finished() -> None:
    workers = [event("SUCCEEDED", global_rank=rank) for rank in range(2)]
    agents = [event("SUCCEEDED", "AGENT", group_rank=rank) for rank in (1, 0)]
    assert told(*workers, *agents) == [Finished(job="train-42", sequence=1 << 20, time_ms=NOW_MS)]


def test_workers_that_were_terminated_with_the_failed_one_tell_nothing() -> None:
    assert told(event("TERMINATED")) == []


def test_a_rendezvous_is_the_phase_init() -> None:
    first, second = told(rendezvous("INIT"), rendezvous("RUNNING", rank=1))
    assert (first.name, first.rank, second.rank) == ("init", None, 1)
    assert 1 << 20 < first.sequence < 1 << 32
    assert first.sequence != second.sequence
    assert told(rendezvous("INIT")) == [first], "sent again, it is the same event"
    assert told(rendezvous("FAILED", error_trace="timeout")) == []
    (timed,) = told(event("RENDEZVOUS", "AGENT", duration_ms=1500.5) | {"timestamp": NOW_MS - 5})
    assert (timed.time_ms, timed.rank, type(timed)) == (NOW_MS - 5, 1, Phase)


def test_a_cycle_of_nvrx_says_which_nodes_train() -> None:
    first = told(cycle(0, "n[1-2],n4"))
    assert [type(row) for row in first] == [Started, Resized]
    assert first[0].nodes == ("n1", "n2", "n4")
    (second,) = told(cycle(1, ["n1", "n9"], attempt_index=1, cycle_start_time=1_760_000_000.5))
    assert (second.job, second.attempt, second.nodes, second.time_ms) == ("4711", 2, ("n1", "n9"), NOW_MS + 500)
    table = JobTable()
    for row in (*first, *told(cycle(1, "n1,n9"))):
        table.apply(row)
    attempt = table.get("4711")
    assert attempt is not None
    assert attempt.nodes == ("n1", "n9")


def test_the_request_names_job_and_attempt_where_the_records_do_not() -> None:
    sender = Sender("ml/train", 4)
    rows: list[JobEvent] = told(event("FAILED", run_id="none", agent_restarts=1), cycle(0, "n1"), sender=sender)
    assert {(row.job, row.attempt) for row in rows} == {("ml/train", 4)}


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({}, "missing_field"),
        (event("FAILED", run_id="none"), "missing_field"),
        (event("FAILED", agent_restarts=-1), "out_of_range"),
        (event("FAILED") | {"timestamp": NOW_MS + 3_600_000}, "future"),
        (event("FAILED", hostname="a\nb"), "bad_name"),
        (cycle(-1, "n1"), "out_of_range"),
        (cycle(0, "n[1-"), "bad_value"),
        (cycle(0, "n1", cycle_start_time="noon"), "bad_value"),
        (cycle(0, "n1", cycle_start_time=1e300), "future"),
        (event("FAILED") | {"metadata": 7}, "wrong_type"),
    ],
)
def test_a_bad_record_is_refused_and_the_others_are_kept(record: dict[str, Any], reason: str) -> None:
    decoded = take(record, event("FAILED"))
    assert [(index, error.reason) for index, error in decoded.rejected] == [(0, reason)]
    assert len(decoded.records) == 1
