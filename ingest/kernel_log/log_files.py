"""A follower of log files that grow, are rotated and truncated, from a saved position.

A file is identified by its inode and first bytes. After a rename, the rest of the old file is read first. A
truncated file is read from its start.
"""

import logging
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

READ_BYTES = 2**18
HEAD_BYTES = 256
SIBLINGS_LOOKED_AT = 1_000


class LogFile:
    """One followed path of a log file. `position` covers every line that `read` returned."""

    def __init__(self, path: Path, position: Mapping[str, Any] | None = None) -> None:
        saved = position or {}
        self.path = path
        self.lost = 0  # times that a rotated file was gone before it was read
        self._inode = int(saved.get("inode", 0))
        self._offset = int(saved.get("offset", 0))
        head = saved.get("head", (0, 0))
        self._head = (int(head[0]), int(head[1]))  # bytes, crc32
        self._file: int | None = None

    def position(self) -> dict[str, Any]:
        return {"inode": self._inode, "offset": self._offset, "head": list(self._head)}

    def read(self, most: int = READ_BYTES) -> list[bytes]:
        """Return new whole lines, about `most` bytes of them. Raises OSError if the file cannot be read.

        A line longer than `most` is returned in pieces.
        """
        if self._file is None and not self._open_file():
            return []
        assert self._file is not None
        if not self._has_same_head(self._file):
            self._reset_offset()
        data = os.pread(self._file, most, self._offset)
        if not data:
            return self._read_next_file(most)
        end = data.rfind(b"\n") + 1
        if end == 0:
            if len(data) < most:
                return []  # the rest of the line is on its way
            end = len(data)  # no line is so long: what it is, is passed in pieces
        self._offset += end
        self._record_file_head(self._file)
        return data[:end].splitlines()

    def backlog_bytes(self) -> int:
        """Return the number of unread bytes in the open file. A file that has replaced it does not count."""
        try:
            status = self.path.stat() if self._file is None else os.fstat(self._file)
        except OSError:
            return 0
        return max(0, status.st_size - (self._offset if status.st_ino == self._inode else 0))

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open_file(self) -> bool:
        """Open the file that was read last, even if it was renamed. If it is gone, open the file at the path.

        Returns False if there is no file to open.
        """
        path = self.path
        if self._inode and _read_inode(path) != self._inode:
            moved = self._find_moved_file()
            if moved is None:
                if _read_inode(path) is None:
                    return False
                self.lost += 1
                logger.warning("%s was rotated and is gone, %d bytes were read of it", self.path, self._offset)
                self._reset_offset()
            path = moved or path
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except FileNotFoundError:
            return False
        self._inode = os.fstat(self._file).st_ino
        return True

    def _find_moved_file(self) -> Path | None:
        """Return the present path of the renamed file, or None if it is gone.

        It searches only the files in the same folder whose names begin with the old name.
        """
        near = sorted(self.path.parent.glob(f"{_escape_glob(self.path.name)}*"))[:SIBLINGS_LOOKED_AT]
        return next((path for path in near if _read_inode(path) == self._inode), None)

    def _read_next_file(self, most: int) -> list[bytes]:
        """Continue with the file that has replaced this one at its path. Call it at the end of a file.

        If this file still has unread lines, returns those first. Returns no lines if no file has replaced it.
        """
        now = _read_inode(self.path)
        if now is None or now == self._inode:
            return []
        assert self._file is not None
        rest = os.pread(self._file, most, self._offset)  # what was written before the rename was seen
        if rest:
            self._offset += len(rest)
            return rest.splitlines()
        self.close()
        self._inode = 0
        self._reset_offset()
        return self.read(most) if self._open_file() else []

    def _reset_offset(self) -> None:
        self._offset, self._head = 0, (0, 0)

    def _has_same_head(self, file: int) -> bool:
        size, crc = self._head
        return os.fstat(file).st_size >= self._offset and zlib.crc32(os.pread(file, size, 0)) == crc

    def _record_file_head(self, file: int) -> None:
        if self._head[0] < HEAD_BYTES:
            head = os.pread(file, min(HEAD_BYTES, self._offset), 0)
            self._head = (len(head), zlib.crc32(head))


def _read_inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


def _escape_glob(name: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)
