"""The state folder, looked at before anything starts: what cannot be written is said once, not by every role."""

import os
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


def _first_there(path: Path) -> Path:
    return next(parent for parent in (path, *path.parents) if parent.exists())


def _remove(path: Path) -> None:
    try:
        path.unlink()
    except OSError:  # it was never made
        return
