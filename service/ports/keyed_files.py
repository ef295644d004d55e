"""The code that ports to files of `key value` lines share."""

import asyncio
from collections.abc import Callable, Sequence

from fleetcast.schedulers.adapter import Seen, Write, WriteOutcome


class KeyedFilePort:
    """A port that reads and writes files in a thread. No other program may write these files.

    `read` and `write` raise OSError.
    """

    async def read(self) -> Seen:
        return await asyncio.to_thread(self._read)

    async def write(self, batch: Sequence[Write]) -> Sequence[WriteOutcome]:
        return await asyncio.to_thread(self._write, batch)

    async def close(self) -> None:
        """Do nothing, because no file stays open."""

    def _read(self) -> Seen:
        raise NotImplementedError

    def _write(self, batch: Sequence[Write]) -> Sequence[WriteOutcome]:
        raise NotImplementedError


def apply_write(held: dict[str, str], write: Write, is_refused: Callable[[Write], bool]) -> WriteOutcome:
    """Apply a write to the values of a file, and return its outcome.

    If a value has changed since the adapter read it, it stays unchanged. held: key → value.
    """
    if held.get(write.key) != write.seen:
        return WriteOutcome.CONFLICT
    if is_refused(write):
        return WriteOutcome.REFUSED
    if write.value is None:
        held.pop(write.key, None)
    else:
        held[write.key] = write.value
    return WriteOutcome.DONE
