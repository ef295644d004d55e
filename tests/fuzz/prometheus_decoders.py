"""Decoders of what Prometheus writes to us, and of what lists targets for it."""

from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import ConfigError, RecordError
from fleetcast.ingest.pages.exporters import ExporterResolver
from fleetcast.ingest.pages.target_groups import read_groups
from fleetcast.ingest.remote_write.decoder import WriteDecoder
from fleetcast.ingest.remote_write.request import Version, parse_write_request
from tests.fuzz.bounds import MIB
from tests.fuzz.decoder import Decoder
from tests.ingest.write_requests import T0, Row, block, gpu, message_v1, message_v2, packed

LONG = 10_000  # what is longer is walked only, and JSON only
POWER = "DCGM_FI_DEV_POWER_USAGE"
ROWS: list[Row] = [
    (gpu(POWER, 0), [(T0, 401.5)]),
    (gpu(POWER, 1), [(T0, 0.0), (T0 + 1, float("nan"))]),
    ({"__name__": "node_uname_info", "instance": "n7:9100", "nodename": "n7"}, [(T0, 1.0)]),
    ({"__name__": "vllm:num_requests_running", "instance": "s:8000", "model_name": "m"}, [(1, 2.0)]),
]
WORDS = (
    *(b"\x0a", b"\x12\x10\x09", b"\x12\x07\x10", b"\x2a\x00", b"\x22\x00", b"\x0a\x02\x01\x02", b"\x18\x01", b"\x80"),
    *(b"\xff" * 9 + b"\x01", b"\x0a\x08__name__", b"\x10\x80\xa0\xb4\xa7\x9c\x33", block(4, b"instance"), b"\x0b"),
)


def _message(data: bytes, version: Version) -> None:
    """A message is refused whole, or each sample belongs to a series, whoever reads it."""
    try:
        write = parse_write_request(data, version)
    except RecordError:
        return
    series = len(write.labels) or len(write.begin)
    assert len(write.of) == len(write.time_ms) == len(write.value)
    assert not len(write.of) or int(write.of.max()) < series
    if len(data) > LONG:
        return
    decoder = WriteDecoder(ExporterResolver(Entities()))
    first = decoder.decode(packed(data), version, T0)
    again = decoder.decode(packed(data), version, T0)
    assert len(first) <= len(parse_write_request(data, version, exact=True).of)
    assert len(again) >= len(first)  # what was learnt is not forgotten


def _body(data: bytes) -> None:
    for version in Version:
        try:
            WriteDecoder(ExporterResolver(Entities())).decode(data, version, T0)
        except RecordError:
            continue


def _groups(data: bytes) -> None:
    for origin in ("x.json",) if len(data) > LONG else ("x.yml", "x.json"):
        try:
            assert all(target.host for target in read_groups(data, origin))
        except ConfigError:
            continue


GROUPS = b"""[{"targets": ["n1:9400", "[::1]:9"], "labels": {"__param_a": "b", "__scheme__": "https", "node": "n7"}}]"""
YAML = b"- targets:\n  - n1:9400\n  labels: {node: n1, __metrics_path__: /x}\n"

MESSAGES = {Version.V1: message_v1, Version.V2: message_v2}
PROMETHEUS = {
    **{
        f"remote write {version}.0": Decoder(
            lambda data, version=version: _message(data, version),  # type: ignore[misc]
            (MESSAGES[version](ROWS), MESSAGES[version](ROWS[:1], block(5, b"\x08\x02")), b""),
            WORDS,
            base_bytes=4 * MIB,
            times=400,  # a series without anything takes two bytes
        )
        for version in Version
    },
    "target groups": Decoder(
        _groups,
        (GROUPS, YAML, b"[]"),
        (
            b"- ",
            b"targets: ",
            b'"targets": [',
            b"&a ",
            b"*a",
            b"!!python/object:os.system ",
            b"<<: ",
            b": ",
            b"!!binary ",
        ),
        times=400,
    ),
    "remote write, packed": Decoder(
        _body,
        (packed(message_v1(ROWS)), packed(message_v2(ROWS)), packed(b""), packed(bytes(1000))),
        (b"\xfe\xff\xff", b"\xff\xff\xff\x1f", b"\x00"),
        base_bytes=80 * MIB,  # what a body may say it unpacks to is allocated before that is known to be a lie
    ),
}
