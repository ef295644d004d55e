"""Events from the wire to the tables: decoded, fsynced in the inbox, read from it, and applied.

`job`: steps of training loops as JSON. `health`: NVSentinel's CloudEvents. `kernel`: lines of many
nodes' kernel logs. In one case each line is an event, in another one line in ten. A body has a thousand
events. Bodies are processed one after the other, in one process, without HTTP. The peer decodes with
`json`, or one regular expression, and commits each body to SQLite (WAL, synchronous=FULL).
"""

import asyncio
import json
import re
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fleetcast.benchmarks.kit.case import Peer, measure
from fleetcast.features.store import WindowStore
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.topology import NodeSpec, Topology
from fleetcast.ingest.health.nvsentinel import TYPE, decode
from fleetcast.ingest.inbox.event_body import DecodedBody, decode_body
from fleetcast.ingest.inbox.inbox import InboxSource, InboxWriter
from fleetcast.ingest.kernel_log.events import KernelReader
from fleetcast.service.api.recent import RecentIdentities
from fleetcast.service.api.routes.events import filter_new_records
from fleetcast.service.api.routes.kernel_log import decode_kernel_log as decode_log
from fleetcast.service.pipeline.state import FleetState

NODES, A_BODY, BODIES = 2_000, 1_000, 20
NOW_MS = 1_760_000_000_000
FUTURE_MS = 60_000
_XID = re.compile(r"^(\S+) (\S+) kernel: NVRM: Xid \(PCI:([0-9a-f:]+)\): (\d+), (.*)$", re.MULTILINE)

Read = Callable[[bytes], DecodedBody]


def run(sizes: Sequence[int] = ()) -> Iterator[dict[str, Any]]:
    """Yield one record for each case. The size of a fleet does not matter here."""
    size = {"events_a_body": A_BODY, "bodies": BODIES, "nodes": NODES}
    for case, (body, read, peer) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            bodies = [body(number) for number in range(BODIES)]
            beside = Peer(
                f"{peer.__name__} and sqlite3, synchronous=FULL", partial(_store_in_sqlite, Path(folder), bodies, peer)
            )
            work = partial(_ingest_bodies, Path(folder), bodies, read)
            yield measure("health", case, size, work, "events/s", peer=beside, repeats=3)


def _make_job_body(number: int) -> bytes:
    rows = (
        b'{"job":"train-%d","attempt":1,"sequence":%d,"time_ms":%d,"type":"step","step":%d,"rank":0,"duration_s":1.6}'
        % (row % 64, number * A_BODY + row, NOW_MS, row)
        for row in range(A_BODY)
    )
    return b"[" + b",".join(rows) + b"]"


def _make_health_body(number: int) -> bytes:
    rows = (
        b'{"specversion":"1.0","id":"%d","source":"nvsentinel://east/healthevents","type":"%b","data":{"healthEvent":{'
        b'"nodeName":"n%d","checkName":"GpuNvlinkWatch","agent":"gpu-health-monitor","componentClass":"GPU","isFatal":'
        b'true,"isHealthy":false,"message":"NVLink errors","recommendedAction":5,"errorCode":["DCGM_FR_NVLINK_DOWN"],'
        b'"entitiesImpacted":[{"entityType":"GPU","entityValue":"%d"},{"entityType":"PCI","entityValue":"0000:9b:00"}],'
        b'"generatedTimestamp":"2025-10-09T08:%02d:%02d.5Z"}}}'
        % (number * A_BODY + row, TYPE.encode(), row * 7 % NODES, row % 8, number % 60, row % 60)
        for row in range(A_BODY)
    )
    return b"[" + b",".join(rows) + b"]"


def _make_kernel_body(number: int, every: int = 1) -> bytes:
    """Make a body of kernel log lines. number: the minute of its events.

    One of `every` lines is an event. The others are about the network.
    """
    return b"".join(
        b"2025-10-09T%02d:%02d:00+0000 n%d kernel: NVRM: Xid (PCI:0000:9b:00): 48, DBE\n"
        % (number // 60 % 24, number % 60, row // every % NODES)
        if row % every == 0
        else b"2025-10-09T08:00:00+0000 n%d kernel: eth0: link becomes ready\n" % (row % NODES)
        for row in range(A_BODY * every)
    )


def _ingest_bodies(folder: Path, bodies: Sequence[bytes], read: Read) -> int:
    """Send all bodies through decoding, the inbox and the tables.

    Returns the number of events in the tables at the end.
    """
    return asyncio.run(_ingest_into_tables(folder, bodies, read))


async def _ingest_into_tables(folder: Path, bodies: Sequence[bytes], read: Read) -> int:
    with tempfile.TemporaryDirectory(dir=folder) as name:
        writer, recent = InboxWriter(Path(name), "bench"), RecentIdentities()
        state = _make_state()
        for body in bodies:
            fresh = await filter_new_records(read(body).records, recent)
            await writer.append([record.raw for record, _ in fresh], NOW_MS)
            for _, key in fresh:
                recent.add_identity(key)
        source = InboxSource(Path(name))
        while source.backlog_bytes():
            state.apply(await source.next(), NOW_MS)
        await writer.close()
        await source.close()
    assert state.counts.events == BODIES * A_BODY, f"{state.counts.events} events, {dict(state.counts.bad)}"
    return state.counts.events


def _make_state() -> FleetState:
    entities = Entities()
    topology = Topology.build([NodeSpec(f"n{number}", gpus=8) for number in range(NODES)])
    return FleetState(entities, WindowStore(entities, interval_s=15.0), topology)


def parse_with_json(body: bytes) -> list[str]:
    return [json.dumps(row) for row in json.loads(body)]


def parse_with_regex(body: bytes) -> list[str]:
    return [match[0] for match in _XID.finditer(body.decode())]


def _store_in_sqlite(folder: Path, bodies: Sequence[bytes], read: Callable[[bytes], list[str]]) -> int:
    database = sqlite3.connect(folder / f"peer{time.monotonic_ns()}.sqlite")
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("PRAGMA synchronous=FULL")
    database.execute("CREATE TABLE inbox (payload TEXT)")
    for one in bodies:
        database.executemany("INSERT INTO inbox VALUES (?)", [(row,) for row in read(one)])
        database.commit()
    (count,) = database.execute("SELECT count(*) FROM inbox").fetchone()
    database.close()
    return int(count)


def _decode_job(body: bytes) -> DecodedBody:
    return decode_body(body, NOW_MS)


def _decode_health(body: bytes) -> DecodedBody:
    return decode(body, {}, NOW_MS, FUTURE_MS)


def _decode_kernel(body: bytes) -> DecodedBody:
    return decode_log(body, KernelReader(), NOW_MS)


CASES: dict[str, tuple[Callable[[int], bytes], Read, Callable[[bytes], list[str]]]] = {
    "job": (_make_job_body, _decode_job, parse_with_json),
    "health": (_make_health_body, _decode_health, parse_with_json),
    "kernel": (_make_kernel_body, _decode_kernel, parse_with_regex),
    "kernel, one line in ten": (partial(_make_kernel_body, every=10), _decode_kernel, parse_with_regex),
}
