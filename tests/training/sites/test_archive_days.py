"""A site's days out of its archive: what a pipeline was told, replayed, labelled by what events said."""

import numpy as np
import pytest
from typer.testing import CliRunner

from fleetcast.cli.main import app
from fleetcast.features.store import WindowStore
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import FleetcastError
from fleetcast.fleet.events import NodeEvent
from fleetcast.fleet.metrics import find_metric_row
from fleetcast.fleet.samples import EntityKind, SampleBatch
from fleetcast.fleet.topology import Topology
from fleetcast.ingest.archive.archive import Archive, ArchiveLimits
from fleetcast.ingest.archive.files import DAY_MS, ArchiveFiles
from fleetcast.ingest.archive.read import ArchiveSpan
from fleetcast.ingest.source import Batch
from fleetcast.models.risk.rules import ROW
from fleetcast.models.risk.site_risk import SITE_FEATURES
from fleetcast.models.versions.registry import Registry
from fleetcast.service.pipeline.state import FleetState
from fleetcast.training.sites.archive_days import list_node_names, measure_scrape_interval_s, read_days
from fleetcast.training.sites.site_days import SiteDays

T0 = 1_795_219_200_000 // DAY_MS * DAY_MS
MINUTE_MS = 60_000


def event(node, type, day, sequence, **more):
    return NodeEvent(node=node, source="s", sequence=sequence, time_ms=T0 + round(day * DAY_MS), type=type, **more)


EVENTS = [
    event("n1", "health", 1.2, 1, severity="warning", check="fan"),
    event("n1", "lost", 2.3, 2),
    event("n1", "returned", 2.6, 3),
    event("n2", "drain", 3.4, 4),
    event("n2", "drain", 3.5, 5),  # still the same one
    event("n2", "undrain", 3.6, 6),
]


@pytest.fixture
def folder(tmp_path):
    """Five days of events, and half an hour of two GPUs every twelve hours: one of n1 reports corrected errors."""
    entities = Entities()
    state = FleetState(entities, WindowStore(entities), Topology.build([]))
    state.archive = Archive(ArchiveFiles(str(tmp_path / "archive")), entities, limits=ArchiveLimits(keep_days=0))
    gpus = np.array([entities.add_to_node(EntityKind.GPU, name, "0") for name in ("n1", "n2")], np.int32)
    metric = np.full(2, find_metric_row(EntityKind.GPU, "ecc_sbe_volatile"), np.int16)
    times = [T0 + half * DAY_MS // 2 + minute * MINUTE_MS for half in range(10) for minute in range(30)]
    for number, time_ms in enumerate(times):
        values = np.array([float(number * 40), 5.0])
        samples = SampleBatch(EntityKind.GPU, metric, gpus, np.full(2, time_ms, np.int64), values)
        told = [one for one in EVENTS if (times[number - 1] if number else 0) < one.time_ms <= time_ms]
        state.apply(Batch(samples=(samples,), node_events=tuple(told)), time_ms)
    state.archive.prepare_flush(state.topology, times[-1])()
    state.archive.close()
    return tmp_path / "archive"


def test_nodes_and_the_interval_are_read_from_the_archive(folder):
    files = ArchiveFiles(str(folder))
    span = ArchiveSpan(T0, T0 + 5 * DAY_MS)
    assert list_node_names(files, span) == ["n1", "n2"]
    assert measure_scrape_interval_s(files, span) == 60.0


def test_what_events_told_are_the_labels_and_rules_the_features(folder):
    days = read_days(ArchiveFiles(str(folder)), 2**53)
    began = {
        kind: [(row, (ms - T0) / DAY_MS) for row, ms in zip(told.node, told.time_ms, strict=True)]
        for kind, told in days.begun.items()
    }
    assert began["fail"] == [(0, pytest.approx(2.3))]
    assert began["drain"] == [(1, pytest.approx(3.4))]
    assert began["slow"] == [(0, pytest.approx(1.2))]
    moments = zip(days.node.tolist(), days.time_ms.tolist(), strict=True)
    rows = {(node, round((ms - T0) / DAY_MS)): at for at, (node, ms) in enumerate(moments)}
    errors = days.columns[:, SITE_FEATURES.index("ecc_burst")]
    assert errors[rows[0, 2]] > 0
    assert errors[rows[1, 2]] == 0
    assert days.compute_labels("fail", 1)[rows[0, 2]]
    assert not days.compute_labels("fail", 1)[rows[1, 2]]
    assert days.levels.shape[1] == len(ROW)


def test_what_comes_later_changes_no_row(folder):
    whole = read_days(ArchiveFiles(str(folder)), 2**53)
    early: SiteDays = read_days(ArchiveFiles(str(folder)), T0 + 2 * DAY_MS + DAY_MS // 2)
    count = int((whole.time_ms < early.end_ms).sum())
    assert count == len(early) > 0
    assert (whole.columns[:count] == early.columns).all()
    assert (whole.levels[:count] == early.levels).all()
    assert (whole.history[:count] == early.history).all()


def test_an_archive_without_anything_says_so(tmp_path):
    with pytest.raises(FleetcastError, match="no samples and no events there"):
        read_days(ArchiveFiles(str(tmp_path / "none")), 2**53)


def test_the_command_keeps_a_version_and_says_how_many_failures_it_needs(folder, tmp_path):
    words = ["train", "risk", "--archive", str(folder), "--state", str(tmp_path / "state")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "risk 0001 is stored, and does not serve" in result.output
    assert "1 failures, 50 needed" in result.output
    registry = Registry(tmp_path / "state" / "models")
    assert registry.find_current_version("risk") is None
    card = registry.read_version_card("risk", "0001")
    assert f"fleetcast train risk --archive {folder}" in card.made_by
    assert (card.gate.won, card.gate.origins) == (False, 0)
    listed = CliRunner().invoke(app, ["models", "list", "risk", "--state", str(tmp_path / "state")])
    assert "0001" in listed.output
