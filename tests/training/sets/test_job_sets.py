"""Job histories by their columns, cut at a moment."""

from datetime import datetime
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fleetcast.training.sets.job_sets import parse_slurm_limit_s, read_job_sets, read_jobs

SWF = {"wait_s": 5, "procs_alloc": 2, "procs_req": 4, "time_req_s": 600, "status": 1, "user": 7, "group": -1}


def write(folder: Path, name: str, rows: list[dict[str, object]]) -> Path:
    path = folder / "jobs" / name / f"{name}.parquet"
    path.parent.mkdir(parents=True)
    pd.DataFrame(rows).to_parquet(path, index=False)
    return path.parent


def swf(job: int, submit_s: int, run_s: int, **other: int) -> dict[str, object]:
    return {**SWF, "job_id": job, "submit_s": submit_s, "run_s": run_s, **other}


def test_swf_unknowns_are_no_values(tmp_path: Path) -> None:
    rows = [
        swf(2, 100, 0, wait_s=-1, procs_alloc=-1, status=-1),
        swf(1, 50, 30),
        swf(3, 200, -1),
        swf(4, 300, 9, status=5),
        swf(4, 300, 9, status=5),
    ]
    table, skipped = read_jobs(write(tmp_path, "s", rows))
    assert table.job.tolist() == ["1", "2", "4"]
    assert table.start_s.tolist() == pytest.approx([55, float("nan"), 305], nan_ok=True)
    assert table.run_s.tolist() == [30, 1, 9]
    assert table.gpus.tolist() == [2, 4, 2]
    assert table.failed.tolist() == pytest.approx([0, float("nan"), 1], nan_ok=True)
    assert (table.user[0], table.group[0], table.limit_s[0]) == ("7", "", 600)
    assert dict(skipped) == {"no run time": 1, "reported twice": 1}


def test_helios_and_philly_columns_are_recognised(tmp_path: Path) -> None:
    noon = datetime(2026, 1, 1, 12)
    helios = {
        "job_id": "a",
        "submit_time": noon,
        "service_sec": 60.0,
        "gpu_count": 8,
        "user": "u",
        "vc": "v",
        "state": "FAILED",
    }
    table, _ = read_jobs(write(tmp_path, "h", [{**helios, "start_time": noon}, {**helios, "gpu_count": 0}]))
    assert (table.queue[0], table.failed[0], table.end_s[0] - table.submit_s[0], len(table)) == ("v", 1, 60, 1)
    philly = {"timestamp": noon, "duration": 5.0, "num_gpus": 1, "gpu_time": 5.0, "cluster": "c"}
    table, _ = read_jobs(write(tmp_path, "p", [philly]))
    assert (table.queue[0], table.submit_s[0]) == ("c", 1767268800)
    assert np.isnan(table.start_s[0])


def test_a_table_cut_at_a_moment_knows_no_later_start_or_end(tmp_path: Path) -> None:
    # job 1 ends at 60, job 2 runs from 45, job 3 waits until 75, job 4 comes at 80
    rows = [swf(1, 0, 55), swf(2, 40, 100), swf(3, 50, 10, wait_s=25), swf(4, 80, 1)]
    table, _ = read_jobs(write(tmp_path, "s", rows))
    known = table.select_known_at(60)
    assert known.run_s.tolist() == pytest.approx([55, float("nan"), float("nan")], nan_ok=True)
    assert known.start_s.tolist() == [5, 45, np.inf]
    assert np.isnan(known.failed[1])


def test_what_is_judged_comes_after_the_train_folder(tmp_path: Path) -> None:
    write(tmp_path / "train", "s", [swf(1, 0, 5), swf(2, 40, 100)])
    write(tmp_path / "test", "s", [swf(3, 10, 5), swf(2, 40, 100), swf(4, 50, 5)])  # 3: the past of a held-out user
    write(tmp_path / "test", "other", [swf(1, 0, 5)])
    skipped: list[str] = []
    (found,) = read_job_sets(tmp_path / "train", tmp_path / "test", skipped)
    assert found.table.job[found.is_judged].tolist() == ["4"]
    assert found.train_jobs.job.tolist() == ["1", "2"]
    assert np.isnan(found.train_jobs.run_s[1])  # it ends after the train folder
    assert dict(found.skipped) == {"in both folders": 1}
    assert skipped == ["jobs/other: not in the train folder, and no set there is older than it"]


def test_a_cluster_that_was_never_seen_is_judged_behind_what_the_others_taught(tmp_path: Path) -> None:
    write(tmp_path / "train", "s", [swf(1, 0, 5), swf(2, 40, 100)])
    write(tmp_path / "test", "s", [swf(3, 50, 5)])
    write(tmp_path / "test", "new", [swf(1, 10, 5), swf(2, 30, 5), swf(3, 45, 5), swf(4, 70, 5)])
    skipped: list[str] = []
    (found, _) = read_job_sets(tmp_path / "train", tmp_path / "test", skipped)
    assert (found.dataset, found.alone, found.train_end_s, skipped) == ("jobs/new", True, 40, [])
    assert found.table.job[found.is_judged].tolist() == ["3", "4"]
    assert found.train_jobs.job.tolist() == ["jobs/s/1", "jobs/s/2"]
    assert found.train_jobs.user.tolist() == ["jobs/s/7", "jobs/s/7"]
    assert found.own_history.train_jobs.job.tolist() == ["1", "2"]
    assert found.own_history.table.job[found.own_history.is_judged].tolist() == ["3", "4"]


def test_times_in_any_form_and_ids_that_gaps_made_floats(tmp_path: Path) -> None:
    moment = 1767268800.0
    forms = [moment, moment * 1000, "2026-01-01T12:00:00", "2026-01-01 13:00:00+01:00", "2026-01-01 12:00:00.5"]
    for number, form in enumerate(forms):
        rows = [{"submit_time": form, "service_sec": 5.0, "gpu_count": 1, "user": 7.0}] * 3
        bad = [{"submit_time": None, "service_sec": 5.0, "gpu_count": np.inf, "user": None}]
        table, skipped = read_jobs(write(tmp_path, f"f{number}", rows + bad))
        assert table.submit_s.tolist() == pytest.approx([moment] * 3, abs=0.5)
        assert (table.user[0], dict(skipped)) == ("7", {"no submission time": 1})


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 5400), ("1:30", 90), ("2:00:00", 7200), ("1-12", 129_600), ("2-00:30:00", 174_600)]
)
def test_slurm_limits_are_seconds(text: str, seconds: float) -> None:
    assert parse_slurm_limit_s(text) == seconds
