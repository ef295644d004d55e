"""The unit for hosts without containers, read by systemd's own analyzer."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import needed

UNIT = Path(__file__).resolve().parents[2] / "deploy" / "systemd" / "fleetcast.service"
MOST_EXPOSED = 15  # tenths of systemd's score from 0 to 10


def analyzed(unit: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [needed("systemd-analyze"), *words, str(unit)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """With a program that is there."""
    path = tmp_path / UNIT.name
    text = UNIT.read_text(encoding="utf-8")
    path.write_text(text.replace("/opt/fleetcast/bin/fleetcast", sys.executable), encoding="utf-8")
    return path


def test_systemd_finds_no_fault_with_the_unit(unit: Path) -> None:
    done = analyzed(unit, "verify")
    assert (done.returncode, done.stderr) == (0, "")


def test_systemd_would_tell_of_a_misspelt_key(unit: Path) -> None:
    unit.write_text(unit.read_text().replace("ProtectHome=", "ProtectHouse="))
    assert "ProtectHouse" in analyzed(unit, "verify").stderr


def test_a_service_is_exposed_to_little(unit: Path) -> None:
    words = ("security", "--offline=true", "--no-pager", f"--threshold={MOST_EXPOSED}")
    done = analyzed(unit, *words)
    assert done.returncode == 0, done.stdout[-500:]
    unit.write_text(
        unit.read_text().replace("DynamicUser=yes\nUser=fleetcast\n", "").replace("NoNewPrivileges=yes\n", "")
    )
    assert analyzed(unit, *words).returncode != 0


def test_tokens_reach_the_service_as_a_credential_alone() -> None:
    text = UNIT.read_text(encoding="utf-8")
    assert re.search(r"^LoadCredential=tokens:/etc/fleetcast/tokens$", text, re.MULTILINE)
    assert re.search(r"^Environment=FLEETCAST_TOKENS_FILE=%d/tokens$", text, re.MULTILINE)
    assert "FLEETCAST_TOKENS=" not in text
