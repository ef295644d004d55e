"""The unit for hosts without containers, read by systemd's own analyzer."""

import asyncio
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from fleetcast.schedulers.adapter import Write
from fleetcast.schedulers.band_file import BAND
from fleetcast.schedulers.slurm_durations import FILE, MINUTES, UNTIL
from fleetcast.service.ports.band_file import BandFilePort
from fleetcast.service.ports.slurm_durations import DurationsPort
from tests.programs import needed

ROOT = Path(__file__).resolve().parents[2]
UNIT = ROOT / "deploy" / "systemd" / "fleetcast.service"
SLURM = ROOT / "deploy" / "slurm"
READ, ENTER = stat.S_IROTH, stat.S_IROTH | stat.S_IXOTH
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
    unit.write_text(unit.read_text().replace("User=fleetcast\n", "").replace("NoNewPrivileges=yes\n", ""))
    assert analyzed(unit, *words).returncode != 0


def test_tokens_reach_the_service_as_a_credential_alone() -> None:
    text = UNIT.read_text(encoding="utf-8")
    assert re.search(r"^LoadCredential=tokens:/etc/fleetcast/tokens$", text, re.MULTILINE)
    assert re.search(r"^Environment=FLEETCAST_TOKENS_FILE=%d/tokens$", text, re.MULTILINE)
    assert "FLEETCAST_TOKENS=" not in text


def settings() -> dict[str, str]:
    lines = UNIT.read_text(encoding="utf-8").splitlines()
    return {key: value for key, equal, value in (line.partition("=") for line in lines) if equal and key[0] != "#"}


def test_other_users_read_what_adapters_write_for_them_and_nothing_of_the_state(tmp_path: Path) -> None:
    given = settings()
    assert int(given["StateDirectoryMode"], 8) == stat.S_IRWXU
    assert "DynamicUser" not in given  # its folders lie in one that only root enters
    before = os.umask(int(given["UMask"], 8))
    try:
        for kind in ("Runtime", "Cache"):
            (tmp_path / kind).mkdir(int(given[f"{kind}DirectoryMode"], 8))
        asyncio.run(BandFilePort(tmp_path / "Runtime" / "bands").write([Write("n1", BAND, "high", None, "")]))
        rows = [Write(FILE, UNTIL, "1", None, ""), Write("ada train", MINUTES, "1 2 3", None, "")]
        asyncio.run(DurationsPort(tmp_path / "Cache" / "durations").write(rows))
    finally:
        os.umask(before)
    written = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file())
    assert written == ["Cache/durations/61", "Cache/durations/until", "Runtime/bands"]
    for path in tmp_path.rglob("*"):
        needed_bits = READ if path.is_file() else ENTER
        assert path.stat().st_mode & needed_bits == needed_bits, path


def test_slurms_files_look_where_the_unit_keeps_what_is_written() -> None:
    given = settings()
    assert (given["RuntimeDirectory"], given["RuntimeDirectoryPreserve"]) == ("fleetcast", "yes")
    assert "/run/fleetcast/bands" in (SLURM / "fleetcast-health").read_text(encoding="utf-8")
    assert given["CacheDirectory"] == "fleetcast"
    assert 'FOLDER = "/var/cache/fleetcast/durations"' in (SLURM / "job_submit.lua").read_text(encoding="utf-8")
