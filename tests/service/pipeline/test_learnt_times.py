"""The capability that learns restart times: what it publishes, and that no later event changes an earlier tick."""

import msgspec

from fleetcast.features.job_changes import FEWEST
from fleetcast.fleet.events import Started, Step, Submitted
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.service.answers.jobs import LearntTimes
from fleetcast.service.pipeline.learnt_times import LearntJobTimes

T0 = 1_789_000_000_000


def running(job: str, first_step_s: float | None) -> JobAttempt:
    attempt = JobAttempt(job, 1)
    attempt.fold(Submitted(job=job, sequence=0, time_ms=T0))
    attempt.fold(Started(job=job, sequence=1, time_ms=T0, nodes=("a",)))
    if first_step_s is not None:
        time_ms = T0 + round(1000 * first_step_s)
        attempt.fold(Step(job=job, sequence=2, time_ms=time_ms, step=0, duration_s=1.0))
    return attempt


def test_it_publishes_what_was_learnt_and_nothing_before() -> None:
    learner, jobs = LearntJobTimes(), [running(f"j{number}", None) for number in range(FEWEST)]
    assert learner.learn(jobs, T0) == {}
    some = [running("j0", 61), running("j1", 71), *jobs[2:]]
    assert learner.learn(some, T0 + 80_000) == {}, "an estimate needs enough starts, whatever follows later"
    done = [*some[:2], running("j2", 301)]
    assert learner.learn(done, T0 + 400_000) == {row.job: LearntTimes(restart_s=70.0) for row in done}
    assert learner.learn([running("new", None)], T0 + 400_000) == {"new": LearntTimes(restart_s=70.0)}


def test_what_it_learnt_survives_a_restart() -> None:
    learner = LearntJobTimes()
    learner.learn([running(f"j{number}", 61) for number in range(FEWEST)], T0 + 90_000)
    about, arrays = learner.dump()
    again = LearntJobTimes()
    again.load(msgspec.msgpack.decode(msgspec.msgpack.encode(about)), arrays)
    again.shift_times(3_600_000)
    assert again.learn([running("new", None)], T0) == {"new": LearntTimes(restart_s=60.0)}


def test_jobs_that_ran_before_the_service_saw_them_say_nothing() -> None:
    learner = LearntJobTimes()
    before = [running(f"j{number}", 3000) for number in range(FEWEST)]
    assert learner.learn(before, T0 + 3_010_000) == {}, "their first steps may have been many, and nobody received them"
    assert learner.learn([running(f"j{number}", 2900) for number in range(FEWEST)], T0 + 3_040_000) == {}


def test_a_job_without_news_gets_what_other_jobs_teach() -> None:
    learner, resting = LearntJobTimes(), running("resting", None)
    some = [running(f"j{number}", 61) for number in range(FEWEST - 1)]
    assert learner.learn([resting, *some], T0 + 90_000) == {}
    last = running("last", 61)
    assert set(learner.learn([resting, *some, last], T0 + 90_000)) == {"resting", "j0", "j1", "last"}
    slower = [running(f"k{number}", 101) for number in range(FEWEST + 1)]
    times = learner.learn([resting, *some, last, *slower], T0 + 120_000)
    assert times["resting"] == LearntTimes(restart_s=100.0)
