"""Set up every test: the Hypothesis profile, which files begin first, and that contract suites say what failed."""

import gc
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Generator
from functools import cache, partial
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from tests.fuzz.bounds import load_profile

pytest.register_assert_rewrite("fleetcast.checks")

for variable in [name for name in os.environ if name.startswith("GIT_")]:  # a hook or a rebase names its repository
    del os.environ[variable]
os.environ |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}

ROOT = Path(__file__).parent
MEMORY = Path("/dev/shm")  # a file system in memory
LEAST_FREE_BYTES = 2 * 2**30
HANGS_S = 900.0
SHOWN_S = 0.005  # shorter set-ups are not in the list of `--durations`
SLOW = ("integration", "outside")  # markers of suites that `make test` leaves out
LONGEST = (
    *("integration/crash/test_failpoints.py", "integration/slurm", "integration/test_prometheus.py"),
    *("integration/kubernetes", "integration/crash/test_kills.py", "integration/kafka", "integration/crash"),
    *("integration/console", "integration/test_demo.py", "integration/test_door.py", "integration/test_soak.py"),
    *("cli/test_hostile_options.py", "service/pipeline/test_lost_parts.py"),  # a fork costs least in a young worker
    *("service/test_floods.py", "simulation", "fuzz/test_decoders.py", "laws"),  # the floods mostly wait
    *("cli/test_private_files.py", "service/http", "cli/lab", "deploy", "dashboards", "benchmarks/kit"),
    *("models/demand", "placement", "service", "training"),
)


def pytest_configure(config: pytest.Config) -> None:
    """Load the fixed profile, or the exploring one where a seed (`--hypothesis-seed`) asks for other examples."""
    load_profile(explores=bool(config.getoption("--hypothesis-seed", default="")))
    replace_sigint_handler()
    if config.getoption("markexpr") not in SLOW:
        _keep_folders_in_memory()
    if hasattr(config, "workerinput") and not config.getoption("verbose") > 0 and not config.getoption("xmlpath"):
        for plugin in config.pluginmanager.get_plugins():
            if type(plugin).__name__ == "WorkerInteractor":
                plugin.sendevent = partial(send_news, plugin.sendevent)


def send_news(send: Callable[..., None], name: str, **event: Any) -> None:
    """Send an event of a worker of pytest-xdist, unless it says only that a test began or that its set-up passed.

    Each test sends six events. Sending and reading them takes a millisecond a test, of which these are more than half.
    """
    report = event.get("data", {}) if name == "testreport" else {}
    is_routine = report.get("when") in ("setup", "teardown") and report.get("outcome") == "passed"
    if name not in ("logstart", "logfinish") and not (is_routine and report["duration"] < SHOWN_S):
        send(name, **event)


def replace_sigint_handler() -> None:
    """Replace Python's handler of SIGINT. A loop that had a handler of its own for it leaves Python's behind."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # in the background a shell ignores the signal
        signal.signal(signal.SIGINT, interrupt)


def interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, as Python's own handler of SIGINT does.

    `asyncio.run` replaces only Python's own handler. When it restores that, `signal.signal` formats the replaced one,
    and with it whatever the coroutine returned. Arrays of a whole fleet took a fifth of the time of some tests.
    """
    signal.default_int_handler(number, frame)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Freeze the modules and tests. Otherwise each full run of the garbage collector visits half a million objects.

    All that is imported here lives as long as the process. The service freezes its own modules in the same way.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()  # with the little garbage of the collection: finding it takes each worker a quarter of a second
        gc.enable()


def pytest_xdist_auto_num_workers() -> int:
    """Return one worker more than there are cores: while tests wait for a process or a time-out, another computes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # macOS has none
    return cores + 1


class SourceFilesTogether(LoadFileScheduling):
    """A distribution by files in which the files that read the product's sources share one worker."""

    def _split_scope(self, nodeid: str) -> str:
        return find_scope(nodeid)


def find_scope(nodeid: str) -> str:
    """Return the file of a test, or "sources" if the file reads the product's sources.

    Parsing all sources takes a worker some seconds (`tests/sources.py`).
    """
    file = nodeid.partition("::")[0]
    return "sources" if _reads_sources(ROOT.parent / file) else file


@cache
def _reads_sources(path: Path) -> bool:
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return re.search(r"^from tests\.(?:sources|test_arrows) import ", text, re.MULTILINE) is not None


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """Return the distribution for `--dist loadfile`, None for others, which pytest-xdist makes itself."""
    return SourceFilesTogether(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files that do not name the marker of a slow suite. Each worker would import and collect all others."""
    marker = config.getoption("markexpr")
    is_other = marker in SLOW and collection_path.suffix == ".py" and not _names_marker(collection_path, marker)
    return True if is_other else None


@cache
def _names_marker(path: Path, marker: str) -> bool:
    return f"mark.{marker}" in path.read_text(encoding="utf-8")


def _keep_folders_in_memory() -> None:
    """Make the folders of `tmp_path` in memory if there is room: a thousand fsyncs take 1.5 s on a disk.

    Docker mounts it `noexec`. Tests that write programs there and run them would fail, so the disk is used.
    """
    if not os.access(MEMORY, os.W_OK) or os.statvfs(MEMORY).f_flag & os.ST_NOEXEC:
        return
    if shutil.disk_usage(MEMORY).free >= LEAST_FREE_BYTES:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what is left when the time for exploring is over (`tests/explore.py`)."""
    replace_sigint_handler()
    if time.time() > float(os.environ.get("FLEETCAST_EXPLORE_UNTIL", "inf")):
        pytest.skip("the time for exploring is over")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long go first, so that no worker is left with one at the end. Within a file nothing moves.

    A limit of time ends a test that hangs. It says nothing of a machine that has others to serve, so it is generous.
    When exploring, a seed decides which files go first, so that none is always left out. A test of tests/integration
    without a marker is refused: `make test` does not collect that folder. So is a marker that its file does not name:
    the suite would not collect that file.
    """
    for item in items:
        markers = [name for name in SLOW if item.get_closest_marker(name)]
        if missing := [name for name in markers if not _names_marker(item.path, name)]:
            raise pytest.UsageError(
                f"{item.nodeid}: its file must name pytest.mark.{missing[0]}, so that a suite runs it"
            )
        is_slow = bool(markers)
        if not is_slow and _name(item.path).startswith("integration/"):
            raise pytest.UsageError(f"{item.nodeid}: needs the marker integration or outside, so that a suite runs it")
        if is_slow:
            limit = item.get_closest_marker("timeout")
            item.add_marker(pytest.mark.timeout(max([HANGS_S, *(limit.args if limit else ())])), append=False)
    if seed := os.environ.get("FLEETCAST_EXPLORE_ORDER"):
        files = {item.path: Random(f"{seed} {item.path.relative_to(ROOT)}").random() for item in items}
        items.sort(key=lambda item: files[item.path])
        return
    items.sort(key=lambda item: _rank(_name(item.path)))


@cache
def _name(path: Path) -> str:
    """Return the path below the folder of the tests, or an empty string for a file outside of it."""
    return path.relative_to(ROOT).as_posix() if ROOT in path.parents else ""


@cache
def _rank(name: str) -> int:
    return next((rank for rank, start in enumerate(LONGEST) if name.startswith(start)), len(LONGEST))
