"""What `fleetcast run` refuses before any role starts."""

import fcntl
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetcast.fleet.errors import ConfigError
from fleetcast.service.config import Config, override_config
from fleetcast.service.start_checks import check_ports_available, check_role_settings
from tests.ports import free_port

NOT_CALLABLE = 7


def a_config(**sections: Any) -> Config:
    return msgspec.convert(sections, Config)


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"scrape": {"targets": ["ftp://n1:9400"]}}, "ftp://n1:9400"),
        ({"scrape": {"targets": ["file:"]}}, "file:"),
        ({"pipeline": {"sources": [{"use": "no.such:Source"}]}}, "no.such"),
        ({"pipeline": {"sources": [{"use": "kafka", "options": {"broker": "x"}}]}}, "broker"),
        ({"pipeline": {"forecasters": ["no.such:Forecaster"]}}, "pipeline.forecasters: 'no.such:Forecaster'"),
        ({"placer": {"filters": ["no.such:filter"]}}, "placer.filters: 'no.such:filter'"),
        ({"placer": {"scorers": ["tests.service.test_start_checks:NOT_CALLABLE"]}}, "expected a function"),
        ({"adapters": {"adapter": [{"use": "no.such:door"}]}}, "no.such:door"),
        ({"api": {"host": "0.0.0.0"}}, "0.0.0.0"),
    ],
)
def test_what_a_role_would_refuse_is_refused_before_any_starts(sections: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_role_settings(a_config(**sections))
    assert named in str(refused.value)


def test_a_topology_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "topology.toml"
    file.write_bytes(bytes(range(256)))
    with pytest.raises(ConfigError, match=r"topology\.toml"):
        check_role_settings(a_config(fleet={"topology": str(file)}))


@pytest.fixture
def taken() -> Iterator[socket.socket]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", free_port()))
        sock.listen()
        yield sock


@pytest.mark.parametrize(
    ("section", "key"), [("api", "port"), ("placer", "port"), ("api", "grpc_port"), ("external_metrics", "port")]
)
def test_a_port_that_is_taken_is_refused_by_its_key(taken: socket.socket, section: str, key: str) -> None:
    port = taken.getsockname()[1]
    config = override_config(Config(), api_port=free_port())
    value = msgspec.structs.replace(getattr(config, section), **{key: port})
    config = msgspec.structs.replace(config, **{section: value})
    with pytest.raises(ConfigError, match=rf"{section}\.{key} = 127\.0\.0\.1:{port}: cannot listen there"):
        check_ports_available(config)


def test_ports_of_our_own_roles_that_still_end_are_waited_for(tmp_path: Path, taken: socket.socket) -> None:
    """A supervisor that was killed leaves roles behind, which end a moment later."""
    port = taken.getsockname()[1]
    config = override_config(Config(state=str(tmp_path)), api_port=port)
    config = msgspec.structs.replace(config, placer=msgspec.structs.replace(config.placer, port=free_port()))
    lock = (tmp_path / "placer.lock").open("wb")
    fcntl.flock(lock, fcntl.LOCK_EX)

    def end() -> None:
        taken.close()
        lock.close()

    timer = threading.Timer(0.3, end)
    timer.start()
    try:
        check_ports_available(config, ["placer"])
    finally:
        timer.join()
