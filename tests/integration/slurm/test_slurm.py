"""A real Slurm: what our API says of its jobs and nodes is what Slurm says."""

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import pytest

from fleetcast.fleet.clock import SystemClock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.events import Resized
from fleetcast.ingest.slurm.jobs import expand_node_list
from fleetcast.ingest.slurm.source import SlurmSource
from fleetcast.ingest.source import Batch
from tests.docs.commands import blocks_of
from tests.docs.pages import ROOT
from tests.integration.service_process import Service
from tests.integration.slurm.cluster import GPUS, SlurmCluster
from tests.integration.slurm.conftest import Watched

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def slow_to_end(watched: Watched) -> str:
    """A job that Slurm ends for its limit of a minute, submitted before everything else."""
    return watched.slurm.submit("sleep 300", "-N1", "--gres=gpu:1", "--time=1")


def test_a_gang_runs_where_slurm_put_it(watched: Watched, slow_to_end: str) -> None:
    job = watched.slurm.submit("sleep 12", "-N2", "--gres=gpu:h100:2", "--job-name=ga|ng", "--time=30")
    running = watched.until_job(job, lambda row: row["state"] == "running")
    told = watched.slurm.job(job)
    held = [re.search(r"IDX:([0-9,-]+)", text) for text in told["gres_detail"]]
    indices = [[int(part) for part in found[1].replace("-", ",").split(",")] for found in held if found]
    assert [(row["node"], row["gpus"]) for row in running["placement"]] == list(
        zip(expand_node_list(told["nodes"]), indices, strict=True)
    )
    assert (running["gpus"], running["user"], running["queue"], running["attempt"]) == (4, "root", "train", 1)
    assert running["submitted_ms"] == told["submit_time"] * 1000
    assert running["started_ms"] == told["start_time"] * 1000
    assert watched.end(job)["type"] == "finished"
    ended = watched.slurm.job(job)
    assert watched.job(job)["ended_ms"] == ended["end_time"] * 1000


def test_a_job_that_shrinks_gives_its_gpus_back(watched: Watched) -> None:
    job = watched.slurm.submit("sleep 30", "-N2", "--gres=gpu:1")
    first = watched.until_job(job, lambda row: row["state"] == "running" and len(row["nodes"]) == 2)
    time.sleep(1)  # Slurm dates a change by the second
    watched.slurm.run("scontrol", "update", f"jobid={job}", "numnodes=1")
    assert watched.until_job(job, lambda row: len(row["nodes"]) == 1)["nodes"] == first["nodes"][:1]
    watched.slurm.run("scancel", job)
    assert watched.end(job)["category"] == "cancelled"


def test_failures_have_their_categories(watched: Watched, slow_to_end: str) -> None:
    slurm = watched.slurm
    bad = slurm.submit("exit 3", "-N1", "--gres=gpu:1")
    killed = slurm.submit("sleep 3; kill -9 $$", "-N1", "--gres=gpu:1", "--comment=epilog: Xid 79")
    cancelled = slurm.submit("sleep 60", "-N1", "--gres=gpu:1")
    lost = slurm.submit("sleep 60", "-N1", "--gres=gpu:1", "--nodelist=n4", "--no-requeue")
    for job in (cancelled, lost):
        watched.until_job(job, lambda row: row["state"] == "running")
    slurm.run("scancel", cancelled)
    slurm.run("scontrol", "update", "nodename=n4", "state=down", "reason=psu 2")
    # The comment is known to the queue alone: where completions or accounts come first, the queue's word counts later.
    assert "Xid 79" in watched.end(killed, "hardware")["message"]
    ends = {job: watched.end(job) for job in (bad, killed, cancelled, lost)}
    categories = {job: end["category"] for job, end in ends.items()}
    assert categories == {bad: "user", killed: "hardware", cancelled: "cancelled", lost: "node_lost"}
    assert "exit 3" in ends[bad]["message"]
    node = watched.service.until("n4 is lost", lambda: _node(watched, "n4", "lost"))
    assert node["node"] == "n4"
    slurm.run("scontrol", "update", "nodename=n4", "state=resume")
    watched.service.until("n4 is back", lambda: not _node(watched, "n4", "lost"))


def _node(watched: Watched, name: str, state: str) -> Any:
    answer = watched.service.get(f"/v1/nodes/{name}")
    return answer if answer and answer["state"] == state else None


def test_a_drained_node_says_why(watched: Watched) -> None:
    watched.slurm.run("scontrol", "update", "nodename=n3", "state=drain", "reason=NHC: fan 3 is slow")
    watched.service.until("n3 is drained", lambda: "fan 3 is slow" in str(_node(watched, "n3", "drained")))
    watched.slurm.run("scontrol", "update", "nodename=n3", "state=resume")
    watched.service.until("n3 works again", lambda: not _node(watched, "n3", "drained"))


def test_a_preempted_job_waits_as_its_next_attempt(watched: Watched) -> None:
    slurm = watched.slurm
    low = slurm.submit("sleep 100", "-N3", f"--gres=gpu:{GPUS}", "--exclude=n1", "--requeue")
    watched.until_job(low, lambda row: row["state"] == "running")
    high = slurm.submit("sleep 1", "-N1", f"--gres=gpu:{GPUS}", "--partition=urgent", "--nodelist=n2")
    rows = watched.service.until("two attempts", lambda: (found := watched.attempts(low)) and len(found) == 2 and found)
    assert rows[1]["state"] == "preempted"
    assert rows[2]["state"] in ("queued", "blocked"), "Slurm lets a requeued job begin after a delay (BeginTime)"
    assert watched.end(high)["type"] == "finished"
    assert watched.job(high)["class"] == "batch"
    slurm.run("scancel", low)
    assert watched.end(low)["category"] == "cancelled"


def test_tasks_and_parts_have_names_of_their_own(watched: Watched) -> None:
    array = watched.slurm.submit("sleep 1", "-N1", "--gres=gpu:1", "--array=3-5%1")
    parts = watched.slurm.submit("sleep 1", "-N1", "--gres=gpu:1", ":", "-N1", "--gres=gpu:2")
    for task in (3, 4, 5):
        assert watched.end(f"{array}_{task}")["type"] == "finished"
    assert watched.end(f"{parts}+0")["type"] == "finished"
    assert watched.job(f"{parts}+1")["gpus"] == 2


def test_nothing_is_lost_when_the_pipeline_or_slurmctld_dies(watched: Watched) -> None:
    long = watched.slurm.submit("sleep 200", "-N1", "--gres=gpu:2")
    watched.until_job(long, lambda row: row["state"] == "running")
    since = time.time()
    short = watched.slurm.submit("sleep 1", "-N1", "--gres=gpu:1")
    watched.service.kill("pipeline")
    assert watched.end(short)["type"] == "finished"
    watched.until_job(long, lambda row: row["state"] == "running")  # asked anew: no snapshot had it
    # slurmctld saves its state every few seconds: a job that began later is gone with it, and Slurm calls it an orphan.
    watched.slurm.until("slurmctld has saved the job", lambda: watched.slurm.saved() > since)
    watched.slurm.kill("slurmctld")
    watched.service.until("the source is away", lambda: not _source(watched)["up"])
    assert watched.job(long)["state"] == "running"
    watched.slurm.start_controller()
    watched.service.until("the source is back", lambda: _source(watched)["up"])
    watched.slurm.until("every slurmd answers", lambda: _all_answer(watched.slurm.states()), 60)
    assert watched.job(long)["state"] == "running"
    watched.slurm.run("scancel", long)
    ended = watched.end(long)["category"]
    # A slurmctld that has just come back may record a job that is cancelled as failed: what it says is what counts.
    assert ended == {"CANCELLED": "cancelled", "FAILED": "user"}[watched.slurm.job(long)["job_state"]]
    assert _source(watched)["bad"] == 0
    assert _source(watched)["noted"]["ends_not_told"] == 0


def _all_answer(states: dict[str, str]) -> bool:
    """sinfo marks the state of a node whose slurmd has not answered yet with a star."""
    return bool(states) and not any("*" in state for state in states.values())


def _source(watched: Watched) -> dict[str, Any]:
    rows = watched.service.get("/v1/ingestion")["sources"]
    return next(row for row in rows if row["name"] == "slurm")


def test_commands_text_and_slurmrestd_tell_the_same(watched: Watched, tmp_path: Path) -> None:
    slurm = watched.slurm
    slurm.environment["SLURMRESTD_SECURITY"] = "disable_user_check"
    socket = tmp_path / "rest.sock"
    slurm.spawn("slurmrestd", "slurmrestd", "-a", "rest_auth/local", f"unix:{socket}")
    slurm.until("slurmrestd listens", socket.exists)
    running = slurm.submit("sleep 30", "-N2", "--gres=gpu:1")
    slurm.until("it runs", lambda: slurm.job(running)["job_state"] == "RUNNING")
    forms: list[dict[str, Any]] = [{}, {"form": "text"}, {"url": f"unix:{socket}"}]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
        told = [_said(_taken(options)) for options in forms]
    assert told[0] == told[1] == told[2]
    assert len({job for job, *_ in told[0]}) > 10
    slurm.kill("slurmrestd")
    slurm.run("scancel", running)


def _posted(service: Service, route: str) -> int:
    """How many requests to a route were answered 200."""
    _, page, _ = service.request("GET", "/metrics")
    found = re.search(rf'fleetcast_http_requests_total\{{[^}}]*{route}[^}}]*status="200"[^}}]*\}} ([0-9.]+)', page)
    return int(float(found[1])) if found else 0


def _taken(options: dict[str, Any]) -> Batch:
    async def first() -> Batch:
        source = SlurmSource(Entities(), SystemClock(), options)
        try:
            return await source.next()
        finally:
            await source.close()

    return asyncio.run(first())


def _said(batch: Batch) -> set[tuple[str, int, int, int]]:
    """All but changes of size, of which the text of 22.05 does not tell."""
    assert not batch.bad
    kept = [event for event in batch.events if not isinstance(event, Resized)]
    return {(event.job, event.attempt, event.sequence, event.time_ms) for event in kept}


def test_hooks_tell_of_a_cluster_that_is_not_polled(watched: Watched, tmp_path: Path) -> None:
    """The script of the manual, as PrologSlurmctld, EpilogSlurmctld and jobcomp/script."""
    url = f"http://127.0.0.1:{watched.service.port}/v1/webhooks/slurm-jobcomp?prefix=east-"
    (page,) = (block for block in blocks_of(ROOT / "docs/sources/slurm.md") if block.tag == "file: fleetcast-hook")
    (tmp_path / "token").write_text("none")
    hook = page.code.replace("/etc/slurm/fleetcast.token", str(tmp_path / "token"))
    hook = hook.replace("http://fleetcast:8080/v1/webhooks/slurm-jobcomp", f"'{url}'")
    slurm = SlurmCluster(tmp_path / "east", accounting=False, hook=hook)
    try:
        job = slurm.submit("sleep 2; exit 4", "-N2", "--gres=gpu:1")
        running = watched.until_job(f"east-{job}", lambda row: row["state"] == "running")
        assert running["nodes"] == ["n1", "n2"]
        end = watched.end(f"east-{job}")
        assert (end["type"], end["category"]) == ("failed", "user")
        watched.service.until("prolog, epilog, completion", lambda: _posted(watched.service, "slurm-jobcomp") >= 3)
        told = slurm.run("squeue", "--json").encode()
        status, answer, _ = watched.service.request("POST", "/v1/webhooks/slurm-jobcomp?prefix=cron-", told)
        assert (status, answer["accepted"], answer["rejected"]) == (200, 3, [])
    finally:
        slurm.stop()


def test_a_job_that_hit_its_limit_timed_out(watched: Watched, slow_to_end: str) -> None:
    watched.until_job(slow_to_end, lambda row: row["state"] == "failed", 120.0)
    assert watched.end(slow_to_end)["category"] == "timeout"


def test_what_the_completion_plugin_sends_was_known(watched: Watched) -> None:
    """It sends every half minute; all of its events have the identities of those that the source told."""

    watched.service.until("completions", lambda: _posted(watched.service, "slurm-jobcomp") > 4, 60.0)
    time.sleep(2)
    answer = watched.service.get("/v1/ingestion")
    assert answer["duplicates_total"] > 0
    assert answer["bad_total"] == 0


@pytest.mark.parametrize("form", ["auto", "text"])
def test_rows_inside_a_name_end_no_job_of_another_user(watched: Watched, form: str) -> None:
    """The attack: a line break in `--job-name`, then the whole row of a running job as an ended one."""
    slurm = watched.slurm
    victim = slurm.submit("sleep 600", "-N1", "--gres=gpu:1")
    watched.until_job(victim, lambda row: row["state"] == "running")
    forged = [victim, "COMPLETED", "0", "1760000000", "1760000001", "1760000002", *["0"] * 16, "x"]
    name = "evil\n" + "|".join(forged) + "|"
    attacker = slurm.submit("sleep 600", "-N1", "--gres=gpu:1", f"--job-name={name}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
        made = SlurmSource(Entities(), SystemClock(), {"form": form, "lookback_s": 3600.0})
        events = asyncio.run(made.next()).events
    told = {job: [event for event in events if event.job == job] for job in (victim, attacker)}
    assert {(type(event).__name__, event.attempt) for event in told[victim]} == {("Submitted", 1), ("Started", 1)}
    assert {type(event).__name__ for event in told[attacker]} >= {"Submitted"}
    assert told[attacker][0].name.startswith("evil")
    for job in (victim, attacker):
        slurm.run("scancel", job)
