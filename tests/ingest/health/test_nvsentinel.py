"""Health events of NVSentinel in the three modes of CloudEvents."""

import json
from typing import Any

import pytest

from fleetcast.fleet.events import NodeEvent
from fleetcast.ingest.health.nvsentinel import TYPE, decode
from fleetcast.ingest.inbox.event_body import DecodedBody

NOW_MS = 1_763_700_000_000  # 2025-11-21T04:40:00Z


def health(**fields: Any) -> dict[str, Any]:
    event = {
        "version": 1,
        "agent": "gpu-health-monitor",
        "componentClass": "GPU",
        "checkName": "GpuNvlinkWatch",
        "isFatal": True,
        "isHealthy": False,
        "message": "NVLink errors on GPU 7",
        "recommendedAction": 5,
        "errorCode": ["DCGM_FR_NVLINK_ERROR_THRESHOLD"],
        "entitiesImpacted": [
            {"entityType": "GPU", "entityValue": "7"},
            {"entityType": "PCI", "entityValue": "0000:DA:00.0"},
            {"entityType": "GPU_UUID", "entityValue": "GPU-1a"},
        ],
        "generatedTimestamp": "2025-11-21T04:12:09.123456789Z",
        "nodeName": "n042",
        "processingStrategy": "EXECUTE_REMEDIATION",
        "metadata": {"chassis_serial": "1"},
    }
    return event | fields


def envelope(id: str = "a", **fields: Any) -> dict[str, Any]:
    return {
        "specversion": "1.0",
        "id": id,
        "source": "nvsentinel://east/healthevents",
        "type": TYPE,
        "time": "2025-11-21T04:12:10Z",
        "data": {"metadata": {"cluster": "east"}, "healthEvent": health(**fields)},
    }


def read(body: Any, headers: dict[str, str] | None = None) -> DecodedBody:
    return decode(body if isinstance(body, bytes) else json.dumps(body).encode(), headers or {}, NOW_MS, 60_000)


def only(body: Any, headers: dict[str, str] | None = None) -> NodeEvent:
    (record,) = read(body, headers).records
    assert isinstance(record.event, NodeEvent)
    return record.event


def test_an_envelope_is_what_the_checker_said() -> None:
    event = only(envelope())
    assert (event.node, event.source, event.type, event.gpu) == ("n042", "nvsentinel", "health", 7)
    assert (event.check, event.severity, event.device) == ("GpuNvlinkWatch", "fatal", "0000:da:00")
    assert event.advice == "contact support"
    assert event.message == "NVLink errors on GPU 7 DCGM_FR_NVLINK_ERROR_THRESHOLD"
    assert event.time_ms == NOW_MS - 1_670_877


def test_the_three_modes_say_the_same() -> None:
    structured = only(envelope())
    batch = read([envelope(), envelope("b")]).records
    binary = {"ce-specversion": "1.0", "ce-id": "a", "ce-type": TYPE, "ce-source": "x"}
    assert batch[0].event == structured
    assert only(envelope()["data"], binary) == structured
    assert batch[0].event.sequence != batch[1].event.sequence


def test_an_id_is_one_event_and_another_id_another() -> None:
    assert only(envelope("a")).sequence == only(envelope("a")).sequence
    assert only(envelope("a")).sequence != only(envelope("b")).sequence


@pytest.mark.parametrize(
    ("fields", "severity"),
    [
        ({"isHealthy": True, "isFatal": False}, "ok"),
        ({"isFatal": False}, "warning"),
        ({"processingStrategy": "STORE_ONLY"}, "warning"),
        ({"processingStrategy": 2}, "warning"),
        ({"processingStrategy": 1}, "fatal"),
    ],
)
def test_how_grave_it_is(fields: dict[str, Any], severity: str) -> None:
    assert only(envelope(**fields)).severity == severity


@pytest.mark.parametrize("code", ["79", "XID_79", "xid79"])
def test_xids_are_xids(code: str) -> None:
    event = only(envelope(checkName="SysLogsXIDError", errorCode=[code], recommendedAction="RESTART_BM"))
    assert (event.type, event.code, event.advice) == ("xid", 79, "restart the node")


@pytest.mark.parametrize(
    ("entities", "expected"),
    [
        ([], [(None, "")]),
        (None, [(None, "")]),
        ([("GPU_UUID", "GPU-1"), ("GPU_UUID", "GPU-2")], [(None, "GPU-1"), (None, "GPU-2")]),
        ([("PCI", "0000:da:00"), ("GPU_UUID", "GPU-2")], [(None, "0000:da:00")]),
        ([("gpu", "0"), ("gpu", "3")], [(0, ""), (3, "")]),
        ([("NIC", "mlx5_0")], [(None, "nic mlx5_0")]),
        ([("GPU", "GPU-1")], [(None, "")]),
    ],
)
def test_every_device_is_an_event(entities: Any, expected: list[tuple[int | None, str]]) -> None:
    impacted = entities and [{"entityType": kind, "entityValue": value} for kind, value in entities]
    events = [record.event for record in read(envelope(entitiesImpacted=impacted)).records]
    assert [(event.gpu, event.device) for event in events if isinstance(event, NodeEvent)] == expected
    assert len({event.sequence for event in events}) == len(expected)


def test_other_advice_is_passed_on_in_its_own_words() -> None:
    custom = {"recommendedAction": "CUSTOM", "customRecommendedAction": "call Ada"}
    assert only(envelope(**custom)).advice == "call Ada"
    assert only(envelope(recommendedAction="REPLACE_GPU")).advice == "replace gpu"
    assert only(envelope(recommendedAction=None)).advice == ""
    assert (
        only(envelope(generatedTimestamp={"seconds": 1_763_699_000, "nanos": 5_000_000})).time_ms == 1_763_699_000_005
    )


def test_our_own_predictions_do_not_come_back() -> None:
    decoded = read(envelope(agent="fleetcast"))
    assert (decoded.records, decoded.rejected) == ([], [])


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"{", "truncated"),
        (b"[{}", "truncated"),
        ([{}, 3], "missing_field"),
        (envelope() | {"type": "com.example"}, "unknown_type"),
        (envelope() | {"specversion": "0.3"}, "cloud_event"),
        (envelope(nodeName=""), "empty_name"),
        (envelope(nodeName="a/b"), "bad_name"),
        (envelope(generatedTimestamp="yesterday"), "bad_value"),
        (envelope(generatedTimestamp="2030-01-01T00:00:00Z"), "future"),
        (envelope(isFatal="yes"), "wrong_type"),
    ],
)
def test_what_is_wrong_is_named(body: Any, reason: str) -> None:
    decoded = read(body)
    assert not decoded.records
    assert decoded.rejected[0][1].reason == reason


@pytest.mark.parametrize("headers", [{"ce-specversion": "1.0"}, {"ce-specversion": "2", "ce-id": "a"}])
def test_headers_without_an_id_are_refused(headers: dict[str, str]) -> None:
    assert read(envelope()["data"], headers).rejected[0][1].reason == "cloud_event"


def test_the_good_events_of_a_bad_batch_are_kept() -> None:
    decoded = read([envelope("a"), {"id": "b"}, envelope("c")])
    assert [record.index for record in decoded.records] == [0, 2]
    assert [index for index, _ in decoded.rejected] == [1]
