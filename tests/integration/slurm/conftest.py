"""One Slurm and one Fleetcast that watches it, for all tests of this folder."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fleetcast.ingest.lifecycle import ENDED, EXPLAINED
from tests.integration.service_process import Service
from tests.integration.slurm.cluster import GPUS, NODES, SBIN, SlurmCluster

OPTIONS = {"interval_s": 1.0, "accounting_s": 5.0, "timeout_s": 4.0, "classes": ["urgent=batch"]}
TOPOLOGY = f'[[rack]]\nname = "r1"\nnodes = "n[1-{NODES}]"\ngpus = {GPUS}\n'


@dataclass(slots=True)
class Watched:
    """A cluster, and the service whose source polls it every second."""

    slurm: SlurmCluster
    service: Service

    def attempts(self, job: str) -> dict[int, dict[str, Any]]:
        """Rows of a job by attempt."""
        answer = self.service.get("/v1/jobs") or {"rows": []}
        return {row["attempt"]: row for row in answer["rows"] if row["job"] == job}

    def job(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.service.get(f"/v1/jobs/{name}") or {}
        return found

    def until_job(self, name: str, check: Callable[[dict[str, Any]], Any], limit_s: float = 30.0) -> dict[str, Any]:
        """The answer about a job once `check` holds of it."""
        found: dict[str, Any] = self.service.until(
            f"job {name}", lambda: (answer := self.job(name)) and check(answer) and answer, limit_s
        )
        return found

    def end(self, name: str, category: str = "") -> dict[str, Any]:
        """The event that ended a job: the last word on it, once that says `category`, if one is given."""

        def told(row: dict[str, Any]) -> Any:
            return _ends(row) and (not category or _ends(row)[-1]["category"] == category)

        ends = _ends(self.until_job(name, told, 90.0))
        assert [row["sequence"] for row in ends] in ([ENDED], [EXPLAINED], [ENDED, EXPLAINED]), ends
        return ends[-1]


def _ends(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in answer["events"] if row["type"] in ("finished", "failed", "preempted")]


@pytest.fixture(scope="session")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """The service starts before Slurm does: a source that is away keeps nothing from working."""
    folder: Path = tmp_path_factory.mktemp("slurm")
    (folder / "service").mkdir()
    (folder / "topology.toml").write_text(TOPOLOGY)
    service = Service(
        folder / "service",
        speed=1.0,
        variables={"SLURM_CONF": str(folder / "cluster" / "slurm.conf"), "PATH": f"{os.environ['PATH']}:{SBIN}"},
        fleet={"topology": str(folder / "topology.toml")},
        pipeline={
            "tick_s": 1.0,
            "sources": [
                {
                    "use": "slurm",
                    "options": {"interval_s": 1.0, "accounting_s": 5.0, "timeout_s": 4.0, "classes": ["urgent=batch"]},
                }
            ],
        },
    )
    try:
        jobcomp = f"http://127.0.0.1:{service.port}/v1/webhooks/slurm-jobcomp"
        slurm = SlurmCluster(folder / "cluster", jobcomp=jobcomp)
        try:
            service.until("a board", lambda: service.get("/v1/jobs"), 60)
            yield Watched(slurm, service)
        finally:
            slurm.stop()
    finally:
        service.stop()
