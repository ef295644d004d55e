"""Marks of refused starts: found again by request, and removed once nobody needs them."""

import errno
from pathlib import Path

import pytest

from fleetcast.service.held_starts import (
    find_marked_requests,
    get_marks_folder,
    has_marks,
    mark_refused_starts,
    remove_marks,
)


def test_marks_of_active_requests_are_found_and_others_removed(tmp_path: Path) -> None:
    mark_refused_starts(tmp_path, ["r1", "r2"])
    assert find_marked_requests(tmp_path, ["r1", "r3"]) == {"r1"}
    assert len(list(get_marks_folder(tmp_path).iterdir())) == 1


def test_a_mark_is_removed_once_and_others_stay(tmp_path: Path) -> None:
    assert not has_marks(tmp_path)
    mark_refused_starts(tmp_path, ["r1", "r2"])
    remove_marks(tmp_path, ["r1", "r3"])
    remove_marks(tmp_path, ["r1"])
    assert (has_marks(tmp_path), find_marked_requests(tmp_path, ["r1", "r2"])) == (True, {"r2"})


def test_a_disk_that_refuses_the_removal_changes_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    mark_refused_starts(tmp_path, ["r1", "r2"])
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refuse)
        assert find_marked_requests(tmp_path, ["r1"]) == {"r1"}
    assert len(list(get_marks_folder(tmp_path).iterdir())) == 2
    assert find_marked_requests(tmp_path, ["r1"]) == {"r1"}
    assert len(list(get_marks_folder(tmp_path).iterdir())) == 1
