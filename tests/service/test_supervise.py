import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from fleetcast.service.exit_reason import record_exit_reason
from fleetcast.service.supervise import SupervisedRole, Supervisor

READY = "from fleetcast.fleet.process import report_ready; report_ready(); "
PAUSE_S = 0.01


def python(name: str, script: str) -> SupervisedRole:
    return SupervisedRole(name, [sys.executable, "-c", script])


def test_a_role_that_refuses_its_configuration_stops_everything(tmp_path: Path) -> None:
    roles = [python("good", READY + "import time; time.sleep(60)"), python("bad", "raise SystemExit(2)")]
    assert asyncio.run(Supervisor(roles, tmp_path).run()) == 2


def test_a_slow_start_is_no_health(tmp_path: Path) -> None:
    """A role that takes long until it refuses its configuration is not taken for one that worked."""
    role = python("slow", "import time; time.sleep(1.2); raise SystemExit(2)")
    supervisor = Supervisor([role], tmp_path, first_pause_s=PAUSE_S)
    assert asyncio.run(supervisor.run()) == 2
    assert supervisor.restarts["slow"] == 0


def test_a_role_that_is_never_ready_ends_the_supervisor_with_its_own_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ZeroDivisionError), record_exit_reason(tmp_path, "r"):
        raise ZeroDivisionError("of the supervisor before")
    script = (
        "from pathlib import Path; from fleetcast.service.exit_reason import record_exit_reason\n"
        f"with record_exit_reason(Path({str(tmp_path)!r}), 'r'): raise ValueError('the ledger is upside down')"
    )
    supervisor = Supervisor([python("r", script)], tmp_path, first_pause_s=PAUSE_S, most_starts=3)
    assert asyncio.run(supervisor.run()) == 1
    assert supervisor.restarts["r"] == 2
    said = caplog.messages[-1]
    assert "r ended 3 times before it was ready, the last time with 1" in said
    assert "the ledger is upside down" in said


def test_a_reason_of_an_earlier_supervisor_is_not_given_for_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ZeroDivisionError), record_exit_reason(tmp_path, "r"):
        raise ZeroDivisionError("of the supervisor before")
    supervisor = Supervisor([python("r", "raise SystemExit(1)")], tmp_path, first_pause_s=PAUSE_S, most_starts=1)
    assert asyncio.run(supervisor.run()) == 1
    assert "recorded no reason" in caplog.messages[-1]
    assert "before" not in caplog.messages[-1].partition("ready")[2]


async def restarted(role: SupervisedRole, folder: Path, times: int) -> Sequence[int]:
    """Stop the supervisor after so many restarts. Returns (restarts, its exit code)."""
    supervisor = Supervisor([role], folder, first_pause_s=PAUSE_S, most_starts=2)
    work = asyncio.ensure_future(supervisor.run())
    while not work.done() and supervisor.restarts[role.name] < times:
        await asyncio.sleep(0.02)
    supervisor.stop()
    return supervisor.restarts[role.name], await work


def test_a_role_that_was_ready_once_is_restarted_for_ever(tmp_path: Path) -> None:
    """Also where it cannot start any more, or refuses a configuration that has changed since."""
    once = tmp_path / "once"
    script = (
        f"import os, sys\nif not os.path.exists({str(once)!r}):\n    {READY}\n    open({str(once)!r}, 'w').close()\n"
        "sys.exit(2)"
    )
    assert asyncio.run(restarted(python("r", script), tmp_path, 4)) == (4, 0)


def test_a_role_that_cannot_be_started_at_all_counts(tmp_path: Path) -> None:
    role = SupervisedRole("r", [str(tmp_path / "nothing")])
    assert asyncio.run(restarted(role, tmp_path, 9)) == (1, 1)


def test_the_processes_are_listed(tmp_path: Path) -> None:
    async def scenario() -> None:
        supervisor = Supervisor([python("r", READY + "import time; time.sleep(60)")], tmp_path)
        work = asyncio.ensure_future(supervisor.run())
        while not (tmp_path / "pids").exists():
            await asyncio.sleep(0.02)
        supervisor.stop()
        await work

    asyncio.run(scenario())
    assert (tmp_path / "pids").read_text().startswith("supervisor ")
