import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.processes import is_running

CHILD = "import time; from fleetcast.fleet.process import watch_parent; watch_parent(); time.sleep(60)"
PARENT = """
import subprocess, sys, time
from fleetcast.fleet.process import make_child_environment
child = subprocess.Popen([sys.executable, "-c", sys.argv[2]], env=make_child_environment(), start_new_session=True)
open(sys.argv[1], "w").write(f"{child.pid}\\n")
time.sleep(60)
"""


def test_a_child_ends_when_its_parent_was_killed(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(note), CHILD])
    while not note.exists() or not note.read_text().endswith("\n"):
        time.sleep(0.02)
    child = int(note.read_text())
    time.sleep(0.5)
    assert is_running(child)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    began = time.monotonic()
    while is_running(child) and time.monotonic() - began < 60:
        time.sleep(0.05)
    assert not is_running(child)


def test_without_the_variable_nobody_is_watched() -> None:
    code = "import threading; from fleetcast.fleet.process import watch_parent; watch_parent(); "
    code += "print(threading.active_count())"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout == "1\n"
