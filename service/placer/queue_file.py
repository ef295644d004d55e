"""The file of queues that the placer serves, read when it changes. A bad one is refused; the old one serves."""

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path

from fleet import files
from fleet.errors import ConfigError, ConflictError, RequestError
from placement.ledger import Ledger
from placement.queues_file import check_capacity, read_queues
from placement.tree import QueueTree

logger = logging.getLogger(__name__)


class QueueFile:
    """`tree` is None where no file is configured. ConfigError at the start for a file that is refused."""

    def __init__(self, path: str, ledger: Ledger, now_ms: int) -> None:
        self.path = Path(path) if path else None
        self.tree: QueueTree | None = None
        self.refused = ""  # why the file that is there now does not serve
        self.text = ""
        self._ledger = ledger
        self._seen: tuple[int, int, int] | None = None
        if self.path is not None:
            self._seen = _stamp(self.path)
            self.text = _read(self.path)
            try:
                self.tree = read_queues(self.text)
            except RequestError as error:
                raise ConfigError(f"placer.queues = {path!r}: {error}") from None
            self._note_start(now_ms)

    @property
    def generation(self) -> str:
        """Of what serves: changes with every other text."""
        return self.tree.digest[:16] if self.tree is not None else ""

    def _note_start(self, now_ms: int) -> None:
        known = self._ledger.marks().get("queues", "")
        if self.tree is not None and known != self.tree.digest:
            self._note(now_ms, "placer", f"queues: {self.tree.digest} serves, before it {known or 'none'}")

    def _note(self, now_ms: int, caller: str, sentence: str) -> None:
        with self._ledger.transaction():
            if self.tree is not None:
                self._ledger.remember(queues=self.tree.digest)
            self._ledger.note("", now_ms, caller, "queues", sentence)
        logger.info("%s", sentence)

    def has_changed(self) -> bool:
        """Whether the file is another one than was read last."""
        return self.path is not None and _stamp(self.path) != self._seen

    def look(self, now_ms: int, capacity: Mapping[str, float] | None = None) -> bool:
        """Read the file if it has changed; True when another tree serves now. The audit has the hashes of both."""
        if self.path is None or not self.has_changed():
            return False
        self._seen = _stamp(self.path)
        try:
            text = _read(self.path)
        except ConfigError as error:
            return self._refuse(now_ms, "none", str(error))
        if text == self.text:
            self.refused = ""
            return False
        try:
            return self._serve(text, now_ms, "placer", capacity)
        except RequestError as error:
            return self._refuse(now_ms, hashlib.sha256(text.encode()).hexdigest(), str(error))

    def _refuse(self, now_ms: int, digest: str, why: str) -> bool:
        self.refused = why
        self._note_refused(now_ms, "placer", digest, why)
        return False

    def _note_refused(self, now_ms: int, caller: str, digest: str, why: str) -> None:
        serving = self.tree.digest if self.tree is not None else "none"
        self._note(now_ms, caller, f"queues: {digest} was refused, {serving} serves: {why}")

    def _serve(self, text: str, now_ms: int, caller: str, capacity: Mapping[str, float] | None) -> bool:
        tree = read_queues(text)
        if capacity:
            check_capacity(tree, capacity, text)
        before = self.tree.digest if self.tree is not None else "none"
        self.tree, self.text, self.refused = tree, text, ""
        self._note(now_ms, caller, f"queues: {tree.digest} serves, before it {before}")
        return True

    def put(
        self, text: str, generation: str, now_ms: int, caller: str, capacity: Mapping[str, float] | None
    ) -> QueueTree:
        """Check a new text, write it to the file and serve it. RequestError; ConflictError for another generation."""
        try:
            tree = self.check(text, generation, capacity)
        except RequestError as error:
            self._note_refused(now_ms, caller, hashlib.sha256(text.encode()).hexdigest(), str(error))
            raise
        assert self.path is not None
        files.replace_file(self.path, [text.encode()], "queues")
        self._seen = _stamp(self.path)
        self._serve(text, now_ms, caller, capacity)
        return tree

    def notes(self, capacity: Mapping[str, float]) -> list[str]:
        """What is wrong with the tree that serves since the fleet is another one than it was read for."""
        try:
            if self.tree is not None:
                check_capacity(self.tree, capacity, self.text)
        except RequestError as error:
            return [str(error)]
        return []

    def check(self, text: str, generation: str, capacity: Mapping[str, float] | None) -> QueueTree:
        """What `put` would serve."""
        if self.path is None:
            raise ConflictError("no file of queues is configured: set queues in [placer] and start again")
        if generation not in ("*", self.generation):
            raise ConflictError(f"the queues have generation {self.generation}, not {generation}: read them again")
        tree = read_queues(text)
        if capacity:
            check_capacity(tree, capacity, text)
        return tree


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text in UTF-8: {error}") from None
