"""Notification of file changes: a task wakes up when any process on this machine writes the files.

Linux reports changes by inotify. The writer need not notify anyone, so a writer that dies after a write
cannot prevent the wake-up. A reader reads everything, then waits. A change between the two ends the wait
at once.

The reader also polls every `REST_S`, because a network file system does not report writes of another
machine. If inotify cannot be used at all, it polls every `poll_s`.
"""

import asyncio
import ctypes
import errno
import logging
import math
import os
import weakref
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from fleetcast.fleet import files

logger = logging.getLogger(__name__)

REST_S = 1.0  # wall, as all times here
READ_BYTES = 65_536

# What happens in a folder. From <sys/inotify.h>, where the names begin with IN_.
MODIFY, ATTRIB, CLOSE_WRITE, MOVED_TO, CREATE, DELETE = 0x2, 0x4, 0x8, 0x80, 0x100, 0x200
DELETE_SELF, MOVE_SELF = 0x400, 0x800
MASK_ADD = 0x2000_0000  # keeps the mask of another path that names the same file

REPLACED = MOVED_TO | DELETE  # files of the folder that a rename replaces, or that go
APPENDED = MODIFY | MOVED_TO  # files of the folder that grow
LISTED = CREATE | DELETE  # names that come and go
CONTENT = CLOSE_WRITE | ATTRIB | DELETE_SELF | MOVE_SELF  # of a file itself, once its writer has closed it
APPEARS = CREATE | MOVED_TO  # a path that is not there yet, in the folder above it


class FileChanges:
    """A waiter for changes of some paths. One task in one event loop may use it at a time."""

    def __init__(self, paths: Mapping[Path, int], poll_s: float) -> None:
        """Prepare to wait for changes.

        paths: each path to watch, and the kinds of changes. A path may be missing, and may be replaced.
        poll_s: the least time between two wake-ups by changes, so that a fast writer costs no more than
        polling.
        """
        self._paths = paths
        self._poll_s = poll_s
        self._watch: _Watch | None = None
        self._reports = all(map(files.is_on_local_disk, paths))
        self._is_woken = self._is_closed = False
        self._waiter: asyncio.Future[None] | None = None
        self._changed_s = -math.inf

    def wake(self) -> None:
        """End the present wait, or the next one. Call this in the thread of the event loop."""
        self._is_woken = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self, most_s: float = math.inf) -> None:
        """Wait for a change since the last call, for `wake`, or for at most `most_s` or `REST_S` seconds."""
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + min(most_s, REST_S)
        if (pause_ends_s := self._changed_s + self._poll_s) > loop.time():
            await self._wait_until(min(ends_s, pause_ends_s), -1)
        if not self._is_woken:
            if not self._watch_paths():
                descriptor = self._watch.descriptor if self._watch is not None else -1
                await self._wait_until(ends_s if self._reports else min(ends_s, loop.time() + self._poll_s), descriptor)
            if self._watch is not None and self._watch.discard_changes():
                self._changed_s = loop.time()
        self._is_woken = False

    async def _wait_until(self, until_s: float, descriptor: int) -> None:
        """Wait until a time of the loop, until `wake`, or until the descriptor has something to read."""
        loop = asyncio.get_running_loop()
        if self._is_woken or until_s <= loop.time():
            return await asyncio.sleep(0)
        self._waiter = loop.create_future()
        timer = loop.call_at(until_s, _end_wait, self._waiter)
        if descriptor >= 0:
            loop.add_reader(descriptor, _end_wait, self._waiter)
        try:
            await self._waiter
        finally:
            self._waiter = None
            timer.cancel()
            if descriptor >= 0:
                loop.remove_reader(descriptor)
            if self._is_closed:
                self._close_descriptor()

    def _watch_paths(self) -> bool:
        """Watch the files that are at the paths now. Return whether any of them is new.

        A new file may already have changed.
        """
        if not self._reports or self._is_closed:
            return False
        try:
            if self._watch is None:
                self._watch = _Watch()
            return self._watch.update_watches(self._paths)
        except OSError as error:
            self._reports = False
            self._close_descriptor()
            _log_watch_failure(", ".join(map(str, self._paths)), _describe_failure(error), self._poll_s)
            return False

    def close(self) -> None:
        """Close the descriptor and end the wait. This may be called twice."""
        self._is_closed = True
        self.wake()
        if self._waiter is None:
            self._close_descriptor()

    def _close_descriptor(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None


def _end_wait(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)


class _Watch:
    """An inotify instance. Its methods raise OSError."""

    def __init__(self) -> None:
        self.descriptor = _call_library("inotify_init1", os.O_NONBLOCK | os.O_CLOEXEC)
        self.close = weakref.finalize(self, os.close, self.descriptor)
        self._watched: set[int] = set()

    def update_watches(self, paths: Mapping[Path, int]) -> bool:
        """Watch each path, or the nearest existing folder above it. Return whether any watch is new."""
        found = {self._add_watch(path, mask) for path, mask in paths.items()}
        is_new = not found <= self._watched
        for number in self._watched - found:
            _load_library().inotify_rm_watch(
                self.descriptor, number
            )  # fails if the file is gone, and its watch with it
        self._watched = found
        return is_new

    def _add_watch(self, path: Path, mask: int) -> int:
        while True:
            try:
                return _call_library("inotify_add_watch", self.descriptor, os.fsencode(path), mask | MASK_ADD)
            except FileNotFoundError:
                if path.parent == path:
                    raise
                path, mask = path.parent, APPEARS

    def discard_changes(self) -> bool:
        """Discard the changes that Linux has reported. Return whether there were any."""
        has_read = False
        while True:
            try:
                has_read = bool(os.read(self.descriptor, READ_BYTES)) or has_read
            except BlockingIOError:
                return has_read


def _call_library(name: str, *arguments: Any) -> int:
    """Call a function of the C library that returns -1 for an error. Raises OSError."""
    library = _load_library()
    function = getattr(library, name, None)
    if function is None:
        raise OSError(errno.ENOSYS, "this system has no inotify")
    result: int = function(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


@cache
def _load_library() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


@cache
def _log_watch_failure(named: str, advice: str, poll_s: float) -> None:
    """Log that paths cannot be watched. Each process logs this only once, although every stream of events retries."""
    logger.warning("cannot watch %s: %s; looking every %.3g s instead", named, advice, poll_s)


def _describe_failure(error: OSError) -> str:
    """Describe why watching fails, and what an operator can do about it."""
    limits = {
        errno.EMFILE: "fs.inotify.max_user_instances with sysctl, or ulimit -n",
        errno.ENOSPC: "fs.inotify.max_user_watches with sysctl",
    }
    if error.errno in limits:
        return f"{error.strerror} (raise {limits[error.errno]})"
    return error.strerror or str(error)
