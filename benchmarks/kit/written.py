"""Remote-write requests as Prometheus sends them, made from templates with new times and values."""

import http.client
import struct
from collections.abc import Mapping, Sequence

import cramjam
import numpy as np

from fleetcast.benchmarks.inputs.decode import FIELDS, GPUS
from fleetcast.ingest.pages.dcgm import FIELD_IDS
from fleetcast.ingest.remote_write.request import Version

SAMPLES_A_REQUEST = 2000
PROTOBUF = "application/x-protobuf;proto="
MESSAGES = {Version.V1: "prometheus.WriteRequest", Version.V2: "io.prometheus.write.v2.Request"}
_SAMPLE = b"\x12\x10\x09" + bytes(8) + b"\x10" + b"\x80" * 5 + b"\x00"
_METADATA = b"\x2a\x04\x08\x02\x18\x01"


def make_series_labels(nodes: int) -> list[dict[str, str]]:
    """Return the labels of every dcgm-exporter series of some nodes, as Prometheus stores them.

    The series have the order of the exporters' pages.
    """
    names = {field: name for name, field in reversed(FIELD_IDS.items())}
    return [
        {
            "DCGM_FI_DRIVER_VERSION": "535.129.03",
            "Hostname": f"n{node:05d}",
            "UUID": f"GPU-{gpu:08d}-0000-0000-0000-{node:012d}",
            "__name__": names[field],
            "device": f"nvidia{gpu}",
            "gpu": str(gpu),
            "instance": f"n{node:05d}:9400",
            "job": "dcgm",
            "modelName": "NVIDIA H100 80GB HBM3",
            "pci_bus_id": f"00000000:{gpu}A:00.0",
        }
        for node in range(nodes)
        for field in FIELDS
        for gpu in range(GPUS)
    ]


class WriteRequests:
    """The requests of a scrape round over all series. Each round gets new times and values."""

    def __init__(self, series: Sequence[Mapping[str, str]], version: Version, rng: np.random.Generator) -> None:
        self.samples = len(series)
        encode = _encode_v1 if version is Version.V1 else _encode_v2
        parts = [series[at : at + SAMPLES_A_REQUEST] for at in range(0, len(series), SAMPLES_A_REQUEST)]
        self._templates = [np.frombuffer(encode(part), np.uint8) for part in parts]
        self._samples = [_find_samples(template.tobytes()) for template in self._templates]
        self._most = [np.array([_find_largest_value(labels["__name__"]) for labels in part]) for part in parts]
        self._rng = rng

    def make_round(self, time_ms: int) -> list[bytes]:
        """Return the compressed bodies of one round at `time_ms`. Values have only a few digits."""
        time = np.array([(time_ms >> 7 * at & 0x7F) | (0x80 if at < 5 else 0) for at in range(6)], np.uint8)
        bodies = []
        for template, places, most in zip(self._templates, self._samples, self._most, strict=True):
            message = template.copy()
            value = np.round((0.05 + 0.95 * self._rng.random(len(places))) * most, 3)
            message[places[:, None] + np.arange(3, 11)] = value.view(np.uint8).reshape(-1, 8)
            message[places[:, None] + np.arange(12, 18)] = time
            bodies.append(bytes(cramjam.snappy.compress_raw(message.tobytes())))
        return bodies


def _find_largest_value(name: str) -> float:
    """Return the largest value that any metric of this name can have.

    Profiling metrics are ratios, and link metrics count few generations and lanes.
    """
    return 1.0 if "_PROF_" in name else 10.0 if "_LINK_" in name else 100.0


def _find_samples(message: bytes) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """Return (sample,) the index at which each sample begins in a message."""
    found, at = [], message.find(_SAMPLE)
    while at >= 0:
        found.append(at)
        at = message.find(_SAMPLE, at + len(_SAMPLE))
    return np.array(found, np.intp)


def _encode_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _encode_field(field: int, data: bytes) -> bytes:
    return _encode_varint(field << 3 | 2) + _encode_varint(len(data)) + data


def _encode_v1(series: Sequence[Mapping[str, str]]) -> bytes:
    rows = []
    for labels in series:
        pairs = [
            _encode_field(1, _encode_field(1, name.encode()) + _encode_field(2, value.encode()))
            for name, value in labels.items()
        ]
        rows.append(_encode_field(1, b"".join(pairs) + _SAMPLE))
    return b"".join(rows)


def _encode_v2(series: Sequence[Mapping[str, str]]) -> bytes:
    symbols = {"": 0, "A help text of the usual length.": 1}
    rows = []
    for labels in series:
        words = [word for pair in labels.items() for word in pair]
        refs = b"".join(_encode_varint(symbols.setdefault(word, len(symbols))) for word in words)
        rows.append(_encode_field(5, _encode_field(1, refs) + _SAMPLE + _METADATA))
    return b"".join(_encode_field(4, symbol.encode()) for symbol in symbols) + b"".join(rows)


class WriteConnection:
    """A connection that sends requests one after the other, as one shard of a Prometheus does."""

    def __init__(self, port: int, version: Version) -> None:
        self._line = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._headers = {
            "content-type": PROTOBUF + MESSAGES[version],
            "content-encoding": "snappy",
            "x-prometheus-remote-write-version": "0.1.0" if version is Version.V1 else "2.0.0",
        }

    def send(self, body: bytes) -> None:
        """Send a body. Raises AssertionError unless the server accepts it."""
        self._line.request("POST", "/api/v1/write", body, self._headers)
        answer = self._line.getresponse()
        text = answer.read()
        assert answer.status in (200, 204), f"{answer.status}: {text[:300]!r}"

    def close(self) -> None:
        self._line.close()


assert len(_SAMPLE) == 2 + struct.calcsize("<BdB") + 6
