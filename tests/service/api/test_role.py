"""The api as a role: what it reports, and when."""

import asyncio
import logging
import signal
import socket
from pathlib import Path

import uvloop

from fleetcast.service.api import role
from fleetcast.service.config import ApiConfig, Config
from tests.ports import free_port


class Newcomer(logging.Handler):
    """Connects as soon as the log says that the api listens, then ends it."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self.port = port
        self.outcomes: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if not record.getMessage().startswith("listening on"):
            return
        try:
            socket.create_connection(("127.0.0.1", self.port), 30).close()
            self.outcomes.append("connected")
        except OSError as error:
            self.outcomes.append(type(error).__name__)
        asyncio.get_running_loop().call_later(0.2, signal.raise_signal, signal.SIGTERM)


def test_the_log_says_listening_when_the_port_accepts_connections(tmp_path: Path) -> None:
    port = free_port()
    newcomer = Newcomer(port)
    role.logger.addHandler(newcomer)
    level = role.logger.level
    role.logger.setLevel(logging.INFO)
    try:
        uvloop.run(role.serve(Config(state=str(tmp_path), api=ApiConfig(port=port))))
    finally:
        role.logger.setLevel(level)
        role.logger.removeHandler(newcomer)
    assert newcomer.outcomes == ["connected"]
