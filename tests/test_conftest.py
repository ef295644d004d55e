"""The set-up of the tests works on other machines than ours."""

import gc
import os
from contextlib import suppress
from pathlib import Path

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
