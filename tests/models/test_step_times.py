"""What step times say where jobs pause, resize, write checkpoints or change their pace for good."""

from fleet.events import Phase, Step


def report(fleet, job, durations, first=2):
    for sequence, seconds in enumerate(durations, first):
        fleet.now_ms += round(seconds * 1000)
        fleet.jobs.apply(Step(job=job, sequence=sequence, time_ms=fleet.now_ms, step=sequence, duration_s=seconds))


def test_a_job_that_was_slow_before_its_evaluation_is_not_slow_in_it(small_fleet):
    fleet = small_fleet(2)
    fleet.start("j", fleet.names)
    report(fleet, "j", [2.0] * 30 + [2.6] * 6)
    assert fleet.tick().stragglers["j"]["slow"]
    fleet.jobs.apply(Phase(job="j", sequence=99, time_ms=fleet.now_ms, name="evaluation", rank=0))
    body = fleet.tick().stragglers["j"]
    assert (body["slow"], body["sentence"]) == (False, "in evaluation: its steps are not compared")
    fleet.jobs.apply(Phase(job="j", sequence=100, time_ms=fleet.now_ms, name="steady", rank=0))
    assert fleet.tick().stragglers["j"]["slow"]
