"""The source: what it tells once, what it tells again, and what it finds out about jobs that are gone."""

import asyncio
import math
import os
from pathlib import Path
from typing import Any

import pytest

from fleetcast.checks import check_source
from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import ConfigError, SourceError
from fleetcast.fleet.events import Failed, Finished, JobEvent, Preempted, Queued, Started, Submitted
from fleetcast.ingest.slurm.source import SlurmSource
from fleetcast.ingest.source import Batch
from tests.ingest.slurm_outputs import AWAY, FakeSlurm, T, account, accounts, node, nodes, old_job, queue

NOW_MS = (T + 200) * 1000


def source(slurm: FakeSlurm, **options: Any) -> SlurmSource:
    return SlurmSource(Entities(), ManualClock(NOW_MS), {"interval_s": 1.0, **options}, client=slurm)


def take(made: SlurmSource, count: int) -> list[Batch]:
    async def taken() -> list[Batch]:
        return [await made.next() for _ in range(count)]

    return asyncio.run(taken())


def said(batch: Batch) -> list[tuple[str, str, int]]:
    return [(type(event).__name__, event.job, event.attempt) for event in batch.events]


def events(batches: list[Batch]) -> list[JobEvent]:
    return [event for batch in batches for event in batch.events]


def test_each_thing_is_told_once() -> None:
    waiting, running, over = (old_job(7, state) for state in ("PENDING", "RUNNING", "COMPLETED"))
    made = source(FakeSlurm([queue(waiting), queue(waiting), queue(running), queue(running), queue(over)]))
    first, second, third = take(made, 3)
    assert said(first) == [("Submitted", "7", 1), ("Queued", "7", 1)]
    assert said(second) == [("Started", "7", 1)]
    assert said(third) == [("Finished", "7", 1)]


def test_a_restarted_source_tells_again_what_its_position_does_not_cover() -> None:
    queues = [queue(old_job()), queue(old_job(), old_job(8, "PENDING"))]
    check_source(lambda: source(FakeSlurm(queues)), batches=2, replays=False)
    made = source(FakeSlurm(queues[1:]))
    first = take(made, 1)
    made.seek({})
    assert events(take(made, 1)) == events(first)
    made.seek(made.position())
    assert events(take(made, 1)) == events(first)


def test_jobs_without_gpus_are_left_out_unless_wanted() -> None:
    plain = old_job(7, "PENDING", tres_req_str="cpu=1,node=1", tres_per_node="")
    made = source(FakeSlurm([queue(plain, old_job(8, "PENDING"))]))
    assert {event.job for event in events(take(made, 1))} == {"8"}
    assert made.health()["noted"]["jobs_without_gpus"] == 1
    assert {event.job for event in events(take(source(FakeSlurm([queue(plain)]), cpu_jobs=True), 1))} == {"7"}


def test_a_requeued_job_ends_its_attempt_as_the_accounts_say() -> None:
    again = old_job(7, "PENDING", restart_cnt=1, submit_time=T + 60)
    book = accounts(account("7", "PREEMPTED", T, T + 60), account("7", "PENDING", T + 60, "Unknown"))
    made = source(FakeSlurm([queue(old_job()), queue(again)], book=book), accounting_s=1000.0)
    first, second = take(made, 2)
    assert ("Started", "7", 1) in said(first)
    assert said(second) == [("Submitted", "7", 2), ("Queued", "7", 2), ("Preempted", "7", 1)]
    ended = second.events[-1]
    assert isinstance(ended, Preempted)
    assert ended.time_ms == (T + 60) * 1000


def test_a_job_that_is_gone_is_looked_up() -> None:
    slurm = FakeSlurm([queue(old_job(), old_job(8)), queue(old_job(8))], book=accounts(account("7", "COMPLETED")))
    made = source(slurm, accounting_s=1000.0)
    slurm.book = accounts()
    take(made, 1)
    slurm.book = accounts(account("7", "COMPLETED"))
    assert said(take(made, 1)[0]) == [("Finished", "7", 1)]
    assert slurm.asked[-1] == (0, ["7"])
    assert list(made.position()["live"]) == ["8"]


def test_a_job_that_ended_while_we_were_away_is_found_by_the_position() -> None:
    made = source(FakeSlurm([queue(old_job())], book=accounts()))
    take(made, 1)
    later = source(FakeSlurm([queue()], book=accounts(account("7", "TIMEOUT"))))
    later.seek(made.position())
    ends = [event for event in events(take(later, 1)) if isinstance(event, Failed)]
    assert [(end.job, end.category) for end in ends] == [("7", "timeout")]


def test_without_accounts_a_job_that_is_gone_has_ended_for_reasons_unknown() -> None:
    made = source(FakeSlurm([queue(old_job()), queue()]))
    end = events(take(made, 2))[-1]
    assert isinstance(end, Failed)
    assert (end.category, made.health()["accounting"], made.health()["noted"]["ends_not_told"]) == ("unknown", False, 1)


def test_accounts_that_do_not_answer_are_asked_again() -> None:
    slurm = FakeSlurm([queue(old_job()), queue(), queue(old_job(9, "PENDING")), queue()], book=AWAY)
    made = source(slurm, accounting_s=1000.0)
    assert [said(batch)[0] for batch in take(made, 2)] == [("Submitted", "7", 1), ("Submitted", "9", 1)]
    slurm.book = accounts(account("7", "COMPLETED"))
    assert any(isinstance(event, Finished) for event in events(take(made, 1)))


def test_an_answer_that_is_no_queue_ends_no_job() -> None:
    made = source(FakeSlurm([queue(old_job()), b"slurm_load_jobs error: Unable to contact", b"{", queue(old_job())]))
    take(made, 1)
    for _ in range(2):
        with pytest.raises(SourceError, match="cannot be read"):
            take(made, 1)
    assert not made.health()["up"]
    assert made.position()["live"] == {"7": 1}


def test_nothing_counts_of_a_look_that_broke_off() -> None:
    slurm = FakeSlurm([queue(old_job())], rows=[nodes(node("n1", "idle", "DRAIN", reason="x", at=T)), b"{"])
    made = source(slurm)
    slurm.rows.reverse()
    with pytest.raises(SourceError):
        take(made, 1)
    assert made.position() == {"since_ms": 0, "live": {}, "nodes": {}, "prints": {}, "numbers": {}}
    (batch,) = take(made, 1)
    assert said(batch)[0] == ("Submitted", "7", 1)
    assert [event.type for event in batch.node_events] == ["drain"]


def test_nodes_are_told_when_they_change() -> None:
    rows = [
        nodes(node("n1"), node("n2", "down", reason="psu", at=T)),
        nodes(node("n1", "mixed", "DRAIN", reason="Xid 79", at=T + 5), node("n2", "down", reason="psu", at=T)),
        nodes(node("n1", "mixed", "DRAIN", reason="Xid 79", at=T + 5), node("n2")),
    ]
    made = source(FakeSlurm([queue()], rows), name="west")
    told = [(event.node, event.type, event.source) for batch in take(made, 3) for event in batch.node_events]
    assert told == [("n2", "lost", "west"), ("n1", "drain", "west"), ("n2", "returned", "west")]
    assert list(made.position()["nodes"]) == ["n1"]


def test_slurm_that_is_away_is_a_source_error() -> None:
    made = source(FakeSlurm([AWAY, queue(old_job())]))
    with pytest.raises(SourceError, match="does not answer"):
        take(made, 1)
    assert not made.health()["up"]
    assert said(take(made, 1)[0])[0] == ("Submitted", "7", 1)
    assert made.health()["up"]


def test_a_job_that_came_and_went_between_two_polls_is_in_the_accounts() -> None:
    made = source(FakeSlurm([queue()], book=accounts(account("5_3", "COMPLETED"))))
    assert said(take(made, 1)[0]) == [("Submitted", "5_3", 1), ("Started", "5_3", 1), ("Finished", "5_3", 1)]


def test_recorded_outputs_are_read_from_a_folder(tmp_path: Path) -> None:
    (tmp_path / "queue.json").write_bytes(queue(old_job(), old_job(8, "PENDING")))
    (tmp_path / "nodes.json").write_bytes(nodes(node("n1", "down", reason="psu", at=T)))
    (tmp_path / "accounting.txt").write_bytes(accounts(account("5", "COMPLETED")))
    made = SlurmSource(Entities(), ManualClock(NOW_MS), {"folder": str(tmp_path)})
    (batch,) = take(made, 1)
    kinds = {type(event) for event in batch.events}
    assert kinds == {Submitted, Started, Queued, Finished}
    assert [event.type for event in batch.node_events] == ["lost"]
    (tmp_path / "queue.json").unlink()
    with pytest.raises(SourceError, match=r"neither queue\.json"):
        take(made, 1)


def test_commands_are_run_elsewhere_and_as_this_slurm_knows_them(tmp_path: Path) -> None:
    """A Slurm without JSON, behind a shell that joins its words as ssh does."""
    columns = "JOBID|STATE|SUBMIT_TIME|START_TIME|NODELIST|TRES_ALLOC|NAME|"
    programs = {
        "ssh": '#!/bin/sh\nshift\nexec sh -c "$*"\n',
        "squeue": f"""#!/bin/sh
case "$*" in *--json*) echo "squeue: unrecognized option '--json'" >&2; exit 1;; esac
case "$*" in *"Name:|"*) ;; *) echo "columns: $*" >&2; exit 1;; esac
test "$SLURM_TIME_FORMAT" = %s && echo '{columns}' && echo '7|RUNNING|{T}|{T + 10}|n[1-2]|gres/gpu=4|a|b|'
""",
        "sinfo": f"#!/bin/sh\necho 'NODELIST|STATECOMPLETE|TIMESTAMP|REASON|'\necho 'n1|down|{T}|psu|'\n",
        "sacct": "#!/bin/sh\necho 'Slurm accounting storage is disabled' >&2\nexit 1\n",
    }
    for name, script in programs.items():
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        made = SlurmSource(Entities(), ManualClock(NOW_MS), {"shell": ["ssh", "login1"]})
        (batch,) = take(made, 1)
    assert said(batch) == [("Submitted", "7", 1), ("Started", "7", 1)]
    assert [(event.node, event.type, event.time_ms) for event in batch.node_events] == [("n1", "lost", T * 1000)]
    assert (batch.bad, made.health()["accounting"]) == ((), False)


def test_a_command_that_is_not_there_is_a_source_error() -> None:
    made = SlurmSource(Entities(), ManualClock(NOW_MS), {"shell": ["/nowhere/ssh"]})
    with pytest.raises(SourceError, match="/nowhere/ssh"):
        take(made, 1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"interval": 5}, "no such key; did you mean interval_s?"),
        ({"interval_s": 0}, "interval_s 0"),
        ({"classes": ["debug=nightly"]}, "nightly"),
        ({"url": "slurm:6820"}, r"http://"),
        ({"url": "http://h", "folder": "/x"}, "exclude"),
        ({"form": "xml"}, "auto, json or text"),
        ({"accounting_s": -1}, "0 or more"),
        ({"interval_s": math.inf}, "interval_s"),
        ({"lookback_s": math.nan}, "lookback_s"),
        ({"name": ""}, "name"),
    ],
)
def test_bad_options_are_refused_with_the_key(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SlurmSource(Entities(), ManualClock(NOW_MS), options)
