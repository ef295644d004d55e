"""The checks before a demo starts: its ports are free, and no other demo uses its folder."""

import contextlib
import fcntl
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import typer

from fleetcast.fleet.errors import ConfigError
from fleetcast.fleet.process import TOKEN_VARIABLE, make_token_headers


def refuse_taken_ports(port: int) -> None:
    """Raise ConfigError if another process listens on the ports that the service needs.

    Without this check, the simulated fleet would send its jobs to that process.
    """
    from fleetcast.service.config import Config, override_config
    from fleetcast.service.start_checks import check_ports_available

    try:
        check_ports_available(override_config(Config(), api_port=port))
    except ConfigError as error:
        raise ConfigError(f"--port {port}: {error}") from None


def refuse_unknown_token() -> None:
    """Raise ConfigError if the service requires a token, and ours lacks the scopes that a demo needs."""
    from fleetcast.service.http.access import LOOPBACK, Scope, load_access
    from fleetcast.service.http.problems import Problem

    access = load_access(LOOPBACK[0])
    headers = [(name.lower().encode(), value.encode()) for name, value in make_token_headers().items()]
    try:
        for scope in (Scope.READ, Scope.EVENTS, Scope.PLACE):
            access.authorize("GET", headers, scope)
    except Problem as problem:
        raise ConfigError(
            f"tokens are set, so the demo needs one with the scope admin in {TOKEN_VARIABLE}: {problem}"
        ) from None


@contextlib.contextmanager
def lock_empty_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty run folder, locked while the context is open.

    A folder that is not empty is emptied only if an earlier demo made it and no demo runs in it.
    """
    mark = folder / "demo"
    if folder.exists() and not folder.is_dir():
        raise typer.BadParameter(f"{folder} is a file; name a folder", param_hint="--folder")
    if folder.exists():
        if any(folder.iterdir()) and not mark.exists():
            raise typer.BadParameter(f"{folder} is not empty and no earlier demo made it", param_hint="--folder")
        with mark.open("wb") as file:
            _lock_file(file, folder)
            shutil.rmtree(folder)
    folder.mkdir(parents=True)
    with mark.open("wb") as file:
        _lock_file(file, folder)
        yield folder.resolve()


def _lock_file(file: BinaryIO, folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"--folder {folder}: another demo runs in it; end it, or name another folder") from None
