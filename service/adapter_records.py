"""The files that the adapters process writes to `state/adapters/`.

The api and the command line also use them.

status            the state of each adapter, and the bands: one JSON document, replaced when it changes
audit-TIME.jsonl  one line for each write: the wish, its reason, its board and its outcome
NAME.withdrawn    while this file exists, everything that the adapter NAME wrote is withdrawn
"""

import contextlib
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import msgspec

from fleetcast.fleet import files

AREA = "adapters"
SEGMENT_BYTES = 8 * 2**20
SEGMENTS = 8
MARK = ".withdrawn"


class AdapterAuditLine(msgspec.Struct, kw_only=True):
    """One write of an adapter, or one step of an executor, as a line of the audit.

    `decision`: an id that no other line has. seen: the value of the field before the write, null if it had
    none. value: the new value, null if the write removes the value. Of an executor: key is the job, field the
    kind of action, value its id.
    """

    time_ms: int
    decision: str
    adapter: str
    mode: str
    board: int | None
    key: str
    field: str
    seen: str | None
    value: str | None
    why: str
    outcome: str


class AdapterStatus(msgspec.Struct, kw_only=True):
    """The state of one adapter, with counts since this process started.

    seen_ms: when the adapter's system was last read. last: the newest write of this process. error: why the
    adapter could not finish its last step. It then tries again. Of an executor: wishes counts the actions sent to
    it, writes those that it began, ours those that it carries out now.
    """

    name: str
    use: str
    mode: str
    kind: str = "writer"
    board: int | None = None
    seen_ms: int | None = None
    wishes: int = 0
    writes: int = 0
    conflicts: int = 0
    errors: int = 0
    ours: int = 0
    held_back: int = 0
    withdrawn: bool = False
    error: str = ""
    last: AdapterAuditLine | None = None


class AdaptersStatus(msgspec.Struct):
    """The JSON document in the file state/adapters/status.

    `bands`: node → band, for nodes whose band is not low. `held_down`: the number of nodes that the limit
    `max_share` keeps out of the band high although their risk is high enough.
    """

    as_of_ms: int = 0
    bands: dict[str, str] = {}
    held_down: int = 0
    adapters: list[AdapterStatus] = []


class AdapterRecords:
    """The folder of the adapters' records. Its methods raise OSError if the disk fails."""

    def __init__(self, state: Path) -> None:
        self.folder = state / "adapters"
        self._segment: files.File | None = None
        self._segment_bytes = 0

    def read_status(self) -> AdaptersStatus:
        """Return the recorded status. It is empty before the first one, or if the file is unreadable."""
        try:
            return msgspec.json.decode((self.folder / "status").read_bytes(), type=AdaptersStatus)
        except (OSError, msgspec.DecodeError):
            return AdaptersStatus()

    def write_status(self, status: AdaptersStatus) -> None:
        """Replace the status file. After a power cut, the previous status may be back."""
        self.folder.mkdir(parents=True, exist_ok=True)
        files.replace_file(self.folder / "status", [msgspec.json.encode(status)], AREA, sync=False)

    def append_lines(self, lines: Sequence[AdapterAuditLine]) -> None:
        """Append lines to the audit. At most SEGMENTS files remain, because a new one replaces the oldest."""
        if self._segment is None or self._segment_bytes > SEGMENT_BYTES:
            self._begin_segment(lines[0].time_ms)
        assert self._segment is not None
        text = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
        self._segment_bytes += self._segment.write(text)

    def _begin_segment(self, time_ms: int) -> None:
        self.close()
        self.folder.mkdir(parents=True, exist_ok=True)
        segments = self._list_segments()
        for path in segments[: max(0, len(segments) + 1 - SEGMENTS)]:
            path.unlink()
        newest_ms = int(segments[-1].stem.removeprefix("audit-")) if segments else -1
        path = self.folder / f"audit-{max(time_ms, newest_ms + 1):015d}.jsonl"
        self._segment, self._segment_bytes = files.create_append_only_file(path, AREA), 0

    def _list_segments(self) -> list[Path]:
        return sorted(self.folder / name for name in files.list_names(self.folder) if name.startswith("audit-"))

    def read_newest_lines(self, adapter: str, limit: int) -> list[AdapterAuditLine]:
        """Return the newest lines of an adapter, newest first."""
        return list(islice((line for line in self._read_lines() if line.adapter == adapter), limit))

    def _read_lines(self) -> Iterator[AdapterAuditLine]:
        for path in reversed(self._list_segments()):
            for text in reversed(path.read_bytes().splitlines()):
                with contextlib.suppress(msgspec.DecodeError):  # a line that a kill cut short
                    yield msgspec.json.decode(text, type=AdapterAuditLine)

    def is_withdrawn(self, adapter: str) -> bool:
        return (self.folder / f"{adapter}{MARK}").exists()

    def mark_withdrawn(self, adapter: str, *, undo: bool = False) -> None:
        """Mark an adapter as withdrawn from now on, or remove the mark."""
        path = self.folder / f"{adapter}{MARK}"
        self.folder.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True) if undo else path.touch()

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None
