"""The health check for Slurm's nodes, over a scontrol that shows a node and tells what it is asked to change.

The real Slurm runs it in tests/integration/slurm/test_slurm_files.py.
"""

import asyncio
import os
import subprocess
from pathlib import Path

import pytest

from fleetcast.schedulers.adapter import Write, WriteOutcome
from fleetcast.schedulers.band_file import BAND, BandFile
from fleetcast.schedulers.weather import Weather
from fleetcast.service.ports.band_file import BandFilePort
from tests.schedulers.small_fleet import NOW_MS, outlook

PROGRAM = Path(__file__).resolve().parents[2] / "deploy" / "slurm" / "fleetcast-health"
SCONTROL = """#!/bin/sh
if [ "$1" = update ]; then shift; echo "$*"; else echo "$SHOWN"; fi
"""
OURS = "[fleetcast] band=high [root@2026-11-24T10:05:00]"
DRAINED, UNDRAINED = "NodeName=n1 State=DRAIN Reason=[fleetcast] band=high", "NodeName=n1 State=UNDRAIN"
THEIRS = (
    *("fan 3 is slow", "psu swap:", "psu swap: ", ":[fleetcast]", "ticket 7:[fleetcast] said so", "x [fleetcast]"),
    *("see Reason=[fleetcast]", "mine Reason=", "State=IDLE", "*", "(fleetcast)"),
)


def asked(folder: Path, band: str, state: str, reason: str = "", more: str = "") -> str:
    """What the program asks slurmctld to change: a line, or nothing. more: fields that Slurm shows after the reason."""
    (folder / "bands").write_text(f"n0 high\nn1 {band}\nn10 high\n")
    scontrol = folder / "scontrol"
    scontrol.write_text(SCONTROL)
    scontrol.chmod(0o755)
    told = f" Reason={reason}" if reason else ""
    shown = f"NodeName=n1 Arch=x86_64 CoresPerSocket=1 OS=Linux State={state} ThreadsPerCore=1  {told}{more}"
    path = f"{folder}:{os.environ['PATH']}"
    settings = {"PATH": path, "SHOWN": shown, "SLURMD_NODENAME": "n1", "FLEETCAST_BANDS": str(folder / "bands")}
    done = subprocess.run([PROGRAM], env=settings, capture_output=True, text=True, timeout=30, check=True)
    assert done.stderr == ""
    return done.stdout.strip()


def test_a_node_is_drained_at_high_and_undrained_at_low(tmp_path: Path) -> None:
    assert asked(tmp_path, "high", "IDLE") == DRAINED
    assert asked(tmp_path, "high", "IDLE", OURS) == DRAINED
    assert asked(tmp_path, "high", "ALLOCATED+DRAIN", OURS) == ""
    assert asked(tmp_path, "low", "IDLE+DRAIN", OURS) == UNDRAINED
    assert asked(tmp_path, "low", "IDLE+DRAIN", "") == ""
    assert asked(tmp_path, "low", "IDLE") == asked(tmp_path, "elevated", "IDLE+DRAIN", OURS) == ""


@pytest.mark.parametrize("reason", THEIRS)
@pytest.mark.parametrize("band", ["low", "high"])
@pytest.mark.parametrize("state", ["DOWN", "IDLE+DRAIN", "DOWN*+DRAIN"])
def test_a_node_with_a_reason_of_somebody_else_is_left_alone(
    tmp_path: Path, band: str, state: str, reason: str
) -> None:
    assert asked(tmp_path, band, state, reason) == ""
    assert asked(tmp_path, band, state, f"{reason} [ada@2026-11-24T10:05:00]") == ""


def test_a_comment_that_speaks_of_a_reason_is_none(tmp_path: Path) -> None:
    assert asked(tmp_path, "low", "IDLE+DRAIN", "fan", more=" Comment=was Reason=[fleetcast] band=high") == ""
    assert asked(tmp_path, "low", "IDLE+DRAIN", OURS, more=" Comment=see Reason=fan State=IDLE") == UNDRAINED


READ_BACK = (
    *("n005", "n05", "5", "05", "5.0", "1e1", "10", "0x10", "n1.site.example", "10.0.0.1:9400", "::1", "fe80::1%eth0"),
    *("high", "low", "n_1", "n-1", "N1", "n" * 253),
)


def drained(folder: Path, node: str) -> str:
    """What the health check of a node asks for by the file that is there."""
    scontrol = folder / "scontrol"
    scontrol.write_text(SCONTROL)
    scontrol.chmod(0o755)
    path, shown = f"{folder}:{os.environ['PATH']}", f"NodeName={node} State=IDLE"
    settings = {"PATH": path, "SHOWN": shown, "SLURMD_NODENAME": node, "FLEETCAST_BANDS": str(folder / "bands")}
    return subprocess.run(
        [PROGRAM], env=settings, capture_output=True, text=True, timeout=30, check=True
    ).stdout.strip()


@pytest.mark.parametrize("parity", [0, 1])
def test_each_node_reads_its_own_band_from_the_file_that_the_adapter_writes(tmp_path: Path, parity: int) -> None:
    bands = {name: "high" if at % 2 == parity else "low" for at, name in enumerate(READ_BACK)}
    port = BandFilePort(tmp_path / "bands")
    writes = [Write(name, BAND, band, None, "") for name, band in bands.items()]
    assert set(asyncio.run(port.write(writes))) == {WriteOutcome.DONE}
    assert {name: values[BAND] for name, values in asyncio.run(port.read()).items()} == bands
    for name, band in bands.items():
        asked_for = f"NodeName={name} State=DRAIN Reason=[fleetcast] band=high" if band == "high" else ""
        assert drained(tmp_path, name) == asked_for, name


@pytest.mark.parametrize("name", [" n005 high", "n005 high", " n005", "n005\nn005", "n005 high\n", "", "n[1-9]", "é"])
def test_a_name_that_no_node_can_have_is_never_written(tmp_path: Path, name: str) -> None:
    port = BandFilePort(tmp_path / "bands")
    writes = [Write("n005", BAND, "low", None, ""), Write(name, BAND, "high", None, "")]
    assert asyncio.run(port.write(writes)) == [WriteOutcome.DONE, WriteOutcome.REFUSED]
    assert (tmp_path / "bands").read_text() == "n005 low\n"


@pytest.mark.parametrize(
    "lines", [" n005 high high\nn005 low\n", "n005 high low\n", "n005 high\nn005 low\n", "n005\thigh\n", " n005 high\n"]
)
def test_a_line_that_the_adapter_does_not_write_drains_no_node(tmp_path: Path, lines: str) -> None:
    (tmp_path / "bands").write_text(lines)
    assert drained(tmp_path, "n005") == ""


def test_lines_of_an_older_version_with_such_names_are_taken_back(tmp_path: Path) -> None:
    (tmp_path / "bands").write_text(" n005 high high\nn005 low\n")
    port = BandFilePort(tmp_path / "bands")
    nodes = outlook({" n005 high": 0.9, "n005": 0.0})
    wishes = list(BandFile().wishes(Weather(1, NOW_MS, NOW_MS, nodes), asyncio.run(port.read())))
    assert [(write.key, write.value) for write in wishes] == [(" n005 high", None)]
    assert asyncio.run(port.write(wishes)) == [WriteOutcome.DONE]
    assert (tmp_path / "bands").read_text() == "n005 low\n"
