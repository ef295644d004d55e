"""The state folder: its checks and its locks.

There is a lock for the supervisor (`lock`), and one for each process of a role (`ROLE.lock`).
"""

import contextlib
import errno
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from fleetcast.fleet.errors import ConfigError, FleetcastError
from fleetcast.ingest.archive.files import ArchiveFiles
from fleetcast.service.config import Config

logger = logging.getLogger(__name__)

PATIENCE_S = 15.0  # wall; longer than the roles of a supervisor that was killed take to end (fleetcast.fleet.process)
POLL_S = 0.1


class StateError(FleetcastError):
    """The error for a state folder that cannot be used now.

    It ends the process, and the supervisor tries again.
    """


def make_state_folders(config: Config) -> None:
    """Make the folders of the state and of the archive.

    Raises ConfigError if a folder cannot be made or is not writable.
    """
    homes = [config.get_pipeline_folder(instance) for instance in range(config.pipeline.instances)]
    for folder in (config.folder, config.inbox, config.board, *(home / "snapshot" for home in homes)):
        _check_writable_folder(folder, f"state = {config.state!r}", "name another folder with --state")
    archive = ArchiveFiles(config.archive_url).folder if config.archive.enabled else None
    if archive is not None and config.archive.url:
        _check_writable_folder(archive, f"archive.url = {config.archive.url!r}", "name another folder or URL")
    if config.ledger.exists() and not config.ledger.is_file():
        raise ConfigError(f"state = {config.state!r}: {config.ledger} is no file: move it away")


def _check_writable_folder(folder: Path, key: str, then: str) -> None:
    """Make a folder, and write a file into it. Raises ConfigError with the key and the fix."""
    probe = folder / f".probe.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"x")
    except OSError as error:
        where = _find_existing_parent(folder)
        raise ConfigError(
            f"{key}: cannot write {folder} ({error.strerror}; {where} is what there is): {then}"
        ) from None
    finally:
        _remove_lock_file(probe)


@contextlib.contextmanager
def lock_state_folder(config: Config) -> Iterator[None]:
    """Lock the state folder for one supervisor, because two would undo each other's work.

    Raises ConfigError if another supervisor holds the lock.
    """
    with (config.folder / "lock").open("wb") as file:
        if not _try_lock(file.fileno()):
            raise ConfigError(
                f"state = {config.state!r}: another `fleetcast run` uses this folder: "
                "end it, or name another with --state"
            )
        yield


@contextlib.contextmanager
def lock_role(config: Config, role: str, patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Lock a role for this process while the context is open.

    Raises StateError if another process still holds the lock after `patience_s` (wall time).
    """
    path = config.folder / f"{role}.lock"
    file = _open_lock_file(path)
    if file is None:  # read-only, and nobody held it before: there is nothing to damage
        yield
        return
    try:
        _wait_for_lock(file, path, role, patience_s)
        with contextlib.suppress(OSError):  # a full disk: only the message of the next one is poorer
            path.write_text(f"process {os.getpid()}")
        yield
    finally:
        os.close(file)


def is_role_held(config: Config, role: str) -> bool:
    """Return whether another process holds the lock of a role now."""
    try:
        file = os.open(config.folder / f"{role}.lock", os.O_RDWR)
    except OSError:
        return False
    try:
        return not _try_lock(file)
    finally:
        os.close(file)


def _open_lock_file(path: Path) -> int | None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise StateError(f"cannot write {path}: {error.strerror}") from None
        logger.error("%s: %s", path, error.strerror)
        return os.open(path, os.O_RDONLY) if path.exists() else None


def _wait_for_lock(file: int, path: Path, role: str, patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    said = False
    while not _try_lock(file):
        holder = path.read_text(errors="replace").strip() or "a process"
        if time.monotonic() >= deadline:
            raise StateError(
                f"state folder {path.parent}: another {role} works in it ({holder}): end that, "
                "or name another folder with --state"
            )
        if not said:
            logger.warning("%s: waiting up to %.0f s for %s to end", path, patience_s, holder)
            said = True
        time.sleep(POLL_S)


def _try_lock(file: int) -> bool:
    """Try to lock the file. Returns whether this process now holds the lock.

    The lock ends with this process, even if the process is killed.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _find_existing_parent(path: Path) -> Path:
    return next(parent for parent in (path, *path.parents) if parent.exists())


def _remove_lock_file(path: Path) -> None:
    try:
        path.unlink()
    except OSError:  # it was never made
        return
