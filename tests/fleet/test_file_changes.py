"""Changes of files end a wait at once, none is missed, and a reader still looks where the kernel reports nothing."""

import asyncio
import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet import file_changes
from fleetcast.fleet.file_changes import APPENDED, CONTENT, LISTED, REPLACED, FileChanges
from tests.fuzz.bounds import examples

LONG_S = 3600.0  # longer than any test: what ends a wait is a change
PATIENCE_S = 60.0


@pytest.fixture
def rests_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports alone end a wait."""
    monkeypatch.setattr(file_changes, "REST_S", LONG_S)


def waits_for(paths: dict[Path, int], change: Callable[[], None], before: int = 1) -> None:
    """Fails unless the change ends a wait that nothing else would end. before: waits that end as watching begins."""

    async def run() -> None:
        changes = FileChanges(paths, 0.0)
        for _ in range(before):
            await wait(changes)
        waiting = asyncio.ensure_future(changes.wait(LONG_S))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        change()
        await asyncio.wait_for(waiting, PATIENCE_S)
        changes.close()

    asyncio.run(run())


async def wait(changes: FileChanges) -> None:
    """Wait for a change. Fails if there is none."""
    await asyncio.wait_for(changes.wait(LONG_S), PATIENCE_S)


def replace(path: Path) -> None:
    beside = path.with_name(".tmp")
    beside.write_text("new")
    beside.replace(path)


def grow(path: Path) -> None:
    with path.open("a") as file:
        file.write("more")


@pytest.mark.usefixtures("rests_long")
class TestReports:
    def test_a_replaced_file_of_a_folder_ends_the_wait(self, tmp_path: Path) -> None:
        replace(tmp_path / "board")
        waits_for({tmp_path: REPLACED}, lambda: replace(tmp_path / "board"))

    def test_a_file_that_grows_ends_the_wait(self, tmp_path: Path) -> None:
        grow(tmp_path / "segment")
        waits_for({tmp_path: APPENDED}, lambda: grow(tmp_path / "segment"))

    def test_a_name_that_comes_or_goes_ends_the_wait(self, tmp_path: Path) -> None:
        waits_for({tmp_path: LISTED}, (tmp_path / "mark").touch)
        waits_for({tmp_path: LISTED}, (tmp_path / "mark").unlink)

    @pytest.mark.parametrize("change", [grow, replace, os.unlink, lambda path: path.rename(path.with_name("other"))])
    def test_a_file_ends_the_wait_however_it_is_written(self, tmp_path: Path, change: Callable[[Path], None]) -> None:
        grow(tmp_path / "queues.toml")
        waits_for({tmp_path / "queues.toml": CONTENT}, lambda: change(tmp_path / "queues.toml"))

    def test_a_file_that_is_written_in_place_ends_the_wait_once_it_is_closed(self, tmp_path: Path) -> None:
        """As `sed ... > queues.toml` does: a reader that woke earlier would find an empty file, or half of one."""
        path = tmp_path / "queues.toml"
        grow(path)

        async def run() -> None:
            changes = FileChanges({path: CONTENT}, 0.0)
            await wait(changes)
            waiting = asyncio.ensure_future(wait(changes))
            with path.open("w") as file:
                for _ in range(2):
                    file.write("half")
                    file.flush()
                    await asyncio.sleep(0.02)
                assert not waiting.done()
            await waiting
            changes.close()

        asyncio.run(run())

    def test_a_file_of_a_folder_that_goes_ends_the_wait(self, tmp_path: Path) -> None:
        """So the urgent part of a board goes that is copied from another host."""
        replace(tmp_path / "urgent")
        waits_for({tmp_path: REPLACED}, (tmp_path / "urgent").unlink)

    def test_one_of_several_paths_ends_the_wait(self, tmp_path: Path) -> None:
        for name in "ab":
            (tmp_path / name).mkdir()
        waits_for({tmp_path / "a": REPLACED, tmp_path / "b": REPLACED}, lambda: replace(tmp_path / "b" / "board"))

    def test_a_folder_that_comes_later_is_watched(self, tmp_path: Path) -> None:
        folder = tmp_path / "state" / "inbox"
        waits_for({folder: APPENDED}, lambda: folder.mkdir(parents=True))

        async def run() -> None:
            changes = FileChanges({folder: APPENDED}, 0.0)
            await wait(changes)
            grow(folder / "segment")
            await wait(changes)

        asyncio.run(run())

    def test_a_folder_that_is_replaced_is_watched_from_the_next_wait_on(self, tmp_path: Path) -> None:
        folder = tmp_path / "inbox"

        async def run() -> None:
            changes = FileChanges({folder: APPENDED}, 0.0)
            folder.mkdir()
            await wait(changes)
            folder.rename(tmp_path / "old")
            folder.mkdir()
            await wait(changes)  # it lies elsewhere: the reader looks again
            grow(folder / "segment")
            await wait(changes)

        asyncio.run(run())

    def test_a_link_that_is_turned_to_another_file_ends_the_wait_when_the_old_one_goes(self, tmp_path: Path) -> None:
        """So Kubernetes replaces the files of a ConfigMap."""
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            grow(tmp_path / name / "queues.toml")
        (tmp_path / "data").symlink_to("one")

        def turn() -> None:
            (tmp_path / "data_tmp").symlink_to("two")
            (tmp_path / "data_tmp").replace(tmp_path / "data")
            (tmp_path / "one" / "queues.toml").unlink()

        waits_for({tmp_path / "data" / "queues.toml": CONTENT}, turn)

    def test_wake_ends_the_wait_or_the_next_one(self, tmp_path: Path) -> None:
        async def run() -> None:
            changes = FileChanges({tmp_path: REPLACED}, LONG_S)
            for _ in range(3):
                changes.wake()
                await wait(changes)

        asyncio.run(run())

    def test_close_ends_the_wait_and_gives_the_descriptor_back(self, tmp_path: Path) -> None:
        async def run() -> None:
            changes = FileChanges({tmp_path: REPLACED}, 0.0)
            await wait(changes)
            opened = descriptor_of(changes)
            waiting = asyncio.ensure_future(changes.wait(LONG_S))
            await asyncio.sleep(0)
            changes.close()
            changes.close()
            await asyncio.wait_for(waiting, PATIENCE_S)
            assert not is_watching(opened)

        asyncio.run(run())

    def test_close_after_a_cancelled_wait_gives_the_descriptor_back(self, tmp_path: Path) -> None:
        async def run() -> None:
            changes = FileChanges({tmp_path: REPLACED}, 0.0)
            await wait(changes)
            opened = descriptor_of(changes)
            waiting = asyncio.ensure_future(changes.wait(LONG_S))
            await asyncio.sleep(0)
            waiting.cancel()
            changes.close()  # before the task has run
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert not is_watching(opened)

        asyncio.run(run())

    def test_a_fast_writer_wakes_no_more_often_than_polling_would(self, tmp_path: Path) -> None:
        async def run() -> int:
            loop, wakes = asyncio.get_running_loop(), 0
            changes = FileChanges({tmp_path: APPENDED}, 0.05)
            ends_s = loop.time() + 0.5
            writer = asyncio.ensure_future(write_until(ends_s))
            while loop.time() < ends_s:
                await changes.wait(0.5)
                wakes += 1
            await writer
            return wakes

        async def write_until(ends_s: float) -> None:
            while asyncio.get_running_loop().time() < ends_s:
                grow(tmp_path / "segment")
                await asyncio.sleep(0.001)

        assert asyncio.run(run()) <= 13  # the first, the one at the end, and 0.5 s / 0.05 s


@examples(60)
@given(steps=st.lists(st.sampled_from(["append", "replace", "read", "restart", "move"]), max_size=25))
def test_a_reader_that_reads_and_then_waits_misses_nothing(
    steps: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever the writer does between the reader's steps, and however often the reader begins anew."""
    folder = tmp_path_factory.mktemp("law")
    inbox, written = folder / "inbox", 0

    async def read_all(changes: FileChanges) -> None:
        """Read after each wait, as readers do, until there is no more."""
        while len(found(inbox)) < written:
            await wait(changes)

    async def run() -> None:
        nonlocal written
        changes = FileChanges({inbox: APPENDED}, 0.0)
        for number, step in enumerate([*steps, "append", "read"]):
            if step in ("append", "replace"):
                inbox.mkdir(exist_ok=True)
                (grow if step == "append" else replace)(inbox / f"{number}")
                written += 1
            elif step == "move" and inbox.exists() and not found(inbox):
                inbox.rename(folder / f"old-{number}")
            elif step == "restart":
                changes.close()
                changes = FileChanges({inbox: APPENDED}, 0.0)
            elif step == "read":
                await read_all(changes)
        waiting = asyncio.ensure_future(wait(changes))
        await asyncio.sleep(0)
        grow(inbox / "last")
        await waiting
        changes.close()

    file_changes.REST_S, before = LONG_S, file_changes.REST_S
    try:
        asyncio.run(run())
    finally:
        file_changes.REST_S = before


def descriptor_of(changes: FileChanges) -> str:
    """Return the path of the descriptor that the object has open."""
    assert changes._watch is not None
    path = f"/proc/self/fd/{changes._watch.descriptor}"
    assert is_watching(path)
    return path


def is_watching(path: str) -> bool:
    """Return whether a descriptor is open and an instance of inotify."""
    return os.path.lexists(path) and "inotify" in os.readlink(path)


def found(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name != ".tmp"] if folder.exists() else []


class TestWithoutReports:
    """The kernel says nothing: a network file system, another system, or no room for one more watch."""

    def test_a_reader_looks_again_where_a_change_is_not_reported(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(file_changes, "REST_S", 0.01)

        async def run() -> None:
            changes = FileChanges({tmp_path: CONTENT}, LONG_S)  # as if another machine wrote into the folder
            await changes.wait()
            grow(tmp_path / "segment")
            await asyncio.wait_for(changes.wait(), PATIENCE_S)

        asyncio.run(run())

    @pytest.mark.parametrize(
        ("number", "advice"),
        [
            (errno.EMFILE, "Too many open files (raise fs.inotify.max_user_instances with sysctl, or ulimit -n)"),
            (errno.ENOSPC, "No space left on device (raise fs.inotify.max_user_watches with sysctl)"),
            (errno.ENOSYS, "Function not implemented"),
        ],
    )
    def test_without_a_watch_it_polls_and_says_so_once(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        number: int,
        advice: str,
    ) -> None:
        def refuse(name: str, *arguments: object) -> int:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(file_changes, "_call_library", refuse)
        monkeypatch.setattr(file_changes, "REST_S", LONG_S)

        async def run() -> None:
            for _ in range(2):  # streams of events and sources begin anew, and must not fill the log
                changes = FileChanges({tmp_path: APPENDED}, 0.001)
                for _ in range(3):
                    await asyncio.wait_for(changes.wait(), PATIENCE_S)

        with caplog.at_level(logging.WARNING):
            asyncio.run(run())
        assert [row.getMessage() for row in caplog.records] == [
            f"cannot watch {tmp_path}: {advice}; looking every 0.001 s instead"
        ]

    def test_a_system_without_inotify_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(file_changes, "_load_library", object)
        with pytest.raises(OSError, match="this system has no inotify"):
            file_changes._call_library("inotify_init1", 0)
