"""`fleetcast state backup`, `verify` and `restore`: make, check and restore copies of the whole state.

A backup is made while the service runs.
"""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fleetcast.cli.kit.options import ConfigOption, StateOption, load_site_config
from fleetcast.cli.kit.screen import echo

if TYPE_CHECKING:
    from fleetcast.service.state_backup import Manifest


def backup(
    to: Annotated[Path, typer.Argument(help="A new folder, or a new file that ends in .tar, .tar.gz or .tgz.")],
    config: ConfigOption = None,
    state: StateOption = None,
) -> None:
    """Copy the whole state while Fleetcast runs.

    The copy has the ledger, snapshots, inbox, board, models, adapters, identity and keys. It is
    complete or absent: it gets its name once its parts agree. A manifest lists the size and checksum of
    each file and the head of the audit. Everything that was acknowledged before the printed moment is
    in the copy. The archive is not copied, and you may copy it at any time. The copy contains the
    placer's key: keep it as private as the state.

    Exit code 0: done; 1: the state is in doubt, or cannot be read or written; 2: wrong usage.

    Examples:

      fleetcast state backup /backup/monday

      fleetcast state backup /backup/monday.tar.gz --config fleet.toml
    """
    from fleetcast.cli.state import load_settings
    from fleetcast.service.state_backup import back_up_state

    _print_summary(back_up_state(load_settings(config, state), to.absolute(), _print_step), f"{to} is a backup")


def verify(
    backup: Annotated[Path, typer.Argument(help="A folder or tar file that `fleetcast state backup` wrote.")],
    config: ConfigOption = None,
) -> None:
    """Check a backup: its files against the manifest, its parts, and the audit chain. Changes nothing.

    Exit code 0: the backup is unchanged; 1: it has changed, and the reasons are printed; 2: wrong usage.

    Example:  fleetcast state verify /backup/monday
    """
    from fleetcast.service.state_backup import verify_backup

    with tempfile.TemporaryDirectory(prefix="fleetcast-verify-") as scratch:
        _print_summary(
            verify_backup(load_site_config(config, None), backup, Path(scratch), _print_step),
            f"{backup} is what was written",
        )


def restore(
    backup: Annotated[Path, typer.Argument(help="A folder or tar file that `fleetcast state backup` wrote.")],
    config: ConfigOption = None,
    state: StateOption = None,
) -> None:
    """Make a state folder from a backup.

    The folder must be new or empty, and Fleetcast must not run on it. The backup is verified first. The
    original site must not run again, because both would place jobs on the same GPUs. Afterwards, start
    Fleetcast and run `fleetcast state show`.

    Exit code 0: done; 1: the backup has changed; 2: wrong usage, or the folder is not empty.

    Example:  fleetcast state restore /backup/monday --state var
    """
    from fleetcast.service.state_backup import restore_state

    settings = load_site_config(config, state)
    _print_summary(restore_state(settings, backup, _print_step), f"{settings.folder} is restored")


def _print_step(step: str) -> None:
    echo(f"{step} …", err=True)


def _print_summary(manifest: "Manifest", done: str) -> None:
    from fleetcast.fleet.clock import format_moment

    size = sum(row.bytes for row in manifest.files)
    echo(f"{done}: {len(manifest.files):,} files, {size:,} bytes, of {format_moment(manifest.time_ms)}")
    echo(f"state {manifest.identity}; head of the audit: line {manifest.head_line}, {manifest.head}")
