"""The job table on disk: one file with the changes since the last save, and links to earlier files.

    000001.jobs …   magic, crc32 and length of the rest, then msgpack rows (job, at rest, its attempts).
                    The newest row of a job wins

A save writes only the jobs of the last minute, not those of 35 days. After SEGMENTS files, or after a
failed save, one file gets every job.
"""

import contextlib
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path

import msgspec

from fleetcast.features.arrays_file import AREA
from fleetcast.features.store_files import SEGMENTS, link_file
from fleetcast.fleet import files
from fleetcast.fleet.job_table import JobTable, decode_job, encode_job
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.service.pipeline.old_names import rename_attempts

MAGIC = b"FLEETJOB"
ROWS_AT_ONCE = 1000
_HEAD = struct.Struct("<8sIQ")
_encode = msgspec.msgpack.Encoder().encode


class _JobRow(msgspec.Struct, array_like=True):
    """One job in a file.

    `attempts`: the result of `encode_job`. For a job at rest, these are the bytes in the job table.
    """

    job: str
    resting: bool
    attempts: bytes


class JobFiles:
    """The files of one job table."""

    def __init__(self) -> None:
        self._files: list[Path] = []  # of the last save; empty: the next one writes everything

    def prepare_save(self, jobs: JobTable, folder: Path, becomes: Path) -> Callable[[], list[str]]:
        """Copy the changes for the next save. Returns a function that writes them and returns the file names.

        The function may run in any thread. If it raises OSError, the next save writes everything.
        `becomes`: the path to which the caller will move the folder.
        """
        earlier = self._files
        earlier = earlier if len(earlier) < SEGMENTS and all(path.exists() for path in earlier) else []
        self._files = []
        changed, jobs.changed = jobs.changed, set()
        awake: dict[str, list[JobAttempt]] = {}
        for attempt in jobs.attempts.values():
            if not earlier or attempt.job in changed:
                awake.setdefault(attempt.job, []).append(attempt.copy())
        resting = jobs.resting if not earlier else {job: jobs.resting[job] for job in changed & jobs.resting.keys()}
        names, rows_at_rest = list(resting), list(resting.values())  # a tuple a job would wake the garbage collector

        def write_files() -> list[str]:
            rows = (_encode(_JobRow(job, True, rows_at_rest[at])) for at, job in enumerate(names))
            more = (_encode(_JobRow(job, False, encode_job(awake_attempt))) for job, awake_attempt in awake.items())
            folder.mkdir()
            files = [link_file(path, folder) for path in earlier]
            newest = folder / f"{max((int(path.stem) for path in files), default=0) + 1:06d}.jobs"
            _write_rows(newest, chain(rows, more), len(names) + len(awake))
            for copies in (names, rows_at_rest, awake):
                copies.clear()  # here, and not in the loop
            self._files = [becomes / path.name for path in (*files, newest)]
            return [path.name for path in self._files]

        return write_files


def _write_rows(path: Path, rows: Iterator[bytes], count: int) -> None:
    """Write encoded rows to a file as one msgpack array, then fsync the file.

    The header before the array reveals a torn file.
    """
    with contextlib.closing(files.create_file(path, AREA)) as file:
        file.write(_HEAD.pack(b"", 0, 0))
        crc = length = 0
        chunk = b"\xdd" + struct.pack(">I", count)
        while chunk:
            file.write(chunk)
            crc, length = zlib.crc32(chunk, crc), length + len(chunk)
            chunk = b"".join(islice(rows, ROWS_AT_ONCE))
        file.write_at(_HEAD.pack(MAGIC, crc, length), 0)
        file.sync()


def read_jobs(folder: Path, names: Iterable[str], jobs: JobTable, is_old: bool = False) -> None:
    """Load saved jobs into an empty table.

    is_old: the attempts have the names in `old_names`. Raises ValueError for a torn file, OSError, or an
    error of msgspec.
    """
    awake: dict[str, bytes] = {}
    for name in names:
        rows = _read_rows(folder / name)
        if is_old:
            rows = [_JobRow(row.job, row.resting, rename_attempts(row.attempts, row.resting)) for row in rows]
        for row in rows if awake or jobs.resting else ():  # nearly all jobs are in the first file
            awake.pop(row.job, None)
            jobs.resting.pop(row.job, None)  # they lie in the order of their rest
        jobs.resting.update({row.job: row.attempts for row in rows if row.resting})
        awake.update({row.job: row.attempts for row in rows if not row.resting})
    for packed in awake.values():
        for attempt in decode_job(packed):
            jobs.add_attempt(attempt)
    jobs.changed.clear()


def _read_rows(path: Path) -> list[_JobRow]:
    data = memoryview(files.map_file(path))
    magic, crc, length = _HEAD.unpack_from(data) if len(data) >= _HEAD.size else (b"", 0, 0)
    body = data[_HEAD.size :]
    if magic != MAGIC or len(body) != length or zlib.crc32(body) != crc:
        raise ValueError(f"{path.name} is torn: {len(data)} bytes")
    return msgspec.msgpack.decode(body, type=list[_JobRow])
