"""The composition's commands as processes: each role alone, none under a supervisor, in any order."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from fleetcast.cli.run import RoleName
from fleetcast.service.answers.risk import StateName
from tests.dashboards.grafana import ROOT
from tests.integration.service_process import Service

pytestmark = pytest.mark.integration

CONFIG = "/etc/fleetcast/config.toml"


class Composed(Service):
    """A service whose roles somebody else starts."""

    def start(self) -> None:
        """Nothing: the containers do."""


@contextmanager
def container(service: dict[str, Any], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The command of a service of ours, with its configuration and its volume in `folder`; ended by SIGTERM."""
    command = [str(folder / "config.toml") if word == CONFIG else word for word in service["command"]]
    with open(folder / "service.log", "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "fleetcast.cli.main", *command], cwd=ROOT, stdout=log, stderr=log
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(20)


def test_the_roles_of_the_composition_work_together_and_end_when_asked(tmp_path: Path) -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
    topology = tmp_path / "topology.toml"
    topology.write_text('[[rack]]\nname = "r"\nblock = "b"\nnodes = ["n[1-2]"]\ngpus = 8\n')
    composed = Composed(tmp_path, fleet={"topology": str(topology)})
    with ExitStack() as stack:
        processes = {
            role.value: stack.enter_context(container(services[role.value], tmp_path)) for role in reversed(RoleName)
        }
        composed.until("readiness", lambda: composed.get("/readyz"), 60)
        status, decision, _ = composed.request("POST", "/v1/placements", {"request_id": "a", "gpus_per_node": 8})
        assert (status, decision["outcome"]) == (200, "placed"), decision
        assert composed.get("/metrics").count("fleetcast_nodes{") == len(get_args(StateName))
        assert {name: process.poll() for name, process in processes.items()} == dict.fromkeys(processes)
    assert {name: process.returncode for name, process in processes.items()} == dict.fromkeys(processes, 0)
