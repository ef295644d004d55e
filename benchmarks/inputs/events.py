"""Events into the inbox over HTTP: decoded, checked for duplicates, and fsynced before the answer.

`batch`: 100 events per request, as a collector sends them. `single`: one event, as a training loop sends it.
The disk must contain as many records as were acknowledged. The peer writes the same events into
SQLite (WAL, synchronous=FULL), one transaction per request, without HTTP. `cpu_s` is the server's CPU
time. The size of a fleet does not matter here.
"""

import sqlite3
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fleetcast.benchmarks.kit.case import Peer, make_record, measure_peer
from fleetcast.benchmarks.kit.load import LoadRequest, make_post, run_closed_loop
from fleetcast.benchmarks.kit.service import ServerProcess, pin_beside_server
from fleetcast.ingest.inbox.segments import HEADER, SUFFIX, scan_records

JOBS = 64
SECONDS = 3.0
REPEATS = 3
CASES = {"batch": (100, 16), "single": (1, 64)}  # events a request, connections
PEER_ROWS = 20_000


def run(sizes: Sequence[int] = ()) -> Iterator[dict[str, Any]]:
    """Yield one record for each case."""
    for name, (events, connections) in CASES.items():
        with tempfile.TemporaryDirectory() as folder, pin_beside_server():
            yield _measure_case(Path(folder), name, events, connections)


def _measure_case(folder: Path, name: str, events: int, connections: int) -> dict[str, Any]:
    rates, cpu_s = [], []
    with ServerProcess.start_role("api", folder) as server:
        server.wait_for_answer("/healthz")
        stream = EventRequests(events)
        for _ in range(REPEATS):
            before, asked = server.measure_cpu_s(), stream.sent
            load = run_closed_loop(server.port, stream, connections=connections, seconds=SECONDS)
            assert len(load.latency_s) * events == stream.sent - asked
            rates.append((stream.sent - asked) / load.seconds)
            cpu_s.append(server.measure_cpu_s() - before)
            assert count_records_on_disk(folder / "inbox") == stream.sent
    peer = measure_peer(
        Peer("sqlite3, synchronous=FULL, no HTTP", lambda: _store_in_sqlite(folder, stream, events)), "events/s"
    )
    size = {"events_a_request": events, "connections": connections}
    best = rates.index(max(rates))
    return make_record("events", name, size, rates, "events/s", cpu_s=cpu_s[best], peer=peer)


class EventRequests:
    """A source of requests with new events: steps of some jobs."""

    def __init__(self, events: int) -> None:
        self.sent = 0
        self._events = events
        self._began_ms = time.time_ns() // 1_000_000

    def make_events(self, events: int) -> list[bytes]:
        """Return the next events, without counting them as sent."""
        numbers = (divmod(number, JOBS) for number in range(self.sent, self.sent + events))
        return [
            b'{"job":"train-%d","attempt":1,"sequence":%d,"time_ms":%d,"type":"step","step":%d,"rank":0,'
            b'"duration_s":1.625,"tokens":65536}' % (job, sequence, self._began_ms, sequence)
            for sequence, job in numbers
        ]

    def make_body(self) -> bytes:
        rows = self.make_events(self._events)
        self.sent += self._events
        return b"[" + b",".join(rows) + b"]" if self._events > 1 else rows[0]

    def __call__(self) -> LoadRequest:
        return make_post("/v1/events", self.make_body(), b"202")


def count_records_on_disk(folder: Path) -> int:
    """Return the number of records in the segments of an inbox. Asserts that no segment is torn."""
    total = 0
    for path in folder.glob(f"*{SUFFIX}"):
        data = path.read_bytes()[len(HEADER) :]
        records, whole = scan_records(data)
        assert whole == len(data), f"{path.name} is torn"
        total += len(records)
    return total


def _store_in_sqlite(folder: Path, stream: EventRequests, events: int) -> int:
    path = folder / f"peer{time.monotonic_ns()}.sqlite"
    database = sqlite3.connect(path)
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("PRAGMA synchronous=FULL")
    database.execute("CREATE TABLE inbox (payload BLOB)")
    rows = [(row,) for row in stream.make_events(events)]
    total = PEER_ROWS if events > 1 else PEER_ROWS // 20
    for _ in range(total // events):
        database.executemany("INSERT INTO inbox VALUES (?)", rows)
        database.commit()
    database.close()
    return total
