"""Coverage guides the fuzzer to a defect that blind changes would not find."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fleetcast.fleet.devices import normalise_device_name
from tests.fuzz.decoder import Decoder

pytest.importorskip("atheris", reason="atheris has no wheel for this platform")
ROOT = Path(__file__).resolve().parents[2]
WORD = b"weather!"


def _planted(body: bytes) -> None:
    """Fail for one beginning of eight bytes, which is found two bytes at a time or not at all."""
    if body[:2] == WORD[:2] and body[2:4] == WORD[2:4] and body[4:6] == WORD[4:6]:
        assert body[6:8] != WORD[6:8], "the planted defect"


def _name_device(body: bytes) -> None:
    normalise_device_name(body.decode(errors="replace"))


PLANTED = Decoder(_planted, (b"sunshine",))
DEVICES = Decoder(_name_device, (b"0000:9b:00.0", b"GPU-1a"))


def guided(folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "tests.fuzz.guided", *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment)
    assert ended.stdout, ended.stderr
    return ended.returncode, json.loads(ended.stdout.splitlines()[-1])


def test_a_planted_defect_is_found_kept_and_replayed(tmp_path: Path) -> None:
    planted = ("--decoder", f"{__name__}:PLANTED")
    status, row = guided(tmp_path, *planted, "--seed", "7", "--runs", "200000")
    assert status == 1
    assert "the planted defect" in row["failure"]["why"]
    kept = row["failure"]["replay"].split()[-1]
    assert (tmp_path / kept).read_bytes().startswith(WORD)
    status, row = guided(tmp_path, *planted, "--input", kept)
    assert (status, "the planted defect" in row["failure"]["why"]) == (1, True)


def test_code_of_the_product_is_instrumented(tmp_path: Path) -> None:
    status, row = guided(tmp_path, "--decoder", f"{__name__}:DEVICES", "--seed", "7", "--runs", "300")
    assert (status, row["failure"]) == (0, None)
    assert row["runs"] >= 300
    assert row["blocks"] > 5
