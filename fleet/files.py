"""Durable file operations. Everything that the service writes durably goes through these functions.

If a path has an attribute `disk`, that object performs the operations. Otherwise the operating system
does. So tests run the service on a disk in memory that tears writes, fills up and loses unsynced data.
All other operations are methods of the path itself. `area` names the writer for
`fleetcast.fleet.failpoints`. Functions raise OSError unless they say otherwise.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from fleetcast.fleet import failpoints
from fleetcast.fleet.local_files import LocalFiles

Data = bytes | bytearray | memoryview


class ShortWrite(OSError):
    """The error of a write that stopped after `written` bytes."""

    def __init__(self, written: int, cause: OSError) -> None:
        super().__init__(cause.errno, cause.strerror)
        self.written = written


class OpenFile(Protocol):
    """A file open for writing, as a disk provides it."""

    def write(self, data: Data) -> int:
        """Write at least one byte, and return the number of bytes written. Raises OSError if no byte can be written."""

    def write_at(self, data: Data, offset: int) -> int: ...

    def sync(self) -> None: ...

    def truncate(self, size_bytes: int) -> None: ...

    def close(self) -> None: ...


class Disk(Protocol):
    """The file operations of a disk. `MACHINE` performs them through the operating system."""

    def create(self, path: Path, append: bool) -> OpenFile: ...

    def rename(self, path: Path, to: Path) -> None: ...

    def link(self, path: Path, to: Path) -> None: ...

    def sync_folder(self, folder: Path) -> None: ...

    def list_names(self, folder: Path) -> list[str]: ...

    def map_file(self, path: Path) -> mmap.mmap | bytes: ...

    def lock(self, path: Path, by_process: bool) -> Callable[[], None]: ...

    def remove_tree(self, folder: Path) -> None: ...

    def measure_disk_bytes(self, folder: Path) -> tuple[int, int]: ...

    def connect(self, path: Path) -> sqlite3.Connection: ...

    def connect_to_read(self, path: Path) -> sqlite3.Connection: ...

    def get_filesystem(self) -> Any: ...


class File:
    """A file open for writing, without a buffer."""

    def __init__(self, opened: OpenFile, area: str) -> None:
        self._opened: OpenFile | None = opened
        self._area = area

    @property
    def closed(self) -> bool:
        return self._opened is None

    def _require_open(self) -> OpenFile:
        if self._opened is None:
            raise ValueError(f"a file of the {self._area} is closed already")
        return self._opened

    def write(self, data: Data) -> int:
        """Write all data, and return its length in bytes. Raises ShortWrite."""
        file, view, written = self._require_open(), memoryview(data).cast("B"), 0
        share = failpoints.call_hook(f"{self._area}.before_write")
        end = int(len(view) * share)
        while written < end:
            try:
                written += file.write(view[written:end])
            except OSError as error:
                raise ShortWrite(written, error) from None
        if share < failpoints.KEEP_ALL:
            failpoints.end_after_torn_write()
        failpoints.call_hook(f"{self._area}.after_write")
        return written

    def write_at(self, data: Data, offset: int) -> None:
        """Overwrite existing content at an offset in bytes. Must not be used for an append-only file."""
        file = self._require_open()
        failpoints.call_hook(f"{self._area}.before_write")
        written = file.write_at(data, offset)
        if written != len(data):
            raise OSError(errno.EIO, f"{written} of {len(data)} bytes were written over what was there")
        failpoints.call_hook(f"{self._area}.after_write")

    def sync(self) -> None:
        """Write the content to disk, and return once it is there. The name of the file may also need `sync_folder`."""
        failpoints.call_hook(f"{self._area}.before_sync")
        self._require_open().sync()
        failpoints.call_hook(f"{self._area}.after_sync")

    def truncate(self, size_bytes: int) -> None:
        failpoints.call_hook(f"{self._area}.before_truncate")
        self._require_open().truncate(size_bytes)
        failpoints.call_hook(f"{self._area}.after_truncate")

    def close(self) -> None:
        """Close the file. This may be called twice."""
        if self._opened is not None:
            opened, self._opened = self._opened, None
            opened.close()


def create_file(path: Path, area: str) -> File:
    """Create an empty file for writing. Replaces an existing file."""
    return File(_find_disk(path).create(path, append=False), area)


def create_append_only_file(path: Path, area: str) -> File:
    """Create a file in which every write goes to the end. Raises FileExistsError if the name is in use."""
    return File(_find_disk(path).create(path, append=True), area)


def replace_file(path: Path, parts: Iterable[Data], area: str, *, sync: bool = True) -> None:
    """Write a temporary file and rename it to `path`, so that readers see the old or the new file.

    A file has one writer. Without `sync`, a power cut may restore the old file or cut the new one short.
    """
    beside = path.with_name(f".{path.name}.tmp")
    try:
        file = create_file(beside, area)
        try:
            for part in parts:
                file.write(part)
            if sync:
                file.sync()
        finally:
            file.close()
        rename(beside, path, area)
    except OSError:
        with contextlib.suppress(OSError):  # on a full disk, half a file is in the way
            beside.unlink()
        raise
    if sync:
        sync_folder(path.parent, area)


def rename(path: Path, to: Path, area: str) -> None:
    """Rename a file or folder. Replaces an existing file of the new name."""
    failpoints.call_hook(f"{area}.before_rename")
    _find_disk(path).rename(path, to)
    failpoints.call_hook(f"{area}.after_rename")


def link(path: Path, to: Path, area: str) -> None:
    """Give a file a second name. Replaces an existing file of that name. If links are impossible, copies the file."""
    failpoints.call_hook(f"{area}.before_link")
    to.unlink(missing_ok=True)
    _find_disk(path).link(path, to)
    failpoints.call_hook(f"{area}.after_link")


def sync_folder(folder: Path, area: str) -> None:
    """Write the names in a folder to disk, and return once they are there. For a file, write its content."""
    failpoints.call_hook(f"{area}.before_sync_folder")
    _find_disk(folder).sync_folder(folder)
    failpoints.call_hook(f"{area}.after_sync_folder")


def make_folder(folder: Path, area: str) -> None:
    """Make a folder and those above it. Existing folders are no error.

    When this returns, the names of `folder` and of every folder made for it are on disk.
    """
    made = [folder, *(parent for parent in folder.parents if not parent.exists())]
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(made):
        sync_folder(path.parent, area)


def list_names(folder: Path) -> list[str]:
    """Return the names in a folder, in any order, or an empty list if the folder does not exist."""
    try:
        return _find_disk(folder).list_names(folder)
    except FileNotFoundError:
        return []


def read_size_bytes(path: Path) -> int:
    """Return the size of a file in bytes, or 0 if it does not exist."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def map_file(path: Path) -> mmap.mmap | bytes:
    """Map a file into memory. The mapping does not change when the file is replaced.

    Raises ValueError if the file is empty.
    """
    return _find_disk(path).map_file(path)


def lock(path: Path, *, by_process: bool = False) -> Callable[[], None]:
    """Lock a file until the caller calls the returned function, or the process ends.

    by_process: repeated calls of this process share the lock. Otherwise each call is a separate holder.
    Raises BlockingIOError if another holder has the lock.
    """
    return _find_disk(path).lock(path, by_process)


def remove_tree(folder: Path) -> None:
    """Delete a folder and its content as far as possible. Never raises OSError."""
    _find_disk(folder).remove_tree(folder)


def read_usage_bytes(folder: Path) -> tuple[int, int]:
    """Return the size and the free space of the disk that holds `folder`, both in bytes."""
    return _find_disk(folder).measure_disk_bytes(folder)


def connect(path: Path) -> sqlite3.Connection:
    """Open a SQLite file in autocommit mode, for any thread. Raises sqlite3.OperationalError."""
    return _find_disk(path).connect(path)


def connect_to_read(path: Path) -> sqlite3.Connection:
    """Open a SQLite file read-only. Raises sqlite3.OperationalError if the file does not exist."""
    return _find_disk(path).connect_to_read(path)


def is_on_local_disk(path: Path) -> bool:
    """Return whether a path belongs to the operating system, which can report changes of the path."""
    return _find_disk(path) is MACHINE


def get_filesystem(path: Path) -> Any:
    """Return the file system for a path, with methods of fsspec.

    It is for listings, reads and removals, not for durable writes.
    """
    return _find_disk(path).get_filesystem()


class _Descriptor:
    """An open file of the operating system."""

    def __init__(self, number: int) -> None:
        self._number = number

    def write(self, data: Data) -> int:
        return os.write(self._number, data)

    def write_at(self, data: Data, offset: int) -> int:
        return os.pwrite(self._number, data, offset)

    def sync(self) -> None:
        os.fdatasync(self._number)

    def truncate(self, size_bytes: int) -> None:
        os.ftruncate(self._number, size_bytes)

    def close(self) -> None:
        os.close(self._number)


class _Machine:
    """The file operations of the operating system, for all of its disks."""

    def create(self, path: Path, append: bool) -> OpenFile:
        how = os.O_EXCL | os.O_APPEND if append else os.O_TRUNC
        return _Descriptor(os.open(path, os.O_WRONLY | os.O_CREAT | how, 0o644))

    def rename(self, path: Path, to: Path) -> None:
        os.replace(path, to)

    def link(self, path: Path, to: Path) -> None:
        try:
            os.link(path, to)
        except OSError:
            shutil.copyfile(path, to)

    def sync_folder(self, folder: Path) -> None:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def list_names(self, folder: Path) -> list[str]:
        return os.listdir(folder)

    def map_file(self, path: Path) -> mmap.mmap | bytes:
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def lock(self, path: Path, by_process: bool) -> Callable[[], None]:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            (fcntl.lockf if by_process else fcntl.flock)(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(handle)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise BlockingIOError(error.errno, f"another process holds {path}") from None
            raise
        return lambda: os.close(handle)

    def remove_tree(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)

    def measure_disk_bytes(self, folder: Path) -> tuple[int, int]:
        usage = shutil.disk_usage(folder)
        return usage.total, usage.free

    def connect(self, path: Path) -> sqlite3.Connection:
        return sqlite3.connect(path, isolation_level=None, check_same_thread=False)

    def connect_to_read(self, path: Path) -> sqlite3.Connection:
        address = f"{path.absolute().as_uri()}?mode=ro"
        db = sqlite3.connect(address, uri=True, isolation_level=None)
        db.text_factory = bytes.decode
        try:
            db.execute("SELECT count(*) FROM sqlite_master")
        except sqlite3.OperationalError:
            db.close()
            if path.with_name(path.name + "-wal").exists():
                raise
            # A closed file in a folder that cannot be written: SQLite cannot make the one by which it shares its log.
            db = sqlite3.connect(f"{address}&immutable=1", uri=True, isolation_level=None)
            db.text_factory = bytes.decode
        return db

    def get_filesystem(self) -> LocalFiles:
        return LocalFiles()


MACHINE: Disk = _Machine()


def _find_disk(path: Path) -> Disk:
    disk: Disk = getattr(path, "disk", MACHINE)
    return disk
