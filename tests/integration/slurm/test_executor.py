"""The executor `slurm` in its host, over a real placer and a real Slurm: stops, shrinks and requeues running jobs."""

import asyncio
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetcast.fleet.requests import RankPlacement
from fleetcast.placement.actions.action import ActionKind, make_recovery_payer
from fleetcast.schedulers.executor import SendOutcome
from fleetcast.service.adapter_records import AdapterRecords
from fleetcast.service.config import AdapterConfig, AdaptersConfig
from fleetcast.service.doors import make_executor
from fleetcast.service.executors import ExecutorHost, make_order
from fleetcast.service.placer.http_actions import make_action_row
from tests.integration.slurm.cluster import GPUS, SlurmCluster
from tests.placement.actions.action_world import make_action
from tests.service.placer_world import World
from tests.service.served_placer import serve_app

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

GANG = (f"--gres=gpu:{GPUS}", "--time=60")
OPTIONS: dict[str, Any] = {"timeout_s": 10.0}


class ActingPlacer:
    """A placer whose sent actions a host gives to Slurm."""

    def __init__(self, slurm: SlurmCluster, placer: World, port: int, folder: Path) -> None:
        self.slurm, self.placer, self.folder = slurm, placer, folder
        self.config = msgspec.structs.replace(
            placer.config,
            placer=msgspec.structs.replace(placer.config.placer, port=port),
            adapters=AdaptersConfig(executor=(AdapterConfig("slurm", mode="write", options=OPTIONS),)),
        )

    def open_action(self, job: str, *nodes: str, kind: str = "preempt", **changes: Any) -> str:
        control, now_ms = self.placer.service.actions, time.time_ns() // 1_000_000
        ranks = tuple(RankPlacement(rank, node, tuple(range(GPUS))) for rank, node in enumerate(nodes))
        facts = {
            "kind": ActionKind(kind),
            "executor": "slurm",
            "by_ms": now_ms + 600_000,
            "gpus": 1.0,
            "grace_s": 3.0,
            "ranks": ranks,
        }
        (record,) = control.propose([make_action(job, **{**facts, **changes})], now_ms).opened
        assert control.send([record.action_id], now_ms)
        return record.action_id

    def state(self, action_id: str) -> tuple[str, str]:
        record = self.placer.service.actions.get_action(action_id)
        return record.state.value, record.why

    def run(self, until: Callable[[], Any], limit_s: float = 60.0) -> None:
        """Run one host until a condition holds, then end it."""

        async def go() -> None:
            host = ExecutorHost(self.config, self.placer.clock, AdapterRecords(self.folder), lambda: None)
            host.run(may_send=True)
            deadline = time.monotonic() + limit_s
            while not await asyncio.to_thread(until):
                await asyncio.sleep(0.1)
                host.pop_change()
                if time.monotonic() > deadline:
                    raise AssertionError(f"not within {limit_s:g} s: {host.list_statuses()}\n{show_all(self.slurm)}")
            await host.close()

        asyncio.run(go())


def make_cluster(folder: Path, preempt: str = "none") -> Iterator[SlurmCluster]:
    made = SlurmCluster(folder / "cluster", accounting=False, preempt=preempt)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SLURM_CONF", made.environment["SLURM_CONF"])
            patch.setenv("PATH", os.environ["PATH"])
            yield made
    finally:
        made.stop()


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    yield from make_cluster(tmp_path_factory.mktemp("acts"))


@pytest.fixture
def acting(slurm: SlurmCluster, tmp_path: Path) -> Iterator[ActingPlacer]:
    placer = World(tmp_path)
    placer.board.publish()
    placer.service.view.observe_fleet()
    with serve_app(placer.app) as port:
        yield ActingPlacer(slurm, placer, port, tmp_path)
    placer.close()
    slurm.run("scancel", "--user=root")
    slurm.until("Slurm is empty", lambda: not slurm.run("squeue", "-h"))
    for name in holds(slurm):
        slurm.run("scontrol", "delete", f"ReservationName={name}")


def show_all(slurm: SlurmCluster) -> str:
    columns = "JobID:|,State:|,NodeList:|,Reason:|,Reservation:|,admin_comment:|"
    return slurm.run("squeue", "-a", f"--Format={columns}") + slurm.run("scontrol", "show", "reservation", "-o")


def shown(slurm: SlurmCluster, number: str, field: str) -> str:
    found = re.search(rf"(?: |^){field}=(.*?)(?: \w+=|$)", slurm.run("scontrol", "show", "job", "-o", number))
    return found[1].strip() if found else ""


def state(slurm: SlurmCluster, number: str) -> str:
    return shown(slurm, number, "JobState")


def is_unmarked(slurm: SlurmCluster, number: str) -> bool:
    return "fleetcast" not in shown(slurm, number, "AdminComment")


def holds(slurm: SlurmCluster) -> list[str]:
    return re.findall(r"ReservationName=(\S+)", slurm.run("scontrol", "show", "reservation", "-o"))


def start(slurm: SlurmCluster, script: str, *options: str) -> str:
    number = slurm.submit(script, *GANG, *options)
    slurm.until(f"{number} runs", lambda: state(slurm, number) == "RUNNING")
    return number


def start_with_trap(slurm: SlurmCluster, folder: Path, trap: str, *options: str) -> str:
    """Start a job that runs a command for each USR1, and goes on. Without its trap, USR1 would end it."""
    number = start(slurm, f"trap '{trap}' USR1; touch {folder}/ready; while :; do sleep 0.2; done", *options)
    slurm.until("its trap is set", (folder / "ready").exists)
    return number


def start_trainer(slurm: SlurmCluster, folder: Path, *options: str) -> str:
    """Start a job that appends a line to a file for each USR1, as its checkpoint, and goes on."""
    return start_with_trap(slurm, folder, f"echo saved >> {folder}/checkpoints", *options)


def count_checkpoints(folder: Path) -> int:
    path = folder / "checkpoints"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_a_stopped_job_saves_gives_its_nodes_to_the_payer_and_runs_later(acting: ActingPlacer, tmp_path: Path) -> None:
    slurm = acting.slurm
    other = start(slurm, "sleep 600", "-N2", "--nodelist=n3,n4")
    victim = start_trainer(slurm, tmp_path, "-N2", "--requeue")
    ahead, payer = slurm.submit("sleep 600", "-N2", *GANG), slurm.submit("sleep 600", "-N2", *GANG)
    began_s = time.monotonic()
    action = acting.open_action(victim, "n1", "n2", payer=payer)
    acting.run(lambda: state(slurm, payer) == "RUNNING")
    print(f"action to payer, with 3 s of grace: {time.monotonic() - began_s:.1f} s; ", end="")
    assert (shown(slurm, payer, "NodeList"), state(slurm, ahead)) == ("n[1-2]", "PENDING")
    acting.run(lambda: acting.state(action)[0] == "accepted")
    assert count_checkpoints(tmp_path) == 1
    acting.run(lambda: not holds(slurm) and is_unmarked(slurm, victim))
    assert (state(slurm, victim), shown(slurm, victim, "Priority") != "0") == ("PENDING", True)
    assert shown(slurm, payer, "Reservation") == ""
    slurm.run("scancel", other, ahead)
    slurm.until("the victim runs again", lambda: state(slurm, victim) == "RUNNING", 300)
    assert (shown(slurm, victim, "Restarts"), state(slurm, payer)) == ("1", "RUNNING")


def test_two_victims_free_their_nodes_for_one_payer(acting: ActingPlacer) -> None:
    slurm = acting.slurm
    victims = [start(slurm, "sleep 600", "-N2", f"--nodelist={nodes}", "--requeue") for nodes in ("n1,n2", "n3,n4")]
    slurm.submit("sleep 600", "-N2", *GANG)
    payer = slurm.submit("sleep 600", "-N4", *GANG)
    for victim, nodes in zip(victims, (("n1", "n2"), ("n3", "n4")), strict=True):
        acting.open_action(victim, *nodes, payer=payer, grace_s=0.0)
    acting.run(lambda: state(slurm, payer) == "RUNNING")
    acting.run(lambda: not holds(slurm))
    assert [state(slurm, victim) for victim in victims] == ["PENDING", "PENDING"]


def test_a_job_that_may_not_be_requeued_ends(acting: ActingPlacer) -> None:
    slurm = acting.slurm
    victim = start(slurm, "sleep 600", "-N1", "--nodelist=n1", "--no-requeue")
    acting.open_action(victim, "n1", payer="a request of ours", grace_s=0.0)
    acting.run(lambda: state(slurm, victim) == "CANCELLED")


def test_a_job_shrinks_and_its_nodes_go_to_the_payer(acting: ActingPlacer, tmp_path: Path) -> None:
    slurm = acting.slurm
    job = start_trainer(slurm, tmp_path, "-N4")
    slurm.submit("sleep 600", "-N1", *GANG)
    payer = slurm.submit("sleep 600", "-N1", *GANG)
    action = acting.open_action(job, "n3", kind="shrink", payer=payer)
    acting.run(lambda: (state(slurm, payer), acting.state(action)[0]) == ("RUNNING", "accepted"))
    assert (shown(slurm, job, "NodeList"), shown(slurm, payer, "NodeList")) == ("n[1-2,4]", "n3")
    assert (state(slurm, job), count_checkpoints(tmp_path)) == ("RUNNING", 1)
    acting.run(lambda: not holds(slurm))
    acting.placer.service.actions.record_seen(action, time.time_ns() // 1_000_000)
    again = acting.open_action(job, "n4", kind="shrink", payer="")
    acting.run(lambda: acting.state(again)[0] == "refused")
    assert "the DB index is being set" in acting.state(again)[1]  # there is no slurmdbd


def test_growth_is_refused_in_the_words_of_slurm(acting: ActingPlacer) -> None:
    job = start(acting.slurm, "sleep 600", "-N1", "--nodelist=n1")
    action = acting.open_action(job, "n1", kind="grow", places=(RankPlacement(1, "n2", (0,)),), payer="")
    acting.run(lambda: acting.state(action)[0] == "refused")
    print(acting.state(action)[1], end="; ")
    assert acting.state(action)[1].startswith("Slurm refuses: scontrol update: ")
    assert shown(acting.slurm, job, "NodeList") == "n1"


def test_a_job_leaves_the_node_that_is_replaced(acting: ActingPlacer) -> None:
    job = start(acting.slurm, "sleep 600", "-N2", "--nodelist=n1,n2", "--requeue", "--exclude=n4")
    acting.open_action(job, "n2", kind="replace", payer="", grace_s=0.0)
    acting.run(lambda: shown(acting.slurm, job, "ExcNodeList") == "n4,n2" and is_unmarked(acting.slurm, job))
    assert state(acting.slurm, job) == "PENDING"


def test_the_new_and_the_healthy_nodes_are_reserved_while_a_gang_restarts(acting: ActingPlacer) -> None:
    slurm = acting.slurm
    job = start(slurm, "sleep 600", "-N2", "--nodelist=n1,n2", "--requeue")
    places = (RankPlacement(0, "n3", tuple(range(GPUS))),)
    acting.open_action(job, "n2", kind="replace", payer="", grace_s=0.0, places=places)
    acting.run(lambda: shown(slurm, job, "ExcNodeList") == "n2" and is_unmarked(slurm, job))
    assert (state(slurm, job), shown(slurm, job, "Reservation")) == ("PENDING", f"fleetcast-{job}")
    rival = slurm.submit("sleep 600", *GANG, "-N1", "--nodelist=n3")
    acting.run(lambda: state(slurm, job) == "RUNNING" and not holds(slurm), limit_s=240)
    assert shown(slurm, job, "NodeList") in ("n1,n3", "n[1,3]")
    assert state(slurm, rival) == "PENDING"


def test_the_node_that_a_job_leaves_is_reserved_for_the_gang_that_replaces_one(acting: ActingPlacer) -> None:
    slurm = acting.slurm
    gang = start(slurm, "sleep 600", "-N2", "--nodelist=n1,n2", "--requeue")
    victim = start(slurm, "sleep 600", "-N1", "--nodelist=n3", "--requeue")
    rival = slurm.submit("sleep 600", *GANG, "-N1", "--nodelist=n3")
    stop = acting.open_action(victim, "n3", payer=make_recovery_payer(gang, 1), grace_s=0.0)
    acting.run(lambda: state(slurm, victim) == "PENDING" and holds(slurm) == [f"fleetcast-{gang}"])
    ended_s = time.monotonic()
    acting.run(lambda: time.monotonic() > ended_s + 15)
    assert (state(slurm, rival), acting.state(stop)[0]) == ("PENDING", "accepted")
    places = (RankPlacement(0, "n3", tuple(range(GPUS))),)
    acting.open_action(gang, "n2", kind="replace", payer="", grace_s=0.0, places=places)
    acting.run(lambda: shown(slurm, gang, "ExcNodeList") == "n2" and is_unmarked(slurm, gang))
    acting.run(lambda: state(slurm, gang) == "RUNNING" and not holds(slurm), limit_s=240)
    assert shown(slurm, gang, "NodeList") in ("n1,n3", "n[1,3]")
    assert state(slurm, rival) == "PENDING"


def test_a_host_killed_before_its_reply_signals_once(
    acting: ActingPlacer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start_trainer(acting.slurm, tmp_path, "-N1", "--nodelist=n1", "--requeue")
    action = acting.open_action(job, "n1", payer="", grace_s=4.0)
    with monkeypatch.context() as patch:

        async def hang(*_: object) -> None:
            await asyncio.Event().wait()

        patch.setattr("fleetcast.service.actions_link.ActionsLink.accept", hang)
        acting.run(lambda: count_checkpoints(tmp_path) == 1)
    assert acting.state(action)[0] == "sent"
    acting.run(lambda: (state(acting.slurm, job), acting.state(action)[0]) == ("PENDING", "accepted"))
    assert count_checkpoints(tmp_path) == 1


def test_a_job_that_requeues_itself_after_the_kill_of_the_host_has_stopped(
    acting: ActingPlacer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = acting.slurm
    trap = f"echo saved >> {tmp_path}/checkpoints; scontrol requeue $SLURM_JOB_ID"
    job = start_with_trap(slurm, tmp_path, trap, "-N1", "--nodelist=n1", "--requeue")
    action = acting.open_action(job, "n1", payer="", grace_s=60.0)
    with monkeypatch.context() as patch:

        async def hang(*_: object) -> None:
            await asyncio.Event().wait()

        patch.setattr("fleetcast.service.actions_link.ActionsLink.accept", hang)
        acting.run(lambda: shown(slurm, job, "Restarts") == "1")
    slurm.until("its mark goes with the attempt", lambda: state(slurm, job) in ("PENDING", "RUNNING"))
    slurm.run("scontrol", "update", f"JobId={job}", "AdminComment=")
    assert acting.state(action)[0] == "sent"
    acting.run(lambda: acting.state(action)[0] != "sent")
    assert acting.state(action) == ("accepted", "")
    assert count_checkpoints(tmp_path) == 1
    done = start(slurm, "sleep 600", "-N1", "--nodelist=n2", "--no-requeue")
    late = acting.open_action(done, "n2", payer="")
    slurm.run("scancel", done)
    slurm.until("it has ended", lambda: not slurm.run("squeue", "-h", "-t", "PD,R,CG", "-j", done).strip())
    acting.run(lambda: acting.state(late)[0] == "accepted")


def test_the_owner_forbids_a_stop_also_within_the_grace(acting: ActingPlacer, tmp_path: Path) -> None:
    forbids = "fleetcast.io/preemptible=false"
    job = start(acting.slurm, "sleep 600", "-N1", "--requeue", f"--comment={forbids}")
    action = acting.open_action(job, "n1")
    acting.run(lambda: acting.state(action) == ("refused", f"its owner forbids it: {forbids}"))
    other = start_with_trap(acting.slurm, tmp_path, "", "-N1", "--requeue")
    later = acting.open_action(other, "n2", grace_s=300.0)
    acting.run(lambda: acting.state(later)[0] == "accepted")
    acting.slurm.run("scontrol", "update", f"JobId={other}", f"Comment={forbids}")
    acting.run(lambda: acting.state(later)[0] == "refused" and is_unmarked(acting.slurm, other))
    assert state(acting.slurm, other) == "RUNNING"


def test_a_job_of_another_attempt_and_one_that_waits_are_refused(acting: ActingPlacer) -> None:
    job = start(acting.slurm, "sleep 600", "-N1", "--requeue")
    waits = acting.slurm.submit("sleep 600", "--hold")
    old, idle = acting.open_action(job, "n1", attempt=2), acting.open_action(waits, "n1")
    acting.run(lambda: [acting.state(action)[0] for action in (old, idle)] == ["refused", "refused"])
    assert acting.state(old)[1] == f"job {job} runs its attempt 1, not 2"
    assert acting.state(idle)[1] == f"job {waits} is PENDING"


def test_where_slurm_preempts_by_itself_nothing_is_preempted(acting: ActingPlacer, tmp_path: Path) -> None:
    row = make_action_row(
        acting.placer.service.actions,
        acting.placer.service.actions.get_action(acting.open_action("x", "n1")),
    )
    for own in make_cluster(tmp_path / "own", preempt="partition_prio"):
        job = start(own, "sleep 600", "-N1", "--requeue")
        order = make_order(row)._replace(job=job, ranks=(RankPlacement(0, "n1"),))
        reply = asyncio.run(make_executor("slurm", OPTIONS).send(order))
        assert (reply.outcome, reply.why) == (
            SendOutcome.REFUSED,
            "Slurm preempts by itself: PreemptType = preempt/partition_prio",
        )
        assert state(own, job) == "RUNNING"
