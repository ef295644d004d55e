"""A function in a fork ends as it would in a process of its own."""

import os
import signal
import sys

import pytest

from tests.forked import run_command, run_forked


def test_its_output_and_environment_are_its_own() -> None:
    def run() -> None:
        print(os.environ["OF_THE_FORK"])
        print("wrong", file=sys.stderr)
        raise SystemExit(3)

    ended = run_forked(run, {"OF_THE_FORK": "é"})
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "é\n", "wrong\n")
    assert "OF_THE_FORK" not in os.environ


def test_a_failure_and_a_kill_are_seen() -> None:
    failed = run_forked(lambda: 1 // 0)
    assert failed.returncode == 1
    assert failed.stderr.endswith("ZeroDivisionError: integer division or modulo by zero\n")
    assert run_forked(lambda: os.kill(os.getpid(), signal.SIGKILL)).returncode == -signal.SIGKILL
    assert run_forked(lambda: sys.exit("why")).returncode == 1


@pytest.mark.parametrize(("words", "status"), [(("--version",), 0), (("--no-such-option",), 2)])
def test_the_command_line_ends_with_its_status(words: tuple[str, ...], status: int) -> None:
    assert run_command(*words).returncode == status
