"""The inbox wakes its reader across kills of either side: what was acknowledged is read without any polling."""

import asyncio
import contextlib
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetcast.fleet import file_changes
from fleetcast.ingest.inbox.inbox import InboxSource, InboxWriter
from tests.ingest.inbox.test_inbox import NOW_MS, record

LONG_S = 3600.0  # longer than any test: what ends a wait is a change
PATIENCE_S = 120.0
KILLS = 4

WRITER = """
import asyncio, sys
from pathlib import Path
from fleetcast.ingest.inbox.inbox import InboxWriter
from tests.ingest.inbox.test_inbox import NOW_MS, record

async def run(folder, first):
    writer = InboxWriter(folder, "api", segment_bytes=400)
    for sequence in range(first, first + 100_000):
        await writer.append([record(sequence)], NOW_MS)
        print(sequence, flush=True)

asyncio.run(run(Path(sys.argv[1]), int(sys.argv[2])))
"""
READER = """
import asyncio, sys
from pathlib import Path
from fleetcast.fleet import file_changes
from fleetcast.ingest.inbox.inbox import InboxSource

async def run(folder):
    source = InboxSource(folder)
    while True:
        for event in (await source.next()).events:
            print(event.sequence, flush=True)

file_changes.REST_S = 3600.0
asyncio.run(run(Path(sys.argv[1])))
"""


@contextlib.contextmanager
def started(code: str, *arguments: object) -> Iterator[tuple["subprocess.Popen[str]", Iterator[str]]]:
    """A process and the lines that it prints. Its end is a kill, also when it hangs."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    late = threading.Timer(PATIENCE_S, process.kill)
    late.start()
    try:
        yield process, iter(process.stdout)
    finally:
        late.cancel()
        process.kill()
        process.wait()
        process.stdout.close()


def test_what_killed_writers_acknowledged_is_read_without_polling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_changes, "REST_S", LONG_S)
    rng = random.Random(7)

    def write(first: int) -> int:
        """The last sequence that a writer acknowledged before it was killed."""
        with started(WRITER, tmp_path, first) as (process, lines):
            for _ in range(rng.randrange(1, 40)):
                last = int(next(lines))
            process.kill()
            return max([last, *(int(line) for line in lines if line.endswith("\n"))])

    async def run() -> None:
        source, fresh, seen = InboxSource(tmp_path), asyncio.Event(), {0}

        async def read_forever() -> None:
            while True:
                seen.update(event.sequence for event in (await source.next()).events)
                fresh.set()

        async def until_read(sequence: int) -> None:
            while sequence not in seen:
                fresh.clear()
                await fresh.wait()

        reading = asyncio.ensure_future(read_forever())
        for _ in range(KILLS):
            acknowledged = await asyncio.to_thread(write, max(seen) + 1)
            await asyncio.wait_for(until_read(acknowledged), PATIENCE_S)
        reading.cancel()
        await source.close()

    asyncio.run(run())


def test_a_reader_that_was_killed_is_woken_as_soon_as_it_runs_again(tmp_path: Path) -> None:
    async def run() -> None:
        writer, last = InboxWriter(tmp_path, "api", segment_bytes=400), 0

        async def append() -> int:
            await writer.append([record(last + 1)], NOW_MS)
            return last + 1

        for _ in range(KILLS):
            last = await append()  # nobody reads
            with started(READER, tmp_path) as (_, lines):
                for _ in range(5):  # it has just read, and waits now or soon
                    await asyncio.to_thread(until_line, lines, last)
                    last = await append()
                await asyncio.to_thread(until_line, lines, last)
        await writer.close()

    asyncio.run(run())


def until_line(lines: Iterator[str], sequence: int) -> None:
    assert any(int(line) == sequence for line in lines), f"{sequence} was never read"
