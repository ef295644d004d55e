"""The adapter `slurm` and its port tell a real Slurm of jobs, and of a thousand nodes, without the role around them."""

import asyncio
import os
import re
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from fleetcast.clients.slurm_control import ControlledNode, NodeChange, ScontrolCommands
from fleetcast.clients.slurm_rest import SlurmRestAccount, SlurmRestControl
from fleetcast.schedulers.adapter import Door, Write, WriteOutcome
from fleetcast.schedulers.bands import HIGH, LEVELS
from fleetcast.schedulers.slurm import FEATURE
from fleetcast.schedulers.weather import StartOutlook, Weather
from fleetcast.service.doors import make_door
from fleetcast.service.ports.slurm import SlurmPort
from tests.integration.slurm.cluster import SlurmCluster
from tests.schedulers.small_fleet import NOW_MS, outlook, start

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

MANY = tuple(f"x{number:04}" for number in range(1, 1001))
T = TypeVar("T")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    folder = tmp_path_factory.mktemp("jobs") / "cluster"
    made = SlurmCluster(folder, accounting=False, more_nodes="x[0001-1000]", features="a100")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SLURM_CONF", made.environment["SLURM_CONF"])
            yield made
    finally:
        made.stop()


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def door(**options: Any) -> Door:
    return make_door("slurm", {"features": False, "timeout_s": 10.0, **options})


async def step(opened: Door, weather: Weather | None) -> list[tuple[Write, WriteOutcome]]:
    """As the host does: read, wish, write."""
    wishes = list(opened.adapter.wishes(weather, await opened.port.read()))
    return list(zip(wishes, await opened.port.write(wishes), strict=True))


def weather(starts: dict[str, StartOutlook] | None = None) -> Weather:
    return Weather(1, NOW_MS, NOW_MS, outlook({}), None, None, starts)


def shown(slurm: SlurmCluster, number: str, field: str) -> str:
    found = re.search(rf"(?: |^){field}=(.*?)(?: \w+=|$)", slurm.run("scontrol", "show", "job", "-o", number))
    return found[1].strip() if found else ""


def test_a_job_that_waits_shows_when_it_starts_and_nothing_once_it_runs(slurm: SlurmCluster) -> None:
    opened = door(comments=True)
    waits, mine = slurm.submit("sleep 60", "--hold"), slurm.submit("sleep 60", "--hold", "--comment=my own | words")
    array = slurm.submit("sleep 60", "--hold", "--array=1-3")
    starts = {number: start(30, 70) for number in (waits, mine, array, f"{array}_1")}
    assert [outcome for _, outcome in run(step(opened, weather(starts=starts)))] == [WriteOutcome.DONE]
    assert shown(slurm, waits, "Comment") == "[fleetcast] start 2025-10-09T09:23 (p90 2025-10-09T10:03)"
    assert shown(slurm, mine, "Comment") == "my own | words"
    assert run(step(opened, weather(starts=starts))) == []
    slurm.run("scontrol", "release", waits)
    slurm.until("it runs", lambda: shown(slurm, waits, "JobState") == "RUNNING")
    assert len(run(step(opened, weather(starts=starts)))) == 1
    assert shown(slurm, waits, "Comment") == ""
    for number in (waits, mine, array):
        slurm.run("scancel", number)


class Counting(ScontrolCommands):
    """Counts the updates of nodes."""

    def __init__(self) -> None:
        super().__init__(timeout_s=10.0)
        self.updates = 0

    async def change_nodes(self, names: Sequence[str], change: NodeChange) -> None:
        self.updates += 1
        await super().change_nodes(names, change)


def test_a_thousand_nodes_are_told_in_few_calls(slurm: SlurmCluster) -> None:
    slurm.run("scontrol", "update", "NodeName=x[0500-0509]", "AvailableFeatures=rack7", "ActiveFeatures=rack7")
    control = Counting()
    opened = door(features=True)._replace(port=SlurmPort(control))
    risk = {name: (0.01, 0.1)[number % 2] for number, name in enumerate(MANY)}
    nodes = outlook(risk)
    assert LEVELS.index(HIGH) not in nodes.level
    began = time.monotonic()
    done = run(step(opened, replace(weather(), nodes=nodes)))
    print(f"1,000 nodes: {control.updates} calls, {time.monotonic() - began:.2f} s; ", end="")
    assert {(write.field, outcome) for write, outcome in done} == {(FEATURE, WriteOutcome.DONE)}
    assert len(done) == 1000
    assert control.updates <= 10
    found = {node.name: node for node in run(control.read_nodes())}
    assert found["x0500"].active == ("rack7", "risk_elevated")
    assert found["x0999"].available == found["x0999"].active == ("risk_low",)
    assert len(run(step(opened, None))) == 1000
    assert control.updates <= 20
    assert run(control.read_nodes()) == [
        replace(node, available=others, active=others)
        for node in found.values()
        for others in [tuple(name for name in node.available if not name.startswith("risk_"))]
    ]


def test_slurmrestd_tells_the_same_as_the_commands_and_says_what_it_cannot(slurm: SlurmCluster) -> None:
    slurm.environment["SLURMRESTD_SECURITY"] = "disable_user_check"
    socket = slurm.folder / "rest.sock"
    slurm.spawn("slurmrestd", "slurmrestd", "-a", "rest_auth/local", "-s", "openapi/v0.0.38", f"unix:{socket}")
    slurm.until("slurmrestd listens", socket.exists)
    slurm.run("scontrol", "update", "NodeName=n4", "State=DRAIN", "Reason=[fleetcast] p", 'Extra={"rack": 7}')
    waits = slurm.submit("sleep 60", "--hold", "--comment=mine")
    control = SlurmRestControl(SlurmRestAccount(f"unix:{socket}"), timeout_s=10.0)

    async def both() -> None:
        try:
            by_commands = {node.name: node for node in await ScontrolCommands(timeout_s=10.0).read_nodes()}
            by_rest = {node.name: node for node in await control.read_nodes()}
            assert by_rest == by_commands
            assert by_rest["n4"] == ControlledNode("n4", True, "[fleetcast] p", ("a100",), ("a100",), '{"rack": 7}')
            told = {one.id: one for one in await control.read_jobs()}
            assert (told[waits].state, told[waits].comment) == ("PENDING", "mine")
            await control.change_job(waits, comment="[fleetcast] start")
            port = SlurmPort(control)
            outcomes = await port.write([Write("n4", FEATURE, "risk_low", None, "")])
            assert outcomes == [WriteOutcome.REFUSED]  # v0.0.38 cannot write nodes
        finally:
            await control.close()

    run(both())
    assert shown(slurm, waits, "Comment") == "[fleetcast] start"
    slurm.kill("slurmrestd")
    slurm.run("scontrol", "update", "NodeName=n4", "State=RESUME", "Extra=")
    slurm.run("scancel", waits)
    assert os.environ["SLURM_CONF"] == slurm.environment["SLURM_CONF"]


def test_a_comment_with_rows_in_it_gives_no_other_job_a_comment(slurm: SlurmCluster) -> None:
    """The attack: a line break in `--comment`, then the whole row of another user's job."""
    other = slurm.submit("sleep 600", "--hold", "--comment=theirs")
    fields = (other, "PENDING", "1", "0", "1", "1", "", "")
    rows = ["".join(field + end for field in fields) for end in ("\x1f", "|", "")]
    attack = slurm.submit(
        "sleep 600", "--hold", "--comment=" + "\n".join(["hello", *rows]), "--job-name=ExcNodeList=n3 "
    )
    opened = door(comments=True)
    for given in (weather(starts={other: start(30, 70)}), Weather(1, 0, NOW_MS), None):
        assert [write for write, _ in run(step(opened, given)) if other in write.key] == []
    assert (shown(slurm, other, "Priority"), shown(slurm, other, "Comment")) == ("0", "theirs")
    for number in (other, attack):
        slurm.run("scancel", number)
