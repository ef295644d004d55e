"""A disk in memory: what was written, what of it was synced, and what a crash leaves of both.

A process sees it through a mount of its own: paths, open files, locks and connections go dead with the process, so
nothing that runs late in one that was killed reaches the disk. Two kinds of end:

    kill         the page cache survives, locks are free, open transactions are rolled back
    power loss   the same, and what was not synced is there, is not, or is cut short: a coin for each file and each name
"""

import errno
import os
import random
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from io import BytesIO
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import Any, ClassVar

from tests.simulation.filesystem import SimFileSystem


class Killed(BaseException):
    """The process has ended: nothing that it does matters any more."""


@dataclass(slots=True, eq=False)
class Content:
    """A file. durable: what a power loss leaves for certain; failed: an fsync failed, later ones change nothing."""

    number: int
    data: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    changed_ns: int = 0
    failed: bool = False


@dataclass(slots=True, eq=False)
class Folder:
    names: dict[str, "Content | Folder"] = field(default_factory=dict)
    durable: dict[str, "Content | Folder"] = field(default_factory=dict)


class MemoryDisk:
    """`full`, `read_only` and `sync_fails` are spells that the world casts."""

    def __init__(self, rng: random.Random, now_ns: Callable[[], int]) -> None:
        self.root = Folder()
        self.full = self.read_only = self.sync_fails = False
        self.rng = rng
        self.now_ns = now_ns
        self.locks: dict[Content, object] = {}
        self.ledgers: dict[tuple[str, ...], sqlite3.Connection] = {}
        self.writers: dict[tuple[str, ...], Any] = {}
        self.torn = self.lost_names = 0
        self.names_changed = 0  # how often
        self._numbers = 0

    def make_state(self) -> None:
        """The folder of the state, on disk."""
        self.root.names["state"] = Folder()
        self.root.durable = dict(self.root.names)

    def new_content(self) -> Content:
        self._numbers += 1
        return Content(self._numbers, changed_ns=self.now_ns())

    def find(self, parts: tuple[str, ...]) -> "Content | Folder | None":
        node: Content | Folder | None = self.root
        for name in parts:
            node = node.names.get(name) if isinstance(node, Folder) else None
        return node

    def heal(self) -> None:
        self.full = self.read_only = self.sync_fails = False

    def close(self) -> None:
        for db in self.ledgers.values():
            db.close()

    def end_process(self, process: object) -> None:
        """What the kernel tidies up."""
        self.locks = {content: holder for content, holder in self.locks.items() if holder is not process}

    def power_loss(self) -> None:
        self.names_changed += 1
        self.locks.clear()
        self._lose(self.root)

    def _lose(self, folder: Folder) -> None:
        changed = [name for name in {**folder.names, **folder.durable} if not self._kept(folder, name)]
        before = dict(folder.names)
        for name in changed:
            if self.rng.random() < 0.5:
                self.lost_names += 1
                if name in folder.durable:
                    folder.names[name] = folder.durable[name]
                else:
                    del folder.names[name]
        self._keep_renamed(folder, before)
        folder.durable = dict(folder.names)
        for node in folder.names.values():
            if isinstance(node, Folder):
                self._lose(node)
            elif bytes(node.data) != node.durable:
                self._tear(node)

    def _keep_renamed(self, folder: Folder, before: "dict[str, Content | Folder]") -> None:
        """A journal holds a rename as one step: who had a name before and after it has one of the two."""
        named = set(folder.names.values())
        for name, node in folder.durable.items():
            if node not in named and name not in folder.names and node in before.values():
                folder.names[name] = node

    def _kept(self, folder: Folder, name: str) -> bool:
        return folder.names.get(name) is folder.durable.get(name)

    def _tear(self, content: Content) -> None:
        """Old, new, or as much of the new as was appended in time."""
        coin = self.rng.random()
        if coin < 0.4:
            content.data[:] = content.durable
        elif coin < 0.7 and content.data.startswith(content.durable):
            content.data[:] = content.data[: self.rng.randint(len(content.durable), len(content.data))]
            self.torn += 1
        content.durable, content.failed = bytes(content.data), False

    def mount(self, process: Any) -> "Mount":
        return Mount(self, process)


class Mount:
    """The disk as one process sees it, for as long as that lives (`process.alive`)."""

    def __init__(self, disk: MemoryDisk, process: Any) -> None:
        self._disk = disk
        self._process = process
        self.path = type("SimPath", (SimPath,), {"disk": self})

    def check(self) -> MemoryDisk:
        if not self._process.alive:
            raise Killed
        return self._disk

    def _check_writable(self) -> MemoryDisk:
        disk = self.check()
        if disk.read_only:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return disk

    def node(self, path: "SimPath") -> "Content | Folder":
        found = self.check().find(path.keys)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return found

    def content(self, path: "SimPath") -> Content:
        found = self.node(path)
        if isinstance(found, Folder):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        return found

    def folder(self, path: "SimPath") -> Folder:
        found = self.node(path)
        if isinstance(found, Content):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        return found

    # -- as fleetcast.fleet.files asks

    def create(self, path: "SimPath", append: bool) -> "SimFile":
        disk, folder = self._check_writable(), self.folder(path.parent)
        found = folder.names.get(path.name)
        if found is not None and append:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        if disk.full and found is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if found is None:
            found = folder.names[path.name] = disk.new_content()
        assert isinstance(found, Content)
        found.data.clear()
        return SimFile(self, found)

    def rename(self, path: "SimPath", to: "SimPath") -> None:
        self._check_writable().names_changed += 1
        node, target = self.node(path), self.folder(to.parent)
        old = target.names.get(to.name)
        if isinstance(old, Folder) and old.names:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(to))
        del self.folder(path.parent).names[path.name]
        target.names[to.name] = node

    def link(self, path: "SimPath", to: "SimPath") -> None:
        self._check_writable()
        self.folder(to.parent).names[to.name] = self.content(path)

    def sync_folder(self, folder: "SimPath") -> None:
        if self.check().sync_fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        node = self.node(folder)
        if isinstance(node, Folder):
            node.durable = dict(node.names)
        elif not node.failed:
            node.durable = bytes(node.data)

    def list_names(self, folder: "SimPath") -> list[str]:
        return list(self.folder(folder).names)

    def map_file(self, path: "SimPath") -> bytes:
        data = bytes(self.content(path).data)
        if not data:
            raise ValueError("cannot mmap an empty file")
        return data

    def lock(self, path: "SimPath", by_process: bool) -> Callable[[], None]:
        disk = self.check()
        names = self.folder(path.parent).names
        if path.name not in names:
            self._check_writable()
            names[path.name] = disk.new_content()
        content = self.content(path)
        if disk.locks.get(content) not in (None, self._process if by_process else None):
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        disk.locks[content] = self._process

        def give_back() -> None:
            if self._process.alive:
                disk.locks.pop(content, None)

        return give_back

    def remove_tree(self, folder: "SimPath") -> None:
        self.check().names_changed += 1
        if not self.check().read_only and isinstance(self.check().find(folder.keys), Folder):
            del self.folder(folder.parent).names[folder.name]

    def measure_disk_bytes(self, folder: "SimPath") -> tuple[int, int]:
        return (2**30, 0 if self.check().full else 2**29)

    def connect(self, path: "SimPath") -> "SimConnection":
        disk = self.check()
        names = self.folder(path.parent).names
        if path.name not in names:
            self._check_writable()
            disk.ledgers[path.keys] = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
            content = names[path.name] = disk.new_content()
            content.data[:] = content.durable = b"SQLite format 3"
            self.folder(path.parent).durable[path.name] = content  # SQLite syncs the folder itself
        if disk.ledgers[path.keys].in_transaction:  # of a process that was killed
            disk.ledgers[path.keys].rollback()
        disk.writers[path.keys] = self._process
        return SimConnection(self, disk.ledgers[path.keys], path.keys)

    def connect_to_read(self, path: "SimPath") -> "SimConnection":
        if not path.exists():
            raise sqlite3.OperationalError("unable to open database file")
        disk = self.check()
        db = disk.ledgers[path.keys]
        if db.in_transaction and not disk.writers[path.keys].alive:
            db.rollback()
        return SimConnection(self, db, path.keys)

    def get_filesystem(self) -> "SimFileSystem":
        return SimFileSystem(self)

    # -- as paths ask

    def make_folder(self, path: "SimPath") -> None:
        names = self.folder(path.parent).names
        if path.name in names:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        self._check_writable()
        names[path.name] = Folder()

    def unlink(self, path: "SimPath") -> None:
        self._check_writable().names_changed += 1
        self.content(path)
        del self.folder(path.parent).names[path.name]


class SimFile:
    """A file open for writing."""

    def __init__(self, mount: Mount, content: Content) -> None:
        self._mount = mount
        self._content = content

    def _disk(self) -> MemoryDisk:
        disk = self._mount._check_writable()
        self._content.changed_ns = disk.now_ns()
        return disk

    def write(self, data: Any) -> int:
        disk, count = self._disk(), len(data)
        if disk.full:
            count = disk.rng.randrange(count) if disk.rng.random() < 0.5 else 0
            if not count:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._content.data += data[:count]
        return count

    def write_at(self, data: Any, offset: int) -> int:
        self._disk()
        self._content.data[offset : offset + len(data)] = data
        return len(data)

    def sync(self) -> None:
        if self._disk().sync_fails:
            self._content.failed = True
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if not self._content.failed:
            self._content.durable = bytes(self._content.data)

    def truncate(self, size_bytes: int) -> None:
        self._disk()
        del self._content.data[size_bytes:]

    def close(self) -> None:
        """Costs nothing, and may be late."""


class SimConnection:
    """A SQLite connection whose file is in memory: what is committed outlives the process and the power."""

    def __init__(self, mount: Mount, db: sqlite3.Connection, keys: tuple[str, ...]) -> None:
        self._mount = mount
        self._db = db
        self._keys = keys

    @property
    def text_factory(self) -> Any:
        return self._db.text_factory

    @text_factory.setter
    def text_factory(self, factory: Any) -> None:
        self._db.text_factory = factory

    def execute(self, statement: str, values: Any = ()) -> sqlite3.Cursor:
        disk = self._mount.check()
        if (
            self._db.in_transaction and not disk.writers[self._keys].alive
        ):  # a reader's file has only what was committed
            self._db.rollback()
        if statement == "COMMIT" and (disk.full or disk.read_only):
            raise sqlite3.OperationalError("database or disk is full" if disk.full else "attempt to write a readonly")
        return self._db.execute(statement, values)

    def executemany(self, statement: str, rows: Any) -> sqlite3.Cursor:
        self._mount.check()
        return self._db.executemany(statement, rows)

    def executescript(self, script: str) -> sqlite3.Cursor:
        self._mount.check()
        return self._db.executescript(script)

    def rollback(self) -> None:
        self._mount.check()
        self._db.rollback()

    @property
    def in_transaction(self) -> bool:
        return self._db.in_transaction

    def close(self) -> None:
        """The file stays."""


class SimPath(PurePosixPath):
    """A path on the disk of one process, with the methods of `Path` that the service uses."""

    disk: ClassVar[Mount]

    @property
    def keys(self) -> tuple[str, ...]:
        return self.parts[1:]

    def exists(self) -> bool:
        return self.disk.check().find(self.keys) is not None

    def is_dir(self) -> bool:
        return isinstance(self.disk.check().find(self.keys), Folder)

    def is_file(self) -> bool:
        return isinstance(self.disk.check().find(self.keys), Content)

    def iterdir(self) -> "Iterator[SimPath]":
        return iter([self / name for name in self.disk.folder(self).names])

    def glob(self, pattern: str) -> "Iterator[SimPath]":
        """Every part of the pattern stands for one part of a path, `**` for any number of them."""
        found = [self]
        for part in pattern.split("/"):
            if part == "**":
                found += [path for at in found for path in at._below()]
                continue
            inside = [path / name for path in found if path.is_dir() for name in self.disk.folder(path).names]
            found = [path for path in inside if fnmatchcase(path.name, part)]
        return iter(found)

    def _below(self) -> "Iterator[SimPath]":
        """The folders in it, and in those."""
        for path in self.iterdir():
            if path.is_dir():
                yield path
                yield from path._below()

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        if parents and len(self.parts) > 2 and not self.parent.exists():
            self.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.disk.make_folder(self)
        except FileExistsError:
            if not (exist_ok and self.is_dir()):
                raise

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            self.disk.unlink(self)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def stat(self) -> SimpleNamespace:
        node = self.disk.node(self)
        if isinstance(node, Folder):
            return SimpleNamespace(st_size=0, st_ino=0, st_mtime_ns=0, st_mtime=0.0)
        ns = node.changed_ns
        return SimpleNamespace(st_size=len(node.data), st_ino=node.number, st_mtime_ns=ns, st_mtime=ns / 1e9)

    def read_bytes(self) -> bytes:
        return bytes(self.disk.content(self).data)

    def read_text(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return self.read_bytes().decode(encoding, errors)

    def open(self, mode: str = "rb") -> BytesIO:
        assert mode == "rb", "what is written goes through fleetcast.fleet.files"
        return BytesIO(self.read_bytes())
