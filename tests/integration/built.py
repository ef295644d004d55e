"""Servers that are built or fetched once a version, and kept in the user's cache folder."""

import fcntl
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

SAY_EVERY_S = 20.0
STEP_S = 7200.0  # the largest is half an hour of a busy machine

Say = Callable[[str], None]
Built = TypeVar("Built")


class BuildError(Exception):
    """A tool is missing or a step failed; says which, with the end of what it printed."""


def cache_folder(name: str) -> Path:
    """`name` with its version, e.g. kafka-4.3.1."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "fleetcast" / name


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """The folder is there and nobody else works in it: one process builds, others wait."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def told(say: Say, what: str) -> Iterator[None]:
    """A line now and then, so that nobody takes a long build for a hang. `what`: "building Kubernetes 1.36.3"."""
    began, done = time.monotonic(), threading.Event()

    def tell() -> None:
        while not done.wait(SAY_EVERY_S):
            say(f"still {what}: {time.monotonic() - began:.0f} s")

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()


def step(command: list[str], folder: Path | None = None) -> str:
    """What a command printed. Raises BuildError when it fails or is not there."""
    if shutil.which(command[0]) is None:
        raise BuildError(f"{command[0]} is needed, and there is none on the path")
    environment = os.environ | {"GOFLAGS": "-mod=mod"}
    ended = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=STEP_S
    )
    if ended.returncode:
        raise BuildError(f"{' '.join(command)[:200]} failed: {(ended.stdout + ended.stderr)[-2000:]}")
    return ended.stdout


def needed(build: Callable[[Say], Built], request: pytest.FixtureRequest) -> Built:
    """For a test: what `build` makes; where it cannot, the test is skipped, but fails in continuous integration."""
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def say(line: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\n{line}", flush=True)

    try:
        return build(say)
    except BuildError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(build: Callable[[Say], object]) -> None:
    """Build now, as a command: the cache is filled before anybody waits for it."""
    try:
        print(build(to_stderr))
    except BuildError as error:
        sys.exit(str(error))
