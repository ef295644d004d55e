"""The part of fsspec's local file system that an archive needs. Importing fsspec costs a process 6 MiB."""

import os
import shutil
from typing import IO


class LocalFiles:
    """The files of this machine, with the methods and errors of `fsspec.filesystem("file")`."""

    protocol = ("file", "local")

    def invalidate_cache(self) -> None:
        """Do nothing, because nothing is cached."""

    def find(self, path: str) -> list[str]:
        """Return all files below a folder, sorted. Empty if there is no such folder."""
        return sorted(f"{folder}/{name}" for folder, _, names in os.walk(path) for name in names)

    def ls(self, path: str, detail: bool) -> list[str]:
        """Return the paths in a folder. `detail` must be False. Raises FileNotFoundError."""
        assert not detail
        return [f"{path}/{name}" for name in os.listdir(path)]

    def size(self, path: str) -> int:
        """Return the size of a file in bytes. Raises FileNotFoundError."""
        return os.stat(path).st_size

    def open(self, path: str, mode: str) -> IO[bytes]:
        """Open a file for reading."""
        assert mode == "rb"
        return open(path, "rb")

    def mv(self, path: str, to: str) -> None:
        """Rename a file. Replaces an existing file of the new name."""
        os.replace(path, to)

    def rm_file(self, path: str) -> None:
        """Delete a file. Raises FileNotFoundError."""
        os.remove(path)

    def rm(self, path: str, recursive: bool) -> None:
        """Delete a folder and its content. Raises FileNotFoundError."""
        assert recursive
        shutil.rmtree(path)
