"""The folder of `slurm_durations`, which `deploy/slurm/job_submit.lua` reads under slurmctld's locks.

    until      Unix seconds: from then on the other files do not count
    00 … ff    lines `p50 p90 day user name`, in minutes. The hash of a name chooses its file, so files are small.

All files are replaced atomically. When the files are withdrawn, `until` is removed first.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from fleetcast.fleet import files
from fleetcast.schedulers.adapter import Door, Write, WriteOutcome
from fleetcast.schedulers.slurm_durations import FILE, MINUTES, UNTIL, JobDurations
from fleetcast.service.plugins import read_options
from fleetcast.service.ports.keyed_files import KeyedFilePort, apply_write

BUCKETS = 256
MOST_BYTES = 65_536  # of a file, as the script reads it
BATCH = 100_000
AREA = "bands"  # small files for other systems


class DurationsOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of the adapter.

    `folder`: a folder for these files alone. Its parent folder must exist.
    """

    folder: str


def make_slurm_durations_door(options: Mapping[str, Any]) -> Door:
    """Make the built-in adapter `slurm_durations`. Raises ConfigError."""
    port = DurationsPort(Path(read_options(options, DurationsOptions).folder))
    return Door(JobDurations(), port, batch=BATCH)


def compute_bucket_name(key: str) -> str:
    """Return the name of the file for a user and a job name. The Lua script computes the same name.

    >>> compute_bucket_name("ada train"), compute_bucket_name("")
    ('61', '00')
    """
    number = 0
    for byte in key.encode():
        number = (number * 31 + byte) % 65521
    return f"{number % BUCKETS:02x}"


class DurationsPort(KeyedFilePort):
    """The port that reads and writes the folder of expected run times."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _read(self) -> dict[str, dict[str, str]]:
        names = sorted(files.list_names(self.folder))
        rows = {
            key: {MINUTES: value} for name in names if len(name) == 2 for key, value in self._read_bucket(name).items()
        }
        until = self._read_text(UNTIL).strip()
        return rows | ({FILE: {UNTIL: until}} if until else {})

    def _read_bucket(self, name: str) -> dict[str, str]:
        lines = (line.split(" ", 3) for line in self._read_text(name).split("\n"))
        return {line[3]: " ".join(line[:3]) for line in lines if len(line) == 4}

    def _read_text(self, name: str) -> str:
        try:
            return (self.folder / name).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""

    def _write(self, batch: Sequence[Write]) -> list[WriteOutcome]:
        self.folder.mkdir(exist_ok=True)
        outcomes: dict[int, WriteOutcome] = {}
        by_file: dict[str, list[int]] = {}
        for at, write in enumerate(batch):
            by_file.setdefault(UNTIL if write.field == UNTIL else compute_bucket_name(write.key), []).append(at)
        withdrawn = any(write.field == UNTIL and write.value is None for write in batch)
        for name in sorted(by_file, key=lambda name: (name == UNTIL) != withdrawn):
            held = {FILE: until} if name == UNTIL and (until := self._read_text(UNTIL).strip()) else {}
            held = held if name == UNTIL else self._read_bucket(name)
            size = sum(_count_line_bytes(key, value) for key, value in held.items())
            for at in by_file[name]:
                before = held.get(batch[at].key)
                outcomes[at] = apply_write(held, batch[at], partial(_has_bad_line, room=MOST_BYTES - size))
                after = held.get(batch[at].key)
                size += _count_line_bytes(batch[at].key, after) - _count_line_bytes(batch[at].key, before)
            self._replace_lines(name, held)
        return [outcomes[at] for at in range(len(batch))]

    def _replace_lines(self, name: str, held: Mapping[str, str]) -> None:
        lines = [value if key == FILE else f"{value} {key}" for key, value in sorted(held.items())]
        if lines:
            text = "".join(f"{line}\n" for line in lines)
            files.replace_file(self.folder / name, [text.encode()], AREA, sync=False)
        else:
            (self.folder / name).unlink(missing_ok=True)


def _count_line_bytes(key: str, value: str | None) -> int:
    """Return the size of a line in bytes, or 0 if there is none."""
    return 0 if value is None else len(f"{value} {key}\n".encode())


def _has_bad_line(write: Write, room: int) -> bool:
    """Return whether a write makes a line that the Lua script cannot read, or a file too long for it.

    room: how many bytes the file may still grow.
    """
    is_too_long = write.value is not None and _count_line_bytes(write.key, write.value) > room + _count_line_bytes(
        write.key, write.seen
    )
    return is_too_long or not write.key.isprintable()
