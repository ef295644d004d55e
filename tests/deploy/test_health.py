"""The health check for Slurm's nodes, over a scontrol that shows a node and tells what it is asked to change.

The real Slurm runs it in tests/integration/slurm/test_slurm_files.py.
"""

import os
import subprocess
from pathlib import Path

import pytest

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
