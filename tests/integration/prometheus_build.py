"""A current Prometheus and its promtool out of their published Go module, for tests and for the benchmark beside us.

Built once a version, in about three minutes of two cores, and kept in the user's cache folder.

    python -m tests.integration.prometheus_build
"""

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

import pytest

VERSION, MODULE_VERSION = "3.15.0", "v0.315.0"
MODULE = "github.com/prometheus/prometheus"
GO_MOD = f"module local.test/prometheus\n\ngo 1.26.0\n\nrequire {MODULE} {MODULE_VERSION}\n"
FLAGS = ("-trimpath", "-tags", "remove_all_sd,netgo", "-ldflags")
LINKED = f"-s -w -X github.com/prometheus/common/version.Version={VERSION}"
SAY_EVERY_S = 20.0

Say = Callable[[str], None]


class BuildError(Exception):
    """Go is missing or a step failed; says which, with the end of what it printed."""


def cache_folder() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "fleetcast" / f"prometheus-{VERSION}"


def prometheus(say: Say) -> Path:
    """The binary in the cache, built first where it is not there: one process builds, others wait. Or BuildError."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    built = folder / "bin" / "prometheus"
    with open(folder / ".lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            _build(folder, built, say)
    return built


def needed_prometheus(say: Say) -> Path:
    """For a test: the binary; without Go the test is skipped, but fails where continuous integration runs it."""
    try:
        return prometheus(say)
    except BuildError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))


def _build(folder: Path, built: Path, say: Say) -> None:
    if shutil.which("go") is None:
        raise BuildError("building Prometheus needs Go, and there is none on the path")
    say(f"building Prometheus {VERSION} into {folder}, once: about 3 minutes")
    source = folder / "source"
    source.mkdir(exist_ok=True)
    (source / "go.mod").write_text(GO_MOD, encoding="utf-8")
    beside = folder / "bin" / "prometheus.tmp"  # a build that is killed leaves no half of a binary under its name
    with _progress(say):
        _go(source, "build", *FLAGS, LINKED, "-o", str(beside), f"{MODULE}/cmd/prometheus")
    beside.rename(built)


def _go(folder: Path, *arguments: str) -> None:
    ended = subprocess.run(
        ["go", *arguments],
        cwd=folder,
        env=os.environ | {"GOFLAGS": "-mod=mod"},
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        raise BuildError(f"go {' '.join(arguments)[:200]} failed: {ended.stderr[-2000:]}")


@contextmanager
def _progress(say: Say) -> Iterator[None]:
    """A line now and then, so that nobody takes a long build for a hang."""
    began, done = time.monotonic(), threading.Event()

    def tell() -> None:
        while not done.wait(SAY_EVERY_S):
            say(f"still building Prometheus {VERSION}: {time.monotonic() - began:.0f} s")

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    print(prometheus(to_stderr))
