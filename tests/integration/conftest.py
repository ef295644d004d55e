import functools
import http.server
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.service_process import Service


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def folder_server(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder, and the URL of the file `metrics` in it, as `python -m http.server` serves it."""
    root = tmp_path / "www"
    root.mkdir()
    handler = functools.partial(Quiet, directory=str(root))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield root, f"http://127.0.0.1:{server.server_port}/metrics"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def start_service(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    """Makes services that are ended with the test."""
    started: list[Service] = []

    def start(**sections: dict[str, Any]) -> Service:
        folder = tmp_path / f"service{len(started)}"
        folder.mkdir(exist_ok=True)
        service = Service(folder, **sections)
        started.append(service)
        return service

    yield start
    for service in started:
        service.stop()
