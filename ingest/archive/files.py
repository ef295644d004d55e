"""Files of the archive: their places, their names, and how each is written whole or not at all.

    samples/day=2026-11-21/block=b1/13-0-1795278000123.parquet                 a part: 13:00 to 14:00, of writer 0
    samples/day=2026-11-21/block=b1/13-0-1795278000123-1795281580456.parquet   replaces all parts in that range
    events/day=2026-11-21/13-0-1795278000123.parquet

Days and hours are UTC. A file is written under a temporary name, fsynced and renamed. An object store's
put is atomic. A compacted file is first stored as `….parquet.ready`. Then its parts are deleted, and it
gets its final name. So readers of `*.parquet` never see a row twice. Our own readers use the `.ready`
file. After a crash, the next start finishes what was interrupted.
"""

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Literal
from urllib.parse import quote, unquote

from fleetcast.fleet import failpoints, files
from fleetcast.fleet.errors import ConfigError

logger = logging.getLogger(__name__)

Dataset = Literal["samples", "events"]
DATASETS: tuple[Dataset, ...] = ("samples", "events")

AREA = "archive"  # of failpoints
DAY_MS = 86_400_000
HOUR_MS = 3_600_000
UNPLACED = "unplaced"
_PATH = re.compile(
    r"(?P<dataset>samples|events)/day=(?P<day>\d{4}-\d\d-\d\d)(?:/block=(?P<block>[^/]+))?/"
    r"(?P<hour>\d\d)-(?P<writer>[a-z0-9]+)-(?P<first>\d+)(?:-(?P<last>\d+))?\.parquet(?P<ready>\.ready)?"
)


@dataclass(frozen=True, slots=True, order=True)
class FileName:
    """The fields of an archive file's name.

    `first` and `last`: the numbers of the first and the last flush in the file. They are equal for a
    part, which holds one flush.
    """

    dataset: Dataset
    day: str
    block: str  # empty for events
    hour: int
    writer: str
    first: int
    last: int
    ready: bool = False

    @property
    def path(self) -> str:
        block = f"/block={quote(self.block, safe='')}" if self.block else ""
        numbers = f"{self.first}-{self.last}" if self.is_compacted else f"{self.first}"
        end = ".ready" if self.ready else ""
        return f"{self.dataset}/day={self.day}{block}/{self.hour:02d}-{self.writer}-{numbers}.parquet{end}"

    @property
    def is_compacted(self) -> bool:
        return self.last != self.first

    @property
    def place(self) -> tuple[str, str, str, int]:
        """The dataset, day, block and hour of the file."""
        return self.dataset, self.day, self.block, self.hour

    @property
    def first_ms(self) -> int:
        """The beginning of the file's hour, in Unix ms."""
        return parse_day_ms(self.day) + self.hour * HOUR_MS

    def supersedes(self, other: "FileName") -> bool:
        """Return whether this file also holds all rows of `other`."""
        if not self.is_compacted or (self.place, self.writer) != (other.place, other.writer):
            return False
        if (self.first, self.last) == (other.first, other.last):
            return other.ready and not self.ready
        return self.first <= other.first and other.last <= self.last

    @classmethod
    def parse(cls, path: str) -> "FileName | None":
        """Parse the name at the end of a path. Returns None if the archive did not write the file.

        >>> FileName.parse("x/events/day=2026-11-21/13-0-17.parquet").hour
        13
        """
        found = re.search(_PATH.pattern + "$", path)
        if found is None:
            return None
        parts: dict[str, Any] = found.groupdict()
        first = int(parts["first"])
        return cls(
            dataset=parts["dataset"],
            day=parts["day"],
            block=unquote(parts["block"] or ""),
            hour=int(parts["hour"]),
            writer=parts["writer"],
            first=first,
            last=int(parts["last"] or first),
            ready=parts["ready"] is not None,
        )


def format_day(time_ms: int) -> str:
    """Return the day of a time in UTC, as YYYY-MM-DD.

    >>> format_day(1_795_278_000_000)
    '2026-11-21'
    """
    return datetime.fromtimestamp(time_ms // 1000, UTC).strftime("%Y-%m-%d")


def parse_day_ms(day: str) -> int:
    """Return the beginning of a day in UTC, in Unix ms."""
    return round(datetime.strptime(day, "%Y-%m-%d").replace(tzinfo=UTC).timestamp()) * 1000


def drop_superseded_files(names: Iterable[FileName]) -> list[FileName]:
    """Return the files that no other file supersedes, sorted. Together they hold each row once."""
    places: dict[tuple[Any, ...], list[FileName]] = {}
    for name in names:
        places.setdefault((*name.place, name.writer), []).append(name)
    left: list[FileName] = []
    for same in places.values():
        wide = [name for name in same if name.is_compacted]
        left += [name for name in same if not any(other.supersedes(name) for other in wide)]
    return sorted(left)


class ArchiveFiles:
    """The files of one archive, in a folder or at any URL of fsspec. Methods raise OSError.

    The constructor touches no file. Raises ConfigError if a URL's filesystem is not installed. Only URLs need fsspec.
    """

    def __init__(self, url: str | Path) -> None:
        self.url = str(url)
        self._on_disk: set[Path] = set()  # folders whose names are
        if isinstance(url, str) and ":" not in url:
            url = Path(os.path.expanduser(url)).absolute()
        if not isinstance(url, str):
            self.folder: Path | None = url
            self._fs, self._root = files.get_filesystem(url), str(url)
            return
        import fsspec

        try:
            self._fs, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"archive.url = {url!r}: {error}") from None
        self.folder = Path(self._root) if "file" in _list_protocols(self._fs) else None

    def list_files(self, dataset: Dataset, days: Sequence[str] | None = None) -> list[FileName]:
        """Return the names of all files, including superseded ones. days: only these days, or None for all."""
        self._fs.invalidate_cache()
        folders = [dataset] if days is None else [f"{dataset}/day={day}" for day in days]
        paths = [path for folder in folders for path in self._fs.find(f"{self._root}/{folder}")]
        return sorted(name for path in paths if (name := FileName.parse(path)) is not None)

    def list_days(self, dataset: Dataset) -> list[str]:
        """Return the days that have a folder, oldest first."""
        self._fs.invalidate_cache()
        try:
            paths = self._fs.ls(f"{self._root}/{dataset}", detail=False)
        except FileNotFoundError:
            return []
        found = (re.search(r"day=(\d{4}-\d\d-\d\d)/?$", path) for path in paths)
        return sorted(match.group(1) for match in found if match is not None)

    def read_size(self, name: FileName) -> int:
        """Return the size of a file in bytes."""
        return int(self._fs.size(self._make_path(name)))

    def open(self, name: FileName) -> IO[bytes]:
        file: IO[bytes] = self._fs.open(self._make_path(name), "rb")
        return file

    def write_file(self, name: FileName, data: Any) -> None:
        """Write the whole file `data` (bytes-like) under its name, which must be unused."""
        if self.folder is None:
            self._fs.pipe_file(self._make_path(name), bytes(data))
            return
        path = self.folder / name.path
        self._make_folder(path.parent)
        files.replace_file(path, [data], AREA)

    def _make_folder(self, folder: Path) -> None:
        """Make a folder, and sync its name and the names of the folders above it.

        An earlier process may have made one of them and ended before it could sync the name.
        """
        assert self.folder is not None
        if folder not in self._on_disk or not folder.exists():
            for one in (folder, *folder.parents):
                files.make_folder(one, AREA)
                if one == self.folder:
                    break
            self._on_disk.add(folder)

    def sync_file_names(self, names: Iterable[FileName]) -> None:
        """Sync these files' names to disk. Another process may have renamed them without an fsync."""
        if self.folder is not None:
            for folder in sorted({(self.folder / name.path).parent for name in names}):
                files.sync_folder(folder, AREA)

    def replace_superseded_files(self, ready: FileName) -> None:
        """Delete the files that a `.ready` file supersedes, then give the `.ready` file its final name.

        Repeating it changes nothing.
        """
        self.sync_file_names([ready])
        final = replace(ready, ready=False)
        names = self.list_files(ready.dataset, [ready.day])
        if final in names and ready not in names:  # `finish` put it there
            return
        for name in names:
            if name != final and ready.supersedes(name):
                self.remove(name)
        failpoints.call_hook(f"{AREA}.before_rename")
        self._fs.mv(self._make_path(ready), self._make_path(final))
        failpoints.call_hook(f"{AREA}.after_rename")
        if self.folder is not None:
            files.sync_folder((self.folder / final.path).parent, AREA)

    def finish_ready_files(self, writer: str) -> None:
        """Give each `.ready` file of a writer its final name.

        A crash, an error or a merge may have left such files.
        """
        for dataset in DATASETS:
            for name in self.list_files(dataset):
                if name.ready and name.writer == writer:
                    logger.info("archive: %s was not finished; it is now", name.path)
                    self.replace_superseded_files(name)

    @contextlib.contextmanager
    def convert_to_os_error(self) -> Iterator[None]:
        """Convert any error of an object store's library into the OSError that a disk would raise."""
        try:
            yield
        except OSError:
            raise
        except Exception as error:
            if self.folder is not None:
                raise
            raise OSError(f"{type(error).__name__}: {error}") from error

    def claim_writer_name(self, writer: str) -> Callable[[], None]:
        """Reserve a writer's name, delete its half-written files, and return a function that releases the name.

        Raises OSError if another process holds the name. In an object store nothing is reserved, and no file is ever
        half-written.
        """
        if self.folder is None:
            return lambda: None
        files.make_folder(self.folder, AREA)
        try:
            give_back = files.lock(self.folder / f".{writer}.lock", by_process=True)
        except BlockingIOError as error:
            raise OSError(error.errno, f"another process writes as {writer!r} into {self.url}") from None
        try:
            for half in self.folder.glob(f"*/day=*/**/.[0-9][0-9]-{writer}-*.tmp"):
                half.unlink(missing_ok=True)
        except OSError:
            give_back()
            raise
        return give_back

    def remove(self, name: FileName) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._make_path(name))

    def remove_day(self, dataset: Dataset, day: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(f"{self._root}/{dataset}/day={day}", recursive=True)

    def _make_path(self, name: FileName) -> str:
        return f"{self._root}/{name.path}"


def _list_protocols(fs: Any) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)
