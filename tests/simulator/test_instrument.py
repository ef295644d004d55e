"""A run with injected faults can be read back as what the exporters of the same fleet would have shown."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import ConfigError
from fleetcast.fleet.events import Failed, Finished, Started, Step
from fleetcast.fleet.nodes import NodeTable
from fleetcast.fleet.requests import RankPlacement
from fleetcast.fleet.samples import EntityKind, SampleBatch
from fleetcast.ingest.pages.exporters import ExporterResolver
from fleetcast.ingest.pages.text import PageDecoder, Target
from fleetcast.simulator.faults.fault_file import (
    FaultFile,
    FleetTable,
    JobsTable,
    format_fault_file,
    parse_fault_file,
    read_fault_file,
)
from fleetcast.simulator.faults.magnitudes import DECOY_KINDS, FAULT_KINDS
from fleetcast.simulator.hardware.cluster import FleetSpec, SimulatedFleet
from fleetcast.simulator.hardware.columns import Recorder
from fleetcast.simulator.hardware.workload import draw_job_profile
from fleetcast.simulator.instrument import simulate_faults
from fleetcast.training.sets.fault_runs import FaultRun, read_fault_runs

EXAMPLES = Path(__file__).parents[2] / "examples" / "faults"
SMALL = FaultFile(
    name="small",
    hours=3.0,
    interval_s=30.0,
    fleet=FleetTable(nodes=8, rack_nodes=4),
    jobs=JobsTable(sizes=(1, 2), weights=(1.0, 1.0), median_s=2400.0, gap_s=30.0, step_every_s=60.0),
)


def table(batches: list[SampleBatch], entities: Entities) -> dict[tuple[str, int, str], float]:
    """(kind, metric, entity name) -> value."""
    return {
        (batch.kind.value, metric, entities[batch.kind].names[entity]): value
        for batch in batches
        for metric, entity, value in zip(
            batch.metric.tolist(), batch.entity.tolist(), batch.value.tolist(), strict=True
        )
    }


def from_pages(fleet: SimulatedFleet, now_ms: int) -> dict[tuple[str, int, str], float]:
    entities = Entities()
    resolver = ExporterResolver(entities)
    batches = [
        batch
        for target in fleet.list_targets()
        if fleet.is_answering(*target)
        for batch in PageDecoder(resolver, Target(target[0], fixed=True))
        .decode(fleet.render_page(*target), now_ms)
        .samples
    ]
    return table(batches, entities)


def test_columns_hold_what_the_decoded_pages_hold(tmp_path: Path) -> None:
    fleet = SimulatedFleet(FleetSpec(nodes=3), seed=2)
    ranks = [RankPlacement(rank, node, tuple(range(8))) for rank, node in enumerate(("n001", "n002"))]
    fleet.start_job("j", 1, ranks, draw_job_profile("j", 16), -600_000)
    fleet.faults.inject("gpu_off_bus", "n001", 5, 20_000, warns_s=0.0)
    fleet.faults.inject("ib_flap", "n002", 1, 10_000)
    fleet.faults.inject("exporter_restart", "n003", None, 55_000, end_ms=90_000, down_s=20.0)
    recorder = Recorder(fleet, tmp_path / "samples")
    expected = {}
    for time_ms in (0, 15_000, 30_000, 60_000):
        fleet.advance(time_ms)
        recorder.record_scrape(time_ms)
        expected[time_ms] = from_pages(fleet, time_ms)
    recorder.close()
    (tmp_path / "events.jsonl").write_bytes(b"")
    entities = Entities()
    for round_ in FaultRun(tmp_path).read_rounds(entities):
        seen = table(list(round_.batches), entities)
        about_scrapes = {key for key in seen if key[0] == "node"} - expected[round_.time_ms].keys()
        assert len(about_scrapes) == 4 * 3 - (round_.time_ms == 60_000)  # nobody counts GPUs on n003 then
        assert seen.keys() - about_scrapes == expected[round_.time_ms].keys()
        for key, value in expected[round_.time_ms].items():
            assert seen[key] == pytest.approx(value, rel=1e-6, abs=1e-5), key


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> FaultRun:
    out = tmp_path_factory.mktemp("faults")
    kinds = msgspec.structs.replace(
        SMALL.kinds,
        **{
            kind: msgspec.structs.replace(SMALL.kinds.get_kind(kind), rate=200.0)
            for kind in (*FAULT_KINDS, *DECOY_KINDS)
        },
    )
    draw = msgspec.structs.replace(SMALL.draw, scale=40.0, decoy_scale=40.0, limit_s=360.0, precursor_share=0.5)
    draw = msgspec.structs.replace(draw, precursor_s=(60.0, 120.0), repeat_share=0.0)
    simulate_faults(msgspec.structs.replace(SMALL, kinds=kinds, draw=draw), out)
    (found,) = read_fault_runs(out)
    return found


def test_a_run_has_faults_and_decoys_of_every_kind_with_their_strength_and_their_jobs(run: FaultRun) -> None:
    assert {row.kind for row in run.truth} == {*FAULT_KINDS, *DECOY_KINDS}
    assert all(row.benign == (row.kind in DECOY_KINDS) for row in run.truth)
    assert any(row.precursor and row.lead_s >= 60 for row in run.truth)
    assert any(not row.precursor and not row.benign for row in run.truth)
    slow = [row for row in run.truth if row.kind == "cpu_contention" and row.visible]
    assert slow
    assert all(1.0 < row.magnitude["slow"] <= 1.3 for row in slow)
    assert any(row.job is not None and row.slowdown > 1.02 for row in slow)


def test_jobs_of_a_run_start_tell_their_steps_and_end(run: FaultRun) -> None:
    events = [event for round_ in run.read_rounds(Entities()) for event in round_.events]
    assert [event.time_ms for event in events] == sorted(event.time_ms for event in events)
    assert any(isinstance(event, Finished) for event in events)
    assert any(isinstance(event, Failed) and event.category == "hardware" for event in events)
    ranks = {(event.job, event.attempt): len(event.ranks) for event in events if isinstance(event, Started)}
    steps = [event for event in events if isinstance(event, Step)]
    assert steps
    assert all(event.rank is not None and event.rank < ranks[event.job, event.attempt] for event in steps)
    assert all(event.parts is not None and event.parts.compute <= event.duration_s for event in steps)


def test_a_gpu_off_the_bus_has_no_rows(run: FaultRun) -> None:
    gone = next(row for row in run.truth if row.kind == "gpu_off_bus" and row.visible_ms)
    assert gone.end_ms is not None
    entities = Entities()
    assert gone.end_ms > gone.start_ms + 90_000
    for round_ in run.read_rounds(entities):
        if gone.start_ms + 60_000 <= round_.time_ms < gone.end_ms:
            (gpus,) = [batch for batch in round_.batches if batch.kind is EntityKind.GPU]
            names = {entities[EntityKind.GPU].names[row] for row in np.unique(gpus.entity).tolist()}
            assert f"{gone.node}/{gone.gpu}" not in names


def test_repairs_are_told_and_nothing_else_of_a_fault(run: FaultRun) -> None:
    told = [event for round_ in run.read_rounds(Entities()) for event in round_.node_events]
    repaired = {"ecc_storm", "gpu_off_bus", "node_lost", "pcie_downgrade"}
    ends = {(row.node, row.end_ms) for row in run.truth if row.kind in repaired and row.end_ms and row.visible}
    table = NodeTable()
    drains, undrains = 0, 0
    for event in told:
        assert event.type in ("drain", "undrain", "returned")
        drains, undrains = drains + (event.type == "drain"), undrains + (event.type == "undrain")
        if event.type == "undrain":
            assert any(event.node == node and 0 <= event.time_ms - end_ms <= 30_000 for node, end_ms in ends)
        record = table.apply(event)
        assert record is not None
        assert record.drained == (event.type == "drain") or event.type == "returned"
    assert len(ends) >= undrains >= 4
    assert 0 <= drains - undrains <= 8  # the rest was under way at the end


def test_the_same_seed_gives_the_same_run_and_another_seed_another(tmp_path: Path) -> None:
    short = msgspec.structs.replace(SMALL, hours=1.0)
    folders = [simulate_faults(short, tmp_path / "a"), simulate_faults(short, tmp_path / "b")]
    other = simulate_faults(msgspec.structs.replace(short, seed=2), tmp_path / "a")
    for name in ("truth.jsonl", "events.jsonl", "samples/gpu.parquet"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()
    assert (folders[0] / "events.jsonl").read_bytes() != (other / "events.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="is there already"):
        simulate_faults(short, tmp_path / "a")


def test_a_fleet_that_nobody_uses_tells_of_no_jobs_and_still_breaks(tmp_path: Path) -> None:
    text = (
        """hours = 1.0\ninterval_s = 60\n[fleet]\nnodes = 4\n[jobs]\nsizes = []\nweights = []\n[draw]\nscale = 9000.0"""
    )
    folder = simulate_faults(parse_fault_file(text), tmp_path)
    assert (folder / "events.jsonl").read_bytes() == b""
    assert FaultRun(folder).truth


def test_the_printed_settings_read_back_as_they_were() -> None:
    assert parse_fault_file(format_fault_file(SMALL)) == SMALL
    assert parse_fault_file("") == FaultFile()


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_an_example_is_read_and_differs_from_the_defaults(path: Path) -> None:
    assert read_fault_file(path) != FaultFile(name=read_fault_file(path).name)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[kinds.slow_nic]\nslwo = [1.0, 2.0]", "line 2: kinds.slow_nic.slwo: no such key; did you mean slow?"),
        ("[draw]\nscales = 3.0", "line 2: draw.scales: no such key; did you mean scale?"),
        ("[kinds.power_cap]\nlimit_w = [600, 500]", "the low end comes first"),
        ("[kinds.ecc_storm]\nprecursor_share = 1.5", "a share lies within 0 and 1"),
        ("[jobs]\nsizes = [1]", "one a size"),
        ("interval_s = 0", "interval_s = 0: must be greater than 0"),
        ("[fleet]\nnodes = 0", "the file: fleet.nodes = 0: must be greater than 0"),
        ("[draw]\nscale = nan", "draw.scale = nan: a number of at least 0"),
        ("[draw]\ndecoy_scale = -1", "draw.decoy_scale = -1: a number of at least 0"),
        ('name = "a/b"', "names the folder"),
        ("[draw", "no TOML"),
    ],
)
def test_a_wrong_setting_is_named_with_its_fix(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match="the file: ") as caught:
        parse_fault_file(text)
    assert words in str(caught.value)
