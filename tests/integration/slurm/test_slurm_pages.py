"""The commands that the documents ask of Slurm's accounting, with a real one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.docs.runner import Reader
from tests.integration.slurm.cluster import SlurmCluster

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    made = SlurmCluster(tmp_path_factory.mktemp("slurm") / "cluster")
    try:
        job = made.submit("true", "-N1")
        made.until("it ended", lambda: made.run("sacct", "-nP", "-j", job, "-o", "State").startswith("COMPLETED"))
        yield made
    finally:
        made.stop()


@pytest.mark.parametrize(
    ("page", "makes"), [("docs/queues.md", "queues.toml"), ("docs/data-scientists.md", "jobs.txt")]
)
def test_every_command_of_a_page_works(page: str, makes: str, slurm: SlurmCluster, tmp_path: Path) -> None:
    variables = {name: slurm.environment[name] for name in ("SLURM_CONF", "TZ")}
    reader = Reader(tmp_path, {"/etc/slurm/slurm.conf": str(slurm.folder / "slurm.conf")}, variables)
    reader.run_page(ROOT / page, "run in slurm", files=False)
    assert (tmp_path / makes).stat().st_size > 0
