"""The commands of the documents, as a reader types them, beside a whole Fleetcast on a simulated fleet."""

import json
import os
import re
import tomllib
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path

import duckdb
import pytest
from distributed import LocalCluster

from fleetcast.models.versions.registry import Registry
from tests.docs.commands import PAGES, blocks, help_examples, pages_with
from tests.docs.pages import ROOT, codes_of, name_of, text_of
from tests.docs.runner import TABLE, Reader
from tests.ingest.health.test_torchelastic import cycle
from tests.ingest.topology.test_fabric_topology import fabric
from tests.ingest.topology.test_host_wiring import MATRIX
from tests.integration.service_process import Service
from tests.integration.simulated_fleet import SimulatedFleet
from tests.models.versions.test_registry import WON, card, write
from tests.simulator.small_recordings import record_small_runs
from tests.training.made_archive import drains_of, events_of, live
from tests.training.made_data import make_data

pytestmark = pytest.mark.integration

NODES = 48
SLOW = os.environ.get("FLEETCAST_DOCS") == "slow"
TAGS = ("run", "slow") if SLOW else ("run",)
HELP_PAGE = "fleetcast --help"
TRAINING = "docs/data-scientists.md"  # its commands read an archive of days
Words = dict[str, str]
DATE = """#!/bin/sh
# The clock of a simulated host is that of its fleet.
ms=$(($(/bin/date +%s%3N) - {wall_ms}))
exec /bin/date -d "@$((({epoch_ms} + ms * {speed}) / 1000))" "$@"
"""
SQL = re.compile(r"```sql\n(.*?)```", re.DOTALL)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedFleet]:
    TABLE.unlink(missing_ok=True)
    running = SimulatedFleet(tmp_path_factory.mktemp("fleet"), NODES, teams=True)
    try:
        service = running.service
        service.until("forecasts of demand", lambda: (service.get("/v1/demand") or {}).get("series"), 120)
        service.until("requests that wait", lambda: (service.get("/v1/queue") or {}).get("rows"), 120)
        service.until("an archive", lambda: list((service.folder / "state/archive/events").rglob("*.parquet")), 120)
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="module")
def service(fleet: SimulatedFleet) -> Service:
    return fleet.service


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data sets in the layout of the public ones, small enough to read in seconds."""
    folder = tmp_path_factory.mktemp("data")
    make_data(folder, ("made", "venus"), ("made", "ricc"), start="2020-08-06")
    record_small_runs(folder)
    return folder


def read_page(page: Path, tags: tuple[str, ...], folder: Path, service: Service, data: Path) -> Reader:
    """Return a reader who sits at a host of the fleet."""
    (folder / "bin").mkdir()
    (folder / "bin/date").write_text(DATE.format(**_clock(service)))
    (folder / "bin/date").chmod(0o755)
    targets = (service.folder / "targets.txt").read_text().split()
    here = f"127.0.0.1:{service.port}"
    places = {
        "127.0.0.1:8080": here,
        "localhost:8080": here,
        "fleetcast:8080": here,
        "http://node1:9400/metrics": targets[0],
        "http://node2:9400/metrics": targets[1],
        "http://n001:9100/metrics": targets[0],
        "http://web-1:8000/metrics": targets[1],
        "GENERATION": str(service.get("/v1/queues")["generation"]),
    }
    variables = {"FLEETCAST_DATA": (os.environ.get("FLEETCAST_DATA", "") if SLOW else "") or str(data)}
    variables["FLEETCAST_URL"] = f"http://{here}"
    state = folder / "var"
    if name_of(page) == TRAINING:
        live(state / "archive", events_of(days=3, jobs_a_day=12), drains_of(days=3))
    else:
        state.symlink_to(service.folder / "state")
    (folder / "topology.toml").symlink_to(service.folder / "topology.toml")
    (folder / "data").mkdir()
    for path in data.iterdir():
        (folder / "data" / path.name).symlink_to(path)
    prepare = PREPARED.get(name_of(page))
    if prepare is not None:
        prepare(folder, service, places, variables)
    return Reader(folder, places, variables)


def _clock(service: Service) -> dict[str, int]:
    clock = tomllib.loads((service.folder / "config.toml").read_text())["clock"]
    return {"epoch_ms": clock["epoch_ms"], "wall_ms": clock["wall_ms"], "speed": int(clock["speed"])}


# What a page says that its reader has.


def _queues(folder: Path, service: Service, places: Words, variables: Words) -> None:
    """A request that waits, and a history of jobs to play."""
    asked = {"request_id": "train-43-1", "gang": 40, "gpus_per_node": 8, "queue": "vision"}
    status, answer, _ = service.request("POST", "/v1/queue", asked)
    assert status < 300, answer
    rows = [f"j{row},{row * 60},{600 + row * 7 % 3000},{1 + row % 8},u{row % 5},production,7200" for row in range(200)]
    (folder / "jobs.csv").write_text("\n".join(["job,submit_s,run_s,gpus,user,queue,limit_s", *rows]) + "\n")


def _audit(folder: Path, service: Service, places: Words, variables: Words) -> None:
    """A head of the chain that was stored elsewhere."""
    places["HASH"] = service.get("/v1/audit?limit=1")["head"]["hash"]


def _training(folder: Path, service: Service, places: Words, variables: Words) -> None:
    """A log of faults, what `sacct` printed, and versions that were fitted before."""
    rows = [f"n{row % 40:03d},2026-{1 + row // 25:02d}-{1 + row % 25:02d}T08:00:00Z,,gpu" for row in range(200)]
    (folder / "faults.csv").write_text("\n".join(["node,start,end,kind", *rows]) + "\n")
    jobs = [
        f"{job}|u{job % 5}|COMPLETED|{_time(job)}|{_time(job, 10)}|{_time(job, 70)}|gres/gpu=8|1" for job in range(400)
    ]
    (folder / "jobs.txt").write_text("\n".join(["JobID|User|State|Submit|Start|End|AllocTRES|NNodes", *jobs]) + "\n")
    registry = Registry(folder / "var" / "models")
    for _ in range(4):
        registry.add_version("demand", write, card(WON))
    for version in ("0001", "0002"):
        registry.promote("demand", version)


def _time(job: int, minutes: int = 0) -> str:
    return (datetime(2026, 1, 1) + timedelta(hours=job, minutes=minutes)).isoformat()


def _launch(folder: Path, service: Service, places: Words, variables: Words) -> None:
    """Write the report of a cycle, as NVRx does."""
    (folder / "cycle_info.train-42.0.1").write_text(json.dumps(cycle(0, "n[001-002]")))


def _fabric(folder: Path, service: Service, places: Words, variables: Words) -> None:
    """Write the output of a fabric and of a host, and a topology with racks."""
    (folder / "topology").mkdir()
    cables = {f"n{node:03d} mlx5_{rail}": str(rail + 1) for node in (1, 2) for rail in (0, 1)}
    (folder / "topology/fabric.txt").write_text(fabric(cables))
    (folder / "topology/H100.txt").write_text(MATRIX)
    (folder / "topology.toml").unlink()
    (folder / "topology.toml").write_text('[[rack]]\nname = "r1"\nnodes = "n[001-002]"\ngpus = 8\ngpu_model = "H100"\n')


def _incident(folder: Path, service: Service, places: Words, variables: Words) -> None:
    """The address of the service, and the log of a role."""
    places |= {"API/": f"http://127.0.0.1:{service.port}/", "LOG": str(service.folder / "service.log")}


def _state(folder: Path, service: Service, places: Words, variables: Words) -> None:
    """A disk for backups."""
    places["/backup"] = str(folder / "backup")
    (folder / "backup").mkdir()


def _examples(folder: Path, service: Service, places: Words, variables: Words) -> None:
    """Files that examples of help texts name."""
    _state(folder, service, places, variables)
    _queues(folder, service, places, variables)
    (folder / "fleet.toml").symlink_to(service.folder / "config.toml")
    (folder / "topology").mkdir()
    (folder / "topology" / "racks.toml").symlink_to(service.folder / "topology.toml")
    (folder / "topology.conf").write_text("SwitchName=leaf1 Nodes=n[001-048]\nSwitchName=spine1 Switches=leaf1\n")
    (folder / "fabric.txt").write_text(fabric({"n001 mlx5_0": "1", "n002 mlx5_0": "1"}))
    (folder / "head-of-last-monday").write_text(service.get("/v1/audit?limit=1")["head"]["hash"])
    (queues,) = (block.code for block in blocks(ROOT / "docs/queues.md") if block.tag == "file: queues.toml")
    (folder / "queues.toml").write_text(queues)


def _client(folder: Path, service: Service, places: Words, variables: Words) -> None:
    """A folder for the package, so that the installation of these tests stays as it is."""
    places["pip install"] = f"pip install --no-deps --no-build-isolation --target {folder / 'packages'}"


def _loop(folder: Path, service: Service, places: Words, variables: Words) -> None:
    """The environment of a job of Slurm."""
    _client(folder, service, places, variables)
    variables["FLEETCAST_TOKEN"] = "none"
    variables |= {"SLURM_JOB_ID": "4711", "STEP": "7", "SECONDS_OF_STEP": "1.5"}


PREPARED: dict[str, Callable[[Path, Service, Words, Words], None]] = {
    "dashboards/runbooks.md": _incident,
    "docs/operating-state.md": _state,
    HELP_PAGE: _examples,
    "docs/queues.md": _queues,
    "docs/placement.md": _audit,
    "docs/schedulers/ray.md": _client,
    "docs/sources/infiniband.md": _fabric,
    "docs/sources/launchers.md": _launch,
    "sdk/README.md": _loop,
    TRAINING: _training,
}


@pytest.mark.parametrize("page", pages_with(*TAGS), ids=name_of)
def test_every_command_of_a_page_works(page: Path, tmp_path: Path, service: Service, data: Path) -> None:
    read_page(page, TAGS, tmp_path, service, data).run_page(page, *TAGS)


HELP = {  # the page of a reader -> examples for which that reader has all that they name
    TRAINING: r"fleetcast (?:models|data list)\b.*",
    HELP_PAGE: r"fleetcast (?:adapters list|audit|check-config|history show|play|queues check|queues show|state show|"
    r"state backup|topology)\b.*",
}


@pytest.mark.parametrize("page", HELP)
def test_examples_of_help_texts_work(page: str, tmp_path: Path, service: Service, data: Path) -> None:
    reader = read_page(ROOT / page, ("run",), tmp_path, service, data)
    examples = dict.fromkeys(row for row in help_examples() if re.fullmatch(HELP[page], row[1]))
    failed = []
    for command, example in examples:
        try:
            reader.run_example(command, example)
        except AssertionError as error:
            failed.append(str(error))
    assert examples
    assert not failed, "\n\n".join(failed)


def test_the_back_test_of_a_page_runs_on_dask(tmp_path: Path, data: Path) -> None:
    (tmp_path / "data").symlink_to(data)
    with LocalCluster(
        n_workers=1, threads_per_worker=2, processes=False, protocol="tcp", host="127.0.0.1", dashboard_address=":0"
    ) as cluster:
        reader = Reader(tmp_path, {"tcp://scheduler:8786": cluster.scheduler_address})
        (done,) = reader.run_page(ROOT / TRAINING, "run in dask", files=False)
    assert cluster.scheduler_address in done.output


def test_every_query_of_the_archive_answers(tmp_path: Path, service: Service) -> None:
    (tmp_path / "var").symlink_to(service.folder / "state")
    queries = SQL.findall(text_of(ROOT / "docs/archive.md"))
    assert queries
    for query in queries:
        here = query.replace("'var/", f"'{tmp_path}/var/")
        assert service.until("an answer", lambda here=here: _rows(here)), query


def _rows(query: str) -> list[object]:
    """Return the rows of a query; none where the service merged files between the listing and the reading."""
    try:
        return list(duckdb.sql(query).fetchall())
    except duckdb.IOException:
        return []


def test_every_route_that_a_document_asks_for_answers(service: Service) -> None:
    """`GET /v1/…` within sentences and tables; API/v1/… in run-books."""
    jobs = service.get("/v1/jobs")["rows"]
    job = next(row for row in jobs if row["state"] == "running")["job"]
    waiting = service.get("/v1/queue")["rows"][0]["request_id"]
    asked = {}
    for page in PAGES:
        for code in codes_of(page):
            if path := re.fullmatch(r"(?:GET |API)(/[\w/{}?=&.-]+)", code):
                known = {
                    "{node}": "n001",
                    "NODE": "n001",
                    "/jobs/{id}": f"/jobs/{job}",
                    "JOB": job,
                    "/queue/{id}": f"/queue/{waiting}",
                }
                text = path[1]
                for said, here in known.items():
                    text = text.replace(said, here)
                asked[text] = name_of(page)
    asked.pop("/v1/stream", None)  # it never ends
    assert len(asked) > 20
    answers = {f"{page}: {path}": service.request("GET", path)[0] for path, page in asked.items() if "{" not in path}
    assert {what: status for what, status in answers.items() if status != 200} == {}
