"""What models are fitted on is the same from a data folder and from an archive, up to a moment."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fleetcast.fleet.errors import ConfigError, FleetcastError
from fleetcast.fleet.events import Finished, Preempted, Started, Submitted
from fleetcast.fleet.job_table import JobTable
from fleetcast.training.sites.histories import LAST_MS, TrainingInputs, make_job_table, parse_moment_ms

T0 = 1_760_000_000_000


def attempts() -> JobTable:
    table = JobTable()
    for event in (
        Submitted(job="a", sequence=0, time_ms=T0, queue="q", user="u", group="g", name="n-1", gpus_per_node=4, cpus=8),
        Started(job="a", sequence=1, time_ms=T0 + 60_000, nodes=("n1", "n2")),
        Finished(job="a", sequence=2, time_ms=T0 + 360_000),
        Submitted(job="waits", sequence=0, time_ms=T0 + 1000, limit_s=600.0),
        Started(job="runs", sequence=0, time_ms=T0 + 2000, nodes=("n1",)),
        Submitted(job="gone", sequence=0, time_ms=T0 + 3000),
        Started(job="gone", sequence=1, time_ms=T0 + 3000, nodes=("n1",)),
        Preempted(job="gone", sequence=2, time_ms=T0 + 4000),
        Submitted(job="back", sequence=0, time_ms=T0 + 4000),
        Started(job="back", sequence=1, time_ms=T0 + 9000, nodes=("n1",)),
        Finished(job="back", sequence=2, time_ms=T0 + 8000),
        Submitted(job="cpu", sequence=0, time_ms=T0 + 5000, gpus_per_node=0),
    ):
        table.apply(event)
    return table


def test_attempts_are_a_job_history() -> None:
    table = make_job_table(list(attempts()))
    assert table.job.tolist() == ["a/1", "waits/1", "runs/1"]  # neither preempted nor without GPUs nor backwards
    np.testing.assert_array_equal(table.start_s - T0 / 1000, [60, np.inf, 2])
    np.testing.assert_array_equal(table.run_s, [300, np.nan, np.nan])
    assert table.gpus.tolist() == [8, 1, 1]
    np.testing.assert_array_equal(table.failed, [0, np.nan, np.nan])
    assert (table.user[0], table.group[0], table.name[0], table.queue[0], table.cpus[0]) == ("u", "g", "n-1", "q", 8)
    np.testing.assert_array_equal(table.limit_s, [np.nan, 600, np.nan])


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name, rows in (("long", 600), ("short", 100)):
        (tmp_path / "demand" / name).mkdir(parents=True)
        times = pd.to_datetime("2020-01-01") + pd.to_timedelta(np.arange(rows) * 10, unit="min")
        pd.DataFrame({"time": times, "active": 5.0}).to_csv(tmp_path / "demand" / name / "nodes.csv", index=False)
    return tmp_path


def test_sets_by_name_and_up_to_a_moment(data: Path) -> None:
    said: list[str] = []
    (one,) = TrainingInputs(data, say=said.append).read_panels()
    assert (one.dataset, one.panel.bins, one.train_bins) == ("demand/long", 600, 600)
    assert any("demand/short" in line and "less than two days" in line for line in said)
    until = parse_moment_ms("--until", "2020-01-04")
    (cut,) = TrainingInputs(data, sets=("long",), until_ms=until, say=said.append).read_panels()
    assert cut.panel.bins == 3 * 144
    assert cut.panel.end_ms(cut.panel.bins - 1) == until
    with pytest.raises(FleetcastError, match="among short"):
        TrainingInputs(data, sets=("short",), say=said.append).read_panels()
    with pytest.raises(FleetcastError, match="no job histories"):
        TrainingInputs(data, say=said.append).read_jobs()


def test_moments_are_dates_or_seconds() -> None:
    assert parse_moment_ms("--until", None) == LAST_MS
    assert parse_moment_ms("--until", "2020-01-01T00:00+01:00") == 1_577_833_200_000
    assert parse_moment_ms("--until", "1500000.5") == 1_500_000_500
    with pytest.raises(ConfigError, match="--since 'tomorrow'"):
        parse_moment_ms("--since", "tomorrow")
