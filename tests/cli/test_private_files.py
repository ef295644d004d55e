"""What our processes write is for their own user alone."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w


def run(tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A whole `fleetcast run` that ends by itself, since its api finds the port taken, and what it wrote."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        config = tmp_path / "c.toml"
        config.write_text(
            tomli_w.dumps(
                {"state": str(tmp_path / "var"), "scrape": {"targets": ["http://u:s3cret@127.0.0.1:9/m?t=s3cret"]}}
            )
        )
        config.chmod(0o600)
        command = [sys.executable, "-m", "cli.main", "run", "--config", str(config), "--port", str(port)]
        environment = {**os.environ, **variables}
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=120, check=False, umask=0o022
        )


def modes(folder: Path) -> dict[str, int]:
    found = [folder, *folder.rglob("*")]
    assert {"config.toml", "pids", "inbox", "board"} <= {path.name for path in found}
    return {str(path.relative_to(folder.parent)): path.stat().st_mode & 0o777 for path in found}


def test_nobody_else_reads_the_state_and_no_secret_is_told(tmp_path: Path) -> None:
    ended = run(tmp_path)
    assert ended.returncode == 2, ended.stderr
    assert {name: oct(mode) for name, mode in modes(tmp_path / "var").items() if mode & 0o077} == {}
    assert "s3cret" not in ended.stdout + ended.stderr


def test_the_environment_widens_it_but_never_for_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "var").mkdir()
    (tmp_path / "var" / "config.toml").write_text("")  # of an earlier run, for everybody
    ended = run(tmp_path, FLEETCAST_UMASK="027")
    assert ended.returncode == 2, ended.stderr
    found = modes(tmp_path / "var")
    assert found["var/inbox"] == 0o750
    assert found["var/pids"] == 0o640
    assert found["var/config.toml"] == 0o600


@pytest.mark.parametrize("text", ["rwx", "0o27", "777", "1022", "-1"])
def test_what_is_no_umask_is_refused(tmp_path: Path, text: str) -> None:
    ended = run(tmp_path, FLEETCAST_UMASK=text)
    assert ended.returncode == 2
    assert f"FLEETCAST_UMASK = {text!r}: expected an umask such as 077, 027 or 022" in ended.stderr
