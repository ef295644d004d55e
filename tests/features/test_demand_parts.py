"""What the demand model is made of beside the series: records of attempts, looks at GPUs, rates of served models."""

import json

import numpy as np
import pytest

from fleetcast.features import job_records
from fleetcast.features.gpu_residency import GpuResidency
from fleetcast.features.job_records import JobRecords
from fleetcast.features.request_series import MINUTE_MS, RequestSeries, ServingCapacity, sum_request_rates
from fleetcast.features.serving import ServedInstance
from fleetcast.fleet.events import Failed, Finished, JobEvent, Phase, Started, Step, Submitted
from fleetcast.fleet.job_table import JobTable

T0 = 1_700_002_800_000


def told(*events: JobEvent) -> JobRecords:
    jobs, records = JobTable(), JobRecords()
    for event in events:
        attempt = jobs.apply(event)
        if attempt is not None:
            records.update(attempt)
    return records


def submitted(job: str = "j", **about: float) -> Submitted:
    return Submitted(job=job, sequence=1, time_ms=T0, queue="q", gpus_per_node=8, **about)


def started(job: str = "j", after_s: float = 60) -> Started:
    return Started(job=job, sequence=2, time_ms=T0 + round(after_s * 1000), nodes=("n1",))


def test_a_record_says_how_long_it_waited_got_going_and_ran() -> None:
    steps = [Step(job="j", sequence=3 + n, time_ms=T0 + 200_000 + n * 1000, step=n, duration_s=1.0) for n in range(300)]
    events = [
        submitted(tolerated_wait_s=900.0),
        started(),
        *steps,
        Finished(job="j", sequence=999, time_ms=T0 + 660_000),
    ]
    (row,) = told(*events).list_records()
    assert (row.queue, row.class_, row.gpus, row.waited_s, row.gave_up) == ("q", "training", 8, 60.0, False)
    assert (row.cold_s, row.run_s, row.tolerated_s) == (140.0, 600.0, 900.0)
    assert told(*events, *events).list_records() == [row]


def test_the_steady_phase_counts_where_it_comes_before_a_step_is_told() -> None:
    steady = Phase(job="j", sequence=4, time_ms=T0 + 100_000, name="steady")
    (row,) = told(submitted(), started(), steady).list_records()
    assert row.cold_s == 40.0
    (row,) = told(
        submitted(), started(), Phase(job="j", sequence=4, time_ms=T0 + 100_000, name="loading")
    ).list_records()
    assert row.cold_s is None


def listened(*events: tuple[JobEvent, int]) -> JobRecords:
    """Records of who heard each event so many seconds after T0."""
    jobs, records = JobTable(), JobRecords()
    for event, heard_s in events:
        attempt = jobs.apply(event)
        assert attempt is not None
        records.update(attempt, T0 + heard_s * 1000)
    return records


def test_only_a_start_that_was_heard_as_it_happened_has_a_cold_start() -> None:
    steady = Phase(job="j", sequence=4, time_ms=T0 + 10_800_000, name="steady")
    (row,) = listened((submitted(), 10_800), (started(), 10_800), (steady, 10_801)).list_records()
    assert (row.cold_s, row.started_ms) == (None, T0 + 60_000)  # a running fleet, met after three hours
    steady = Phase(job="j", sequence=4, time_ms=T0 + 100_000, name="steady")
    (row,) = listened((submitted(), 1), (started(), 62), (steady, 900)).list_records()
    assert row.cold_s == 40.0
    (row,) = listened((started(), 62), (Started(job="j", sequence=3, time_ms=T0 + 60_000), 9_000)).list_records()
    assert row.is_start_observed  # what is told again later does not unsay it


def test_a_state_that_does_not_say_what_it_heard_loses_its_cold_starts() -> None:
    records = told(submitted(), started(), Phase(job="j", sequence=4, time_ms=T0 + 100_000, name="steady"))
    (row,) = records.list_records()
    again = JobRecords()
    again.load({"rows": [("j", 1, *row[:-1])]})
    assert again.list_records() == [row._replace(cold_s=None, is_start_observed=False)]


def test_who_is_cancelled_unstarted_gave_up() -> None:
    gone = Failed(job="j", sequence=2, time_ms=T0 + 500_000, category="cancelled")
    (row,) = told(submitted(), gone).list_records()
    assert (row.waited_s, row.gave_up, row.run_s) == (500.0, True, None)
    (row,) = told(submitted(), Failed(job="j", sequence=2, time_ms=T0 + 5, category="user")).list_records()
    assert (row.waited_s, row.gave_up) == (None, False)


def test_records_are_bounded_and_survive_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_records, "MAX_RECORDS", 5)
    records = told(*(Submitted(job=f"j{n}", sequence=1, time_ms=T0 + n) for n in range(9)))
    assert [row.arrived_ms - T0 for row in records.list_records()] == [4, 5, 6, 7, 8]
    again = JobRecords()
    again.load(json.loads(json.dumps(records.dump())))
    assert again.list_records() == records.list_records()
    assert JobRecords().dump() == {"rows": []}


def test_residency_is_shares_of_held_gpu_time_of_about_a_day() -> None:
    residency = GpuResidency()
    residency.record(T0, {("q", "inference"): (8, 8, 0)})
    assert residency.compute_shares() == {}  # one look stands for no time
    residency.record(T0 + 10_000, {("q", "inference"): (8, 8, 2)})
    residency.record(T0 + 10_000, {("q", "inference"): (8, 0, 0)})
    everything = {(pool, class_) for pool in ("q", "all") for class_ in ("inference", "all")}
    assert residency.compute_shares() == dict.fromkeys(everything, (1.0, 0.25))
    again = GpuResidency()
    again.load(json.loads(json.dumps(residency.dump())))
    again.record(
        T0 + 10_000 + 86_400_000, {("q", "inference"): (8, 4, 0)}
    )  # after a day of silence, a look is a minute
    loaded, active = again.compute_shares()["q", "inference"]
    assert (loaded, active) == (pytest.approx((40 + 240) / (40 + 480)), pytest.approx(10 / (40 + 480)))


def served(instance: str, rate: float | None, model: str = "llama", pool: str = "q") -> ServedInstance:
    about = dict.fromkeys(("requests_running", "requests_waiting", "kv_cache_used", "prompt_tokens"))
    about |= dict.fromkeys(("generated_tokens", "requests_finished", "ttft_s", "ttft_requests"))
    return ServedInstance(
        pool=pool, model=model, instance=instance, age_s=1.0, ttft_le=(), requests_last_minute=rate, **about
    )


def test_rates_of_a_model_are_sums_over_its_instances() -> None:
    rates = sum_request_rates([served("1", 2.0), served("2", 3.0), served("3", None), served("4", 7.0, "other")])
    assert rates == {("q", "llama"): (5.0, 2), ("q", "other"): (7.0, 1)}


def test_a_rate_told_twice_is_told_once_and_ten_minutes_are_the_mean_of_their_minutes() -> None:
    series = RequestSeries()
    for minute in range(20):
        for _ in range(2):
            series.record(T0 + minute * MINUTE_MS, {("q", "llama"): (float(minute), 2)})
    now_ms = T0 + 19 * MINUTE_MS
    assert series.read_series("q", "llama", now_ms, 60, 3).tolist() == [17.0, 18.0, 19.0]
    assert series.read_series("q", "llama", now_ms, 600, 3)[1:].tolist() == [4.5, 14.5]
    assert np.isnan(series.read_series("q", "llama", now_ms, 600, 3)[0])
    assert series.find_capacity("q", "llama") == ServingCapacity(2, 9.5)


def test_silence_is_unknown_and_all_is_the_sum_of_what_is_known() -> None:
    series = RequestSeries()
    series.record(T0, {("q", "a"): (1.0, 1), ("p", "b"): (2.0, 1)})
    series.record(T0 + MINUTE_MS, {("q", "a"): (4.0, 1)})
    now_ms = T0 + 2 * MINUTE_MS
    assert series.read_series("all", "all", now_ms, 60, 3)[:2].tolist() == [3.0, 4.0]
    assert np.isnan(series.read_series("all", "all", now_ms, 60, 3)[2])
    assert np.isnan(series.read_series("p", "b", now_ms, 60, 2)).all()
    assert np.isnan(series.read_series("nobody", "all", now_ms, 60, 2)).all()
    days_ms = 3 * 86_400_000
    assert np.isnan(series.read_series("q", "a", now_ms + days_ms, 60, 1440)).all()
    assert series.read_series("q", "a", now_ms + days_ms, 600, 3 * 144 + 1)[0] == 2.5


def test_rates_survive_a_restart() -> None:
    series = RequestSeries()
    for minute in range(30):
        series.record(T0 + minute * MINUTE_MS, {("q", "llama"): (float(minute), 1)})
    about, arrays = series.dump()
    again = RequestSeries()
    again.load(json.loads(json.dumps(about)), arrays)
    for one in (series, again):
        one.record(T0 + 30 * MINUTE_MS, {("q", "llama"): (30.0, 1)})
    for bin_s in (60, 600):
        now_ms = T0 + 31 * MINUTE_MS
        np.testing.assert_array_equal(*(one.read_series("q", "llama", now_ms, bin_s, 40) for one in (series, again)))
