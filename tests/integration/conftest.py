from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.service_process import Service


@pytest.fixture
def start_service(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    """Makes services that are ended with the test."""
    started: list[Service] = []

    def start(**sections: dict[str, Any]) -> Service:
        folder = tmp_path / f"service{len(started)}"
        folder.mkdir()
        service = Service(folder, **sections)
        started.append(service)
        return service

    yield start
    for service in started:
        service.stop()
