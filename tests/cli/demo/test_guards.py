import socket
from pathlib import Path

import pytest
import typer

from fleetcast.cli.demo.guards import lock_empty_folder, refuse_taken_ports, refuse_unknown_token
from fleetcast.fleet.errors import ConfigError


def test_a_demo_does_not_start_on_a_port_where_somebody_listens() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(
            ConfigError, match=f"--port {port}: api.host, api.port = 127.0.0.1:{port}: cannot listen there"
        ):
            refuse_taken_ports(port)
        with pytest.raises(ConfigError, match=f"127.0.0.1:({port}|{port - 1}): cannot listen there"):
            refuse_taken_ports(port - 1)  # the placer's port is the next one


def test_the_folder_of_a_running_demo_is_not_emptied(tmp_path: Path) -> None:
    with lock_empty_folder(tmp_path / "run") as folder:
        (folder / "state").touch()
        with pytest.raises(ConfigError, match="another demo runs in it"), lock_empty_folder(folder):
            pass
        assert (folder / "state").exists()
    with lock_empty_folder(folder):
        assert [path.name for path in folder.iterdir()] == ["demo"]


def test_a_folder_that_no_demo_made_is_not_emptied(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(typer.BadParameter, match="no earlier demo made it"), lock_empty_folder(tmp_path):
        pass
    assert (tmp_path / "mine").exists()


@pytest.mark.parametrize("token", ["", "nobody-knows-this-one", "reader-0123456789"])
def test_a_demo_that_could_not_ask_its_own_service_does_not_start(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_unknown_token()
    monkeypatch.setenv("FLEETCAST_TOKENS", "ada read reader-0123456789\nbob admin admin-0123456789")
    monkeypatch.setenv("FLEETCAST_TOKEN", token)
    with pytest.raises(ConfigError, match="with the scope admin in FLEETCAST_TOKEN") as refusal:
        refuse_unknown_token()
    assert not token or token not in str(refusal.value)
    monkeypatch.setenv("FLEETCAST_TOKEN", "admin-0123456789")
    refuse_unknown_token()
