"""The commands of the pages on Slurm, with a real one."""

import asyncio
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetcast.schedulers.adapter import Write, WriteOutcome
from fleetcast.schedulers.slurm_durations import MINUTES
from fleetcast.service.ports.slurm_durations import DurationsPort
from tests.docs.pages import ROOT
from tests.docs.runner import Reader
from tests.integration.service_process import Service
from tests.integration.slurm.cluster import SlurmCluster
from tests.integration.slurm.told import Telling

NODES = ("n1", "n2", "n3", "n4")
REASON = "[fleetcast] p_fail_1h=0.90 cause=high_risk"
pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Slurm with accounting, which writes a line of each completed job into a file."""
    folder = tmp_path_factory.mktemp("slurm") / "cluster"
    completions = ("JobCompType=jobcomp/filetxt", f"JobCompLoc={folder / 'jobcomp.txt'}")
    made = SlurmCluster(folder, features="a100", settings=completions)
    try:
        job = made.submit("true", "-N1")
        made.until("it ended", lambda: made.run("sacct", "-nP", "-j", job, "-o", "State").startswith("COMPLETED"))
        yield made
    finally:
        made.stop()


def reader_of(slurm: SlurmCluster, folder: Path, **places: str) -> Reader:
    """Return a reader on a host of the cluster. places: text of the page -> what it is here."""
    return Reader(folder, places, {name: slurm.environment[name] for name in ("SLURM_CONF", "TZ")})


@pytest.mark.parametrize(
    ("page", "makes"), [("docs/queues.md", "queues.toml"), ("docs/data-scientists.md", "jobs.txt")]
)
def test_every_command_of_a_page_works(page: str, makes: str, slurm: SlurmCluster, tmp_path: Path) -> None:
    reader = reader_of(slurm, tmp_path, **{"/etc/slurm/slurm.conf": str(slurm.folder / "slurm.conf")})
    reader.run_page(ROOT / page, "run in slurm", files=False)
    assert (tmp_path / makes).stat().st_size > 0


def test_every_command_of_the_page_on_the_adapters_works(slurm: SlurmCluster, tmp_path: Path) -> None:
    """By hand goes what an adapters role wrote that is dead then."""
    site, durations = tmp_path / "site", tmp_path / "durations"
    site.mkdir()
    known = {"use": "slurm_durations", "mode": "write", "options": {"folder": str(durations)}}
    telling = Telling(slurm, site, NODES, adapters=(known,))
    (site / "state" / "config.toml").symlink_to(telling.config)
    held = slurm.submit("true", "--hold")
    places = {"NODE": "n1", "JOB": held, "/var/cache/fleetcast/durations": str(durations)}
    reader = reader_of(slurm, tmp_path / "reader", **places)
    (reader.folder / "var").symlink_to(site / "state")
    (reader.folder / "train.sh").write_text("#!/bin/sh\ntrue\n")

    def check_refusal(constraint: str = "risk_low|risk_elevated") -> None:
        command = ["sbatch", f"--constraint={constraint}", str(reader.folder / "train.sh")]
        done = subprocess.run(command, env=slurm.environment, capture_output=True, text=True, check=False)
        assert "Invalid feature specification" in done.stderr

    def mark(**risk: float) -> None:
        telling.publish(**risk)
        telling.until("n1", *((True, REASON, "a100,risk_high") if risk else (False, "", "a100,risk_low")))

    def remember() -> None:
        """A board with jobs would let the adapter write this."""
        row = Write("root train", MINUTES, "60 90 20000", None, "")
        assert asyncio.run(DurationsPort(durations).write([row])) == [WriteOutcome.DONE]

    def mark_and_die() -> None:
        telling.cli("withdraw", "slurm", "--undo")
        mark(n1=0.9)
        telling.end()
        remember()

    try:
        before: dict[str, Callable[[], Any]] = {
            "sbatch": mark,
            "squeue": check_refusal,
            "fleetcast adapters withdraw slurm": telling.publish,
            "fleetcast adapters withdraw slurm_durations": remember,
        }
        reader.run_page(ROOT / "docs/schedulers/slurm.md", "run in slurm", before=before | {"sinfo": mark_and_die})
        assert telling.node("n1") == (False, "", "a100")
        check_refusal("risk_low")
        slurm.until("the job was released", lambda: slurm.job(held).get("job_state") != "PENDING")
        assert not durations.exists()
    finally:
        telling.end()


def test_every_command_of_the_page_on_the_source_works(
    slurm: SlurmCluster, start_service: Callable[..., Service], tmp_path: Path
) -> None:
    service = start_service()
    service.until("a board", lambda: service.get("/v1/jobs"))
    running = slurm.submit("sleep 600", "-N1", "--gres=gpu:1")
    done = slurm.submit("true", "-N1", "--gres=gpu:1")
    completions = slurm.folder / "jobcomp.txt"
    slurm.until("its line", lambda: completions.exists() and f"JobId={done} " in completions.read_text())
    slurm.until("it runs", lambda: slurm.job(running)["job_state"] == "RUNNING")
    url = f"http://127.0.0.1:{service.port}"
    reader = reader_of(slurm, tmp_path / "reader", **{"http://fleetcast:8080": url, "jobcomp.txt": str(completions)})
    reader.run_page(ROOT / "docs/sources/slurm.md", "run in slurm")
    service.until(
        "both jobs", lambda: state_of(service, running) == "running" and state_of(service, done) == "finished"
    )
    slurm.run("scancel", running)


def state_of(service: Service, job: str) -> str:
    return str((service.get(f"/v1/jobs/{job}") or {}).get("state"))
