"""What is replayed from an archive is what the service had."""

from pathlib import Path

import numpy as np
import pytest

from fleetcast.features.demand_series import TARGETS
from fleetcast.fleet.errors import FleetcastError
from fleetcast.fleet.events import Started, Submitted
from fleetcast.fleet.metrics import find_metric_row
from fleetcast.fleet.samples import EntityKind, SampleBatch
from fleetcast.ingest.archive.archive import Archive, ArchiveLimits
from fleetcast.ingest.archive.files import DAY_MS, ArchiveFiles
from fleetcast.ingest.archive.read import ArchiveSpan
from fleetcast.training.sites.archive_history import collect_full_bins, read_history
from tests.training.made_archive import T0, events_of, live


def test_the_panel_of_an_archive_is_the_one_that_the_live_series_had(tmp_path: Path) -> None:
    state = live(tmp_path, events_of(days=4, jobs_a_day=12))
    history = read_history(ArchiveFiles(str(tmp_path)), fleet_gpus=64)
    assert [panel.target for panel in history.panels] == list(TARGETS)
    for panel in history.panels:
        assert panel.names == state.demand.list_queues() == ("default", "serve", "train", "all")
        first, ms = panel.first_ms // 600_000, panel.end_ms(panel.bins - 1)
        assert history.end_ms - 600_000 < ms <= history.end_ms
        for row, name in enumerate(panel.names):
            expected = collect_full_bins(state.demand, name, panel.target, first, panel.bins, 600)  # type: ignore[arg-type]
            np.testing.assert_array_equal(panel.values[row], expected)
    running = next(panel for panel in history.panels if panel.target == "running")
    np.testing.assert_array_equal(running.capacity, [64.0] * 4)
    assert np.nanmax(running.values) > 0
    assert set(running.covariates) == {"running", "queued", "arriving"}
    wanted = next(panel for panel in history.panels if panel.target == "wanted")
    np.testing.assert_array_equal(wanted.values, running.values + running.covariates["queued"])


def test_levels_and_arrivals_of_one_bin_belong_together(tmp_path: Path) -> None:
    live(
        tmp_path,
        [
            Submitted(job="a", sequence=0, time_ms=T0 + 1, queue="q", gpus_per_node=4),
            Started(job="a", sequence=1, time_ms=T0 + 600_000 + 1, nodes=("n1",)),
            Submitted(job="b", sequence=0, time_ms=T0 + 1_800_000 + 1, queue="q", gpus_per_node=4),
        ],
    )
    values = {panel.target: panel.values[0].tolist() for panel in read_history(ArchiveFiles(str(tmp_path))).panels}
    assert values["arriving"] == [4, 0, 0]  # the fourth bin is not over
    assert values["queued"] == [4, 0, 0]
    assert values["running"] == [0, 4, 4]


def test_more_than_the_service_keeps_is_read_window_by_window(tmp_path: Path) -> None:
    events = events_of(days=60, jobs_a_day=1)
    live(tmp_path, events)
    history = read_history(ArchiveFiles(str(tmp_path)))
    panels = {panel.target: panel for panel in history.panels}
    assert panels["arriving_jobs"].bins > 55 * 144
    first = [event for event in events if isinstance(event, Submitted)]
    assert panels["arriving_jobs"].values[-1].sum() == pytest.approx(len(first), abs=1)
    assert len(history.attempts) >= len(first)
    assert min(attempt.submitted_ms for attempt in history.attempts if attempt.submitted_ms) == events[0].time_ms
    assert all(attempt.started_ms for attempt in history.attempts if attempt.outcome)
    total = panels["running"].values[-1]
    np.testing.assert_array_equal(total, panels["running"].values[:-1].sum(axis=0))


def test_a_span_ends_where_it_is_told_and_an_empty_archive_is_an_error(tmp_path: Path) -> None:
    live(tmp_path, events_of(days=5, jobs_a_day=8))
    until = T0 + 3 * DAY_MS
    history = read_history(ArchiveFiles(str(tmp_path)), ArchiveSpan(0, until))
    assert history.end_ms < until
    assert all((attempt.ended_ms or 0) < until for attempt in history.attempts)
    with pytest.raises(FleetcastError, match="no job events"):
        read_history(ArchiveFiles(str(tmp_path / "nothing")))


def test_without_a_topology_the_gpus_that_told_of_themselves_are_the_capacity(tmp_path: Path) -> None:
    told = [Started(job=job, sequence=0, time_ms=T0 + at, nodes=("n1",)) for job, at in (("a", 5), ("b", 700_000))]
    state = live(tmp_path, told)
    assert np.isnan(read_history(ArchiveFiles(str(tmp_path))).panels[0].capacity).all()
    rows = [state.entities.add_to_node(EntityKind.GPU, "n1", gpu) for gpu in range(4)]
    power = find_metric_row(EntityKind.GPU, "power_w")
    batch = SampleBatch.from_rows(EntityKind.GPU, [(power, gpu, T0 + 700_000, 100.0) for gpu in rows])
    archive = Archive(ArchiveFiles(str(tmp_path)), state.entities, writer="1", limits=ArchiveLimits(keep_days=0))
    archive.add(batch, np.ones(len(batch), np.bool_))
    archive.prepare_flush(state.topology, T0)()
    archive.close()
    panels = {panel.target: panel for panel in read_history(ArchiveFiles(str(tmp_path))).panels}
    assert panels["running"].capacity.tolist() == [4.0, 4.0]
    assert np.isnan(panels["queued"].capacity).all()
