import asyncio
import sys
from pathlib import Path

from service.supervise import SupervisedRole, Supervisor


def test_a_role_that_refuses_its_configuration_stops_everything(tmp_path: Path) -> None:
    roles = [
        SupervisedRole("good", [sys.executable, "-c", "import time; time.sleep(60)"]),
        SupervisedRole("bad", [sys.executable, "-c", "raise SystemExit(2)"]),
    ]
    assert asyncio.run(Supervisor(roles, tmp_path).run()) == 2


def test_a_role_that_dies_is_started_again(tmp_path: Path) -> None:
    marker = tmp_path / "starts"
    script = f"open({str(marker)!r}, 'a').write('x'); raise SystemExit(1)"

    async def scenario() -> Supervisor:
        supervisor = Supervisor([SupervisedRole("r", [sys.executable, "-c", script])], tmp_path)
        work = asyncio.ensure_future(supervisor.run())
        while not marker.exists() or len(marker.read_text()) < 2:
            await asyncio.sleep(0.05)
        supervisor.stop()
        await work
        return supervisor

    supervisor = asyncio.run(scenario())
    assert supervisor.restarts["r"] >= 1
    assert (tmp_path / "pids").read_text().startswith("supervisor ")


async def restarted(role: SupervisedRole, folder: Path, healthy_after_s: float) -> int:
    """How often, when the supervisor is stopped after the first time."""
    supervisor = Supervisor([role], folder, healthy_after_s)
    work = asyncio.ensure_future(supervisor.run())
    while not work.done() and not supervisor.restarts[role.name]:
        await asyncio.sleep(0.02)
    supervisor.stop()
    assert await work == 0
    return supervisor.restarts[role.name]


def test_a_role_that_was_healthy_may_refuse_its_configuration_later(tmp_path: Path) -> None:
    role = SupervisedRole("r", [sys.executable, "-c", "raise SystemExit(2)"])
    assert asyncio.run(restarted(role, tmp_path, healthy_after_s=0.0)) == 1


def test_a_role_that_cannot_be_started_now_is_tried_again(tmp_path: Path) -> None:
    role = SupervisedRole("r", [str(tmp_path / "nothing")])
    assert asyncio.run(restarted(role, tmp_path, healthy_after_s=9.0)) == 1
