"""What telemetry saw of jobs, and what it says of the next one of their kind."""

from typing import Any

import numpy as np

from fleetcast.features.job_peaks import GIB, MAX_RUNS, MOST_KINDS, JobPeaks
from fleetcast.features.past_runs import JobShape
from fleetcast.features.similarity import make_job_shape, make_kind_keys
from fleetcast.fleet.events import Submitted
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.placements import RunningPlaces

NOW_MS = 1_789_000_000_000


def attempt(job: str, *, user: str = "ada", gpus: int = 2, outcome: str = "", age_s: float = 600.0) -> JobAttempt:
    told = Submitted(job=job, sequence=0, time_ms=NOW_MS, user=user, queue="train", gang=1, gpus_per_node=gpus)
    return JobAttempt(job, 1, submission=told, started_ms=NOW_MS - round(age_s * 1000), outcome=outcome)


def see(
    peaks: JobPeaks,
    running: list[JobAttempt],
    holder: list[list[int]],
    memory_gib: Any,
    power_w: Any,
    places: RunningPlaces | None = None,
) -> None:
    """One node a row of `holder`; its GPUs are told of in order."""
    holders = np.array(holder, np.int32)
    rows = np.arange(holders.size, dtype=np.int32).reshape(holders.shape)
    memory = np.array(memory_gib, np.float32) * np.float32(GIB)
    peaks.observe(running, NOW_MS, holders, rows, memory, np.array(power_w, np.float32), places)


def likely(peaks: JobPeaks, job: JobAttempt, kind: Any = "user and name") -> list[float] | None:
    keys, values = peaks.make_table()
    at = np.flatnonzero(keys == make_kind_keys(make_job_shape(job))[kind])
    return values[at[0]].tolist() if len(at) else None


def peak_of(peaks: JobPeaks, job: JobAttempt) -> tuple[float, float]:
    """GiB and W that a running job has come to."""
    about, arrays = peaks.dump()
    memory_gib, power_w = arrays["peaks"][about["running"].index([job.job, job.attempt])].tolist()
    return memory_gib, power_w


def test_a_peak_is_the_fullest_gpu_and_the_mean_power_at_its_highest() -> None:
    peaks, jobs = JobPeaks(), [attempt("a-1"), attempt("b-1")]
    #               a  a  b  free
    see(peaks, jobs, [[0, 0, 1, -1]], [10, 30, 5, 70], [200, 400, 100, 700])
    see(peaks, jobs, [[0, 0, 1, -1]], [20, 20, 6, 70], [500, 300, 90, 700])
    assert peak_of(peaks, jobs[0]) == (30.0, 400.0)
    assert peak_of(peaks, jobs[1]) == (6.0, 100.0)


def test_remembered_places_change_no_peak() -> None:
    remembering, other = JobPeaks(), JobPeaks()
    places = RunningPlaces(())
    for running, holder in (
        ("ab", [0, 0, 1]),
        ("ab", [0, 1, 1]),
        ("b", [0, 0, -1]),
        ("cb", [1, 1, 0]),
        ("cb", [0, 1, 1]),
    ):
        jobs = [attempt(job) for job in running]
        same = [row.job for row in jobs] == [job for job, _ in places.keys]
        places = places if same else RunningPlaces(jobs)
        ended = [attempt(job, outcome="finished") for job in "abc" if job not in running]
        power = [100.0 * len(running), 200.0, 50.0 + 10 * sum(holder)]
        for peaks, of in ((remembering, places), (other, None)):
            peaks.store_finished(ended)
            see(peaks, jobs, [holder], [1, 2, 3], power, of)
    assert repr(remembering.dump()) == repr(other.dump())
    assert remembering.dump()[0]["running"] == [["c", 1], ["b", 1]]


def test_what_no_telemetry_saw_is_not_known() -> None:
    peaks, jobs = JobPeaks(), [attempt("a-1"), attempt("b-1")]
    see(peaks, jobs, [[0, 1]], [np.nan, 4], [np.nan, np.nan])
    assert np.isnan(peak_of(peaks, jobs[0])).all()
    assert peak_of(peaks, jobs[1])[0] == 4.0
    assert np.isnan(peak_of(peaks, jobs[1])[1])
    peaks.store_finished([attempt("a-1", outcome="finished")])
    assert likely(peaks, jobs[0]) is None


def test_a_job_that_began_just_now_is_not_charged_with_what_ran_before() -> None:
    peaks, jobs = JobPeaks(), [attempt("a-1", age_s=10.0)]
    see(peaks, jobs, [[0]], [70], [700])
    assert np.isnan(peak_of(peaks, jobs[0])).all()


def test_peaks_of_finished_jobs_speak_for_the_next_of_their_kind() -> None:
    peaks, job = JobPeaks(), attempt("train-1")
    see(peaks, [job], [[0, 0]], [40, 30], [300, 500])
    peaks.store_finished([attempt("train-1", outcome="finished")])
    peaks.store_finished([attempt("train-1", outcome="finished")])  # told again: once
    assert likely(peaks, attempt("train-2")) == [40.0, 400.0, 1.0]
    assert likely(peaks, attempt("other", user="ada"), "user and GPUs") == [40.0, 400.0, 1.0]
    assert likely(peaks, attempt("other", user="bob"), "queue and GPUs") == [40.0, 400.0, 1.0]
    assert likely(peaks, attempt("other", user="bob", gpus=4), "queue and GPUs") is None


def test_what_failed_or_vanished_says_nothing() -> None:
    peaks, jobs = JobPeaks(), [attempt("a-1"), attempt("b-1")]
    see(peaks, jobs, [[0, 1]], [10, 20], [100, 200])
    peaks.store_finished([attempt("a-1", outcome="failed")])
    see(peaks, [], [[-1, -1]], [10, 20], [100, 200])
    peaks.store_finished([attempt("b-1", outcome="finished")])
    assert len(peaks.make_table()[0]) == 0


def test_the_newest_runs_of_a_kind_speak() -> None:
    peaks = JobPeaks()
    for number in range(2 * MAX_RUNS):
        job = attempt(f"a-{number}")
        see(peaks, [job], [[0]], [80.0 if number < MAX_RUNS else 10.0], [100])
        peaks.store_finished([attempt(f"a-{number}", outcome="finished")])
    assert likely(peaks, attempt("a-9")) == [10.0, 100.0, MAX_RUNS]


def test_kinds_are_bounded_and_the_one_used_longest_ago_goes() -> None:
    peaks = JobPeaks()
    jobs = [attempt(f"job-{chr(97 + n // 676)}{chr(97 + n // 26 % 26)}{chr(97 + n % 26)}") for n in range(MOST_KINDS)]
    see(peaks, jobs, [[n] for n in range(len(jobs))], np.ones(len(jobs)), np.ones(len(jobs)))
    for job in jobs:
        job.outcome = "finished"
    peaks.store_finished(jobs)
    assert len(peaks.make_table()[0]) == MOST_KINDS
    assert likely(peaks, jobs[0]) is None
    assert likely(peaks, jobs[-1]) == [1.0, 1.0, 1.0]


def test_a_snapshot_goes_on_where_it_was() -> None:
    peaks, jobs = JobPeaks(), [attempt("a-1"), attempt("b-1"), attempt("c-1")]
    see(peaks, jobs, [[0, 1, 2]], [10, 20, 30], [100, 200, 300])
    peaks.store_finished([attempt("a-1", outcome="finished")])
    again = JobPeaks()
    again.load(*peaks.dump())
    for one in (peaks, again):
        see(one, jobs[1:], [[-1, 0, 1]], [50, 25, 5], [1, 1, 1])
        one.store_finished([attempt("c-1", outcome="finished")])
    assert peak_of(again, jobs[1]) == peak_of(peaks, jobs[1]) == (25.0, 200.0)
    for mine, other in zip(peaks.make_table(), again.make_table(), strict=True):
        np.testing.assert_array_equal(mine, other)


def test_kinds_are_by_words_not_by_numbers() -> None:
    shape = JobShape(user="ada", name="train-7", queue="q", gpus=8)
    first, second = make_kind_keys(shape), make_kind_keys(JobShape(user="ada", name="train_8.1", queue="q", gpus=8.0))
    assert first == second
    assert len(set(first.values())) == 7
    assert "user and name" not in make_kind_keys(JobShape(user="ada", name="4711", queue="q", gpus=8))
