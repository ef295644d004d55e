"""What our processes write is for their own user alone."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tomli_w

from tests.forked import run_command
from tests.ports import free_port

WRITTEN = {"config.toml", "pids", "inbox", "board"}


def run(tmp_path: Path, **variables: str) -> str:
    """What a whole `fleetcast run` printed until its state was written; it is then asked to end."""
    config = tmp_path / "c.toml"
    settings = {"state": str(tmp_path / "var"), "scrape": {"targets": ["http://u:s3cret@127.0.0.1:9/m?t=s3cret"]}}
    config.write_text(tomli_w.dumps(settings))
    config.chmod(0o600)
    command = [sys.executable, "-m", "fleetcast.cli.main", "run", "--config", str(config), "--port", str(free_port())]
    with (tmp_path / "printed").open("wb") as printed:
        process = subprocess.Popen(
            command, env={**os.environ, **variables}, stdout=printed, stderr=subprocess.STDOUT, umask=0o022
        )
        try:
            ends_s = time.monotonic() + 120
            while process.poll() is None and time.monotonic() < ends_s and not names(tmp_path / "var") >= WRITTEN:
                time.sleep(0.1)
        finally:
            process.terminate()
            process.wait(60)
    return (tmp_path / "printed").read_text()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*")}


def modes(folder: Path) -> dict[str, int]:
    found = [folder, *folder.rglob("*")]
    assert {path.name for path in found} >= WRITTEN
    return {str(path.relative_to(folder.parent)): path.stat().st_mode & 0o777 for path in found}


def test_nobody_else_reads_the_state_and_no_secret_is_told(tmp_path: Path) -> None:
    printed = run(tmp_path)
    assert {name: oct(mode) for name, mode in modes(tmp_path / "var").items() if mode & 0o077} == {}
    assert "s3cret" not in printed


def test_the_environment_widens_it_but_never_for_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "var").mkdir()
    (tmp_path / "var" / "config.toml").write_text("")  # of an earlier run, for everybody
    run(tmp_path, FLEETCAST_UMASK="027")
    found = modes(tmp_path / "var")
    assert found["var/inbox"] == 0o750
    assert found["var/pids"] == 0o640
    assert found["var/config.toml"] == 0o600


@pytest.mark.parametrize("text", ["rwx", "0o27", "777", "1022", "-1"])
def test_what_is_no_umask_is_refused(tmp_path: Path, text: str) -> None:
    printed = run_command("run", "--state", str(tmp_path / "var"), FLEETCAST_UMASK=text).stderr
    assert f"FLEETCAST_UMASK = {text!r}: expected an umask such as 077, 027 or 022" in printed
