"""A decoder of health events from NVIDIA NVSentinel's event exporter into node events.

The events arrive as CloudEvents 1.0 in any of its three modes. Delivery is at-least-once and unordered. The
id identifies an event, and the later `generatedTimestamp` wins. An event that NVSentinel only stores becomes
a warning at most. Our own predictions are dropped.
"""

import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Literal

import msgspec

from fleetcast.fleet.decode_faults import format_value
from fleetcast.fleet.devices import normalise_device_name
from fleetcast.fleet.errors import RecordError
from fleetcast.fleet.events import NodeEvent
from fleetcast.ingest.inbox.event_body import MAX_RECORDS, MAX_REJECTED, DecodedBody, DecodedRecord
from fleetcast.ingest.inbox.job_events import MAX_MESSAGE_LENGTH, check_event, make_malformed_error

SOURCE: Final = "nvsentinel"
TYPE: Final = "com.nvidia.nvsentinel.health.v1"
OWN_AGENT: Final = "fleetcast"
MOST_ENTITIES: Final = 64
_HASH_BITS: Final = 20
_xid_code = re.compile(r"(?:XID_?)?(\d{1,6})", re.IGNORECASE)
_number = re.compile(r"\d{1,3}")

# RecommendedAction by name and by number → advice in words.
ADVICE: Final = {
    "NONE": "",
    "COMPONENT_RESET": "reset the component",
    "CONTACT_SUPPORT": "contact support",
    "RUN_FIELDDIAG": "run field diagnostics",
    "RESTART_VM": "restart the virtual machine",
    "RESTART_BM": "restart the node",
    "REPLACE_VM": "replace the virtual machine",
    "RUN_DCGMEUD": "run DCGM's diagnostics",
    "RESTART_APP": "restart the application",
    "UNKNOWN": "",
}
NUMBERS: Final = {0: "NONE", 2: "COMPONENT_RESET", 5: "CONTACT_SUPPORT", 6: "RUN_FIELDDIAG", 15: "RESTART_VM"} | {
    24: "RESTART_BM",
    25: "REPLACE_VM",
    26: "RUN_DCGMEUD",
    39: "RESTART_APP",
    99: "UNKNOWN",
}
OTHER_DEVICES: Final = frozenset({"NIC", "NIC_PORT", "NICPORT", "NVSWITCH", "NVLINK"})
STORE_ONLY: Final = ("STORE_ONLY", 2)


class Entity(msgspec.Struct, rename="camel", frozen=True):
    entity_type: str = ""
    entity_value: str = ""


class Instant(msgspec.Struct):
    """A protobuf timestamp."""

    seconds: int = 0
    nanos: int = 0


class HealthEvent(msgspec.Struct, rename="camel"):
    """A health event as NVSentinel's exporter writes it. Unknown fields are ignored."""

    node_name: str
    check_name: str = ""
    agent: str = ""
    component_class: str = ""
    is_fatal: bool = False
    is_healthy: bool = False
    message: str = ""
    recommended_action: int | str | None = None
    custom_recommended_action: str = ""
    error_code: list[str] | None = None
    entities_impacted: tuple[Entity, ...] | None = None
    generated_timestamp: str | Instant | None = None
    processing_strategy: int | str | None = None


class HealthData(msgspec.Struct, rename="camel"):
    health_event: HealthEvent


class HealthEnvelope(msgspec.Struct):
    """A CloudEvent that carries one health event."""

    specversion: str
    id: str
    source: str
    type: str
    data: HealthData
    time: str = ""


_envelope = msgspec.json.Decoder(HealthEnvelope).decode
_data = msgspec.json.Decoder(HealthData).decode
_raw_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class EventEnvelope:
    """One health event with its envelope's id and time."""

    id: str
    time: str
    event: HealthEvent


def decode(body: bytes, headers: Mapping[str, str], now_ms: int, future_limit_ms: int) -> DecodedBody:
    """Decode every event of a request body, and list refused ones by index.

    headers: names in lower case.
    """
    records: list[DecodedRecord] = []
    rejected: list[tuple[int, RecordError]] = []
    for index, part in enumerate(_split_body(body, headers)):
        if index >= MAX_RECORDS or len(rejected) >= MAX_REJECTED:
            rejected.append((index, RecordError("too_many", f"the rest was not read: at most {MAX_RECORDS} events")))
            break
        try:
            if isinstance(part, RecordError):
                raise part
            for event in make_node_events(part if isinstance(part, EventEnvelope) else _decode_envelope(part), now_ms):
                check_event(event, now_ms, future_limit_ms)
                records.append(DecodedRecord(index, _encode(event), event))
        except RecordError as error:
            rejected.append((index, error.with_traceback(None)))
    return DecodedBody(records, rejected)


def _split_body(body: bytes, headers: Mapping[str, str]) -> "Iterable[bytes | EventEnvelope | RecordError]":
    if "ce-specversion" in headers:
        return (_decode_binary_event(body, headers),)
    body = body.removeprefix(b"\xef\xbb\xbf").strip()
    if body[:1] != b"[":
        return (body,)
    try:
        return map(bytes, _raw_list(body))
    except (ValueError, RecursionError) as error:
        return (make_malformed_error(error, body, _raw_list),)


def _decode_binary_event(body: bytes, headers: Mapping[str, str]) -> "EventEnvelope | RecordError":
    if headers["ce-specversion"] != "1.0" or not headers.get("ce-id"):
        said = f"{format_value(headers['ce-specversion'])}, {format_value(headers.get('ce-id', ''))}"
        return RecordError("cloud_event", f"ce-specversion, ce-id {said}: expected '1.0' and an id")
    if headers.get("ce-type") != TYPE:
        return RecordError("unknown_type", f"ce-type {format_value(headers.get('ce-type', ''))}, expected {TYPE}")
    try:
        return EventEnvelope(headers["ce-id"], headers.get("ce-time", ""), _data(body).health_event)
    except (ValueError, RecursionError) as error:
        return make_malformed_error(error, body, _data)


def _decode_envelope(part: bytes) -> EventEnvelope:
    try:
        envelope = _envelope(part)
    except (ValueError, RecursionError) as error:
        raise make_malformed_error(error, part, _envelope) from None
    if envelope.specversion != "1.0" or not envelope.id:
        raise RecordError("cloud_event", f"specversion {format_value(envelope.specversion)}, expected '1.0' and an id")
    if envelope.type != TYPE:
        raise RecordError("unknown_type", f"type {format_value(envelope.type)}, expected {TYPE}")
    return EventEnvelope(envelope.id, envelope.time, envelope.data.health_event)


def make_node_events(envelope: EventEnvelope, now_ms: int) -> list[NodeEvent]:
    """Return one node event for each affected GPU or other device, or one for the node if none is named.

    Returns no events for our own predictions. Raises RecordError.
    """
    event = envelope.event
    if event.agent == OWN_AGENT:
        return []
    time_ms = _parse_time_ms(event.generated_timestamp or envelope.time, now_ms)
    code = _parse_xid(event)
    return [
        NodeEvent(
            node=event.node_name,
            source=SOURCE,
            sequence=(time_ms // 1000 << _HASH_BITS) | _hash_text(f"{envelope.id}/{number}"),
            time_ms=time_ms,
            type="health" if code is None else "xid",
            gpu=gpu,
            code=code,
            message=_format_message(event),
            check=event.check_name or event.component_class,
            severity=_choose_severity(event),
            device=device,
            advice="" if event.is_healthy else _format_advice(event),
        )
        for number, (gpu, device) in enumerate(_list_devices(event.entities_impacted or ()))
    ]


def _hash_text(text: str) -> int:
    return zlib.crc32(text.encode("utf-8", "replace")) & ((1 << _HASH_BITS) - 1)


def _choose_severity(event: HealthEvent) -> Literal["ok", "warning", "fatal"]:
    if event.is_healthy:
        return "ok"
    return "fatal" if event.is_fatal and event.processing_strategy not in STORE_ONLY else "warning"


def _parse_xid(event: HealthEvent) -> int | None:
    """Return the XID if the check reports XIDs, otherwise None.

    Other checks have error codes of their own.
    """
    if "xid" not in event.check_name.lower():
        return None
    found = (_xid_code.fullmatch(code) for code in event.error_code or ())
    return next((int(code[1]) for code in found if code is not None), None)


def _format_message(event: HealthEvent) -> str:
    codes = [code for code in event.error_code or () if code not in event.message]
    return (
        " ".join([event.message, *codes]).strip()[:MAX_MESSAGE_LENGTH] if codes else event.message[:MAX_MESSAGE_LENGTH]
    )


def _format_advice(event: HealthEvent) -> str:
    action = event.recommended_action
    name = NUMBERS.get(action, "") if isinstance(action, int) else action or ""
    words = ADVICE.get(name, name.replace("_", " ").lower())
    return (event.custom_recommended_action if name == "CUSTOM" else words)[:MAX_MESSAGE_LENGTH]


def _list_devices(entities: tuple[Entity, ...]) -> list[tuple[int | None, str]]:
    """Return (GPU index, device) for each affected GPU, or for each other device.

    A node without named devices gives (None, ""). NVSentinel lists the indices, PCI addresses and UUIDs of GPUs
    as separate entities in the same order.
    """
    gpus: list[int | None] = []
    addresses: list[str] = []
    boards: list[str] = []
    others: list[str] = []
    for entity in entities[: 4 * MOST_ENTITIES]:
        kind, value = entity.entity_type.upper(), entity.entity_value
        if kind == "PCI":
            addresses.append(normalise_device_name(value))
        elif kind == "GPU_UUID":
            boards.append(value)
        elif kind == "GPU" and _number.fullmatch(value):
            gpus.append(int(value))
        elif kind in OTHER_DEVICES:
            others.append(f"{kind.lower()} {value}")
    names = addresses or boards or (others if not gpus else [])
    rows = max(len(gpus), len(names))
    if rows == 0:
        return [(None, "")]
    gpus += [None] * (rows - len(gpus))
    return list(zip(gpus, [*names, *[""] * (rows - len(names))], strict=True))[:MOST_ENTITIES]


def _parse_time_ms(stated: str | Instant, now_ms: int) -> int:
    if isinstance(stated, Instant):
        return stated.seconds * 1000 + stated.nanos // 1_000_000
    if not stated:
        return now_ms
    try:
        time = datetime.fromisoformat(stated)
    except ValueError:
        raise RecordError("bad_value", f"generatedTimestamp {format_value(stated)}, expected RFC 3339") from None
    return round((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1000)
