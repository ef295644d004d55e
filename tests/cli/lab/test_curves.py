"""Curves of the judges: the same runs at several points, bounded and repeatable."""

import xml.etree.ElementTree as ET
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from fleetcast.cli.lab import curves
from fleetcast.cli.lab.curves import CURVES, make_fault_settings
from fleetcast.cli.main import app
from fleetcast.fleet.errors import ConfigError
from fleetcast.simulator import instrument
from fleetcast.simulator.faults.magnitudes import DECOY_KINDS, USUAL, scale_faults


def invoke(*words: object) -> None:
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None:
        raise result.exception


def small(monkeypatch: pytest.MonkeyPatch, points: tuple[float, ...] | tuple[str, ...]) -> None:
    monkeypatch.setattr(curves, "CURVES", dict.fromkeys(CURVES, points))
    monkeypatch.setattr(curves, "NODES", 3)
    monkeypatch.setattr(curves, "HOURS", 0.8)
    monkeypatch.setattr(curves, "FAULT_SCALE", 60_000.0)


@pytest.mark.parametrize("task", ["straggler", "risk"])
def test_a_curve_is_written_as_numbers_a_table_and_a_plot(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(monkeypatch, (30.0, 60.0))
    paths = {name: tmp_path / f"curve.{name}" for name in ("json", "md", "svg")}
    words = ["--curve", "interval", "--seed", 6, "--runs", 1, "--drop", "prof"]
    invoke("evaluate", task, *words, "--json", paths["json"], "--results", paths["md"], "--plot", paths["svg"])
    told = msgspec.json.decode(paths["json"].read_bytes())
    assert [point["at"] for point in told["points"]] == [30.0, 60.0]
    assert all(point["faults"] > 0 and point["values"] for point in told["points"])
    assert f"`fleetcast evaluate {task} --curve=interval --seed=6 --runs=1 --drop=prof`" in paths["md"].read_text()
    assert ET.fromstring(paths["svg"].read_text()).tag.endswith("svg")


def test_what_is_left_out_is_judged_on_the_same_fleets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, ("nothing", "ib+default"))
    simulated = []
    simulate = instrument.simulate_faults
    monkeypatch.setattr(instrument, "simulate_faults", lambda *of: (simulated.append(of), simulate(*of)))
    paths = {name: tmp_path / f"curve.{name}" for name in ("json", "svg")}
    words = ["--curve", "drop", "--seed", 6, "--runs", 1, "--json", paths["json"], "--plot", paths["svg"]]
    invoke("evaluate", "straggler", *words)
    told = msgspec.json.decode(paths["json"].read_bytes())["points"]
    assert [point["at"] for point in told] == ["nothing", "ib+default"]
    assert told[0]["faults"] == told[1]["faults"] > 0
    assert len(simulated) == 1


def test_faults_are_as_strong_as_the_point_says_and_one_is_the_usual() -> None:
    assert scale_faults(USUAL, 1.0) == USUAL
    half = make_fault_settings("magnitude", 0.5, 7).kinds
    assert half.slow_nic.slow == (1.1, 1.3)
    assert half.thermal_throttle.hot_c == (75.5, 78.0)
    assert half.pcie_downgrade.widths == USUAL.pcie_downgrade.widths
    assert make_fault_settings("interval", 60.0, 7).interval_s == 60.0
    assert min(scale_faults(USUAL, 9.0).power_brake.clock) > 0


@pytest.mark.parametrize("times", CURVES["magnitude"])
def test_look_alikes_keep_their_full_strength_at_each_point(times: float) -> None:
    kinds, usual = (make_fault_settings(*point, 7).kinds for point in (("magnitude", times), ("drop", "nothing")))
    assert {kind: kinds.get_kind(kind) for kind in DECOY_KINDS} == {kind: usual.get_kind(kind) for kind in DECOY_KINDS}


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("straggler", "--curve", "colour"), "--curve colour: expected one of magnitude, interval, drop"),
        (("demand", "--curve", "interval"), "demand judges no simulated fleet"),
        (("straggler", "--curve", "interval", "--test", "here"), "leave out --test"),
        (("straggler", "--curve", "interval", "--drop", "all"), "--drop 'all': expected one of"),
        (("straggler", "--curve", "drop", "--drop", "ib"), "leave out --drop"),
        (("straggler", "--plot", "a.svg"), "--curve None: expected one of"),
        (("straggler", "--curve", "interval", "--plot", "nowhere/a.svg"), "no folder nowhere"),
    ],
)
def test_what_fits_no_curve_is_told(words: tuple[str, ...], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        invoke("evaluate", *words)
