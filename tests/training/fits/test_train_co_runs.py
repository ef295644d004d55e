"""Interference of a site: co-runs out of an archive, judged on later ones, served where they help."""

import numpy as np
import pytest
from typer.testing import CliRunner

from fleetcast.cli.main import app
from fleetcast.features.co_runs import CoRun, CoRuns
from fleetcast.features.store import WindowStore
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.events import Finished, Started, Step, Submitted
from fleetcast.fleet.metrics import find_metric_row
from fleetcast.fleet.requests import RankPlacement
from fleetcast.fleet.samples import EntityKind, SampleBatch
from fleetcast.fleet.topology import Topology
from fleetcast.ingest.archive.archive import Archive, ArchiveLimits
from fleetcast.ingest.archive.files import ArchiveFiles
from fleetcast.ingest.source import Batch
from fleetcast.models.jobs.co_run_fit import CoRunFit, PastCoRun
from fleetcast.models.versions.card import Card
from fleetcast.models.versions.registry import Registry
from fleetcast.service.pipeline.jobs.co_run_versions import ServedCoRuns
from fleetcast.service.pipeline.jobs.interference import InterferenceLearner
from fleetcast.service.pipeline.state import FleetState
from fleetcast.training.fits.retrain import TrainingPlan
from fleetcast.training.fits.train_co_runs import (
    SeenCoRun,
    SiteCoRuns,
    compute_errors,
    judge_co_runs,
    read_co_runs,
    train_interference,
)

T0 = 1_795_219_200_000
MINUTE_MS = 60_000
PLAN = TrainingPlan("interference", "a test")


def co_runs(count, seed=0, harm=0.2):
    """Jobs of four kinds; those of an odd kind suffer more than the rule says, whoever is beside them."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        kind, other = (int(one) for one in rng.integers(1, 5, 2))
        load, partner = (0.3 + 0.1 * kind, 0.2, 0.2), (0.3 + 0.1 * other, 0.2, 0.2)
        speed = 1 - load[0] * partner[0] / 2 - harm * (kind % 2) + rng.normal(0, 0.01)
        keys = (100 * kind + number % 3, kind), (100 * other + number % 3, other)
        rows.append(SeenCoRun(T0 + number * MINUTE_MS, CoRun("gpu", *keys, float(speed)), load, partner))
    return rows


def site(rows):
    return SiteCoRuns(tuple(rows), {7: (0.5, float("nan"), 0.1)}, {7: (1.0, 0.2)}, T0, rows[-1].time_ms)


def test_past_co_runs_that_help_serve_and_a_later_version_must_help_more(tmp_path):
    registry = Registry(tmp_path)
    rows = co_runs(120)
    first = train_interference(site(rows), PLAN, registry, T0)
    assert first.objection == ""
    assert "over 60 later ones" in first.card.gate.sentence
    again = train_interference(site(rows), PLAN, registry, T0)
    assert "0 co-runs since the data of version 0001 ended, 50 needed" in again.objection
    assert registry.find_current_version("interference") == "0001"


def test_few_co_runs_and_co_runs_that_teach_nothing_do_not_serve():
    assert judge_co_runs(co_runs(10), None, T0)[1].sentence == "10 co-runs on GPUs, 50 needed"
    gate = judge_co_runs(co_runs(120, harm=0.0), None, T0)[1]
    assert not gate.won
    assert gate.origins == 60


def test_what_is_told_of_a_co_run_rests_on_earlier_ones_alone():
    rows = co_runs(100)
    assert compute_errors(rows[:50], rows[50:]).tolist()[:10] == pytest.approx(
        compute_errors(rows[:50], rows[50:60]).tolist()
    )


def test_a_fit_survives_its_file(tmp_path):
    big = 2**64 - 1
    fit = CoRunFit((PastCoRun("gpu", (big, 1), (2, 3), 0.5),), {big: (0.5, None, 0.1)}, {big: (1.0, 0.2)})
    fit.save(tmp_path)
    assert CoRunFit.load(tmp_path) == fit
    assert np.isnan(fit.make_load_table()[big][1])


def version(registry, speed):
    fit = CoRunFit((PastCoRun("gpu", (11, 1), (12, 2), speed),), {11: (0.5, 0.1, 0.1)})
    name = registry.add_version("interference", fit.save, train_card())
    registry.promote("interference", name, force=True)
    return name


def train_card():
    return Card(kind="interference", created_ms=T0, made_by="a test", seed=0, fitted_until_ms=T0)


def test_the_service_knows_what_was_promoted_and_forgets_it_on_a_rollback(tmp_path):
    registry = Registry(tmp_path)
    served = ServedCoRuns(registry)
    assert not served.refresh(0)
    version(registry, 0.5)
    assert served.refresh(20_000)
    assert (served.version, served.co_runs[0].speed, served.alone[11][0]) == ("interference-0001", 0.5, 0.5)
    version(registry, 0.7)
    assert served.refresh(40_000)
    registry.roll_back("interference")
    assert served.refresh(60_000)
    assert served.co_runs[0].speed == 0.5
    (registry.find_folder("interference", "0001") / "co_runs.json").write_text("{")
    assert not served.refresh(80_000)


def test_past_co_runs_teach_beside_the_own_ones(tmp_path):
    registry = Registry(tmp_path)
    version(registry, 0.5)
    sharing = InterferenceLearner(CoRuns(), registry)
    fresh = sharing._served.refresh(20_000)
    sharing._learn_if_due(sharing._served.alone, 20_000, fresh)
    assert b'"gpu"' in sharing._document
    assert b"[11,1]" in sharing._document


@pytest.fixture
def folder(tmp_path):
    """Half an hour of one GPU: a runs alone, b joins and both slow down, then b is alone."""
    entities = Entities()
    state = FleetState(entities, WindowStore(entities), Topology.build([]))
    state.archive = Archive(ArchiveFiles(str(tmp_path / "archive")), entities, limits=ArchiveLimits(keep_days=0))
    gpu = entities.add_to_node(EntityKind.GPU, "n1", "0")
    metric = find_metric_row(EntityKind.GPU, "sm_active")
    place = (RankPlacement(rank=0, node="n1", gpus=(0,)),)
    spans = {"a": (0, 20), "b": (10, 30)}
    events = []
    for job, (begin, end) in spans.items():
        at = T0 + begin * MINUTE_MS
        events += [
            Submitted(job=job, sequence=0, time_ms=at, user=job, name=job),
            Started(job=job, sequence=1, time_ms=at, ranks=place),
            Finished(job=job, sequence=9999, time_ms=T0 + end * MINUTE_MS),
        ]
        time_ms, step = at, 0
        while time_ms < T0 + end * MINUTE_MS - 8_000:
            seconds = 8.0 if 10 * MINUTE_MS <= time_ms - T0 < 20 * MINUTE_MS else 5.0
            time_ms, step = time_ms + round(seconds * 1000), step + 1
            events.append(Step(job=job, sequence=step + 1, time_ms=time_ms, step=step, duration_s=seconds))
    events.sort(key=lambda event: event.time_ms)
    for number in range(30 * 4):
        time_ms = T0 + number * 15_000
        one = np.array([gpu], np.int32)
        samples = SampleBatch(
            EntityKind.GPU, np.array([metric], np.int16), one, np.array([time_ms], np.int64), np.array([0.6])
        )
        told = tuple(event for event in events if time_ms - 15_000 < event.time_ms <= time_ms)
        state.apply(Batch(samples=(samples,), events=told), time_ms)
    state.archive.prepare_flush(state.topology, T0 + 30 * MINUTE_MS)()
    state.archive.close()
    return tmp_path / "archive"


def test_co_runs_are_read_from_an_archive_as_a_service_sees_them(folder):
    found = read_co_runs(ArchiveFiles(str(folder)), 2**53)
    assert {row.co_run.share for row in found.seen} == {"gpu"}
    assert [row.co_run.speed for row in found.seen] == pytest.approx([5 / 8] * len(found.seen), abs=0.02)
    assert len(found.seen) == 2
    assert found.seen[0].load[0] == pytest.approx(0.6, abs=0.01)


def test_the_command_keeps_a_version_and_says_how_many_co_runs_it_needs(folder, tmp_path):
    words = ["train", "interference", "--archive", str(folder), "--state", str(tmp_path / "state")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "2 co-runs on GPUs, 50 needed" in result.output
    assert Registry(tmp_path / "state" / "models").list_names("interference") == ["0001"]
