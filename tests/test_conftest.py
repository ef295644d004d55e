"""The set-up of the tests works on other machines than ours."""

import asyncio
import gc
import os
import signal
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest


@pytest.mark.parametrize(("flag", "is_used"), [(0, True), (os.ST_NOEXEC, False)])
def test_folders_are_in_memory_unless_programs_cannot_run_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: int, is_used: bool
) -> None:
    real = os.statvfs(tmp_path)
    fields = [*real[:8], flag, real[9]]
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(fields))
    monkeypatch.setattr(conftest, "MEMORY", tmp_path)
    monkeypatch.setattr(conftest, "LEAST_FREE_BYTES", 0)
    monkeypatch.setattr(os, "environ", {})
    conftest._keep_folders_in_memory()
    assert dict(os.environ) == ({"PYTEST_DEBUG_TEMPROOT": str(tmp_path)} if is_used else {})


def test_workers_are_counted_where_no_process_has_an_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert conftest.pytest_xdist_auto_num_workers() == 2


def test_files_that_read_the_sources_share_a_worker_and_others_do_not() -> None:
    readers = ("test_arrows.py::test_a", "test_plain_texts.py::test_b[c::d]", "cli/test_lab_extra.py::test_e")
    assert {conftest.find_scope(f"tests/{test}") for test in readers} == {"sources"}
    assert conftest.find_scope("tests/test_conftest.py::test_f[g]") == "tests/test_conftest.py"


def test_no_collection_of_garbage_visits_modules_and_tests() -> None:
    hook = conftest.pytest_collection()
    next(hook)
    try:
        assert not gc.isenabled()
    finally:
        with suppress(StopIteration):
            hook.send(None)
    assert gc.isenabled()
    assert gc.get_freeze_count() > len(gc.get_objects())


def test_a_loop_does_not_format_what_its_coroutine_returned() -> None:
    formatted = []

    class Returned:
        def __repr__(self) -> str:
            formatted.append(self)
            return "returned"

    async def answer() -> Returned:
        return Returned()

    asyncio.run(answer())
    assert formatted == []


def test_a_handler_that_a_loop_left_behind_is_replaced_before_the_next_test() -> None:
    async def handle_once() -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, lambda: None)
        loop.remove_signal_handler(signal.SIGINT)

    asyncio.run(handle_once())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    conftest.replace_sigint_handler()
    assert signal.getsignal(signal.SIGINT) is conftest.interrupt


def test_an_interrupt_ends_a_test() -> None:
    with pytest.raises(KeyboardInterrupt):
        conftest.interrupt(signal.SIGINT, None)


@pytest.mark.parametrize(
    ("marker", "file", "is_left_out"),
    [
        ("integration", "slow.py", None),
        ("integration", "fast.py", True),
        ("outside", "slow.py", True),
        ("", "fast.py", None),
        ("not integration", "slow.py", None),
        ("integration", ".", None),
    ],
)
def test_a_slow_suite_imports_the_files_that_name_its_marker(
    tmp_path: Path, marker: str, file: str, is_left_out: bool | None
) -> None:
    (tmp_path / "slow.py").write_text("pytestmark = pytest.mark.integration")
    (tmp_path / "fast.py").write_text("def test_it(): ...")
    config: Any = SimpleNamespace(getoption=lambda _: marker)
    assert conftest.pytest_ignore_collect(tmp_path / file, config) is is_left_out


def test_each_file_of_the_slow_suites_names_its_marker() -> None:
    """`make integration` imports no other file, so a test whose marker comes from elsewhere would run nowhere."""
    files = sorted((conftest.ROOT / "integration").rglob("test_*.py"))
    assert files
    assert [path for path in files if not any(conftest._names_marker(path, name) for name in conftest.SLOW)] == []


def test_a_marker_that_its_file_does_not_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "test_slow.py").write_text("")
    item: Any = SimpleNamespace(
        path=tmp_path / "test_slow.py",
        nodeid="test_slow.py::test_it",
        get_closest_marker=lambda name: pytest.mark.integration.mark if name == "integration" else None,
    )
    with pytest.raises(pytest.UsageError, match=r"must name pytest\.mark\.integration"):
        conftest.pytest_collection_modifyitems([item])


@pytest.mark.parametrize(
    ("name", "event", "is_sent"),
    [
        ("logstart", {}, False),
        ("logfinish", {}, False),
        ("runtest_protocol_complete", {}, True),
        ("testreport", {"when": "setup", "outcome": "passed", "duration": 0.001}, False),
        ("testreport", {"when": "teardown", "outcome": "passed", "duration": 0.5}, True),
        ("testreport", {"when": "teardown", "outcome": "failed", "duration": 0.001}, True),
        ("testreport", {"when": "setup", "outcome": "skipped", "duration": 0.001}, True),
        ("testreport", {"when": "call", "outcome": "passed", "duration": 0.001}, True),
    ],
)
def test_a_worker_sends_what_says_more_than_that_a_test_began(name: str, event: dict[str, Any], is_sent: bool) -> None:
    sent: list[str] = []
    conftest.send_news(lambda name, **_: sent.append(name), name, data=event)
    assert bool(sent) == is_sent
