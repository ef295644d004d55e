"""Job histories as demand: a small sacct file trains and judges it, and a bin holds what was known at its end."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from fleetcast.cli.main import app
from fleetcast.training.sets.demand_sets import read_panels

HEADER = "JobIDRaw|JobID|User|State|Submit|Start|End|AllocTRES|Partition|NNodes"
# bins of ten minutes:  10:00  10:10  10:20  10:30  10:40
#   1 (8 GPUs, a)       run    run    |ended
#   2 (4 GPUs, b)       wait   run    run    run    |ended
#   3 (2 GPUs, a)              submitted, cancelled in the queue at 10:35
#   4 (1 GPU, a)                      submitted, still waits
#   5 (1 GPU, b)                                    runs still
SACCT = f"""{HEADER}
1|1|ann|COMPLETED|2026-01-01T09:00:00|2026-01-01T09:01:00|2026-01-01T10:25:00|gres/gpu=8|a|1
2|2|bob|COMPLETED|2026-01-01T10:01:00|2026-01-01T10:12:00|2026-01-01T10:41:00|gres/gpu=4|b|1
3|3|bob|CANCELLED by 7|2026-01-01T10:13:00|None|2026-01-01T10:35:00|gres/gpu=2|a|1
4|4|ann|PENDING|2026-01-01T10:22:00|Unknown|Unknown|gres/gpu=1|a|1
5|5|ann|RUNNING|2026-01-01T10:44:00|2026-01-01T10:45:00|Unknown|gres/gpu=1|b|1
0|0|ann|COMPLETED|2026-01-01T08:00:00|2026-01-01T08:01:00|2026-01-01T10:02:00|gres/gpu=1|a|1
"""


def imported(folder: Path, text: str) -> Path:
    (folder / "sacct.txt").write_text(text)
    done = CliRunner().invoke(
        app, ["data", "import", "slurm", str(folder / "sacct.txt"), "--out", str(folder / "data")]
    )
    assert done.exit_code == 0, done.output
    return folder / "data"


def by_target(folder: Path, **wanted: Path | None) -> dict[str, pd.DataFrame]:
    sets = read_panels(folder, wanted.get("test"))
    return {one.panel.target: pd.DataFrame(one.panel.values, one.panel.names) for one in sets}


def test_levels_and_arrivals_follow_from_submit_start_end_and_gpus(tmp_path: Path) -> None:
    found = by_target(imported(tmp_path, SACCT))
    assert found["running"].loc["all"].tolist() == [8, 12, 4, 4, 1]
    assert found["queued"].loc["all"].tolist() == [4, 2, 3, 1, 1]
    assert found["arriving"].loc["all"].tolist() == [4, 2, 1, 0, 1]
    assert found["arriving_jobs"].loc["all"].tolist() == [1, 1, 1, 0, 1]
    assert found["wanted"].equals(found["running"] + found["queued"])
    assert found["running"].loc[["a", "b"]].to_numpy().tolist() == [[8, 8, 0, 0, 0], [0, 4, 4, 4, 1]]


def test_history_begins_with_the_first_end_and_ends_with_the_last_submission(tmp_path: Path) -> None:
    (one, *_) = read_panels(imported(tmp_path, SACCT), None)
    assert one.panel.first_ms == pd.Timestamp("2026-01-01T10:00").value // 10**6
    assert one.panel.end_ms(one.panel.bins - 1) == pd.Timestamp("2026-01-01T10:50").value // 10**6


def test_what_comes_after_a_moment_changes_no_bin_before_it(tmp_path: Path) -> None:
    later = SACCT + "6|6|ann|COMPLETED|2026-01-01T11:00:00|2026-01-01T11:00:00|2026-01-01T11:30:00|gres/gpu=64|a|1\n"
    (tmp_path / "later").mkdir()
    before, after = by_target(imported(tmp_path, SACCT)), by_target(imported(tmp_path / "later", later))
    for target, table in before.items():
        assert after[target].iloc[:, :5].equals(table)


def test_a_history_without_starts_tells_run_times_alone(tmp_path: Path) -> None:
    table = pd.DataFrame({"timestamp": pd.date_range("2026-01-01", periods=9), "duration": 60, "num_gpus": 1})
    (tmp_path / "jobs/plain").mkdir(parents=True)
    table.to_parquet(tmp_path / "jobs/plain/jobs.parquet")
    lines: list[str] = []
    assert read_panels(tmp_path, None, lines.append) == []
    assert lines == ["skipped jobs/plain: most of its starts are unknown, so it shows run times alone"]


def sacct_of_days(days: int) -> str:
    """A job an hour, which waits for five minutes and runs for two to four hours."""
    rng, lines = np.random.default_rng(0), [HEADER]
    for number, at in enumerate(pd.date_range("2026-01-01", periods=24 * days, freq="h")):
        times = at, at + pd.Timedelta(5, "min"), at + pd.Timedelta(int(rng.integers(120, 240)), "min")
        submit, start, end = (time.isoformat() for time in times)
        lines.append(f"{number}|{number}|ann|COMPLETED|{submit}|{start}|{end}|gres/gpu={number % 3 + 1}|a|1")
    return "\n".join(lines)


@pytest.mark.parametrize("command", ["train", "evaluate", "backtest"])
def test_one_sacct_file_trains_and_judges_demand(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fleetcast.models.demand.boosting import Settings

    small = Settings(trees=2, rows=300, threads=1)
    monkeypatch.setattr("fleetcast.training.judges.demand.TREES", small)
    monkeypatch.setattr("fleetcast.training.judges.demand.WARM_TREES", small)
    monkeypatch.setattr("fleetcast.training.judges.demand.HORIZONS_S", (3600,))
    monkeypatch.setattr("fleetcast.training.fits.retrain.fit_demand", lambda sets, seed, say: fitted(sets, seed, small))
    data, models, split = imported(tmp_path, sacct_of_days(8)), str(tmp_path / "models"), tmp_path / "split"
    words = {
        "train": ["train", "demand", "--data", str(data), "--models", models, "--no-promote"],
        "backtest": ["backtest", "demand", "--data", str(data), "--windows", "1"],
        "evaluate": [
            "evaluate",
            "demand",
            "--train",
            str(tmp_path / "split/train"),
            "--test",
            str(tmp_path / "split/test"),
        ],
    }
    if command == "evaluate":
        cut = ["data", "split", "slurm", "--data", str(data), "--at", "2026-01-07", "--out", str(split)]
        assert CliRunner().invoke(app, cut).exit_code == 0
    done = CliRunner().invoke(app, words[command])
    assert done.exit_code == 0, done.output
    assert "jobs/slurm" in done.output
    assert "running" in done.output


def fitted(sets, seed, settings):  # type: ignore[no-untyped-def]
    from fleetcast.models.demand.features import FEATURES
    from fleetcast.models.demand.trees import DemandTrees
    from fleetcast.training.fits.retrain import FitResult

    panels = [row.panel for row in sets]
    model = DemandTrees(seed, settings).fit(panels, [panel.bins for panel in panels])
    return FitResult(model, model.fitted_until_ms, (), FEATURES, {})
