"""Marks of placed requests for which the api had to refuse the start of the job.

Such a job may run although its start was refused, for example because a clock is ahead. So while a
request has a mark, the placer does not let its promise of GPUs expire. Once the job's start or end is in
the inbox, the api removes the mark. A mark is an empty file. Its name is a hash of the request's id.
"""

import contextlib
import hashlib
from collections.abc import Iterable
from pathlib import Path

from fleetcast.fleet import files

AREA = "held_starts"  # of failpoints


def get_marks_folder(state: Path) -> Path:
    return state / "held_starts"


def make_mark_name(request_id: str) -> str:
    return hashlib.blake2b(request_id.encode(), digest_size=16).hexdigest()


def mark_refused_starts(state: Path, request_ids: Iterable[str]) -> None:
    """Write a mark for each of these requests, and return once the marks are on disk. Raises OSError."""
    folder = get_marks_folder(state)
    names = {make_mark_name(request_id) for request_id in request_ids}
    if not names:
        return
    files.make_folder(folder, AREA)
    for name in names:
        files.create_file(folder / name, AREA).close()
    files.sync_folder(folder, AREA)


def has_marks(state: Path) -> bool:
    return bool(files.list_names(get_marks_folder(state)))


def remove_marks(state: Path, request_ids: Iterable[str]) -> None:
    """Remove the marks of these requests, if they have any. Raises OSError."""
    for request_id in request_ids:
        (get_marks_folder(state) / make_mark_name(request_id)).unlink(missing_ok=True)


def find_marked_requests(state: Path, active: Iterable[str]) -> set[str]:
    """Return the active requests that have a mark, and remove the marks of all other requests.

    If the disk refuses the removal, the result is the same. The next call tries again.
    """
    folder = get_marks_folder(state)
    there = set(files.list_names(folder))
    if not there:
        return set()
    by_mark = {make_mark_name(request_id): request_id for request_id in active}
    for name in there - by_mark.keys():
        with contextlib.suppress(OSError):
            (folder / name).unlink()
    return {by_mark[name] for name in there & by_mark.keys()}
