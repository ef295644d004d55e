"""What is replayed from an archive is what the service had."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from features.demand_series import TARGETS
from features.store import WindowStore
from fleet.entities import Entities
from fleet.errors import FleetcastError
from fleet.events import Failed, Finished, JobEvent, Preempted, Resized, Started, Step, Submitted
from fleet.requests import RankPlacement
from fleet.topology import Topology
from ingest.archive import Archive, Limits
from ingest.archive_files import DAY_MS, ArchiveFiles
from ingest.archive_read import Span
from ingest.source import Batch
from service.state import FleetState
from training.archive_history import full_bins, read_history

T0 = 1_795_276_800_000
MINUTE_MS = 60_000


def events_of(days: int, jobs_a_day: int, seed: int = 0) -> list[JobEvent]:
    """Jobs of two pools: some wait, fail, are resized, preempted and started again, or still run at the end."""
    rng = np.random.default_rng(seed)
    events: list[JobEvent] = []
    for number in range(days * jobs_a_day):
        job, queue = f"j{number}", ("train", "serve")[number % 2]
        at = T0 + int(rng.integers(0, days * DAY_MS))
        began = at + int(rng.integers(1, 300)) * MINUTE_MS
        ended = began + int(rng.integers(1, 2000)) * MINUTE_MS
        events += [
            Submitted(job=job, sequence=0, time_ms=at, queue=queue, user=f"u{number % 5}", gpus_per_node=8),
            Started(job=job, sequence=1, time_ms=began, nodes=("n1",)),
            Step(job=job, sequence=2, time_ms=began + 1000, step=1, duration_s=1.0),
        ]
        if number % 7 == 0:
            ranks = tuple(RankPlacement(rank=rank, node=f"n{rank}", gpus=(0, 1)) for rank in range(3))
            events.append(Resized(job=job, sequence=3, time_ms=began + MINUTE_MS, ranks=ranks))
        if number % 5 == 0:
            events.append(Preempted(job=job, sequence=4, time_ms=began + 2 * MINUTE_MS))
            events.append(Started(job=job, attempt=2, sequence=0, time_ms=ended, nodes=("n2",)))
        elif number % 3:
            events.append(Finished(job=job, sequence=4, time_ms=ended))
        elif number % 2:
            events.append(Failed(job=job, sequence=4, time_ms=ended, category="user"))
    end_ms = T0 + days * DAY_MS
    return sorted((event for event in events if event.time_ms < end_ms), key=lambda event: event.time_ms)


def live(folder: Path, events: Sequence[JobEvent]) -> FleetState:
    """A service's state that was told all this, and archived it under the folder."""
    entities = Entities()
    state = FleetState(entities, WindowStore(entities), Topology.build([]))
    state.archive = Archive(ArchiveFiles(str(folder)), entities, limits=Limits(keep_days=0))
    rng = np.random.default_rng(1)
    for first in range(0, len(events), 50):
        some = [events[first + row] for row in rng.permutation(len(events[first : first + 50]))]
        state.apply(Batch(events=(*some, some[0])), T0)
    state.archive.hand_over(state.topology, T0)()
    state.archive.close()
    return state


def test_the_panel_of_an_archive_is_the_one_that_the_live_series_had(tmp_path: Path) -> None:
    state = live(tmp_path, events_of(days=6, jobs_a_day=30))
    history = read_history(ArchiveFiles(str(tmp_path)), capacity={"all": 64, "train": 40})
    assert [panel.target for panel in history.panels] == list(TARGETS)
    for panel in history.panels:
        assert panel.names == state.demand.pools() == ("default", "serve", "train", "all")
        first, ms = panel.first_ms // 600_000, panel.end_ms(panel.bins - 1)
        assert history.end_ms - 600_000 < ms <= history.end_ms
        for row, name in enumerate(panel.names):
            expected = full_bins(state.demand, name, panel.target, first, panel.bins, 600)  # type: ignore[arg-type]
            np.testing.assert_array_equal(panel.values[row], expected)
    running = next(panel for panel in history.panels if panel.target == "running")
    np.testing.assert_array_equal(running.capacity, [np.nan, np.nan, 40.0, 64.0])
    assert np.nanmax(running.values) > 0
    np.testing.assert_array_equal(
        running.covariates["wanted"], running.values + running.covariates["queued"], "levels of the same moments"
    )


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
    events = events_of(days=80, jobs_a_day=3)
    live(tmp_path, events)
    history = read_history(ArchiveFiles(str(tmp_path)))
    panels = {panel.target: panel for panel in history.panels}
    assert panels["arriving_jobs"].bins > 79 * 144
    first = [event for event in events if isinstance(event, Submitted)]
    assert panels["arriving_jobs"].values[-1].sum() == pytest.approx(len(first), abs=1)
    assert len(history.attempts) >= len(first)
    assert min(attempt.submitted_ms for attempt in history.attempts if attempt.submitted_ms) == events[0].time_ms
    assert all(attempt.started_ms for attempt in history.attempts if attempt.outcome)
    total = panels["running"].values[-1]
    np.testing.assert_array_equal(total, panels["running"].values[:-1].sum(axis=0))


def test_a_span_ends_where_it_is_told_and_an_empty_archive_is_an_error(tmp_path: Path) -> None:
    live(tmp_path, events_of(days=6, jobs_a_day=10))
    until = T0 + 3 * DAY_MS
    history = read_history(ArchiveFiles(str(tmp_path)), Span(0, until))
    assert history.end_ms < until
    assert all((attempt.ended_ms or 0) < until for attempt in history.attempts)
    with pytest.raises(FleetcastError, match="no job events"):
        read_history(ArchiveFiles(str(tmp_path / "nothing")))
