"""Decoders of what strangers send: exporter pages, event bodies, compressed bodies, tokens."""

import contextlib
import gzip
import zlib

import numpy as np

from fleetcast.features.store import WindowStore
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import ConfigError
from fleetcast.fleet.metrics import METRICS
from fleetcast.fleet.samples import SampleBatch
from fleetcast.fleet.topology import NodeSpec, Topology
from fleetcast.ingest.inbox.event_body import decode_body
from fleetcast.ingest.inbox.job_events import decode_event
from fleetcast.ingest.inbox.records import decode_records
from fleetcast.ingest.inbox.segments import Record, RecordKind
from fleetcast.ingest.pages.exporters import ExporterResolver
from fleetcast.ingest.pages.text import PageDecoder, Target
from fleetcast.ingest.source import Batch
from fleetcast.service.http.access import parse_presented_token, parse_tokens
from fleetcast.service.http.problems import Problem
from fleetcast.service.http.request_body import inflate
from fleetcast.service.pipeline.state import FleetState
from tests.fuzz.bounds import MIB
from tests.fuzz.decoder import Decoder
from tests.ingest.amd_pages import amd_lines

NOW_MS = 1_760_000_000_000
FUTURE_MS = 60_000

# -- exporter pages -------------------------------------------------------------------------------------------------

GPU = b'gpu="0",UUID="GPU-1",device="nvidia0",modelName="NVIDIA H100 80GB HBM3",Hostname="n001"'
PAGE = b"""# HELP DCGM_FI_DEV_POWER_USAGE Power draw (in W).
# TYPE DCGM_FI_DEV_POWER_USAGE gauge
DCGM_FI_DEV_POWER_USAGE{%b} 401.5
DCGM_FI_DEV_XID_ERRORS{%b,err_code="79",err_msg="fell \\"off\\" \\\\ the bus\\n"} 79
DCGM_FI_DEV_GPU_UTIL{%b} 9223372036854775794
DCGM_FI_PROF_SM_ACTIVE{%b,GPU_I_PROFILE="1g.10gb",GPU_I_ID="7"} 0.5
""" % ((GPU,) * 4)
PORTS = b"""node_uname_info{nodename="n002",release="6.8"} 1
node_infiniband_port_data_received_bytes_total{device="mlx5_0",port="1"} 1.5e+12
infiniband_port_rcv_data{device="mlx5_1",port="1",Hostname="n003"} 4294967295
PortXmitWait{hca="mlx5_0",port="2"} 17
node_pressure_cpu_waiting_seconds_total 12.5
node_hwmon_power_average_watt{chip="power_meter_acpi0",sensor="power1"} 5400
"""
AMD = b"".join(f"{line}\n".encode() for gpu in range(2) for line in amd_lines(gpu, prefix="amd_" * gpu))
ODD_PAGES = (
    b"",
    b"\n\n\n",
    PAGE + PORTS,
    b"DCGM_FI_DEV_GPU_TEMP{%b} 61 1760000000000\n" % GPU,
    b'DCGM_FI_DEV_GPU_TEMP{UUID="GPU-1"} +Inf\r\n' + PAGE,
    b'up{a="1",a="2"} 1\nup{} 1\nup 1\n up{ a = "x" , } NaN 12 \nup{le="+Inf"}1\n# EOF\n',
)


def decode_page(page: bytes) -> None:
    entities = Entities()
    store, decoder = WindowStore(entities), PageDecoder(ExporterResolver(entities), Target("host"))
    batches = [decoder.decode(page, NOW_MS + 15_000 * scrape) for scrape in range(3)]
    for batch in batches:
        assert len(batch.bad) <= page.count(b"\n") + 3
        for samples in batch.samples:
            _check_samples(samples, entities)
            written = store.write(samples, NOW_MS + 45_000)
            bad = written.future + written.not_finite + len(written.implausible)
            assert written.applied + written.late + bad == len(samples)
    again, third = map(_said, batches[1:])
    assert again == third, "the same page says something else the third time"
    _check_warm(page)
    PageDecoder(ExporterResolver(entities), Target("n7", fixed=True), max_series=3).decode(page, NOW_MS)


def _said(batch: Batch) -> object:
    """Samples but for their times. What is bad may differ: of a line that nobody wants the number is read once."""
    return [(row.kind, row.metric.tolist(), row.entity.tolist(), row.value.tolist()) for row in batch.samples]


def _check_warm(page: bytes) -> None:
    """A decoder that knows the lines of another page reads this one as a new decoder does."""
    resolver = ExporterResolver(Entities())
    warm = PageDecoder(resolver, Target("host", fixed=True))
    warm.decode(PAGE + PORTS, NOW_MS)
    for _ in range(2):  # the boards that the page itself names are known the second time
        cold = PageDecoder(resolver, Target("host", fixed=True))
        in_order = cold.decode(page, NOW_MS)
        if any(error.reason == "two_boards" for error in in_order.bad):
            return  # a decoder that knows one of the boards needs another page to see both
    assert _said(warm.decode(page, NOW_MS)) == _said(in_order)


def _check_samples(samples: SampleBatch, entities: Entities) -> None:
    assert ((samples.metric >= 0) & (samples.metric < len(METRICS[samples.kind]))).all()
    assert ((samples.entity >= 0) & (samples.entity < len(entities[samples.kind]))).all()
    assert np.isfinite(samples.value).all()
    assert (samples.time_ms <= NOW_MS + 45_000 + FUTURE_MS).all()


PAGES = Decoder(
    decode_page,
    (PAGE, PORTS, *ODD_PAGES),
    (GPU, b'="', b'",', b'gpu="', b'UUID="', b"Hostname", b'GPU_I_ID="', b"DCGM_FI_DEV_", b"node_infiniband_", b" 1\n"),
    times=200,  # a line of a byte is a list entry, an error and a bit of both for three scrapes
)

AMD_PAGES = Decoder(
    decode_page,
    (AMD, AMD.replace(b"\n", b" 1760000000000\n", 9), b"gpu_clock" + AMD, PAGE + AMD),
    (b'gpu_id="', b'clock_type="system"', b'link_index="', b"card_model", b"hostname", b"amd_gpu_", b"65535", b" 1\n"),
    times=200,
)

# -- event bodies ---------------------------------------------------------------------------------------------------

STARTED = b"""{"job": "team/a", "attempt": 1, "sequence": 2, "time_ms": 1760000000000, "type": "started",
 "ranks": [{"rank": 0, "node": "n1", "gpus": [0, 1]}, {"rank": 1, "node": "n2.example"}]}"""
SUBMITTED = b"""{"job": "team/a", "sequence": 1, "time_ms": 1759999999000, "type": "submitted", "class": "training",
 "queue": "train", "user": "ada", "gang": {"min": 1, "desired": 4, "step": 1}, "gpus_per_node": 8, "priority": -3,
 "limit_s": 3600.5, "cpus": 16, "labels": {"team": "x"}}"""
STEP = b"""{"job": "a", "sequence": 9, "time_ms": 1760000000000, "type": "step", "step": 4, "duration_s": 1.25,
 "parts": {"compute": 1.0, "data": 0.25}, "tokens": 4096, "rank": 3}"""
DRAIN = b"""{"node": "n1", "source": "nhc", "sequence": 1, "time_ms": 1760000000000, "type": "xid", "gpu": 3,
 "code": 79, "message": "fell off the bus"}"""
OTHERS = tuple(
    b'{"job": "b", "sequence": %d, "time_ms": 1760000000000, %b}' % (number, rest)
    for number, rest in enumerate(
        (
            b'"type": "finished"',
            b'"type": "failed", "category": "hardware", "node": "n1", "message": "x"',
            b'"type": "resized", "nodes": ["n1", "n2"]',
            b'"type": "checkpoint", "edge": "begin", "bytes": 12, "target": "s3://x"',
            b'"type": "phase", "name": "steady", "rank": 0',
            b'"type": "node_lost", "node": "n2", "reason": "gone"',
            b'"type": "preempted", "by": "c"',
        )
    )
)
WRAPPED = b'{"specversion": "1.0", "id": "1", "source": "/x", "type": "t", "data": %b}' % DRAIN
PACKED = b'{"specversion": "1.0", "id": "1", "source": "/x", "type": "t", "data_base64": "eyJqb2IiOiJhIn0="}'
HEADERS: tuple[dict[str, str], ...] = (
    {},
    {"content-type": "application/x-ndjson"},
    {"content-type": "application/cloudevents+json; charset=utf-8"},
    {"content-type": "application/cloudevents-batch+json"},
    {"ce-specversion": "1.0", "ce-id": "1", "ce-source": "/x", "ce-type": "t"},
)


def decode_events(body: bytes) -> None:
    for headers in HEADERS:
        decoded = decode_body(body, NOW_MS, headers)
        indexes = [record.index for record in decoded.records] + [index for index, _ in decoded.rejected]
        assert len(set(indexes)) == len(indexes) == len(decoded)
        for record in decoded.records:
            assert decode_event(record.raw, NOW_MS) == record.event
        from_disk = decode_records([Record(RecordKind.EVENT, NOW_MS, record.raw) for record in decoded.records])
        assert not from_disk.bad
        assert len(from_disk) == len(decoded.records)
        take(from_disk)


def take(batch: Batch) -> None:
    """What the door lets in, the pipeline can hold."""
    entities = Entities()
    state = FleetState(entities, WindowStore(entities), Topology.build([NodeSpec("n1", 8)]))
    state.apply(batch, NOW_MS)
    for pool in state.demand.list_queues():
        assert not np.isinf(state.demand.read_series(pool, "wanted", NOW_MS, 600, 3)).any()


EVENTS = Decoder(
    decode_events,
    (
        *(STARTED, SUBMITTED, STEP, DRAIN, WRAPPED, PACKED, *OTHERS, b"{}", b"[]", b"[1, {}]"),
        b"[" + b",".join((STARTED, DRAIN, *OTHERS)) + b"]",
        b"\n".join(OTHERS) + b"\n",
        b"[" + WRAPPED + b"," + PACKED + b"]",
    ),
    (
        *(b'"type": "', b'"job": "', b'"node": "', b'"sequence": ', b'"time_ms": ', b'"gang": ', b'"ranks": ['),
        *(b'"gpus": [', b"1760000000000", b"1760000061000", b'"labels": {', b'"duration_s": '),
    ),
    times=600,  # the rejected are told of, each with a sentence, in every one of the five modes
)


def decode_payload(payload: bytes) -> None:
    """An inbox record that somebody else wrote, with a checksum that is right."""
    records = [Record(kind, NOW_MS, payload) for kind in (RecordKind.EVENT, RecordKind.REFUSED, 77)]
    batch = decode_records(records)
    assert len(batch) + len(batch.bad) >= 1
    take(batch)


PAYLOADS = Decoder(
    decode_payload,
    (STARTED, DRAIN, b'{"reasons": {"not_json": 2, "future": 1}, "examples": {"future": "60 s"}}', b'{"reasons": {}}'),
    (b'"reasons": {', b'"examples": {', b'": 1', b'": 200001'),
    base_bytes=8 * MIB,  # what was refused is counted one by one, up to 200,000
)

# -- compressed bodies ----------------------------------------------------------------------------------------------

MOST = 100_000


def decode_packed(body: bytes) -> None:
    for coding in ("gzip", "deflate"):
        with contextlib.suppress(Problem):
            assert len(inflate(body, coding, MOST)) <= MOST


def _raw_deflate(data: bytes) -> bytes:
    stream = zlib.compressobj(wbits=-15)
    return stream.compress(data) + stream.flush()


PACKED_BODIES = Decoder(
    decode_packed,
    (
        *(gzip.compress(STARTED, mtime=0), gzip.compress(b"", mtime=0), gzip.compress(b"a", mtime=0) * 3),
        *(zlib.compress(DRAIN), _raw_deflate(DRAIN), gzip.compress(bytes(MOST + 1), mtime=0), b""),
    ),
    (b"\x1f\x8b\x08", b"\x78\x9c", bytes(10), b"\x03\x00"),
)

# -- tokens ---------------------------------------------------------------------------------------------------------

TOKENS_TEXT = (
    b"# who\ngrafana read 0f6c2e55a1b2c3d4\nslurm events,place AAAAbbbbCCCCdddd==\n\nops admin ~~~~~~~~~~~~~~~~\n"
)


def decode_tokens(text: bytes) -> None:
    parse_presented_token(text)
    try:
        callers = parse_tokens(text.decode("utf-8", "surrogateescape"), "here")
    except ConfigError as error:
        said = str(error)
        assert not [word for word in text.decode("utf-8", "replace").split() if len(word) >= 16 and word in said]
    else:
        assert callers
        assert all(len(digest) == 32 for digest in callers)


TOKENS = Decoder(
    decode_tokens,
    (TOKENS_TEXT, b"", b"Bearer 0f6c2e55a1b2c3d4", b"Basic dXNlcjphYmM=", b"a read 0f6c2e55a1b2c3d4\n" * 2),
    (b"admin", b",read", b"Bearer ", b"Basic ", b"place"),
)

DOORS = {
    "pages": PAGES,
    "pages of AMD": AMD_PAGES,
    "events": EVENTS,
    "payloads": PAYLOADS,
    "packed": PACKED_BODIES,
    "tokens": TOKENS,
}
