"""The law of all records, at each way in: read + refused + ignored + unread = all."""

import math
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.clients.kafka_records import Message
from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.entities import Entities
from fleetcast.ingest.health.gpud import (
    ComponentEvents,
    ComponentHealth,
    ComponentStates,
    Event,
    count_states_and_events,
    make_state_events,
    make_xid_events,
)
from fleetcast.ingest.inbox.records import decode_records, encode_refusals
from fleetcast.ingest.inbox.segments import Record, RecordKind
from fleetcast.ingest.kafka.columnar import (
    ColumnarRecord,
    Header,
    RecordDecoder,
    RecordNames,
    encode_binary_record,
    encode_json_record,
)
from fleetcast.ingest.kafka.payload import PayloadDecoder
from fleetcast.ingest.pages.exporters import ExporterResolver
from fleetcast.ingest.remote_write.decoder import WriteDecoder
from fleetcast.ingest.remote_write.request import Version
from fleetcast.ingest.slurm.json import decode_queued_jobs, read_nodes
from fleetcast.ingest.tally import SkipRule
from tests.fuzz.bounds import examples
from tests.ingest.remote_write.test_write_decoder import MESSAGES, STALE
from tests.ingest.write_requests import T0, Row, gpu, packed

NOW_MS = T0
SERIES = st.sampled_from(
    [
        *(gpu("DCGM_FI_DEV_POWER_USAGE", at) for at in range(3)),
        gpu("dcgm_fi_dev_gpu_temp", 0),
        gpu("DCGM_FI_DEV_NEW_FIELD", 0),
        {"UUID": "GPU-x", "__name__": "DCGM_FI_DEV_GPU_TEMP", "instance": "n1:9400"},
        {"__name__": "go_goroutines", "instance": "n1:9400"},
        {"__name__": "made_up", "instance": "n1:9400"},
        {"__name__": "up", "instance": "n1:9400"},
        {"__name__": "node_network_receive_bytes_total", "device": "eth0", "instance": "n1:9100"},
        {"__name__": "node_network_receive_bytes_total", "device": "lo", "instance": "n1:9100"},
        {"instance": "nameless"},
    ]
)
TIMES = st.sampled_from([NOW_MS, NOW_MS - 1, NOW_MS + 3_600_000, NOW_MS // 1000, 5])
VALUES = st.sampled_from([0.0, 1.0, -1.0, 400.5, math.inf, math.nan, STALE, 2147483632.0])
ROWS = st.lists(st.tuples(SERIES, st.lists(st.tuples(TIMES, VALUES), max_size=3)), max_size=8)


@given(st.lists(ROWS, min_size=1, max_size=3), st.sampled_from(list(Version)))
@examples(150)
def test_a_remote_write(requests: list[list[Row]], version: Version) -> None:
    decoder = WriteDecoder(ExporterResolver(Entities()))
    for rows in [*requests, requests[0]]:
        tally = decoder.decode(packed(MESSAGES[version](rows)), version, NOW_MS).get_tally()
        assert tally.all == sum(len(samples) for _, samples in rows), tally
        assert min([tally.read, tally.refused, tally.unread, *tally.ignored.values()], default=0) >= 0


@given(st.data())
@examples(100)
def test_a_columnar_record(data: st.DataObject) -> None:
    names = {
        "gpu": st.sampled_from(["power_w", "xid", "made_up", "gpu_temp_c"]),
        "port": st.sampled_from(["rx_bytes", "unheard_of"]),
        "quark": st.sampled_from(["spin"]),
    }
    entities = {"gpu": ("0", "1", "2"), "port": ("mlx5_0/1",), "quark": ("up",)}
    columns, values = {}, []
    for kind in data.draw(st.lists(st.sampled_from(sorted(names)), unique=True)):
        metrics = tuple(data.draw(st.lists(names[kind], unique=True, min_size=1)))
        columns[kind] = RecordNames(metrics, entities[kind])
        shape = (len(metrics), len(entities[kind]))
        numbers = st.lists(st.sampled_from([1.0, 0.0, math.nan]), min_size=math.prod(shape), max_size=math.prod(shape))
        values.append(np.array(data.draw(numbers)).reshape(shape))
    bad = data.draw(st.sampled_from([{}, {"bad_line": 3}]))
    record = ColumnarRecord(Header("n1", columns, "", bad), NOW_MS, tuple(values))
    decoder = RecordDecoder(Entities())
    for encode in (encode_json_record, encode_binary_record):
        tally = decoder.decode(encode(record), NOW_MS).get_tally()
        assert tally.all == sum(block.size for block in values) + sum(bad.values())
        assert bool(tally.names) == bool(tally.unread)


def sent(value: bytes | None, **headers: str) -> Message:
    found = tuple((name, text.encode()) for name, text in headers.items())
    return Message(("telemetry", 0), 0, NOW_MS, b"n1", value, found)


def test_records_of_kafka() -> None:
    decoder = PayloadDecoder(Entities(), ManualClock(NOW_MS))
    page = b'DCGM_FI_DEV_POWER_USAGE{gpu="0"} 400 1759999990\nmade_up 1\n'
    text = decoder.decode_telemetry(sent(page)).batch
    assert (text.get_tally().all, text.get_tally().unread, [error.reason for error in text.bad]) == (
        2,
        1,
        ["absurd_time"],
    )
    kind = {"content-type": "application/openmetrics-text; version=1.0.0"}
    assert decoder.decode_telemetry(sent(page, **kind)).batch.get_tally().read == 1, "seconds, as the content type says"
    for batch, count in (
        (decoder.decode_telemetry(sent(None)).batch, {SkipRule.NO_DATA: 1}),
        (decoder.decode_events(sent(None)).batch, {SkipRule.NO_DATA: 1}),
    ):
        assert (batch.get_tally().all, batch.get_tally().ignored) == (1, count)
    refused = decoder.decode_telemetry(sent(b"{}")).batch.get_tally()
    assert (refused.all, refused.refused) == (1, 1)


HEALTH = st.sampled_from(["Healthy", "Degraded", "Unhealthy", "Initializing", "", "Odd"])
STATES = st.lists(st.builds(ComponentHealth, HEALTH, st.sampled_from(["", "a", "b"])), max_size=4)
EVENTS = st.lists(st.builds(Event, name=st.sampled_from(["xid", "other"]), message=st.just("xid 79")), max_size=3)


@given(
    st.lists(st.builds(ComponentStates, st.sampled_from(["cpu", "gpu"]), st.none() | STATES), max_size=3),
    st.lists(st.builds(ComponentEvents, st.sampled_from(["error-xid", "disk"]), st.none() | EVENTS), max_size=3),
)
@examples(150)
def test_an_answer_of_gpud(states: list[ComponentStates], events: list[ComponentEvents]) -> None:
    known: dict[str, list[Any]] = {}
    for _ in range(2):
        told = [*make_state_events("n1", states, known, NOW_MS)]
        xids = [*make_xid_events("n1", events, NOW_MS)]
        tally = count_states_and_events(states, events, len(told), len(xids), 0)
        parts = [*(row.states or () for row in states), *(row.events or () for row in events)]
        assert tally.all == sum(map(len, parts))
        assert tally.unread == sum(row.health == "Odd" for group in states for row in group.states or ())
        assert min([tally.read, *tally.ignored.values()], default=0) >= 0


def test_the_inbox_counts_events_refusals_samples_and_what_it_cannot_read() -> None:
    series: list[Row] = [(gpu("DCGM_FI_DEV_POWER_USAGE", 0), [(T0, 1.0)]), ({"__name__": "new"}, [(T0, 1.0)])]
    write = packed(MESSAGES[Version.V1](series))
    rows = [
        (RecordKind.EVENT, b'{"job": "a", "sequence": 1, "time_ms": 1760000000000, "type": "finished"}'),
        (RecordKind.EVENT, b"{"),
        (RecordKind.REFUSED, encode_refusals([])),
        (RecordKind.WRITE, write),
        (RecordKind.WRITE, b"no snappy"),
    ]
    records = [Record(kind, T0, payload) for kind, payload in rows]
    batch = decode_records(records, (), WriteDecoder(ExporterResolver(Entities())))
    tally = batch.get_tally()
    assert (tally.all, tally.read, tally.refused, tally.unread, tally.names) == (5, 2, 2, 1, ("new",))


def test_fields_that_nothing_reads_are_a_second_counter() -> None:
    known = b'{"job_id": 7, "job_state": ["RUNNING"], "name": "a"}'
    more = b'{"job_id": 8, "job_state": ["RUNNING"], "colour": "red", "shape": {"round": 1}}'
    read = decode_queued_jobs(b'{"jobs": [' + known + b"," + more + b"]}")
    assert (len(read.rows), read.unknown_fields) == (2, 2)
    assert read_nodes(b'{"nodes": [{"name": "n1", "state": ["IDLE"], "mood": "good"}]}').unknown_fields == 1
