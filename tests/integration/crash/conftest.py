from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.kafka.conftest import cluster, kafka_program, topics
from tests.integration.service_process import Service

__all__ = ["cluster", "kafka_program", "topics"]

TOPOLOGY = '[[rack]]\nname = "r1"\nblock = "b"\nnodes = ["n[1-4]"]\ngpus = 8\ngpu_model = "H100"\n'


@pytest.fixture
def four_nodes(tmp_path: Path, start_service: Callable[..., Service]) -> Callable[..., Service]:
    """Starts a service for four nodes of 8 GPUs and waits until it is ready."""

    def start(**sections: dict[str, Any]) -> Service:
        (tmp_path / "topology.toml").write_text(TOPOLOGY)
        service = start_service(fleet={"topology": str(tmp_path / "topology.toml")}, **sections)
        service.until("ready", lambda: service.get("/readyz"), 60)
        return service

    return start


@pytest.fixture
def service(four_nodes: Callable[..., Service]) -> Service:
    return four_nodes()
