"""What the live files of the archive hold. Each file is read once, whenever the names on the disk have changed."""

from collections.abc import Iterator
from io import BytesIO

import pyarrow.parquet as pq

from fleetcast.ingest.archive.files import FileName, drop_superseded_files
from tests.simulation.disk import Content, Folder, MemoryDisk
from tests.simulation.oracle import Broken, EventKey

LAW = "archived once"


class ArchiveLook:
    def __init__(self, disk: MemoryDisk) -> None:
        self._disk = disk
        self._looked_at = -1  # disk.names_changed
        self._read: dict[tuple[Content, int], list[EventKey]] = {}
        self.names: list[FileName] = []

    def look(self) -> list[EventKey] | None:
        """The events of all live files, None where nothing has changed. Raises Broken for a file that is torn."""
        if self._disk.names_changed == self._looked_at:
            return None
        self._looked_at = self._disk.names_changed
        there = dict(_files("events", self._disk.find(("state", "archive", "events"))))
        names = drop_superseded_files(there)
        if names == self.names:
            return None
        self.names = names
        return [key for name in names for key in self._keys(name, there[name])]

    def _keys(self, name: FileName, content: Content) -> list[EventKey]:
        keys = self._read.get((content, len(content.data)))
        if keys is None:
            keys = self._read[content, len(content.data)] = _keys_of(name, bytes(content.data))
        return keys


def _files(path: str, node: Content | Folder | None) -> Iterator[tuple[FileName, Content]]:
    if isinstance(node, Folder):
        for part, inside in node.names.items():
            yield from _files(f"{path}/{part}", inside)
    elif node is not None and (name := FileName.parse(path)) is not None:
        yield name, node


def _keys_of(name: FileName, data: bytes) -> list[EventKey]:
    try:
        table = pq.ParquetFile(BytesIO(data)).read(["name", "attempt", "sequence"], use_threads=False)
    except (OSError, ValueError) as error:
        raise Broken(LAW, f"{name.path} is damaged: {error}") from error
    return list(zip(*(column.to_pylist() for column in table.columns), strict=True))
