"""The judge of run times: what it knows when, and what it writes."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from fleetcast.features.past_runs import PastRuns
from fleetcast.features.run_past import LEVELS
from fleetcast.training.judges.duration import evaluate_sets, predict_test_span
from fleetcast.training.judges.duration_metrics import judge_run_times
from fleetcast.training.reports.results import Results
from fleetcast.training.sets.duration_rows import make_job_shape, replay_history
from fleetcast.training.sets.job_sets import HistoryJobs, JobHistory

DAY_S = 86_400.0
TRAIN_END_S, SIX_DAYS_S = 8 * DAY_S, 6 * DAY_S


def table(count: int = 260, seed: int = 5) -> HistoryJobs:
    """Two users on ten days: ada's jobs run for about 20 min, bob's for about 3 h; some wait, one fails."""
    rng = np.random.default_rng(seed)
    submit_s = np.sort(rng.uniform(0, 10 * DAY_S, count)).round()
    bob = rng.random(count) < 0.4
    run_s = (np.where(bob, 10_800, 1200) * np.exp(rng.normal(0, 0.6, count))).round()
    none = np.full(count, "", object)
    return HistoryJobs(
        job=np.array([f"j{row}" for row in range(count)], object),
        submit_s=submit_s,
        start_s=submit_s + rng.integers(0, 300, count),
        run_s=run_s,
        gpus=np.where(bob, 8.0, 1.0),
        user=np.where(bob, "bob", "ada").astype(object),
        group=none,
        name=none,
        queue=np.full(count, "train", object),
        cpus=np.full(count, np.nan),
        limit_s=np.full(count, 43_200.0),
        failed=np.zeros(count),
    )


def job_set(jobs: HistoryJobs, train_end_s: float = TRAIN_END_S) -> JobHistory:
    return JobHistory("jobs/ours", jobs, jobs.submit_s > train_end_s, train_end_s, Counter())


def test_features_at_a_submission_are_those_of_the_service_at_that_time() -> None:
    jobs = table(60)
    rows = replay_history(jobs, watched=np.ones(60, np.bool_), landmarks_s=(600, 3600))
    live = PastRuns()
    at = 40
    now_ms = round(jobs.submit_s[at] * 1000)
    for row in range(60):
        begin_ms = round(jobs.start_s[row] * 1000)
        if row < at:
            live.record_submission(str(row), 1, make_job_shape(jobs, row))
            if begin_ms <= now_ms:
                live.record_start(str(row), 1, begin_ms)
    for row in np.argsort(jobs.end_s):
        if jobs.end_s[row] <= jobs.submit_s[at]:
            live.record_end(str(row), 1, round(jobs.end_s[row] * 1000))
    (offline,) = rows.features[(rows.job == at) & (rows.elapsed_s == 0)]
    np.testing.assert_array_equal(live.compute_features(make_job_shape(jobs, at), now_ms), offline)
    late = rows.job[rows.elapsed_s > 0]
    assert len(late) == (jobs.run_s > 600).sum() + (jobs.run_s > 3600).sum()


def test_a_job_that_runs_at_a_moment_tells_nothing_before_its_end() -> None:
    jobs = table(80)
    now_s = jobs.begin_s[40] + 1
    running = (jobs.begin_s <= now_s) & (jobs.end_s > now_s)
    assert running.any()
    other = replace(jobs, run_s=np.where(running, jobs.run_s + 4000, jobs.run_s))
    first, second = (replay_history(one) for one in (jobs, other))
    before = jobs.submit_s[first.job] <= np.min(jobs.end_s[running])
    np.testing.assert_array_equal(first.features[before], second.features[before])


@pytest.fixture(autouse=True)
def few_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetcast.models.run_times.boosted_quantiles.TREES", 8)


@pytest.fixture(scope="module")
def jobs() -> HistoryJobs:
    return table()


def test_ours_and_every_baseline_are_judged_on_the_same_jobs(jobs: HistoryJobs) -> None:
    results = evaluate_sets([job_set(jobs)], 0, lambda line: None)
    judged = int((jobs.submit_s > TRAIN_END_S).sum())
    medians = results.select(metric="pinball_50")
    assert {row.method: row.n for row in medians} == dict.fromkeys(
        ("last_two", "group", "group_train", "limit", "ours"), judged
    )
    values = {row.method: row.value for row in results.select(metric="log_mae")}
    assert values["ours"] is not None
    assert values["limit"] is not None
    assert values["ours"] < values["limit"]
    (row,) = results.select(metric="coverage_80", method="ours")
    assert row.value is not None
    assert row.low is not None
    assert row.high is not None
    assert row.low <= row.value <= row.high
    late = results.select(metric="remaining_log_mae", horizon_s=600)
    assert {row.method for row in late} == {"global", "group", "ours"}
    runs, left = results.predictions
    assert len(runs["job"]) == judged * len(LEVELS)
    assert set(left["horizon_s"]) <= {600, 3600, 21_600, 86_400}
    assert {len(column) for column in left.values()} == {len(left["job"])}


def test_outcomes_after_a_moment_change_no_prediction_before_it(jobs: HistoryJobs) -> None:
    now_s = 9 * DAY_S
    late = jobs.end_s > now_s
    changed = replace(jobs, run_s=np.where(late, jobs.run_s * 3, jobs.run_s))
    first, second = (predict_test_span(job_set(one), 0, lambda line: None) for one in (jobs, changed))
    before = jobs.submit_s[first.job] < now_s
    assert before.any()
    np.testing.assert_array_equal(first.runs["ours"][before], second.runs["ours"][before])


def test_jobs_whose_end_is_not_known_count_neither_as_hits_nor_as_misses(jobs: HistoryJobs) -> None:
    known = job_set(jobs)
    running = np.flatnonzero(known.is_judged)[::3]
    open_s = jobs.run_s.copy()
    open_s[running] = np.nan
    judged = predict_test_span(replace(known, table=replace(jobs, run_s=open_s)), 0, lambda line: None)
    results = Results("duration")
    judge_run_times(results, judged, 0)
    (row,) = results.select(metric="coverage_80", method="ours")
    ended = judged.job[np.isfinite(open_s[judged.job])]
    told = judged.runs["ours"][np.isfinite(open_s[judged.job])]
    inside = (told[:, 1] <= np.log(open_s[ended])) & (np.log(open_s[ended]) <= told[:, 5])
    assert (row.n, row.value) == (len(ended), pytest.approx(inside.mean()))
    assert {row.n for row in results.select(method="group")} == {len(ended)}


def test_run_times_are_judged_in_windows_each_with_a_fit_of_its_own(jobs: HistoryJobs) -> None:
    lines: list[str] = []
    results = evaluate_sets([job_set(jobs, SIX_DAYS_S)], 0, lines.append, windows=2)
    assert sum("fitting on" in line for line in lines) == 2
    rows = [row for row in results.windows if (row.metric, row.method) == ("pinball_50", "ours")]
    assert [row.begin_ms for row in rows] == sorted({row.begin_ms for row in rows})
    (whole,) = results.select(metric="pinball_50", method="ours")
    assert [len(rows), sum(row.n for row in rows)] == [2, whole.n]
    assert whole.value == pytest.approx(sum(row.value * row.n for row in rows) / whole.n)
    methods = {row.method for row in results.windows if row.metric == "pinball_50"}
    assert methods == {"last_two", "group", "group_train", "limit", "ours"}


def test_a_fit_before_a_window_knows_the_jobs_that_ended_by_then(jobs: HistoryJobs) -> None:
    """Run times become ten times as long after the train folder. The second fit has seen that, the first has not."""
    longer = replace(jobs, run_s=np.where(jobs.submit_s > SIX_DAYS_S, jobs.run_s * 10, jobs.run_s))
    one, two = (predict_test_span(job_set(longer, SIX_DAYS_S), 0, lambda line: None, windows=count) for count in (1, 2))
    first, second = two.run_in == 0, two.run_in == 1
    np.testing.assert_array_equal(one.runs["ours"][first], two.runs["ours"][first])
    train = [np.mean(found.runs["group_train"][second, LEVELS.index(0.5)]) for found in (one, two)]
    assert train[1] > train[0]


@pytest.mark.parametrize("count", [1, 2])
def test_a_window_knows_nothing_that_ends_after_it_began(jobs: HistoryJobs, count: int) -> None:
    found = predict_test_span(job_set(jobs, SIX_DAYS_S), 0, lambda line: None, windows=count)
    begin_s = found.windows[-1].begin_s
    later = jobs.end_s > begin_s
    changed = replace(jobs, run_s=np.where(later, jobs.run_s * 3, jobs.run_s))
    other = predict_test_span(job_set(changed, SIX_DAYS_S), 0, lambda line: None, windows=count)
    last = found.run_in == count - 1
    np.testing.assert_array_equal(found.runs["group_train"][last], other.runs["group_train"][last])
