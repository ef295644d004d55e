"""Backups of the whole state folder while the service runs: writing, verifying and restoring.

Each part of the state records how far it has seen the others. So the copy of a part must not be older
than the records about it in the other copies. The order of copying ensures this:

    1  a lock keeps the pipeline from deleting segments of the inbox: the copied snapshots need them
    2  models, adapters and everything else that records nothing about the others
    3  inbox/seen, board and snapshots, which have seen lines of the ledger
    4  the ledger, at one moment: it has seen offsets of the inbox
    5  the inbox: every event that was acknowledged before that moment is in it

A backup is written under another name. It is renamed once its own parts have been found to agree. The
archive is not part of it.
"""

import hashlib
import os
import sqlite3
import tarfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from importlib import metadata
from pathlib import Path

import msgspec

from fleetcast.fleet import files
from fleetcast.fleet.decode_faults import explain_json_error
from fleetcast.fleet.errors import ConfigError, FleetcastError
from fleetcast.ingest.inbox.segments import KEEP_LOCK
from fleetcast.placement.ledger.chain import ChainHead
from fleetcast.placement.ledger.schema import SCHEMA_VERSION
from fleetcast.placement.ledger.verify import verify_ledger
from fleetcast.service.config import Config
from fleetcast.service.state_identity import describe_doubt, find_doubts
from fleetcast.service.state_parts import read_state_parts

AREA = "backup"  # of failpoints
MANIFEST, FORMAT = "manifest.json", 1
TRIES = 3  # to copy a snapshot before the pipeline deletes it
SNAPSHOTS = 2  # the newest ones of a pipeline are copied, as many as it holds
BLOCK_BYTES = 2**20
LEFT_OUT = (".tmp", ".lock", "-wal", "-shm", ".partial")  # endings of what is of a process, not of the state
TAR = (".tar", ".tar.gz", ".tgz")
Say = Callable[[str], None]


class BackupError(FleetcastError):
    """The error for a backup that cannot be made, or that differs from its manifest."""


class BackupFile(msgspec.Struct, frozen=True):
    """A file of a backup. path: relative to the state folder."""

    path: str
    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The manifest of a backup: its files, and the identity and ledger head of its state.

    time_ms: every event acknowledged before this time (Unix ms) is in the backup.
    """

    format: int = FORMAT
    time_ms: int
    version: str  # of Fleetcast
    ledger_version: int = SCHEMA_VERSION
    identity: str
    head_line: int
    head: str  # the hash of the ledger's last line of audit
    files: list[BackupFile]


def back_up_state(config: Config, to: Path, say: Say) -> Manifest:
    """Write a backup of the state to a new folder, or to a new tar file.

    Raises BackupError, ConfigError, OSError.
    """
    if to.exists():
        raise ConfigError(f"{to} exists already: name a new one")
    if not to.parent.is_dir():
        raise ConfigError(f"{to}: no folder {to.parent}; make it first: mkdir -p {to.parent}")
    if config.folder.resolve() in (to.resolve(), *to.resolve().parents):
        raise ConfigError(f"{to} lies in the state folder {config.folder}: a backup belongs on another disk")
    part = to.with_name(f".{to.name}.partial")
    files.remove_tree(part)
    try:
        part.mkdir(mode=0o700)
        with _lock_inbox(config.inbox):
            manifest = _copy_state(config, part, say)
        if to.name.endswith(TAR):
            _pack_backup(part, to, say)
        else:
            files.rename(part, to, AREA)
            files.sync_folder(to.parent, AREA)
    finally:
        files.remove_tree(part)
    return manifest


def _copy_state(config: Config, part: Path, say: Say) -> Manifest:
    state, copy = config.folder, part / "state"
    inbox = state / "inbox"
    say("models, adapters and what else there is")
    for path in sorted(state.iterdir()):
        if path.name not in ("inbox", "board", "snapshot", "archive", config.ledger.name) and not (
            path.name.startswith("pipeline-")
        ):
            _copy_tree(path, copy / path.name)
    say("board and snapshots")
    for path in (inbox / "seen", inbox / "identity"):
        _copy_file(path, copy / "inbox" / path.name)
    for home in (state, *sorted(state.glob("pipeline-*"))):
        _copy_tree(home / "board", copy / home.relative_to(state) / "board")
        _copy_snapshots(home / "snapshot", copy / home.relative_to(state) / "snapshot")
    say("ledger")
    time_ms = config.make_clock().now_ms()
    _copy_ledger(config.ledger, copy / config.ledger.name)
    say("inbox")
    _copy_inbox(inbox, copy / "inbox")
    say("verifying the copy")
    there = msgspec.structs.replace(config, state=str(copy))
    head = _check_state(there)
    manifest = Manifest(
        time_ms=time_ms,
        version=metadata.version("fleetcast"),
        identity=read_state_parts(there).find_identity(),
        head_line=head.audit_id,
        head=head.hash,
        files=[_describe_file(path, copy) for path in _list_files(copy)],
    )
    for folder in sorted({path.parent for path in _list_files(copy)}):
        files.sync_folder(folder, AREA)
    files.replace_file(part / MANIFEST, [msgspec.json.format(msgspec.json.encode(manifest), indent=1)], AREA)
    return manifest


def _check_state(config: Config) -> ChainHead:
    """Check that the parts of the state agree, and return the head of the audit trail.

    Raises BackupError if they disagree, or if the ledger is damaged.
    """
    found = [describe_doubt(doubt) for doubt in find_doubts(read_state_parts(config))]
    if not config.ledger.exists():
        head = ChainHead()
    else:
        verdict = verify_ledger(config.ledger, "")
        head, found = verdict.head, [*found, *(finding.sentence for finding in verdict.findings)]
    if found:
        raise BackupError(f"the state is in doubt, and so would be this copy of it: {'; '.join(found)}")
    return head


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a backup.

    Raises BackupError if it is missing or damaged, or if its format is newer than this program.
    """
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except OSError as error:
        raise BackupError(f"{folder} is no backup: {MANIFEST} cannot be read ({error})") from None
    except msgspec.MsgspecError as error:
        raise BackupError(f"{folder} is no backup: {MANIFEST} is damaged ({explain_json_error(error)})") from None
    if manifest.format > FORMAT:
        raise BackupError(f"{folder} has format {manifest.format}, this program reads {FORMAT}: use a later one")
    return manifest


def verify_backup(config: Config, backup: Path, scratch: Path, say: Say) -> Manifest:
    """Check a backup against its manifest. Raises BackupError that lists what is wrong.

    A tar file is unpacked to the folder ``scratch``.
    """
    folder = _unpack_backup(backup, scratch, say) if backup.is_file() else backup
    say(f"verifying {backup}")
    return _check_against_manifest(config, folder)


def _check_against_manifest(config: Config, backup: Path) -> Manifest:
    manifest, copy = read_manifest(backup), backup / "state"
    there, wanted = {_describe_file(path, copy) for path in _list_files(copy)}, set(manifest.files)
    names = {row.path for row in there}
    wrong = [f"{row.path} is {'not what was written' if row.path in names else 'gone'}" for row in wanted - there]
    wrong += [f"{row.path} was added" for row in there if row.path not in {known.path for known in wanted}]
    if wrong:
        more = f", and {len(wrong) - 10:,} more" if len(wrong) > 10 else ""
        raise BackupError(f"{backup} is not what was written: {'; '.join(sorted(wrong)[:10])}{more}")
    _check_state(msgspec.structs.replace(config, state=str(copy)))
    return manifest


def restore_state(config: Config, backup: Path, say: Say) -> Manifest:
    """Verify a backup, and create the state folder from it.

    Raises ConfigError if the state folder exists and is not empty. Raises the errors of `verify_backup`.
    """
    to = config.folder
    if to.exists() and any(to.iterdir()):
        raise ConfigError(f"state = {config.state!r}: the folder is not empty; move it away, or name a new one")
    part = to.with_name(f".{to.name}.partial")
    files.remove_tree(part)
    try:
        part.mkdir(parents=True)
        folder = _unpack_backup(backup, part / "unpacked", say) if backup.is_file() else backup
        say("verifying the backup")
        manifest = _check_against_manifest(config, folder)
        say(f"copying {len(manifest.files):,} files")
        _copy_tree(folder / "state", part / "state")
        for path in sorted({path.parent for path in _list_files(part / "state")}):
            files.sync_folder(path, AREA)
        if to.exists():
            to.rmdir()
        files.rename(part / "state", to, AREA)
        files.sync_folder(to.parent, AREA)
    finally:
        files.remove_tree(part)
    return manifest


def _unpack_backup(backup: Path, into: Path, say: Say) -> Path:
    say(f"unpacking {backup}")
    try:
        with tarfile.open(backup) as tar:
            tar.extractall(into, filter="data")
    except (tarfile.TarError, OSError, EOFError) as error:
        raise BackupError(f"{backup} cannot be unpacked: {error}") from None
    return into


def _pack_backup(part: Path, to: Path, say: Say) -> None:
    say(f"packing {to}")
    beside = to.with_name(f".{to.name}.tmp")
    try:
        beside.touch(mode=0o600)
        with tarfile.open(beside, "w:gz" if to.name.endswith("gz") else "w") as tar:
            for path in (part / MANIFEST, part / "state"):
                tar.add(path, path.name)
        files.sync_folder(beside, AREA)
        files.rename(beside, to, AREA)
        files.sync_folder(to.parent, AREA)
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def _lock_inbox(inbox: Path) -> Iterator[None]:
    """Keep the pipeline from deleting segments while the context is open.

    The lock ends with this process, even if the process is killed.
    """
    if not inbox.is_dir():
        yield
        return
    path = inbox / KEEP_LOCK
    try:
        give_back = files.lock(path)
    except BlockingIOError:
        raise BackupError(f"another backup of {inbox.parent} runs: wait for its end") from None
    try:
        if os.geteuid() == 0:  # the service must be able to see whether it is held
            owner = inbox.stat()
            os.chown(path, owner.st_uid, owner.st_gid)
        yield
    finally:
        path.unlink(missing_ok=True)
        give_back()


def _copy_inbox(inbox: Path, to: Path) -> None:
    """Copy the segments and marks of the inbox.

    If an event is being written, the copy may contain a part of it. The event is not acknowledged yet.
    """
    for name in sorted(files.list_names(inbox)):
        if name not in ("seen", "identity"):
            _copy_tree(inbox / name, to / name)


def _copy_snapshots(folder: Path, to: Path) -> None:
    """Copy the newest complete snapshots.

    If the pipeline deletes all of them during the copy, newer ones are copied.
    """
    for _ in range(TRIES):
        for name in sorted(filter(str.isdecimal, files.list_names(folder)), key=int)[-SNAPSHOTS:]:
            _copy_tree(folder / name, to / name)
            if sorted(_list_names(folder / name)) != sorted(_list_names(to / name)):
                files.remove_tree(to / name)
        if files.list_names(to) or not files.list_names(folder):
            return


def _copy_tree(path: Path, to: Path) -> None:
    """Copy a file or a folder, except locks, sockets, and files that are being written."""
    if path.name.endswith(LEFT_OUT) or path.name in ("lock",):
        return
    if path.is_dir():
        to.mkdir(parents=True, exist_ok=True)
        for name in sorted(files.list_names(path)):
            _copy_tree(path / name, to / name)
    elif path.is_file():
        _copy_file(path, to)


def _copy_file(path: Path, to: Path) -> None:
    """Copy one file with its permissions. If the file no longer exists, do nothing."""
    to.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError), path.open("rb") as source:
        rights = os.fstat(source.fileno()).st_mode & 0o777
        with open(os.open(to, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, rights), "wb") as target:
            for block in iter(lambda: source.read(BLOCK_BYTES), b""):
                target.write(block)
            target.flush()
            os.fsync(target.fileno())


def _copy_ledger(path: Path, to: Path) -> None:
    """Copy the ledger at one moment with SQLite's backup, even while the placer writes."""
    if not path.exists():
        return
    to.parent.mkdir(parents=True, exist_ok=True)
    try:
        with closing(files.connect_to_read(path)) as source, closing(files.connect(to)) as target:
            source.backup(target)
            target.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    except sqlite3.Error as error:
        raise BackupError(f"{path} cannot be copied: {error}") from None
    files.sync_folder(to, AREA)


def _list_files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.endswith(("-wal", "-shm")))


def _list_names(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if not path.name.endswith(LEFT_OUT)]


def _describe_file(path: Path, folder: Path) -> BackupFile:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return BackupFile(str(path.relative_to(folder)), path.stat().st_size, digest)
