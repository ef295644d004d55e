"""A fleet that speaks through Kafka: two pipelines on disjoint partitions say of it what one says, gangs included."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetcast.clients.kafka_records import OutgoingRecord
from fleetcast.fleet.clock import ScaledClock
from fleetcast.ingest.kafka.columnar import JSON_TYPE
from tests.integration.kafka.topics import Topics
from tests.integration.service_process import SPEED, Service

pytestmark = pytest.mark.integration

NODES = [f"n{number}" for number in range(8)]
GPUS = 4
GANG = ("n1", "n2", "n5", "n6")  # in all blocks
ROUNDS, SLOW_FROM = 26, 12
EVERY_S = 15.0
LIMIT_S = 90.0


def block_of(node: str) -> str:
    return f"b{NODES.index(node) // 2}"


def record(node: str, number: int, time_ms: int) -> bytes:
    """One scrape: n2/1 throttles after a while, n6/3 has an XID."""
    late = number >= SLOW_FROM
    throttles = [late and (node, index) == ("n2", 1) for index in range(GPUS)]
    values = {
        "sm_clock_mhz": [600.0 if slow else 1980.0 for slow in throttles],
        "clock_event_reasons": [36 if slow else 4 for slow in throttles],
        "gpu_temp_c": [60.0 + index for index in range(GPUS)],
        "power_w": [600.0 + number % 5] * GPUS,
        "gpu_util": [0.99] * GPUS,
        "sm_active": [0.8] * GPUS,
        "tensor_active": [0.4] * GPUS,
        "xid": [79 if late and (node, index) == ("n6", 3) else 0 for index in range(GPUS)],
    }
    gpu = {"entities": [str(index) for index in range(GPUS)], "values": values}
    own = {"entities": [""], "values": {"scrape_up": [1], "gpus_reported": [GPUS]}}
    return msgspec.json.encode({"schema": 1, "node": node, "time_ms": time_ms, "columns": {"gpu": gpu, "node": own}})


def events(number: int, time_ms: int) -> list[dict[str, Any]]:
    """The gang starts, and steps: slower after a while."""
    job = {"job": "gang", "attempt": 1, "time_ms": time_ms}
    told: list[dict[str, Any]] = []
    if number == 0:
        gang = {"min": len(GANG), "desired": len(GANG)}
        ranks = [{"rank": rank, "node": node, "gpus": list(range(GPUS))} for rank, node in enumerate(GANG)]
        told.append(job | {"sequence": 1, "type": "submitted", "gang": gang, "gpus_per_node": GPUS})
        told.append(job | {"sequence": 2, "type": "started", "ranks": ranks})
    for part in range(3):
        step = 10 + 3 * number + part
        took_s = 5.0 if number < SLOW_FROM else 9.0
        told.append(job | {"sequence": step, "type": "step", "step": step, "duration_s": took_s})
    return told


def feed(topics: Topics, clock: ScaledClock) -> None:
    """A fleet's scrapes and steps, one round each `EVERY_S` of fleet time."""
    for number in range(ROUNDS):
        now_ms = clock.now_ms()
        kind = (("content-type", JSON_TYPE.encode()),)
        scrapes = [
            OutgoingRecord(topics.telemetry, block_of(node).encode(), record(node, number, now_ms), kind)
            for node in NODES
        ]
        told = [OutgoingRecord(topics.events, b"gang", json.dumps(event).encode()) for event in events(number, now_ms)]
        topics.writer.write([*scrapes, *told])
        time.sleep(EVERY_S / SPEED)


def picture(service: Service) -> dict[str, Any]:
    """What is said of the fleet; of numbers that change with time, only what they are like."""
    pages = {node: service.get(f"/v1/nodes/{node}") for node in NODES}
    gang = service.get("/v1/jobs/gang/stragglers")
    return {
        "states": {node: page["state"] for node, page in pages.items()},
        "risk": {node: [row["p"] for row in page["risk"]] for node, page in pages.items()},
        "reasons": {node: [(row["feature"], row["entity"]) for row in page["reasons"]] for node, page in pages.items()},
        "actions": {node: page["action"]["code"] for node, page in pages.items()},
        "jobs": {node: (page["jobs"], [gpu["job"] for gpu in page["gpus"]]) for node, page in pages.items()},
        "gang": {key: gang[key] for key in ("slow", "culprit", "cause", "observed_step_s", "expected_step_s")},
    }


def test_two_pipelines_on_disjoint_partitions_say_what_one_says(
    topics: Topics, tmp_path: Path, start_service: Callable[..., Service]
) -> None:
    racks = [
        f'[[rack]]\nname = "r{row}"\nblock = "b{row}"\nnodes = {NODES[2 * row : 2 * row + 2]}\n' for row in range(4)
    ]
    (tmp_path / "topology.toml").write_text("".join(f'{rack}gpus = {GPUS}\ngpu_model = "H100"\n' for rack in racks))
    now_ms = time.time_ns() // 1_000_000
    clock = {"epoch_ms": now_ms, "wall_ms": now_ms, "speed": SPEED}
    sources = [{"use": "kafka", "options": topics.options()}]
    one, two = (
        start_service(
            clock=clock,
            fleet={"topology": str(tmp_path / "topology.toml")},
            pipeline={"instances": instances, "sources": sources},
            archive={"enabled": False},
        )
        for instances in (1, 2)
    )
    for service in (one, two):
        service.until("ready", lambda service=service: service.get("/readyz"), LIMIT_S)
    feed(topics, ScaledClock(now_ms, now_ms, SPEED))
    sources_of_two = {row["name"]: row for row in two.get("/v1/ingestion")["sources"]}
    assert sources_of_two["kafka"]["partitions"] == sources_of_two["kafka (1)"]["partitions"] == 3  # 2, and the events
    two.until("the culprit", lambda: picture(two)["gang"]["culprit"]["name"] == "n2/1")
    here, there = picture(one), picture(two)
    for node in NODES:
        assert there["risk"].pop(node) == pytest.approx(here["risk"].pop(node), rel=0.02)
    assert there == here
    assert here["gang"]["slow"]
    assert {node for node, state in here["states"].items() if state == "degraded"} == {"n2", "n6"}
