"""The queue file that the placer uses. It is read when it changes, and a bad file never takes effect.

While the file is bad, the previous tree stays in use. The ledger stores the text of the last good file
for a restart. If there is none, all requests wait in one line.
"""

import hashlib
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from fleetcast.fleet import files
from fleetcast.fleet.errors import ConfigError, ConflictError, RequestError
from fleetcast.placement.ahead.queue_trial import try_tree
from fleetcast.placement.ledger.ledger import Ledger
from fleetcast.placement.queues.queues_file import check_capacity, read_queues
from fleetcast.placement.queues.tree import QueueTree

logger = logging.getLogger(__name__)

STILL_S = 0.1  # wall; a file is read once it has not changed for this long, since its writer may be halfway
Stamp = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class ServedText:
    """The text of a queue file with its parsed tree, which has passed `try_tree`."""

    text: str
    tree: QueueTree


@dataclass(frozen=True, slots=True)
class QueueFileContents:
    """The result of reading the queue file.

    found: the checked text, or None if the file is refused or unchanged. stamp: identifies the version of
    the file. why: the reason for a refusal, or "".
    """

    stamp: Stamp | None
    found: ServedText | None
    digest: str = "none"
    why: str = ""


class QueueFile:
    """The queue file and the queue tree in use.

    `tree` is None if no file is configured, or if no tree can be used. Raises ConfigError if the first file
    is refused.
    """

    def __init__(self, path: str, ledger: Ledger, now_ms: int) -> None:
        self.path = Path(path) if path else None
        self.refused = ""  # why the file that is there now does not serve
        self._ledger = ledger
        self._seen: Stamp | None = None
        self._met: tuple[Stamp | None, float] = (None, -math.inf)  # what lay there last, and since when
        self._serving: ServedText | None = None
        self._before: ServedText | None = None  # serves again if the first pass with `_serving` fails
        self._is_confirmed = True
        self._failed = ""  # the digest of a text with which a pass failed
        if self.path is not None:
            self._load_first_file(self.path, now_ms)

    @property
    def tree(self) -> QueueTree | None:
        return self._serving.tree if self._serving else None

    @property
    def text(self) -> str:
        return self._serving.text if self._serving else ""

    @property
    def generation(self) -> str:
        """The generation of the text in use. Two different texts have different generations."""
        return self.tree.digest[:16] if self.tree is not None else ""

    @property
    def _digest(self) -> str:
        return self.tree.digest if self.tree is not None else "none"

    def _load_first_file(self, path: Path, now_ms: int) -> None:
        marks = self._ledger.list_marks()
        known, stored = marks.get("queues", ""), self._parse_stored(marks.get("queues_text", ""))
        self._failed = marks.get("queues_failed", "")
        self._seen = _read_stamp(path)
        try:
            self._serving = self._parse_and_check(_read_text(path))
        except (ConfigError, RequestError) as error:
            if not known:
                raise ConfigError(f"placer.queues = {str(path)!r}: {error}") from None
            self._serving, self.refused = stored, str(error)
            serves = f"{self._digest} of before serves" if stored else "all requests wait in one line"
            self._record_in_audit(now_ms, "placer", f"queues: {path} was refused, {serves}: {error}")
            return
        if known != self._digest:
            self._before, self._is_confirmed = stored, False
            self._record_in_audit(now_ms, "placer", f"queues: {self._digest} serves, before it {known or 'none'}")

    def _parse_stored(self, text: str) -> ServedText | None:
        try:
            return ServedText(text, read_queues(text)) if text else None
        except RequestError as error:
            logger.error("the file of queues that served before is refused: %s", error)
            return None

    def _record_in_audit(self, now_ms: int, caller: str, sentence: str) -> None:
        if self._serving is not None:  # it serves already, so the mark does not depend on the line
            self._ledger.record_marks(queues=self._digest, queues_text=self._serving.text)
        with self._ledger.transaction():
            self._ledger.record_audit_line("", now_ms, caller, "queues", sentence)
        logger.info("%s", sentence)

    def has_changed(self) -> bool:
        """Return whether the file has changed since it was last read."""
        return self.path is not None and _read_stamp(self.path) != self._seen

    def is_file_stable(self) -> bool:
        """Return whether every call in the last `STILL_S` seconds has seen the same file."""
        stamp, now_s = _read_stamp(self.path) if self.path is not None else None, monotonic()
        if stamp != self._met[0]:
            self._met = stamp, now_s
        return now_s - self._met[1] >= STILL_S

    def read(self, capacity: Mapping[str, float] | None = None) -> QueueFileContents:
        """Read and check the file. This changes no state, so a thread may call it."""
        assert self.path is not None
        stamp = _read_stamp(self.path)
        try:
            text = _read_text(self.path)
        except ConfigError as error:
            return QueueFileContents(stamp, None, why=str(error))
        if text == self.text:
            return QueueFileContents(stamp, None)
        try:
            return QueueFileContents(stamp, self._parse_and_check(text, capacity))
        except RequestError as error:
            return QueueFileContents(stamp, None, compute_file_digest(text), str(error))

    def apply_contents(self, read: QueueFileContents, now_ms: int) -> None:
        """Use the file that was read, or record why it is refused."""
        self._seen = read.stamp
        if read.found is not None:
            self._serve_text(read.found, now_ms, "placer")
            return
        self.refused = read.why
        if read.why:
            self.audit_refusal(now_ms, "placer", read.digest, read.why)

    def audit_refusal(self, now_ms: int, caller: str, digest: str, why: str) -> None:
        """Record in the audit trail that a file was refused."""
        self._record_in_audit(now_ms, caller, f"queues: {digest} was refused, {self._digest} serves: {why}")

    def _serve_text(self, found: ServedText, now_ms: int, caller: str) -> None:
        before = self._digest
        if self._is_confirmed:
            self._before = self._serving
        self._serving, self.refused, self._is_confirmed = found, "", False
        self._record_in_audit(now_ms, caller, f"queues: {self._digest} serves, before it {before}")

    def confirm_tree(self) -> None:
        """Record that a pass has succeeded with the tree in use."""
        self._is_confirmed, self._before = True, None

    def withdraw_tree(self, now_ms: int, why: str) -> None:
        """Use the previous tree again, unless a pass has succeeded with the present one.

        why: the reason for the audit trail.
        """
        if self._is_confirmed or self._serving is None:
            return
        self._failed, self._serving = self._digest, self._before
        self._ledger.record_marks(queues_failed=self._failed, queues_text="")
        self.confirm_tree()
        self.refused = f"the first pass with it failed: {why}"
        self.audit_refusal(now_ms, "placer", self._failed, self.refused)

    def write_and_serve(self, found: ServedText, generation: str, now_ms: int, caller: str) -> None:
        """Write a checked text to the file and use it. Raises ConflictError if the generation does not match."""
        self.check_generation(generation)
        assert self.path is not None
        files.replace_file(self.path, [found.text.encode()], "queues")
        self._seen = _read_stamp(self.path)
        self._serve_text(found, now_ms, caller)

    def list_faults(self, capacity: Mapping[str, float]) -> list[str]:
        """List the faults of the tree in use at the fleet's present capacity."""
        try:
            if self.tree is not None:
                check_capacity(self.tree, capacity, self.text)
        except RequestError as error:
            return [str(error)]
        return []

    def check_generation(self, generation: str) -> None:
        """Check that a file is configured and its generation matches. Raises ConflictError if not.

        The generation `*` matches any file.
        """
        if self.path is None:
            raise ConflictError("no file of queues is configured: set queues in [placer] and start again")
        if generation not in ("*", self.generation):
            raise ConflictError(f"the queues have generation {self.generation}, not {generation}: read them again")

    def check_text(self, text: str, generation: str, capacity: Mapping[str, float] | None) -> ServedText:
        """Check a text and a generation, and return the text with its tree.

        This changes no state, so a thread may call it. Raises ConflictError if the generation does not match,
        and RequestError if the tree cannot be used.
        """
        self.check_generation(generation)
        return self._parse_and_check(text, capacity)

    def _parse_and_check(self, text: str, capacity: Mapping[str, float] | None = None) -> ServedText:
        """Return a text with its tree. Raises RequestError if the tree cannot be used."""
        if compute_file_digest(text) == self._failed:
            raise RequestError("a pass over the queue failed with this very file: change it", None)
        tree = read_queues(text)
        if capacity:
            check_capacity(tree, capacity, text)
        try_tree(tree)
        return ServedText(text, tree)


def compute_file_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _read_stamp(path: Path) -> Stamp | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text in UTF-8: {error}") from None
