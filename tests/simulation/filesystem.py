"""The disk of one process as fsspec knows it: what the archive lists, reads and removes goes by here."""

from typing import IO, TYPE_CHECKING, Any

from fsspec import AbstractFileSystem

from fleetcast.fleet import failpoints

if TYPE_CHECKING:
    from tests.simulation.disk import Mount, SimPath


class SimFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """Goes dead with its process. A kill may come between any two removals."""

    protocol = "file"
    cachable = False

    def __init__(self, mount: "Mount") -> None:
        super().__init__()
        self._mount = mount

    def _path(self, path: str) -> "SimPath":
        return self._mount.path(path)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        found = sorted(self._path(path).iterdir())
        return [self.info(str(one)) for one in found] if detail else [str(one) for one in found]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        kind = "directory" if self._path(path).is_dir() else "file"
        return {"name": path, "size": self._path(path).stat().st_size, "type": kind}

    def open(self, path: str, mode: str = "rb", **_: Any) -> IO[bytes]:
        return self._path(path).open(mode)

    def mv(self, path1: str, path2: str, **_: Any) -> None:
        self._mount.rename(self._path(path1), self._path(path2))

    def rm_file(self, path: str) -> None:
        failpoints.call_hook("archive.before_remove")
        self._path(path).unlink()

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        assert recursive
        self._mount.remove_tree(self._path(path))
