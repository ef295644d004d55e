"""One heap of the C library for all threads of a role, however the role was started."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

needs_glibc = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="not the C library of GNU")

COUNT = """
import ctypes, os, sys, threading
from pathlib import Path

def count_heaps():
    libc = ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p
    file = libc.fopen(b"heaps.xml", b"w")
    libc.malloc_info(0, ctypes.c_void_p(file))
    libc.fclose(ctypes.c_void_p(file))
    return Path("heaps.xml").read_text().count("<heap ")

def allocate_in_thread():
    thread = threading.Thread(target=bytearray, args=(100_000,))
    thread.start()
    thread.join()
"""
PROGRAM = """
from fleetcast.cli.main import main
os.environ["FLEETCAST_PARENT"] = str(os.getppid())
sys.argv = ["fleetcast", "--version"]
try:
    main()
except SystemExit:
    allocate_in_thread()
    print("heaps", count_heaps())
"""
LAUNCHER = """
from fleetcast.cli import main, run

def fork_roles(config):
    allocate_in_thread()
    print("heaps", count_heaps())
    raise SystemExit

run._start_launcher = fork_roles
sys.argv = ["fleetcast", "run", "--state", "var"]
main.main()
"""
PLAIN = """
allocate_in_thread()
print("heaps", count_heaps())
"""


def count_heaps(script: str, folder: Path) -> int:
    """Return the number of heaps of a new process that ran a script in a folder."""
    done = subprocess.run(
        [sys.executable, "-c", COUNT + script], cwd=folder, capture_output=True, text=True, check=True
    )
    return int(done.stdout.split("heaps ")[1])


@needs_glibc
def test_by_default_a_thread_gets_a_heap(tmp_path: Path) -> None:
    assert count_heaps(PLAIN, tmp_path) > 1


@needs_glibc
@pytest.mark.parametrize("script", [PROGRAM, LAUNCHER], ids=["a program", "the launcher"])
def test_a_role_has_one_heap(script: str, tmp_path: Path) -> None:
    assert count_heaps(script, tmp_path) == 1
