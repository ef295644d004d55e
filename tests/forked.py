"""Run a function or the command line in a fork of the process of the tests.

A new process imports our modules for a second, a fork has them. What a process imports is tested in new processes.
"""

import io
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import typing
import warnings
from collections.abc import Callable, Mapping

LIMIT_S = 120.0  # wall, on a machine with much else to do


def run_forked(run: Callable[[], object], environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess:
    """Call a function in a fork and return its exit status and output. A return is status 0, a traceback is 1."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if not child:
            _be_child(run, environment or {}, out.fileno(), err.fileno())
        status = wait_for_child(child, LIMIT_S)
        if status is None:
            raise subprocess.TimeoutExpired(["fork"], LIMIT_S)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
        return subprocess.CompletedProcess(["fork"], status, *texts)


def run_command(*words: str, **environment: str) -> subprocess.CompletedProcess:
    """Run `fleetcast` with these words in a fork."""
    return run_forked(lambda: run_main(*words), environment)


def run_main(*words: str) -> typing.NoReturn:
    """Run `fleetcast` with these words and exit."""
    from fleetcast.cli.main import main

    sys.argv = ["fleetcast", *words]
    main()


def wait_for_child(child: int, limit_s: float) -> int | None:
    """Return the exit status of a child process. After the limit kill it and return None."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _be_child(run: Callable[[], object], environment: Mapping[str, str], out: int, err: int) -> typing.NoReturn:
    status = 1
    try:
        os.environ |= environment
        warnings.resetwarnings()  # the tests make errors of them
        warnings.simplefilter("ignore")
        logging.getLogger().handlers.clear()
        for number, file in ((1, out), (2, err)):
            os.dup2(file, number)
        sys.stdout, sys.stderr = (
            io.TextIOWrapper(io.FileIO(number, "w", closefd=False), "utf-8", "backslashreplace", write_through=True)
            for number in (1, 2)
        )
        run()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
