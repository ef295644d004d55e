"""Registry: the versions of models on disk. Each is added completely or not at all.

A promotion or a rollback is one atomic write.

    ROOT/demand/0001/           one version: the model's own files, card.json, card.html. It never changes
    ROOT/demand/current         the version that serves, then those that served before it, one per line
    ROOT/demand/shadow          the chosen shadow version, or off. Without this file it is the newest version
    ROOT/demand/promotions.jsonl    one line for each promotion and rollback, and whether it was forced
    ROOT/demand/lock            held while a version gets its number, and while `current` changes
    ROOT/demand/.new-…          a version being written, locked by its writer. Deleted if it has no writer

A version is written into its own folder, fsynced, then renamed. So after a kill it is complete or
absent. Readers take no lock.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from fleetcast.fleet import files
from fleetcast.fleet.clock import Clock, SystemClock
from fleetcast.fleet.errors import ModelError, UnknownEntity
from fleetcast.models.versions.card import CARD_FILE, PAGE_FILE, Card, FileSum, read_card, write_card

logger = logging.getLogger(__name__)

KINDS = ("demand", "duration", "risk", "interference")
SHADOWED = ("demand", "risk")  # whose challengers a pipeline scores
CURRENT, LOG, LOCK, NEW = "current", "promotions.jsonl", "lock", ".new-"
SHADOW, OFF, NEWEST = "shadow", "off", "newest"
SHIPPED = "shipped"  # in place of a version: what comes with the program serves
REMEMBERED = 50  # versions that `current` keeps for rollbacks
KIND_NAME, VERSION_NAME = re.compile(r"[a-z][a-z0-9_]*"), re.compile(r"\d{4,}")


class Promotion(msgspec.Struct, frozen=True):
    """One promotion or rollback: a line of promotions.jsonl.

    action: promote or rollback. version: a name or SHIPPED. forced: whether the gate had objected. `sentence` is
    its objection, if there was one.
    """

    time_ms: int
    action: str
    version: str
    previous: str | None
    forced: bool
    sentence: str


class Registry:
    """The versions of models below one folder. Any number of processes may read and write at once."""

    def __init__(self, root: Path, clock: Clock | None = None) -> None:
        self.root = root
        self._clock = clock or SystemClock()

    # -- reading ----------------------------------------------------------------------------------------------------

    def find_current_version(self, kind: str) -> str | None:
        """Return the name of the version that serves, or None.

        The call reads one small file, so it is cheap enough for every tick.
        """
        served = self._read_served(kind)
        return served[0] if served else None

    def find_serving_folder(self, kind: str) -> Path | None:
        """Return the folder of the version that serves, after checking its files, or None if none serves.

        If this version is damaged, the version that served before it serves, with a warning. Raises ModelError if all
        are damaged.
        """
        served = self._read_served(kind)
        reasons: list[str] = []
        for version in dict.fromkeys(served):
            damage = self.find_damage(kind, version)
            if damage is None:
                if reasons:
                    logger.warning("%s: %s serves in its place", "; ".join(reasons), version)
                return self.find_folder(kind, version)
            reasons.append(f"{kind} {version} is damaged: {damage}")
        if reasons:
            raise ModelError("; ".join(reasons))
        return None

    def find_challenger(self, kind: str) -> str | None:
        """Return the name of the version to run in the shadow, or None for none.

        The shadow is the chosen version. Without a choice, or if the chosen version serves, it is the newest version if
        that is newer than the serving one. The shadow may be damaged. The call is as cheap as `find_current_version`.
        """
        chosen, serving, names = self._read_shadow_choice(kind), self.find_current_version(kind), self.list_names(kind)
        if chosen not in (NEWEST, serving):
            return None if chosen == OFF else chosen
        return names[-1] if names and (serving is None or int(names[-1]) > int(serving)) else None

    def _read_shadow_choice(self, kind: str) -> str:
        path = self._make_kind_path(kind) / SHADOW
        try:
            word = path.read_text(encoding="ascii").strip()
        except FileNotFoundError:
            return NEWEST
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from None
        if word not in (OFF, NEWEST) and not VERSION_NAME.fullmatch(word):
            raise ModelError(f"{path} says {word[:40]!r}: expected a version, {OFF} or {NEWEST}")
        return word

    def list_cards(self, kind: str) -> list[Card]:
        """Return the cards of all versions with a readable card, oldest first."""
        cards = []
        for version in self.list_names(kind):
            try:
                cards.append(self.read_version_card(kind, version))
            except ModelError as error:
                logger.warning("%s: the version is passed over", error)
        return cards

    def list_names(self, kind: str) -> list[str]:
        """Return the names of all versions, including damaged ones, oldest first."""
        folder = self._make_kind_path(kind)
        if not folder.is_dir():
            return []
        return sorted((path.name for path in folder.iterdir() if VERSION_NAME.fullmatch(path.name)), key=int)

    def find_folder(self, kind: str, version: str) -> Path:
        """Return the folder of a version. "3" means 0003. Raises UnknownEntity if there is none."""
        name = version.zfill(4)
        folder = self._make_kind_path(kind) / name
        if not VERSION_NAME.fullmatch(name) or not folder.is_dir():
            known = ", ".join(self.list_names(kind)[-5:]) or "none"
            raise UnknownEntity(f"no version {version} of {kind} in {self.root}; the newest are: {known}")
        return folder

    def read_version_card(self, kind: str, version: str) -> Card:
        return read_card(self.find_folder(kind, version))

    def find_damage(self, kind: str, version: str) -> str | None:
        """Describe the damage of a version, or return None if there is none.

        A file may be missing or have another checksum.
        """
        try:
            folder = self.find_folder(kind, version)
            for file in read_card(folder).files:
                if _compute_checksum(folder / file.path) != file.sha256:
                    return f"{file.path} has another sha256 than its card says"
        except (ModelError, UnknownEntity) as error:
            return str(error)
        except OSError as error:
            return f"{error.filename}: {error.strerror}"
        return None

    def list_promotions(self, kind: str) -> list[Promotion]:
        """Return all promotions and rollbacks, oldest first. Skips a line that a crash cut short."""
        path = self._make_kind_path(kind) / LOG
        lines = path.read_bytes().splitlines() if path.exists() else []
        left = []
        for line in lines:
            with contextlib.suppress(ValueError):
                left.append(msgspec.json.decode(line, type=Promotion))
        return left

    def _read_served(self, kind: str) -> list[str]:
        """Return the names of the version that serves and of those that served before it, newest first."""
        try:
            lines = (self._make_kind_path(kind) / CURRENT).read_text(encoding="ascii").split()
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            raise ModelError(f"{self._make_kind_path(kind) / CURRENT} cannot be read: {error}") from None
        return [line for line in lines if VERSION_NAME.fullmatch(line)]

    def _make_kind_path(self, kind: str) -> Path:
        if not KIND_NAME.fullmatch(kind):
            raise UnknownEntity(f"kind {kind!r}: expected one of {', '.join(KINDS)}")
        return self.root / kind

    # -- adding -----------------------------------------------------------------------------------------------------

    def add_version(
        self, kind: str, write: Callable[[Path], None], card: Card, page: Callable[[Card], str] | None = None
    ) -> str:
        """Add a version without promoting it, and return its number.

        `write` fills an empty folder. The card receives the number and the checksums of the files. `page`
        renders card.html. If `write` raises, the folder is removed. An OSError (full disk) becomes a ModelError.
        """
        folder = self._make_kind_path(kind)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with self._make_locked_folder(folder) as new:
                write(new)
                sums = _list_file_sums(new)
                with self._hold_lock(folder):
                    version = f"{self._find_last_version_number(kind) + 1:04d}"
                    card = msgspec.structs.replace(card, kind=kind, version=version, files=sums)
                    write_card(card, new)
                    read_card(new)  # NaN where a number must be is found now, not by who serves it
                    if page is not None:
                        (new / PAGE_FILE).write_text(page(card), encoding="utf-8")
                    _sync_tree(new)
                    files.rename(new, folder / version, "models")
                    files.sync_folder(folder, "models")
        except OSError as error:
            raise ModelError(f"cannot keep a version of {kind} in {folder}: {error.strerror or error}") from error
        return version

    def _find_last_version_number(self, kind: str) -> int:
        """Return the greatest version number ever used. So the number of a deleted version is not used again."""
        return max(map(int, [*self.list_names(kind), *self._read_served(kind), "0"]))

    @contextlib.contextmanager
    def _make_locked_folder(self, folder: Path) -> Iterator[Path]:
        """Yield an empty folder that this process has locked. Removes the folder at the end unless it was renamed."""
        with self._hold_lock(folder):
            _delete_unfinished_versions(folder)
            new = folder / f"{NEW}{secrets.token_hex(8)}"
            new.mkdir()
            handle = os.open(new, os.O_RDONLY)
            fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            yield new
        finally:
            shutil.rmtree(new, ignore_errors=True)
            os.close(handle)

    # -- serving ----------------------------------------------------------------------------------------------------

    def promote(self, kind: str, version: str, force: bool = False) -> None:
        """Make a version the serving one. Does nothing if it already serves.

        Raises ModelError if the version is damaged, or if its card says that it lost or was never evaluated.

        force: promote the version despite the gate's objection, which is recorded.
        """
        folder = self.find_folder(kind, version)
        damage = self.find_damage(kind, folder.name)
        if damage is not None:
            raise ModelError(f"{kind} {folder.name} is not promoted: it is damaged: {damage}")
        card = read_card(folder)
        objection = _find_objection(card)
        if objection is not None and not force:
            raise ModelError(f"{kind} {folder.name} is not promoted: {objection}")
        with self._hold_lock(folder.parent):
            served = self._read_served(kind)
            if served[:1] == [folder.name]:
                return
            self._write_served(kind, [folder.name, *served])
            sentence = objection or (card.gate.sentence if card.gate else "")
            self._record_promotion(kind, "promote", served, sentence, forced=objection is not None)

    def roll_back(self, kind: str) -> str:
        """Replace the serving version by the last undamaged version that served before it.

        Returns the name of that version, or SHIPPED. Before the first version, the model that ships with the program
        served. So this model serves again if all earlier versions are damaged. Raises ModelError if no version serves.
        """
        with self._hold_lock_if_exists(kind):
            served = self._read_served(kind)
            if served:
                whole = (at for at in range(1, len(served)) if served[at] != served[0])
                back = next((at for at in whole if self.find_damage(kind, served[at]) is None), len(served))
                self._write_served(kind, served[back:])
                self._record_promotion(kind, "rollback", served, f"back from {served[0]}")
                return served[back] if back < len(served) else SHIPPED
        raise ModelError(f"no version of {kind} to go back from: none serves, what ships does")

    def choose_shadow(self, kind: str, version: str) -> None:
        """Choose the version to run in the shadow: a version, `off` or `newest`.

        Raises ModelError if the version serves or is damaged.
        """
        if version not in (OFF, NEWEST):
            version = self.find_folder(kind, version).name
            if version == self.find_current_version(kind):
                raise ModelError(f"{kind} {version} serves: only another version can run in its shadow")
            damage = self.find_damage(kind, version)
            if damage is not None:
                raise ModelError(f"{kind} {version} cannot run in the shadow: it is damaged: {damage}")
        with self._hold_lock(self._make_kind_path(kind)):
            self._replace_lines(kind, SHADOW, [version])

    def list_old_versions(self, kind: str, keep: int) -> list[str]:
        """Return the names of the versions that `prune` would delete.

        Four kinds of versions stay: the newest `keep`, the serving version, the one that served before it, and the
        shadow.
        """
        left = {*list(dict.fromkeys(self._read_served(kind)))[:2], self.find_challenger(kind)}
        names = self.list_names(kind)
        return [name for name in names[: max(0, len(names) - keep)] if name not in left]

    def prune(self, kind: str, keep: int) -> list[str]:
        """Delete old versions, and return their names."""
        with self._hold_lock_if_exists(kind):
            old = self.list_old_versions(kind, keep)
            for name in old:
                gone = self._make_kind_path(kind) / f"{NEW}{name}"
                (self._make_kind_path(kind) / name).rename(gone)  # first out of sight at once, then file by file
                shutil.rmtree(gone)
        return old

    def _write_served(self, kind: str, served: list[str]) -> None:
        self._replace_lines(kind, CURRENT, served[:REMEMBERED])

    def _replace_lines(self, kind: str, name: str, lines: list[str]) -> None:
        folder = self._make_kind_path(kind)
        files.replace_file(folder / name, ["".join(f"{line}\n" for line in lines).encode("ascii")], "models")

    def _record_promotion(self, kind: str, action: str, before: list[str], sentence: str, forced: bool = False) -> None:
        version, previous = self.find_current_version(kind) or SHIPPED, before[0] if before else None
        line = Promotion(self._clock.now_ms(), action, version, previous, forced, sentence)
        with (self._make_kind_path(kind) / LOG).open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")

    @contextlib.contextmanager
    def _hold_lock(self, folder: Path) -> Iterator[None]:
        """Hold the folder's lock while the context is open, so that there is one writer at a time.

        The lock also ends if the process that holds it ends.
        """
        try:
            with (folder / LOCK).open("ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                yield
        except OSError as error:
            raise ModelError(f"cannot change {folder}: {error.strerror or error}") from error

    def _hold_lock_if_exists(self, kind: str) -> contextlib.AbstractContextManager[None]:
        folder = self._make_kind_path(kind)
        return self._hold_lock(folder) if folder.is_dir() else contextlib.nullcontext()


def _find_objection(card: Card) -> str | None:
    """Return the reason why a card's model must not serve, or None if there is none."""
    gate = card.gate
    if gate is None:
        return "no gate has judged it against a baseline; --force promotes it all the same, and that is recorded"
    if gate.won:
        return None
    if not gate.origins:
        return f"{gate.sentence}; --force promotes it all the same, and that is recorded"
    return (
        f"it lost to {gate.baseline}: {gate.metric} {gate.ours:.4g} against {gate.baseline_value:.4g} over "
        f"{gate.origins:,} origins ({gate.sentence}); --force promotes it all the same, and that is recorded"
    )


def _delete_unfinished_versions(folder: Path) -> None:
    """Delete the folders of unfinished versions whose lock is free, because no process is writing to them."""
    for path in folder.glob(f"{NEW}*"):
        handle = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        finally:
            os.close(handle)
        logger.info("%s was left by a writer that is gone: deleted", path)
        shutil.rmtree(path)


def _list_file_sums(folder: Path) -> tuple[FileSum, ...]:
    """Return the path, size and checksum of every file below a folder, except the card's own files."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [(path, path.relative_to(folder).as_posix()) for path in paths]
    return tuple(
        FileSum(name, path.stat().st_size, _compute_checksum(path))
        for path, name in names
        if name not in (CARD_FILE, PAGE_FILE)
    )


def _compute_checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_tree(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        files.sync_folder(path, "models")
