"""Roles that the launcher forks: they start, report, end, are restarted, and hold nothing of the supervisor."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes import is_running

SCRIPT = """
import asyncio, json, os, signal, sys, threading, time
from pathlib import Path
from fleetcast.fleet.process import report_ready
from fleetcast.service.launcher import fork_launcher
from fleetcast.service.supervise import SupervisedRole, Supervisor

folder = Path(sys.argv[1])
fork, refusals = os.fork, 2
def refuse_some():
    global refusals
    if os.getppid() != began or refusals == 0 or "refused" not in sys.argv:
        return fork()
    refusals -= 1
    raise BlockingIOError(11, "Resource temporarily unavailable")
began = os.getpid()
os.fork = refuse_some
begin_session = os.setsid
def signal_at_once():
    begin_session()
    if os.getppid() != began and "early" in sys.argv and not (folder / "signalled").exists():
        (folder / "signalled").touch()
        os.kill(os.getpid(), signal.SIGTERM)
os.setsid = signal_at_once
name = fork_launcher(["json"])
if isinstance(name, str):
    number = len(list(folder.glob(f"{name}-*")))
    row = {"pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0), "files": os.listdir("/proc/self/fd")}
    row |= {"threads": [thread.name for thread in threading.enumerate()], "number": number}
    row |= {"signals": [str(signal.getsignal(n)) for n in (signal.SIGTERM, signal.SIGCHLD)]}
    (folder / f".{name}").write_text(json.dumps(row))
    (folder / f".{name}").rename(folder / f"{name}-{number}")
    if name == "bad":
        sys.exit(2)
    if name != "never":
        report_ready()
    while not (folder / f"end-{name}-{number}").exists():
        time.sleep(0.01)
    sys.exit(3)
held = open(folder / "held", "w")
command = [sys.executable, "-c", "import sys, time; open(sys.argv[1], 'w').close(); time.sleep(60)"]
roles = [SupervisedRole(role, [*command, str(folder / f"{role}-new")]) for role in sys.argv[2:]]
supervisor = Supervisor(roles, folder, first_pause_s=0.01, launcher=name)
code = asyncio.run(supervisor.run())
(folder / "done").write_text(json.dumps([code, supervisor.restarts]))
"""
QUITS = """
import os, select, socket
from fleetcast.service.launcher import fork_launcher

launcher = fork_launcher(["json"])
if not isinstance(launcher, str):
    socket.send_fds(launcher._line, [b"a"], [os.pipe()[1]])
    select.select([launcher._line], [], [])
os._exit(0)
"""
LIMIT_S = 60.0
try:
    os.close(os.pidfd_open(os.getpid()))
    CAN_WATCH_PROCESSES = True
except (AttributeError, OSError):  # as in some sandboxes: a role then polls for its launcher
    CAN_WATCH_PROCESSES = False


def until(check: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + LIMIT_S
    while not (found := check()):
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.01)
    return found


class World:
    """A supervisor in a process of its own."""

    def __init__(self, folder: Path, *roles: str) -> None:
        self.folder = folder
        self.process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(folder), *roles])
        self.known: set[int] = set()

    def role(self, name: str, number: int = 0) -> dict[str, Any]:
        path = self.folder / f"{name}-{number}"
        until(path.exists)
        row: dict[str, Any] = json.loads(path.read_text())
        self.known.add(row["pid"])
        return row

    def pids(self, *names: str) -> dict[str, int]:
        """Return process ids by name once the supervisor has listed all of `names`. A role may run before that."""
        file = self.folder / "pids"

        def listed() -> dict[str, int]:
            rows = (line.split() for line in file.read_text().splitlines()) if file.exists() else ()
            found = {name: int(pid) for name, pid in rows}
            return found if set(names) <= found.keys() else {}

        found: dict[str, int] = until(listed)
        return found

    def stop(self) -> list[Any]:
        self.process.terminate()
        assert self.process.wait(LIMIT_S) == 0
        done: list[Any] = json.loads((self.folder / "done").read_text())
        return done

    def clean(self) -> None:
        self.process.kill()
        self.process.wait()
        for pid in self.known:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def started(*roles: str) -> World:
        worlds.append(World(tmp_path, *roles))
        return worlds[-1]

    yield started
    for world in worlds:
        world.clean()


def test_a_role_has_a_session_and_signals_of_its_own_and_no_file_of_the_supervisor(start: Any) -> None:
    world = start("a", "b")
    rows = [world.role("a"), world.role("b")]
    pids = world.pids("launcher", "a", "b")
    assert {row["pid"] for row in rows} == {pids["a"], pids["b"]}
    for row in rows:
        assert row["parent"] == pids["launcher"]
        assert row["session"] == row["pid"]
        assert row["signals"] == ["0", "0"] or row["signals"] == ["Handlers.SIG_DFL"] * 2
        assert row["threads"] == ["MainThread", "parent"]
        files = 6 if CAN_WATCH_PROCESSES else 5
        assert len(row["files"]) == files, "stdin, stdout, stderr, the report, the launcher, and the listing itself"
    assert world.stop() == [0, {"a": 0, "b": 0}]
    assert not any(is_running(pid) for pid in pids.values())


def test_a_role_that_ends_is_restarted_with_its_exit_code(start: Any, capfd: pytest.CaptureFixture[str]) -> None:
    world = start("a", "b")
    first, other = world.role("a"), world.role("b")
    (world.folder / "end-a-0").touch()
    second = world.role("a", 1)
    os.kill(second["pid"], signal.SIGKILL)
    third = world.role("a", 2)
    assert len({first["pid"], second["pid"], third["pid"]}) == 3
    assert is_running(other["pid"])
    assert world.stop()[1] == {"a": 2, "b": 0}
    said = capfd.readouterr().err
    assert "a ended with 3" in said
    assert "a ended with -9" in said


def test_a_role_that_refuses_its_configuration_stops_everything(start: Any) -> None:
    world = start("a", "bad")
    assert world.process.wait(LIMIT_S) == 0
    assert json.loads((world.folder / "done").read_text()) == [2, {"a": 0, "bad": 0}]


def test_a_fork_that_is_refused_counts_as_a_start(start: Any, capfd: pytest.CaptureFixture[str]) -> None:
    world = start("refused")
    world.role("refused")
    assert world.stop() == [0, {"refused": 2}]
    assert "refused ended with cannot fork: Resource temporarily unavailable" in capfd.readouterr().err


def test_a_signal_to_a_role_that_was_just_forked_is_not_lost(start: Any, capfd: pytest.CaptureFixture[str]) -> None:
    world = start("early")
    world.role("early")
    assert world.stop() == [0, {"early": 1}]
    assert "early ended with -15" in capfd.readouterr().err


@pytest.mark.parametrize("closed", ["", ">&-"])
def test_a_launcher_ends_silently_with_a_supervisor_that_left_messages_unread(closed: str) -> None:
    """Also where standard output was closed before the program began."""
    command = ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, QUITS]
    done = subprocess.run(command, stderr=subprocess.PIPE, timeout=LIMIT_S, check=True)
    assert done.stderr == b""


def test_the_roles_end_with_a_supervisor_that_is_killed(start: Any) -> None:
    world = start("a", "b")
    pids = [world.role("a")["pid"], world.role("b")["pid"], world.pids("launcher")["launcher"]]
    world.process.kill()
    world.process.wait()
    until(lambda: not any(is_running(pid) for pid in pids))


def test_without_its_launcher_a_supervisor_starts_new_programs(start: Any) -> None:
    world = start("a", "b")
    pids = [world.role("a")["pid"], world.role("b")["pid"]]
    os.kill(world.pids("launcher")["launcher"], signal.SIGKILL)
    until(lambda: (world.folder / "a-new").exists() and (world.folder / "b-new").exists())
    until(lambda: not any(is_running(pid) for pid in pids))
    world.known |= set(world.pids("a", "b").values())
    assert world.stop()[0] == 0
