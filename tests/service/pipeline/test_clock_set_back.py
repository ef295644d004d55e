"""Ends before their starts, from any source: the job is over, the fault is counted, and no run time is learnt."""

from itertools import permutations
from pathlib import Path

import pytest

from fleetcast.fleet.events import Failed, Finished, JobEvent, Preempted, Started, Submitted
from fleetcast.ingest.slurm.jobcomp import read_completions
from fleetcast.ingest.slurm.jobs import Site, make_job_events
from fleetcast.ingest.source import Batch
from fleetcast.service.pipeline.state import FleetState
from tests.service.pipeline.test_folded_limits import NOW_MS, state

FIELD = Path(__file__).parents[2] / "field"
SUBMITTED = Submitted(job="a", sequence=1, time_ms=NOW_MS - 90_000, gpus_per_node=4)
STARTED = Started(job="a", sequence=2, time_ms=NOW_MS - 10_000, nodes=("n1",))
ENDS = (
    Finished(job="a", sequence=3, time_ms=NOW_MS - 60_000),
    Failed(job="a", sequence=3, time_ms=NOW_MS - 60_000, category="user"),
    Preempted(job="a", sequence=3, time_ms=NOW_MS - 60_000),
)


def folded(*events: JobEvent) -> FleetState:
    made = state()
    for event in events:
        made.apply(Batch(events=(event,)), NOW_MS)
    return made


def learnt(made: FleetState) -> list[float | None]:
    return [row.run_s for row in made.demand.records.list_records()]


def test_a_clock_that_was_set_back_is_counted_and_nothing_is_learnt() -> None:
    (job,) = read_completions((FIELD / "38-jobcomp-clock-set-back.txt").read_bytes(), 1_793_000_000_000).rows
    made = folded(*make_job_events(job, Site()))
    attempt = made.jobs.get("911")
    assert attempt is not None
    assert (attempt.state, attempt.run_s, made.jobs.list_running()) == ("finished", None, [])
    assert made.counts.bad == {"ends_before_start": 1}
    assert "1,200 s before it starts" in made.counts.bad_examples["ends_before_start"]
    assert (learnt(made), made.demand.compute_duration_quantiles()["all"]) == ([None], None)


@pytest.mark.parametrize("end", ENDS)
def test_every_end_of_every_source_is_checked_in_any_order(end: JobEvent) -> None:
    for events in permutations((SUBMITTED, STARTED, end)):
        made = folded(*events, end)
        assert made.counts.bad == {"ends_before_start": 1}
        assert (learnt(made), made.jobs.list_running()) == ([None], [])


def test_an_end_that_is_corrected_is_learnt() -> None:
    right = Finished(job="a", sequence=4, time_ms=NOW_MS - 4_000)
    made = folded(SUBMITTED, STARTED, ENDS[0], right)
    assert learnt(made) == [6.0]


def test_an_end_at_the_moment_of_the_start_is_no_fault() -> None:
    made = folded(SUBMITTED, STARTED, Finished(job="a", sequence=3, time_ms=STARTED.time_ms))
    assert (made.counts.bad, learnt(made)) == ({}, [0.0])
