"""The door of remote write: what a sender may send, what it is told, and what lies on disk by then."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.entities import Entities
from fleetcast.ingest.inbox.inbox import InboxSource
from fleetcast.ingest.pages.exporters import ExporterResolver
from fleetcast.ingest.remote_write.decoder import WriteDecoder
from fleetcast.ingest.source import Batch
from fleetcast.service.api.app import create_app
from tests.ingest.write_requests import T0, Row, gpu, message_v1, message_v2, packed
from tests.service.api_world import NOW_MS, Client, config

POWER = "DCGM_FI_DEV_POWER_USAGE"
ROWS: list[Row] = [(gpu(POWER, index), [(T0, 100.0 + index)]) for index in range(3)]
V1, V2 = "application/x-protobuf", "application/x-protobuf;proto=io.prometheus.write.v2.Request"


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with Client(create_app(config(tmp_path), ManualClock(NOW_MS))) as client:
        yield client


def send(client: Client, body: bytes, kind: str = V1, coding: str = "snappy") -> Any:
    return client.post("/api/v1/write", content=body, headers={"content-type": kind, "content-encoding": coding})


def on_disk(folder: Path) -> Batch:
    """What a pipeline that starts now would read."""

    async def read() -> Batch:
        source = InboxSource(folder / "inbox", writes=WriteDecoder(ExporterResolver(Entities())))
        return await asyncio.wait_for(source.next(), 60)

    return asyncio.run(read())


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (V1, message_v1(ROWS)),
        ("application/x-protobuf;proto=prometheus.WriteRequest", message_v1(ROWS)),
        (V2, message_v2(ROWS)),
        ('Application/X-Protobuf ; charset=utf-8; proto="io.prometheus.write.v2.Request"', message_v2(ROWS)),
    ],
)
def test_samples_are_on_disk_when_they_are_acknowledged(client: Client, tmp_path: Path, kind: str, body: bytes) -> None:
    assert send(client, packed(body), kind).status_code == 204
    batch = on_disk(tmp_path)
    assert batch.samples[0].value.tolist() == [100.0, 101.0, 102.0]
    assert not batch.bad


def test_a_sender_of_2_0_is_told_what_was_written(client: Client) -> None:
    headers = send(client, packed(message_v2(ROWS)), V2).headers
    written = {key: value for key, value in headers.items() if key.startswith("x-prometheus-remote-write-")}
    assert written == {
        "x-prometheus-remote-write-samples-written": "3",
        "x-prometheus-remote-write-histograms-written": "0",
        "x-prometheus-remote-write-exemplars-written": "0",
    }
    assert "fleetcast_api_written_samples_total" in client.get("/metrics").text


def test_an_empty_request_is_fine_and_leaves_nothing(client: Client, tmp_path: Path) -> None:
    for kind in (V1, V2):
        assert send(client, packed(b""), kind).status_code == 204
    assert not (tmp_path / "inbox").exists()


@pytest.mark.parametrize(
    ("kind", "coding", "body", "status", "code"),
    [
        ("application/json", "snappy", b"", 415, "unknown_media_type"),
        ("", "snappy", b"", 415, "unknown_media_type"),
        (f"{V1};proto=io.prometheus.write.v3.Request", "snappy", b"", 415, "unknown_media_type"),
        (V1, "zstd", b"", 415, "unknown_coding"),
        (V2, "gzip", b"", 415, "unknown_coding"),
        (V1, "snappy", b"", 400, "bad_snappy"),
        (V1, "snappy", b"\x05abc", 400, "bad_snappy"),
        (V1, "snappy", packed(b"\x0a\x05ab"), 400, "bad_protobuf"),
        (V2, "snappy", packed(message_v1(ROWS)), 400, "bad_protobuf"),
        (V1, "snappy", packed(message_v2(ROWS)), 400, "bad_protobuf"),
        (V1, "snappy", b"\xff\xff\xff\xff\x07", 413, "too_large"),
        (V1, "snappy", bytes(2**20 + 1), 413, "too_large"),
    ],
)
def test_what_can_never_be_read_is_refused_for_good(
    client: Client, tmp_path: Path, kind: str, coding: str, body: bytes, status: int, code: str
) -> None:
    answer = send(client, body, kind, coding)
    assert (answer.status_code, answer.json()["type"]) == (status, f"urn:fleetcast:problem:{code}")
    assert not list(tmp_path.glob("inbox/writes*"))


def test_a_long_backlog_makes_senders_wait_but_holds_up_no_event(tmp_path: Path) -> None:
    small = config(tmp_path)
    small = msgspec.structs.replace(small, api=msgspec.structs.replace(small.api, max_backlog_bytes=1024))
    (tmp_path / "inbox").mkdir()
    (tmp_path / "inbox" / "writes.api-000000000001.seg").write_bytes(bytes(2000))
    with Client(create_app(small, ManualClock(NOW_MS))) as client:
        answer = send(client, packed(message_v1(ROWS)))
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert "2,000 bytes wait" in answer.json()["detail"]
        step = {"job": "a", "sequence": 1, "time_ms": NOW_MS, "type": "finished"}
        assert client.post("/v1/events", json=step).status_code == 202
