"""The state folder, looked at before anything starts: what cannot be written is said once, not by every role."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from fleet.errors import ConfigError
from service.config import Config


def prepare(config: Config) -> None:
    """Make the folders of the state; ConfigError where one cannot be made or written."""
    for folder in (config.folder, config.inbox, config.board, config.folder / "snapshot"):
        probe = folder / f".probe.{os.getpid()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"x")
        except OSError as error:
            where = _first_there(folder)
            raise ConfigError(
                f"state = {config.state!r}: cannot write {folder} ({error.strerror}; {where} is what there is): "
                "name another folder with --state"
            ) from None
        finally:
            _remove(probe)
    if config.ledger.exists() and not config.ledger.is_file():
        raise ConfigError(f"state = {config.state!r}: {config.ledger} is no file: move it away")


@contextlib.contextmanager
def claimed(config: Config) -> Iterator[None]:
    """Hold the state folder for one supervisor; ConfigError while another one does.

    Two placers on one ledger and two pipelines on one board would undo each other's work.
    """
    with (config.folder / "lock").open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"state = {config.state!r}: another `fleetcast run` uses this folder: "
                "end it, or name another with --state"
            ) from None
        yield


def _first_there(path: Path) -> Path:
    return next(parent for parent in (path, *path.parents) if parent.exists())


def _remove(path: Path) -> None:
    try:
        path.unlink()
    except OSError:  # it was never made
        return
