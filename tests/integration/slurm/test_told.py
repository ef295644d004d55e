"""The adapter `slurm` in a real adapters role tells a real Slurm of its nodes."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.slurm.cluster import SlurmCluster
from tests.integration.slurm.told import STALE_S, Telling

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

NODES = ("n1", "n2", "n3", "n4")
REASON = "[fleetcast] p_fail_1h=0.90 cause=high_risk"
LOW = (False, "", "a100,risk_low")
HIGH = (True, REASON, "a100,risk_high")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    made = SlurmCluster(tmp_path_factory.mktemp("told") / "cluster", accounting=False, features="a100")
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture
def telling(slurm: SlurmCluster, tmp_path: Path) -> Iterator[Telling]:
    """All nodes have our feature beside that of slurm.conf; in the end nothing of ours is left."""
    made = Telling(slurm, tmp_path, NODES)
    try:
        made.publish()
        for name in NODES:
            made.until(name, *LOW)
        yield made
    finally:
        made.end()
        made.cli("withdraw", "slurm")
        for name in NODES:
            assert made.node(name) == (False, "", "a100")


def test_a_band_becomes_a_drain_and_a_low_one_lifts_it(telling: Telling) -> None:
    job = telling.slurm.submit("sleep 300", "-N1", "--nodelist=n1", "--gres=gpu:1")
    telling.slurm.until("it runs", lambda: telling.slurm.job(job)["job_state"] == "RUNNING")
    telling.publish(n1=0.9)
    print(f"band to drain: {telling.until('n1', *HIGH):.2f} s; ", end="")
    assert telling.slurm.job(job)["job_state"] == "RUNNING"  # what runs goes on
    assert telling.node("n2") == LOW
    telling.publish(n1=0.1)
    telling.until("n1", True, REASON, "a100,risk_elevated")  # that is not enough
    telling.publish()
    telling.until("n1", *LOW)
    telling.slurm.run("scancel", job)


def test_what_an_operator_drained_is_left_alone(telling: Telling) -> None:
    telling.slurm.run("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=fan 3 is slow")
    telling.publish(n2=0.9)
    telling.until("n2", True, "fan 3 is slow", "a100,risk_high")
    telling.publish()
    telling.until("n2", True, "fan 3 is slow", "a100,risk_low")
    telling.publish(n1=0.9)
    telling.until("n1", *HIGH)
    telling.slurm.run("scontrol", "update", "NodeName=n1", "Reason=mine now")  # and what he took over
    telling.publish()
    telling.until("n1", True, "mine now", "a100,risk_low")
    telling.cli("withdraw", "slurm")
    assert [telling.node(name)[:2] for name in ("n1", "n2")] == [(True, "mine now"), (True, "fan 3 is slow")]
    for name in ("n1", "n2"):
        telling.slurm.run("scontrol", "update", f"NodeName={name}", "State=RESUME")


def test_features_that_a_reconfiguration_took_come_back(telling: Telling) -> None:
    telling.publish(n1=0.9)
    telling.until("n1", *HIGH)
    telling.slurm.run("scontrol", "reconfigure")
    telling.until("n1", True, REASON, "a100")
    telling.publish(n1=0.9)
    telling.until("n1", *HIGH)
    telling.until("n2", *LOW)


def test_an_old_board_takes_features_back_and_lifts_no_drain(telling: Telling) -> None:
    telling.publish(n1=0.9)
    telling.until("n1", *HIGH)
    telling.publish(age_s=2 * STALE_S, n1=0.9)
    telling.until("n1", True, REASON, "a100")
    telling.until("n2", False, "", "a100")


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_while_we_stand_still_or_are_dead_jobs_go_on_and_an_operator_has_the_last_word(
    telling: Telling, how: signal.Signals
) -> None:
    slurm = telling.slurm

    def runs(job: str) -> bool:
        return bool(slurm.job(job)["job_state"] == "RUNNING")

    before = slurm.submit("sleep 300", "-N1", "--nodelist=n1", "--gres=gpu:1")
    slurm.until("it runs", lambda: runs(before))
    telling.publish(n1=0.9)
    telling.until("n1", *HIGH)
    telling.process.send_signal(how)
    waiting = slurm.submit("sleep 300", "-N1", "--nodelist=n1", "--gres=gpu:1")
    elsewhere = slurm.submit("sleep 300", "-N1", "--nodelist=n2", "--gres=gpu:1")
    slurm.until("one elsewhere runs", lambda: runs(elsewhere))
    assert (runs(before), runs(waiting), telling.node("n1")) == (True, False, HIGH)
    slurm.run("scontrol", "update", "NodeName=n1", "State=RESUME")
    slurm.until("the one that waits runs", lambda: runs(waiting))
    slurm.run("scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=fan 3 is slow")
    if how == signal.SIGSTOP:
        telling.process.send_signal(signal.SIGCONT)
    else:
        telling.process.wait()
        telling.start()
    telling.publish(n1=0.9, n3=0.9)
    telling.until("n3", *HIGH)
    telling.until("n1", True, "fan 3 is slow", "a100,risk_high")
    telling.publish()
    telling.until("n3", *LOW)
    telling.until("n1", True, "fan 3 is slow", "a100,risk_low")
    assert runs(before)
    for job in (before, waiting, elsewhere):
        slurm.run("scancel", job)
    slurm.run("scontrol", "update", "NodeName=n1", "State=RESUME")


def test_a_slurmctld_that_stands_still_or_is_gone_holds_up_nothing(telling: Telling) -> None:
    controller = telling.slurm.processes["slurmctld"]
    controller.send_signal(signal.SIGSTOP)
    try:
        telling.publish(n1=0.9)
        telling.slurm.until("an error", lambda: telling.standing()["error"])
        began = time.monotonic()
        telling.cli("list")
        assert time.monotonic() - began < 60
    finally:
        controller.send_signal(signal.SIGCONT)
    telling.publish(n1=0.9)
    telling.until("n1", *HIGH)
    telling.slurm.kill("slurmctld")
    try:
        telling.publish()
        telling.slurm.until("an error", lambda: telling.standing()["error"])
    finally:
        telling.slurm.start_controller()
        telling.slurm.until("slurmctld answers", lambda: len(telling.slurm.states()) == len(NODES))
    telling.publish()
    telling.until("n1", *LOW, limit_s=150.0)
