import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetcast.fleet import failpoints, files

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def points() -> Iterator[list[str]]:
    """The failpoints that were reached."""
    reached: list[str] = []

    def note(point: str) -> float:
        reached.append(point)
        return failpoints.KEEP_ALL

    failpoints.set_hook(note)
    yield reached
    failpoints.set_hook(None)


def test_a_file_is_replaced_in_an_order_that_a_power_cut_cannot_hurt(tmp_path: Path, points: list[str]) -> None:
    files.replace_file(tmp_path / "mark", [b"one", b"two"], "mark")
    assert (tmp_path / "mark").read_bytes() == b"onetwo"
    assert files.list_names(tmp_path) == ["mark"]
    before = [point.removeprefix("mark.before_") for point in points if ".before_" in point]
    assert before == ["write", "write", "sync", "rename", "sync_folder"]
    assert set(points) <= set(failpoints.POINTS)


def test_a_replacement_without_sync_is_a_rename_alone(tmp_path: Path, points: list[str]) -> None:
    files.replace_file(tmp_path / "board", [b"x"], "board", sync=False)
    assert points == ["board.before_write", "board.after_write", "board.before_rename", "board.after_rename"]


def test_a_full_disk_leaves_the_old_file_and_no_half(tmp_path: Path) -> None:
    files.replace_file(tmp_path / "mark", [b"old"], "mark")
    failpoints.set_hook(failpoints.parse_failpoints("mark.before_sync=error"))
    try:
        with pytest.raises(OSError, match=r"No space left on device \(failpoint mark\.before_sync\)") as caught:
            files.replace_file(tmp_path / "mark", [b"new"], "mark")
    finally:
        failpoints.set_hook(None)
    assert caught.value.errno == errno.ENOSPC
    assert (tmp_path / "mark").read_bytes() == b"old"
    assert files.list_names(tmp_path) == ["mark"]


def test_a_write_that_breaks_off_says_how_far_it_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, room = os.write, [4]

    def limited(number: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = real(number, data[: room[0]])
        room[0] -= written
        return written

    file = files.create_append_only_file(tmp_path / "api-1.seg", "inbox")
    monkeypatch.setattr(os, "write", limited)
    with pytest.raises(files.ShortWrite) as caught:
        file.write(b"123456")
    monkeypatch.undo()
    assert (caught.value.written, caught.value.errno) == (4, errno.ENOSPC)
    file.truncate(2)
    file.write(b"xy")
    file.close()
    assert (tmp_path / "api-1.seg").read_bytes() == b"12xy"


def test_a_file_is_closed_once_and_then_takes_nothing(tmp_path: Path) -> None:
    file = files.create_file(tmp_path / "a", "snapshot")
    file.close()
    file.close()
    assert file.closed
    with pytest.raises(ValueError, match="closed already"):
        file.write(b"x")


def test_a_folder_that_is_made_has_its_name_on_disk_and_those_above_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(files, "sync_folder", lambda folder, area: synced.append(folder))
    files.make_folder(tmp_path / "state" / "inbox", "inbox")
    assert synced == [tmp_path, tmp_path / "state"]
    files.make_folder(tmp_path / "state" / "inbox", "inbox")  # who made it may have been killed before it was synced
    assert synced == [tmp_path, tmp_path / "state", tmp_path / "state"]


def test_one_holder_of_a_lock_at_a_time(tmp_path: Path) -> None:
    give_back = files.lock(tmp_path / "lock")
    with pytest.raises(BlockingIOError, match="another process holds"):
        files.lock(tmp_path / "lock")
    give_back()
    files.lock(tmp_path / "lock")()


def test_a_process_may_hold_its_own_lock_twice(tmp_path: Path) -> None:
    first = files.lock(tmp_path / "lock", by_process=True)
    second = files.lock(tmp_path / "lock", by_process=True)
    assert "another process holds" in another_process_takes(tmp_path / "lock")
    second()
    first()
    assert another_process_takes(tmp_path / "lock") == ""


def another_process_takes(path: Path) -> str:
    """What it says of the lock; nothing where it gets it."""
    program = (
        f"from pathlib import Path; from fleetcast.fleet import files; files.lock(Path({str(path)!r}), by_process=True)"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False).stderr


def test_a_link_takes_the_place_of_what_has_its_name(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"new")
    (tmp_path / "b").write_bytes(b"left by a save that failed")
    files.link(tmp_path / "a", tmp_path / "b", "snapshot")
    assert (tmp_path / "b").read_bytes() == b"new"


def test_what_is_not_there_has_no_size_and_no_names(tmp_path: Path) -> None:
    assert files.read_size_bytes(tmp_path / "none") == 0
    assert files.list_names(tmp_path / "none") == []
    files.remove_tree(tmp_path / "none")


@pytest.mark.parametrize(
    "text",
    [
        *("inbox.after_write", "inbox.after_write=burn", "inbox.after_write:0=kill", "inbox.after_write:x=kill"),
        *("inbox.after_lunch=kill", "inbox.after_write=torn", "=kill", "inbox.before_write:=kill"),
    ],
)
def test_a_setting_that_would_never_act_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no failpoint"):
        failpoints.parse_failpoints(text)


PROGRAM = """
import sys
from pathlib import Path
from fleetcast.fleet import files
file = files.create_append_only_file(Path(sys.argv[1]), "inbox")
for part in (b"11111111", b"22222222", b"33333333"):
    try:
        file.write(part)
    except OSError as error:
        print(error)
"""


@pytest.mark.parametrize(
    ("setting", "status", "content"),
    [
        ("inbox.before_write:2=kill", -9, b"11111111"),
        ("inbox.after_write:2=kill", -9, b"1111111122222222"),
        ("inbox.before_write:2=torn", -9, b"111111112222"),
        ("inbox.before_write:2=error", 0, b"1111111133333333"),
        ("board.before_write=kill,inbox.before_write:2=error", 0, b"1111111133333333"),
        ("inbox.before_write:4=kill", 0, b"111111112222222233333333"),
        ("", 0, b"111111112222222233333333"),
    ],
)
def test_the_environment_arms_a_process(tmp_path: Path, setting: str, status: int, content: bytes) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), failpoints.VARIABLE: setting}
    path = tmp_path / "api-1.seg"
    ended = subprocess.run([sys.executable, "-c", PROGRAM, str(path)], env=environment, check=False, timeout=60)
    assert ended.returncode == status
    assert path.read_bytes() == content


def test_every_failpoint_is_reached_by_some_writer() -> None:
    """Areas of the list are areas of the code: a name that nobody reaches would make tests that cannot fail."""
    packages = ("ingest", "features", "models", "placement", "service", "schedulers")
    code = "".join(path.read_text() for package in packages for path in (ROOT / package).rglob("*.py"))
    for area in failpoints.OPERATIONS:
        assert f'"{area}"' in code or f'"{area}.' in code, area
