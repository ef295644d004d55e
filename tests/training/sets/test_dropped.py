"""Telemetry that is left out of a run: exactly what was asked for, and nobody's job events."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fleetcast.cli.main import app
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import ConfigError
from fleetcast.fleet.metrics import METRICS, find_metric_row
from fleetcast.fleet.samples import EntityKind
from fleetcast.simulator.faults.fault_file import parse_fault_file
from fleetcast.simulator.instrument import simulate_faults
from fleetcast.training.sets.dropped import DEFAULT_COUNTERS, DROPS, SCRAPES, find_dropped_metrics
from fleetcast.training.sets.fault_runs import FaultRun, read_fault_runs

WORLD = 'name = "bare"\nhours = 0.1\ninterval_s = 60\n[fleet]\nnodes = 2\n[draw]\nscale = 0.0\n'
GPU, PORT, NODE = EntityKind.GPU, EntityKind.PORT, EntityKind.NODE


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bare")
    simulate_faults(parse_fault_file(WORLD), folder)
    return folder


def shown(run: FaultRun) -> set[tuple[EntityKind, str]]:
    """Kind and name of every metric that the run shows."""
    rounds = run.read_rounds(Entities())
    batches = (batch for one in rounds for batch in one.batches)
    return {(batch.kind, METRICS[batch.kind][row].name) for batch in batches for row in set(batch.metric.tolist())}


@pytest.mark.parametrize(
    ("drops", "gone", "there"),
    [
        (["default"], {(GPU, "sm_active"), (GPU, "clock_event_reasons"), (GPU, "ecc_sbe_volatile")}, {(GPU, "xid")}),
        (["xid"], {(GPU, "xid")}, {(GPU, "sm_active")}),
        (["ib"], {(PORT, "rx_bytes"), (PORT, "state"), (NODE, "ports_reported")}, {(NODE, "cpu_idle_s")}),
        (["prof"], {(GPU, "tensor_active"), (GPU, "pcie_tx_bytes_per_s")}, {(GPU, "power_w"), (GPU, "xid")}),
        (["host"], {(NODE, "cpu_steal_s"), (NODE, "bmc_power_w")}, {(NODE, "scrape_up"), (PORT, "rx_bytes")}),
        (["default", "xid"], {(GPU, "xid"), (GPU, "sm_active")}, {(GPU, "tensor_active"), (GPU, "power_w")}),
    ],
)
def test_what_is_dropped_is_not_shown_and_the_rest_is(out: Path, drops: list[str], gone: set, there: set) -> None:
    (whole,), (less,) = read_fault_runs(out), read_fault_runs(out, without=find_dropped_metrics(drops))
    assert gone <= shown(whole)
    assert there <= shown(whole)
    assert shown(less) == shown(whole) - {(metric.kind, metric.name) for metric in find_dropped_metrics(drops)}
    assert not gone & shown(less)
    assert there <= shown(less)


def test_the_lists_name_metrics_of_the_catalogue() -> None:
    assert all(find_metric_row(GPU, name) >= 0 for name in DEFAULT_COUNTERS)
    assert all(find_metric_row(NODE, name) >= 0 for name in SCRAPES)
    assert all(find_dropped_metrics([name]) for name in DROPS)


def test_an_unknown_drop_is_named_with_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"'nvlink': expected one of default, ib, xid, prof, host"):
        find_dropped_metrics(["nvlink"])


def test_only_judges_of_telemetry_take_a_drop(tmp_path: Path) -> None:
    folder = str(tmp_path)
    told = CliRunner().invoke(app, ["evaluate", "demand", "--train", folder, "--test", folder, "--drop", "ib"])
    assert "demand reads no telemetry; risk and straggler with data folders do" in str(told.exception)
