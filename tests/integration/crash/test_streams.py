"""At least 50 SIGKILLs of two pipelines, and some of the api, under load from Kafka and remote write.

In the archive every (series, time) is there once, and all that was acknowledged is; the dead letters are the poison;
rings and tables are those of a pipeline that was never interrupted. CRASH_SEED and CRASH_PIPELINE_KILLS choose another
run; the moments of the kills differ each time.
"""

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import pytest
import tomli_w

from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.samples import EntityKind
from fleetcast.ingest.kafka.payload import PayloadDecoder
from fleetcast.ingest.pages.exporters import ExporterResolver
from fleetcast.ingest.remote_write.decoder import WriteDecoder
from fleetcast.ingest.shares import Share
from fleetcast.ingest.topology.load import load_topology
from fleetcast.service.config import ArchiveConfig, Config, load_config
from fleetcast.service.pipeline.pipeline import Pipeline
from fleetcast.service.pipeline.state import FleetState
from tests.integration.crash.load import Diary, Door
from tests.integration.crash.roles import RunningRole
from tests.integration.crash.straight import check_rings, check_tables
from tests.integration.crash.streams import (
    KAFKA_NODES,
    WRITE_NODES,
    Book,
    KafkaSender,
    Sender,
    WriteSender,
    block_of,
    until,
)
from tests.integration.kafka.topics import Topics, read_all
from tests.ports import free_port

pytestmark = pytest.mark.integration

SEED = int(os.environ.get("CRASH_SEED", "1"))
KILLS = int(os.environ.get("CRASH_PIPELINE_KILLS", "50"))
INSTANCES = 2
LONGEST_LIFE_S = 2.0
DRAIN_S = 400.0


def write_config(folder: Path, topics: Topics, **pipeline: Any) -> Path:
    blocks: dict[str, list[str]] = {}
    for node in (*KAFKA_NODES, *WRITE_NODES):
        blocks.setdefault(block_of(node), []).append(node)
    racks = [
        f'[[rack]]\nname = "r{block}"\nblock = "{block}"\nnodes = {nodes}\ngpus = 8\ngpu_model = "H100"\n'
        for block, nodes in blocks.items()
    ]
    (folder / "topology.toml").write_text("\n".join(racks))
    port = free_port()
    config = {
        "state": str(folder / "state"),
        "fleet": {"topology": str(folder / "topology.toml")},
        "scrape": {"interval_s": 1.0},
        "pipeline": {
            "instances": INSTANCES,
            "tick_s": 1.0,
            "snapshot_s": 1.0,
            "sources": [{"use": "kafka", "options": topics.options()}],
        }
        | pipeline,
        "api": {"port": port},
        "placer": {"port": port + 1},
    }
    path = folder / "config.toml"
    path.write_text(tomli_w.dumps(config))
    return path


@contextmanager
def running(config: Path) -> Iterator[list[RunningRole]]:
    """The pipelines, then the api."""
    instances = load_config(config).pipeline.instances
    roles = [RunningRole(config, "pipeline", "--instance", str(number)) for number in range(instances)]
    roles.append(RunningRole(config, "api"))
    try:
        yield roles
    finally:
        for role in roles:
            role.stop()


def kill_at_random(roles: list[RunningRole], book: Book) -> None:
    """Each role is killed again before it came up, in the middle of things, or after it has settled."""
    rng = random.Random(SEED)
    *pipelines, api = roles
    while sum(role.kills for role in pipelines) < KILLS:
        time.sleep(rng.uniform(0.0, LONGEST_LIFE_S / 2 if rng.random() < 0.8 else 2 * LONGEST_LIFE_S))
        (api if rng.random() < 0.15 else rng.choice(pipelines)).kill()
        assert not book.troubles, book.troubles[:3]
        assert all(role.process.poll() is None for role in roles), [role.words() for role in roles]


def drained(port: int, after_ms: int) -> bool:
    """Whether a board that is later than `after_ms` says that nothing waits to be read."""
    status, answer, _ = Door(port, Diary()).ask("GET", "/v1/ingestion")
    if status != 200:
        return False
    document = msgspec.json.decode(answer)
    rows = {row["name"]: row for row in document["sources"]}
    names = [f"{name}{number}" for name in ("kafka", "inbox") for number in ("", " (1)")]
    if document["as_of_ms"] <= after_ms or not all(name in rows for name in names):
        return False
    fresh = all(rows[name].get("as_of_ms", after_ms + 1) > after_ms for name in names)  # of the other pipeline's board
    waiting = [rows[name].get(key, 0) for name in names for key in ("lag_records", "backlog_bytes")]
    return fresh and waiting == [0] * len(waiting)


def end_all(roles: list[RunningRole], senders: list[Sender], port: int) -> float:
    """Let the senders finish, and the pipelines read it all; returns how long that took, in seconds."""
    for sender in senders:
        sender.ending.set()
    for sender in senders:
        sender.join(60)
    began = time.monotonic()
    after_ms = time.time_ns() // 1_000_000 + 3000
    until(lambda: drained(port, after_ms), DRAIN_S, "not all was read")
    took_s = time.monotonic() - began
    for role in roles:
        assert role.stop() == 0, role.words()
    return took_s


def run_straight(config: Config, book: Book, now_ms: int) -> FleetState:
    """One pipeline that was told everything in the order in which readers find it, none of it twice."""
    clock = ManualClock(now_ms)
    pipeline = Pipeline(config, clock, load_topology(Path(config.fleet.topology)), lambda _: [])
    decoder = PayloadDecoder(pipeline.state.entities, clock)
    writes = WriteDecoder(ExporterResolver(pipeline.state.entities))
    telemetry = config.pipeline.sources[0].options["telemetry"]
    for message in book.records:
        read = decoder.decode_telemetry if message.place[0] == telemetry else decoder.decode_events
        pipeline.apply_batch(read(message).batch)
    for version, body in book.writes:
        pipeline.apply_batch(writes.decode(body, version, now_ms))
    pipeline.state.store.advance(now_ms)
    return pipeline.state


def reload(config: Config, instance: int, now_ms: int) -> FleetState:
    """What the last snapshot of a pipeline holds."""
    topology = load_topology(Path(config.fleet.topology))
    share = Share.from_topology(instance, config.pipeline.instances, topology)
    pipeline = Pipeline(config, ManualClock(now_ms), topology, lambda _: [], share)
    pipeline.state.store.advance(now_ms)
    return pipeline.state


def check_archive(archive: Path, book: Book) -> int:
    """Every sample once, with its value; every event once. Returns how many samples."""
    database = duckdb.connect()
    samples = f"read_parquet('{archive}/samples/**/*.parquet', hive_partitioning = true)"
    counted = database.sql(f"select count(*), count(distinct (metric, entity, time_ms)) from {samples}").fetchall()[0]
    rows = database.sql(f"select metric, entity, time_ms, value, block from {samples}").fetchall()
    found = {(metric, entity, time_ms): value for metric, entity, time_ms, value, _ in rows}
    missing, more = book.samples.keys() - found.keys(), found.keys() - book.samples.keys()
    print(f"archive: count(*) {counted[0]}, distinct {counted[1]}, produced {len(book.samples)}")
    nodes = Counter(entity.partition("/")[0] for _, entity, _ in missing)
    assert not missing, f"{nodes} missing, such as {sorted(missing)[:5]}"
    assert not more, f"{len(more)} that nobody sent, such as {sorted(more)[:5]}"
    assert counted == (len(book.samples), len(book.samples))
    assert found == book.samples
    assert all(block == block_of(entity.partition("/")[0]) for _, entity, _, _, block in rows)
    return len(found)


def check_events(archive: Path, state: FleetState) -> int:
    events = f"read_parquet('{archive}/events/**/*.parquet', hive_partitioning = true)"
    query = f'select count(*), count(distinct ("of", name, attempt, source, sequence)) from {events}'
    counted = duckdb.connect().sql(query).fetchall()[0]
    told = state.jobs.position + state.nodes.position
    assert counted == (told, told)
    return told


def check_letters(topics: Topics, book: Book) -> int:
    """The dead letters are the poison, and none is there twice."""
    letters = asyncio.run(read_all(topics.access, topics.dead))
    places = Counter(
        (headers["topic"].decode(), int(headers["partition"]), int(headers["offset"]))
        for headers in (dict(letter.headers) for letter in letters)
    )
    print(f"dead letters: {len(letters)}, distinct {len(places)}, poison sent {len(book.poison)}")
    assert set(places) == book.poison
    assert len(letters) == len(places)
    return len(letters)


def test_fifty_kills_under_load_lose_nothing_and_double_nothing(tmp_path: Path, topics: Topics) -> None:
    path = write_config(tmp_path, topics)
    config, book = load_config(path), Book()
    senders: list[Sender] = [
        KafkaSender(book, topics.writer, topics.telemetry, topics.events, SEED),
        WriteSender(book, config.api.port, SEED),
    ]
    began = time.monotonic()
    with running(path) as roles:
        for sender in senders:
            sender.start()
        kill_at_random(roles, book)
        loaded_s = time.monotonic() - began
        took_s = end_all(roles, senders, config.api.port)
    assert not book.troubles, book.troubles[:3]
    kills = {role.name: role.kills for role in roles}
    print(f"\nseed {SEED}: {kills} in {loaded_s:.0f} s; {book.retries} writes sent again; read {took_s:.1f} s later")
    now_ms = time.time_ns() // 1_000_000
    judged = msgspec.structs.replace(config, archive=ArchiveConfig(enabled=False))
    alone = msgspec.structs.replace(judged, state=str(tmp_path / "straight"))
    straight = run_straight(alone, book, now_ms)
    check_archive(config.folder / "archive", book)
    events = check_events(config.folder / "archive", straight)
    check_letters(topics, book)
    states = [reload(judged, instance, now_ms) for instance in range(INSTANCES)]
    check_tables(states[0], straight)
    values = 0
    for instance, state in enumerate(states):
        ring = state.store.ring(EntityKind.GPU)
        times = ring.time_ms[:, : ring.size].max(axis=0)
        names = state.entities[EntityKind.GPU].names
        own = {name.partition("/")[0] for name, time_ms in zip(names, times.tolist(), strict=False) if time_ms >= 0}
        assert own, instance
        values += check_rings(state, straight, own)
    print(f"equal: {len(list(straight.jobs))} jobs of {events} events, {values} ring values")
